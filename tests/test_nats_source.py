"""The setting nats_source: the address of a server, and one sentence for each mistake."""

from pathlib import Path

import pytest

from pipeline.errors import BadSetting
from pipeline.nats.subjects import FLOWS
from pipeline.settings import Settings
from pipeline.settings.nats import LOG_SUBJECTS, NatsSource, nats_packages, with_absolute_paths


def test_an_address_has_servers_subjects_and_options() -> None:
    found = NatsSource.parse(
        "tls://me:p%40ss@n1,n2:4333/raw_logs,opnilog_workload_logs?mode=core&start=latest&stream=logs&out=found"
        "&ca=/etc/ca.pem&keep_hours=48&size_gib=2&replicas=3"
    )
    assert found.servers == ("n1:4222", "n2:4333") and found.tls
    assert found.subjects == ("raw_logs", "opnilog_workload_logs")
    assert (found.user, found.password, found.token) == ("me", "p@ss", "")
    assert (found.mode, found.start, found.stream, found.out) == ("core", "latest", "logs", "found")
    assert (found.keep_hours, found.size_gib, found.replicas) == (48, 2, 3)
    assert not found.is_durable and not found.is_gpu_service and found.ca == Path("/etc/ca.pem")
    assert NatsSource.parse("nats://s3cr%20et@[::1]/raw_logs").token == "s3cr et"


def test_a_gpu_service_reads_what_the_training_controller_passes_on() -> None:
    gpu = NatsSource.parse("nats://n/raw_logs?serve=gpu")
    assert gpu.subjects == ("raw_logs", "gpu_service_inference_internal")
    assert gpu.is_gpu_service and not gpu.is_controller
    both = NatsSource.parse("nats://n/raw_logs?serve=controller")
    assert both.is_gpu_service and both.is_controller


def test_every_log_subject_has_a_flow() -> None:
    assert set(LOG_SUBJECTS) == set(FLOWS)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis://n/raw_logs", "is not usable; write it like nats://"),
        ("n:4222/raw_logs", "is not usable"),
        ("nats://n/raw_logs nats://m/raw_logs", "is not usable"),
        ("nats://n", "no usable subject ''; use raw_logs, "),
        ("nats://n/logs", "no usable subject 'logs'; use raw_logs, "),
        ("nats://n/raw_logs,>", "no usable subject '>'"),
        ("nats://n:70000/raw_logs", "a server that is not HOST or HOST:PORT"),
        ("nats://n,/raw_logs", "a server that is not HOST or HOST:PORT"),
        ("nats://n/raw_logs?queue=x", "unknown option 'queue'; known are mode, serve"),
        ("nats://n/raw_logs?mode", "options that are not NAME=VALUE"),
        ("nats://n/raw_logs?mode=push", "mode=push is unknown; use jetstream, core"),
        ("nats://n/raw_logs?serve=cpu", "serve=cpu is unknown; use nothing, gpu, controller"),
        ("nats://n/raw_logs?start=now", "start=now is unknown; use earliest, latest"),
        ("nats://n/raw_logs?stream=a.b", "stream=a.b is no name of a stream"),
        ("nats://n/raw_logs?stream=a&out=a", "use two streams, one each way"),
        ("nats://n/raw_logs?replicas=7", "replicas=7 is not usable; use a number from 1 to 5"),
        ("nats://n/raw_logs?size_gib=big", "size_gib=big is not usable"),
        ("nats://n/raw_logs?ca=/x", "files for TLS, which only tls:// has"),
        ("tls://n/raw_logs?cert=/x", "needs both cert=FILE and key=FILE"),
        ("nats://u:p@n/raw_logs?creds=/x", "both creds=FILE and a login"),
        ("nats://u:@n/raw_logs", "needs user:password@host, or token@host"),
        ("nats://:p@n/raw_logs", "needs user:password@host, or token@host"),
    ],
)
def test_a_mistake_is_one_sentence(address: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        NatsSource.parse(address)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_and_a_token_are_never_shown() -> None:
    for address in ("nats://me:geheim@n/raw_logs", "nats://geheim@n/raw_logs"):
        settings = Settings(nats_source=address)
        assert "geheim" not in repr(settings) and "n/raw_logs" in repr(settings)
        source = NatsSource.parse(address)
        assert "geheim" not in repr(source) + str(source)
    for wrong in (
        "nats://me:geheim@n",
        "nats://geheim@n",
        "nats://me:geheim@n:x/raw_logs",
        "me:geheim@n/raw_logs",
        "geheim@n/raw_logs",
        "nats://geheim@n/raw_logs?x=1",
    ):
        with pytest.raises(BadSetting) as caught:
            Settings(nats_source=wrong)
        assert "geheim" not in str(caught.value)


def test_a_child_process_gets_the_same_address() -> None:
    settings = Settings(nats_source="nats://me:p%40ss@n1,n2/raw_logs?serve=gpu")
    assert Settings.load(environ=settings.to_environ()).nats == settings.nats
    assert Settings.load(environ={"LOGWEIR_NATS_SOURCE": ""}).nats.source is None


def test_files_are_found_from_any_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = NatsSource.parse(with_absolute_paths("tls://n/raw_logs?ca=ca.pem&creds=app.creds&serve=gpu"))
    assert (found.ca, found.creds) == (tmp_path / "ca.pem", tmp_path / "app.creds")
    assert found.serve == "gpu"


def test_only_credentials_need_the_package_that_signs() -> None:
    assert nats_packages(None) == ()
    assert nats_packages("nats://n/raw_logs") == ("nats", "google.protobuf")
    assert nats_packages("nats://n/raw_logs?creds=/x") == ("nats", "google.protobuf", "nkeys")
