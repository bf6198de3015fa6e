"""A process that is killed between the script and its answer: what it took in is in once, however it comes
again."""

import http.client
from pathlib import Path

import pytest
from intake_process import DIES, Intake, running_intake
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from pipeline.settings import Settings

pytestmark = pytest.mark.long  # starts processes


def export(*bodies: str) -> bytes:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    for n, body in enumerate(bodies):
        records.add(time_unix_nano=1_700_000_000_123_456_000 + n).body.string_value = body
    request.resource_logs[0].resource.attributes.add(key="service.name").value.string_value = "app"
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("declared", [False, True], ids=["by its body", "by a declared key"])
def test_a_request_whose_answer_died_with_its_process_is_in_once(
    settings: Settings, tmp_path: Path, declared: bool
) -> None:
    mark = tmp_path / "mark"
    path, body = ("/lines?workload=app", b"a\nb") if declared else ("/v1/logs", export("a", "b"))
    headers = {"Content_Type": "text/plain" if declared else "application/x-protobuf"}
    headers |= {"Idempotency_Key": "k"} if declared else {}
    command = ["-c", DIES]
    with running_intake(settings, command=command, arguments=("intake", str(mark)), start=False) as intake:
        killed = intake.start()
        mark.touch()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            intake.ask(path, body, **headers)
        assert killed.wait(20) == -9
        assert intake.accepted("app") == 2
        intake.start()  # as its supervisor does
        assert intake.ask(path, body, **headers).status == 200
        assert intake.accepted("app") == 2
        other = Intake(settings=settings, port=intake.port)
        assert other.ask(path, body + (b"c" if declared else export("c")), **headers).status == (
            409 if declared else 200
        )
        assert intake.accepted("app") == (2 if declared else 5)
