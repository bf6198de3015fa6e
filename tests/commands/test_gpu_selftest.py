"""`logweir gpu selftest`: with a made-up driver, made-up answers of its processes, and no GPU at all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Verb, command_line
from fake_nvml_driver import Driver, Gpu

from pipeline.commands.gpu import selftest, selftest_child
from pipeline.commands.gpu.selftest import NO_GPU, CheckResult, all_checks
from pipeline.gpu.node import cuda
from pipeline.gpu.node.host_lock import host_lock
from pipeline.gpu.node.readings import MachineReading, Reading
from pipeline.logs import logger
from pipeline.settings import Settings

UUID = f"GPU-self{os.getpid():07x}"
GOOD = {
    "limit": {"leased_mib": 2048, "got_mib": 1536, "context_mib": 512},
    "model": {"training_s": 3.2, "lines_per_s": 41_000, "place": "cuda:0"},
}


@pytest.fixture
def verb(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys, "gpu", columns=160) as run:
        yield run


@pytest.fixture
def no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def doors(*_: object) -> Iterator[float]:
        logger().info("gpu.lease_asked_for")  # as each real one does
        yield from (3.0, 2.0, 9.0)

    monkeypatch.setattr(selftest, "_doors", doors)


def test_a_machine_without_a_gpu_says_so_and_ends_with_its_own_code(
    verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "probe_devices", lambda: None)
    said = verb("selftest")
    assert said.code == NO_GPU == 3
    assert said.out == "no GPU to test on this machine: no NVIDIA driver is installed\n"
    assert json.loads(verb("selftest", "--json").out) == {
        "gpus": 0, "why": "no NVIDIA driver is installed", "checks": [],
    }  # fmt: skip


def test_a_driver_that_shows_nothing_is_no_gpu(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    driver.devices()
    driver.use(monkeypatch)
    said = verb("selftest")
    assert said.code == NO_GPU and "shows no GPU" in said.out


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the locks of a machine with one GPU."""
    driver = Driver(tmp_path)
    driver.devices(Gpu(UUID))
    driver.use(monkeypatch)
    monkeypatch.setattr(selftest, "HOST_DIRECTORY", tmp_path / "locks")
    return tmp_path / "locks"


HOLD = """
import json, os, sys
from pathlib import Path
from pipeline.gpu.node.host_lock import host_lock
with host_lock(Path(sys.argv[1]), sys.argv[2], exclusive=True):
    print(json.dumps({"pid": os.getpid()}), flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("no_door")
def test_the_table_of_a_device_with_a_foreign_process_that_has_it_alone(
    verb: Verb, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process is real, and holds the lock as the check does, without CUDA."""

    def child(words: Sequence[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", HOLD, str(locks), words[1]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    monkeypatch.setattr(selftest, "child", child)
    answers = GOOD | {"model": {"error": "CUDA does not start"}}
    monkeypatch.setattr(selftest, "ask_child", lambda kind, _uuid, _mib: answers[kind])
    said = verb("selftest")
    assert said.code == 1, said
    head, _, *rows = said.out.splitlines()
    assert head == "| check | device | result | measured |"
    found = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in rows}
    assert found == {
        "driver": "passed", "health": "passed", "MIG": "passed", "memory limit of a lease": "passed",
        "exclusive use by a foreign process": "passed", "MPS": "skipped", "training": "failed",
        "scoring": "failed", "door of a device": "passed",
    }  # fmt: skip
    assert "CUDA does not start" in said.out and "kept another process out" in said.out
    assert "p50 3 ms, longest 9 ms of 3" in said.out
    assert said.err == ""  # no event of a log between the rows


@pytest.mark.usefixtures("no_door")
def test_a_device_that_a_stack_leases_is_no_failure(
    verb: Verb, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "ask_child", lambda kind, _uuid, _mib: GOOD[kind])
    with host_lock(locks, UUID, exclusive=False):
        said = verb("selftest")
    assert said.code == 0, said
    (row,) = (row for row in said.out.splitlines() if "foreign process" in row)
    assert "| skipped | a program has a lease of the device" in row


def test_a_process_of_a_check_that_dies_or_hangs_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(code: str) -> Callable[[Sequence[str]], "subprocess.Popen[str]"]:
        return lambda _: subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    for code, why in (
        ("raise SystemExit(9)", "its process ended with 9"), ("print('x')", "it said 'x'"),
        ("import time; time.sleep(60)", "it did not end within 1 s"),
    ):  # fmt: skip
        monkeypatch.setattr(selftest, "child", child(code))
        monkeypatch.setattr(selftest, "CHILD_S", 1.0 if "sleep" in code else 30.0)
        assert selftest.ask_child("limit", "GPU-a", 512) == {"error": why}


@pytest.mark.usefixtures("no_door")
def test_good_answers_pass_and_slices_stand_for_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(uuid: str, **more: Any) -> Reading:
        return Reading(
            uuid=uuid, index=0, name="A100", total_mib=40_960, reserved_mib=500, used_mib=3, **more
        )

    machine = MachineReading(
        driver="570.1",
        readings=(
            reading("GPU-a"), reading("GPU-b", split=True), reading("MIG-1", parent="GPU-b"),
            reading("GPU-c", recovery=1),
        ),
    )  # fmt: skip
    monkeypatch.setattr(selftest, "_of_lock", lambda one, _mib: selftest._of_mig(one))
    asked: list[tuple[str, str]] = []

    def ask(kind: str, uuid: str) -> dict[str, Any]:
        asked.append((kind, uuid))
        return GOOD[kind]

    checks = list(all_checks(machine, 512, ask))
    words = {(check.check, check.device): check for check in checks}
    assert words["driver", ""].measured == "570.1; 3 GPUs (A100), 1 MIG slice"
    assert words["memory limit of a lease", "GPU-a"].measured == (
        "tensors got 1536 MiB of 2048 MiB less 512 MiB for CUDA"
    )
    assert words["scoring", "MIG-1"].measured == "41,000 distinct lines/s"
    assert words["MIG", "MIG-1"].measured == "a slice of GPU-b"
    assert words["health", "GPU-c"].verdict is CheckResult.FAILED
    assert {uuid for _, uuid in asked} == {"GPU-a", "MIG-1", "GPU-c"}
    assert [c.check for c in checks if c.verdict is CheckResult.FAILED] == ["health"]


def test_a_training_and_its_scoring_are_measured_also_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_child, "LINES", 200)
    facts = selftest_child.train_and_score("cpu", 512, seconds=0.5)
    assert facts["place"] == "cpu" and facts["training_s"] > 0 and facts["lines_per_s"] > 0


def test_a_door_is_measured_on_a_redis_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "DOORS", 2)
    one = Reading(uuid=UUID, index=0, name="A100", total_mib=4_096, reserved_mib=0, used_mib=0)
    took_ms = list(selftest._doors(MachineReading(readings=(one,)), tmp_path))
    assert len(took_ms) == 2 and all(0 < ms < 20_000 for ms in took_ms)


def test_a_check_that_fails_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        from pipeline.errors import DeviceFailed

        raise DeviceFailed("tensors got 4096 MiB")

    monkeypatch.setattr(cuda, "prove_limit", refuse)
    assert selftest_child.main(["limit", "GPU-a", "512"]) == 0
    assert json.loads(capsys.readouterr().out) == {"error": "tensors got 4096 MiB"}
