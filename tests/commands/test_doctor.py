"""What `logweir doctor` says of packages, the GPUs of a machine and its Redis."""

import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from command_line import Verb, command_line
from fake_nvml_driver import DRIVER_NOT_LOADED, Driver, Gpu
from polling import wait_until

from pipeline.commands import doctor
from pipeline.gpu.node import probe
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import find_server


@pytest.fixture
def logweir(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys) as verb:
        yield verb


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(tmp_path)
    found.use(monkeypatch)
    return found


def torch_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torch" else real(name)
    )


def gpu_line(logweir: Verb) -> str:
    done = logweir("doctor")
    assert done.code == 0, done.out
    (line,) = [line for line in done.out.splitlines() if " GPU: " in line]
    return line


def test_a_machine_without_a_driver_lacks_nothing(logweir: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIBRARY", "libnot-on-this-machine.so.1")
    assert gpu_line(logweir) == "ok      GPU: none (no NVIDIA driver)"


def test_the_gpus_are_counted_and_the_driver_named(
    logweir: Verb, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_is("2.9.0+cu128", monkeypatch)
    driver.devices(Gpu("GPU-a"), Gpu("GPU-b"))
    assert gpu_line(logweir) == "ok      GPU: 2, driver 570.86.10"
    driver.devices()
    assert gpu_line(logweir) == "ok      GPU: none, driver 570.86.10"


def test_a_torch_that_cannot_use_the_gpu_is_warned_of(
    logweir: Verb, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_is("2.9.0+cpu", monkeypatch)
    assert "torch" not in gpu_line(logweir)
    driver.devices(Gpu("GPU-a"))
    line = gpu_line(logweir)
    assert line.startswith("warning GPU: 1, driver 570.86.10; torch 2.9.0+cpu cannot use it: install a build")


def test_a_driver_that_fails_or_hangs_is_said_and_keeps_nobody(
    logweir: Verb, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    assert gpu_line(logweir) == "warning GPU: the driver does not work; see what `nvidia-smi` says"
    driver.mend()
    driver.hang("nvmlInitWithFlags", seconds=60)
    monkeypatch.setattr(doctor, "PROBE_S", 0.5)
    began = time.monotonic()
    assert gpu_line(logweir).startswith("warning GPU: the driver did not answer within 0.5 s; see")
    assert time.monotonic() - began < 10


def lines_of(logweir: Verb, what: str) -> list[str]:
    return [line for line in logweir("doctor").out.splitlines() if f" {what}: " in line]


@pytest.mark.long
def test_a_redis_that_keeps_its_promises_is_well_and_one_that_does_not_is_warned_of(
    logweir: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines_of(logweir, "Redis memory") == ["ok      Redis memory: maxmemory-policy noeviction"]
    assert lines_of(logweir, "Redis on disk") == [
        "ok      Redis on disk: appendonly yes, appendfsync everysec"
    ]
    (clocks,) = lines_of(logweir, "clocks")
    assert clocks.startswith("ok ") and "s apart from Redis" in clocks
    loose = tmp_path / "r.sock"
    config = ["port 0", f"unixsocket {loose}", 'save ""', "maxmemory-policy allkeys-lru", f"dir {tmp_path}"]
    (tmp_path / "r.conf").write_text("\n".join(config) + "\n")
    server = subprocess.Popen([find_server(), tmp_path / "r.conf"], stdout=subprocess.DEVNULL)
    try:
        assert wait_until(loose.exists, timeout_s=10)
        monkeypatch.setenv("REDIS_URL", f"unix://{loose}?db=0")
        done = logweir("doctor")
        assert done.code == 0, done.out
        assert "warning Redis memory: maxmemory-policy allkeys-lru may drop accepted batches" in done.out
        assert "warning Redis on disk: appendonly no: what was accepted is lost when Redis dies" in done.out
        warned = sum(line.startswith("warning ") for line in done.out.splitlines())
        assert f"nothing is missing; {warned} warnings" in done.out
        with redis.Redis(unix_socket_path=str(loose)) as server_client:
            server_client.config_set("appendonly", "yes")
            server_client.config_set("appendfsync", "no")
        assert "warning Redis on disk: appendonly yes, appendfsync no" in logweir("doctor").out
    finally:
        server.kill()  # it refuses SIGTERM as long as it writes its first append-only file
        server.wait(10)


def packages_lack(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # no import finds it


def test_an_extra_that_is_not_installed_is_named_and_lacks_nothing(
    logweir: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages_lack(monkeypatch, "opensearchpy", "confluent_kafka", "nats", "nkeys", "obstore", "deltalake")
    done = logweir("doctor")
    assert done.code == 0, done.out
    (line,) = lines_of(logweir, "extra kafka")
    assert line == (
        "ok      extra kafka: left out: confluent_kafka not installed; "
        "run: pip install '.[kafka]' in a clone of logweir"
    )


@pytest.mark.parametrize(
    "package", ["duckdb", "tokenizers", "safetensors", "jinja2", "msgpack", "zstandard", "numpy"]
)
def test_each_package_that_works_on_lines_is_missed(
    logweir: Verb, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    packages_lack(monkeypatch, package)
    done = logweir("doctor")
    assert done.code == 1, done.out
    assert f"missing packages: {package} not installed; run: pip install '.[worker]' in a clone" in done.out


def test_a_feature_that_is_set_up_without_its_packages_is_a_fault(
    logweir: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages_lack(monkeypatch, "confluent_kafka")
    monkeypatch.delitem(sys.modules, "pipeline.sources.kafka.client", raising=False)
    monkeypatch.setenv("LOGWEIR_KAFKA_SOURCE", "kafka://broker:9092/app-logs")
    done = logweir("doctor")
    assert done.code == 1 and "missing Kafka at broker:9092: this needs packages" in done.out, done.out
