"""Every protocol over HTTP: what is stored, and each answer in the words of its clients."""

import gzip
import json
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import zstandard
from google.rpc.status_pb2 import Status
from intake_process import Intake, running_intake
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from polling import wait_until

from pipeline.redis.connection import connect
from pipeline.service.senders import read_senders
from pipeline.settings import Settings
from pipeline.workers.intake.exchange import MOST_ADDRESS

pytestmark = pytest.mark.long  # starts processes

NDJSON = "application/x-ndjson"
PROTOBUF = "application/x-protobuf"


def bulk(*messages: str, index: str) -> bytes:
    pairs = ((json.dumps({"create": {"_index": index}}), json.dumps({"message": m})) for m in messages)
    return "".join(f"{action}\n{document}\n" for action, document in pairs).encode()


def otlp(workload: str, *bodies: str, nanos: int = 1_700_000_000_123_456_000) -> bytes:
    request = ExportLogsServiceRequest()
    resource = request.resource_logs.add()
    service = resource.resource.attributes.add(key="service.name")
    service.value.string_value = workload
    records = resource.scope_logs.add().log_records
    for body in bodies:
        record = records.add(time_unix_nano=nanos)
        record.body.string_value = body
    return bytes(request.SerializeToString())


def loki(workload: str, *lines: str) -> bytes:
    values = [[str(1_700_000_000_000_000_000 + n), line] for n, line in enumerate(lines)]
    return json.dumps({"streams": [{"stream": {"app": workload}, "values": values}]}).encode()


def test_lines_by_post_are_in_when_they_are_answered(intake: Intake, workload: str) -> None:
    answer = intake.ask(f"/api/v1/lines?workload={workload}", b"one\ntwo\n")
    assert (answer.status, answer.json) == (200, {"records": 2, "rejected": 0})
    assert intake.accepted(workload) == 2


def test_otlp_is_answered_in_its_own_encoding(intake: Intake, workload: str) -> None:
    answer = intake.ask("/v1/logs", otlp(workload, "a", "b"), Content_Type=PROTOBUF)
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"", PROTOBUF)
    assert intake.accepted(workload) == 2
    bad = intake.ask("/v1/logs", b"\xff\xff", Content_Type=PROTOBUF)
    assert bad.status == 400 and Status.FromString(bad.body).message
    bad_json = intake.ask("/v1/logs", b"[]", Content_Type="application/json")
    assert bad_json.status == 400 and bad_json.json["message"]


def test_bulk_is_one_answer_for_the_whole_request_in_the_order_that_shippers_search(
    intake: Intake, workload: str
) -> None:
    for path in ("/_bulk", "/es/_bulk", "/es/any/_bulk"):
        answer = intake.ask(path, bulk("a", "b", index=workload), Content_Type=NDJSON)
        assert answer.status == 200 and answer.headers["x-elastic-product"] == "Elasticsearch"
        assert b'"errors":false,"items":[{"create":{"status":201}},{' in answer.body
    assert intake.accepted(workload) == 6
    bad = intake.ask("/_bulk", b'{"delete":{"_id":"1"}}\n', Content_Type=NDJSON)
    assert bad.status == 400 and bad.json["error"]["reason"]


@pytest.mark.parametrize("path", ["/loki/api/v1/push", "/api/prom/push"])
def test_loki_is_answered_with_204_and_nothing(intake: Intake, workload: str, path: str) -> None:
    answer = intake.ask(path, loki(workload, "a"), Content_Type="application/json; charset=utf-8")
    assert (answer.status, answer.body) == (204, b"")
    assert intake.accepted(workload) == 1


def test_hec_answers_with_its_codes_and_acknowledges_what_is_stored(intake: Intake, workload: str) -> None:
    events = json.dumps({"event": "a", "index": workload}) + json.dumps({"event": "b", "index": workload})
    channel = {"X_Splunk_Request_Channel": "c1"}
    answer = intake.ask("/services/collector/event", events.encode(), **channel)
    assert answer.json["code"] == 0
    acks = intake.ask(
        "/services/collector/ack?channel=c1", json.dumps({"acks": [answer.json["ackId"]]}).encode()
    )
    assert acks.json == {"acks": {str(answer.json["ackId"]): True}}
    assert intake.ask("/services/collector/event", b"").json == {"text": "No data", "code": 5}
    assert intake.ask("/services/collector/event/1.0", method="OPTIONS").status == 200
    assert intake.ask("/services/collector/health").json["code"] == 17


def test_the_journal_is_answered_as_its_own_receiver_does(intake: Intake) -> None:
    entry = b"MESSAGE=x\n__REALTIME_TIMESTAMP=1700000000000001\n_HOSTNAME=h\nSYSLOG_IDENTIFIER=j1\n\n"
    assert intake.ask("/upload", entry, Content_Type="application/vnd.fdo.journal").status == 202
    assert any("j1" in name for name in intake.workloads())


def test_questions_of_elasticsearchs_clients_are_answered(intake: Intake) -> None:
    for path in ("/", "/es/", "/_license", "/es/_cluster/health", "/_cat/health"):
        answer = intake.ask(path)
        assert answer.status == 200 and answer.headers["x-elastic-product"] == "Elasticsearch"
    assert intake.ask("/", method="HEAD").status == 200
    assert intake.ask("/_ilm/policy/x", b"{}", method="PUT").json == {"acknowledged": True}


def test_an_unknown_path_names_the_right_ones(intake: Intake) -> None:
    answer = intake.ask("/v2/logs", b"x")
    assert answer.status == 404 and "/v1/logs (OTLP), /_bulk" in answer.json["error"]
    for path in ("/v1/logs", "/es/any/_bulk", "/services/collector/event"):
        wrong = intake.ask(path)
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST") and "by POST" in wrong.json["error"]
    traces = intake.ask("/v1/traces", b"")
    assert traces.status == 404 and "takes logs, no traces" in traces.json["error"]
    assert intake.ask("/healthz").status == intake.ask("/readyz").status == intake.ask("/ready").status == 200


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),  # without its header
        ("zstd", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
def test_a_body_is_decompressed(intake: Intake, workload: str, encoding: str, pack: object) -> None:
    packed = pack(b"one\ntwo")  # type: ignore[operator]
    assert intake.ask(f"/lines?workload={workload}", packed, Content_Encoding=encoding).status == 200
    assert intake.accepted(workload) == 2


def test_an_unknown_or_damaged_encoding_is_refused(intake: Intake) -> None:
    assert intake.ask("/lines", b"x", Content_Encoding="br").status == 415
    damaged = intake.ask("/lines", b"no gzip", Content_Encoding="gzip")
    assert damaged.status == 400 and "not readable as gzip" in damaged.json["error"]
    assert intake.ask("/lines", gzip.compress(b"x" * 99)[:-9], Content_Encoding="gzip").status == 400


@pytest.mark.parametrize(
    ("encoding", "bomb"),
    [
        ("gzip", gzip.compress(bytes(64 << 20))),
        ("zstd", zstandard.ZstdCompressor().compress(bytes(64 << 20))),
        ("identity", bytes(21 << 20)),
        ("gzip", bytes(9 << 20)),
    ],
    ids=["gzip bomb", "zstd bomb", "too large", "too large packed"],
)
def test_a_body_beyond_the_limit_is_413_for_each_client(intake: Intake, encoding: str, bomb: bytes) -> None:
    headers = {"Content_Encoding": encoding, "Content_Type": PROTOBUF}
    assert intake.ask("/v1/logs", bomb, **headers).status == 413


def test_a_declared_key_makes_a_retry_a_duplicate_and_another_body_a_conflict(
    intake: Intake, workload: str
) -> None:
    path = f"/lines?workload={workload}"
    for _ in range(2):
        assert intake.ask(path, b"one", Idempotency_Key="k1").status == 200
        assert intake.ask(f"{path}&batch_id=k2", b"two").status == 200
    assert intake.ask(path, b"other", Idempotency_Key="k1").status == 409
    assert intake.accepted(workload) == 2


def test_equal_bodies_are_one_request_only_where_their_times_tell_them_apart(
    intake: Intake, workload: str
) -> None:
    for _ in range(2):
        assert intake.ask("/v1/logs", otlp(workload, "GET /"), Content_Type=PROTOBUF).status == 200
        assert intake.ask("/_bulk", bulk("GET /", index=workload), Content_Type=NDJSON).status == 200
    assert intake.accepted(workload) == 3


def test_web_pages_cannot_send_without_a_key(intake: Intake) -> None:
    assert intake.ask("/lines", b"x", Origin="http://page.example").status == 403
    assert intake.ask("/lines", b"x", Host="page.example").status == 403


def test_a_full_pipeline_is_said_in_each_clients_own_words(intake: Intake, workload: str) -> None:
    gate = intake.ledger().intake
    gate.pause("maintenance")  # no room comes, so the door does not wait for it
    try:
        full = intake.ask("/v1/logs", otlp(workload, "a"), Content_Type=PROTOBUF)
        assert (full.status, full.headers["retry-after"]) == (503, "1")
        assert "drained" in Status.FromString(full.body).message
        full = intake.ask("/_bulk", bulk("a", index=workload), Content_Type=NDJSON)
        assert full.status == full.json["status"] == 429
        assert full.json["error"]["type"] == "es_rejected_execution_exception"
        body = bulk("a", "b", index=workload)
        full = intake.ask("/_bulk", body, Content_Type=NDJSON, User_Agent="elasticsearch-js/8.19.2 (linux)")
        assert (full.status, full.json["errors"]) == (200, True)
        assert [item["create"]["status"] for item in full.json["items"]] == [429, 429]
        assert (
            intake.ask("/loki/api/v1/push", loki(workload, "a"), Content_Type="application/json").status
            == 429
        )
        assert intake.ask("/services/collector", b'{"event":"a"}').json["code"] == 9
        full = intake.ask("/lines", b"a")
        assert (full.status, full.headers["retry-after"]) == (503, "1")
        assert intake.ask("/readyz").status == 503
    finally:
        gate.resume()
    assert intake.accepted(workload) == 0


def test_a_request_waits_two_seconds_for_room(redis_url: str, settings: Settings) -> None:
    small = settings.replace(max_pending_batches=1)
    with running_intake(small) as full:
        assert full.ask("/lines?workload=a", b"x").status == 200
        began = time.monotonic()
        assert full.ask("/lines?workload=a", b"x").status == 503
        assert 1.9 < time.monotonic() - began < 6
        counts = full.ledger().keys.counts
        room = threading.Timer(0.5, lambda: full.ledger().client.hset(counts, "batches", 0))
        room.start()
        assert full.ask("/lines?workload=a", b"y").status == 200
        room.join()
        assert full.accepted("a") == 2


def test_a_client_that_goes_silent_disturbs_nobody(intake: Intake, workload: str) -> None:
    with socket.create_connection(("127.0.0.1", intake.port)) as slow:
        slow.sendall(b"POST /lines HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        assert intake.ask(f"/lines?workload={workload}", b"x").status == 200
    assert intake.accepted(workload) == 1


def test_two_processes_share_a_port_and_know_each_others_requests(settings: Settings) -> None:
    with running_intake(settings, arguments=("--share",)) as both:
        both.start()
        for n in range(6):
            for _ in range(2):
                answer = both.ask("/lines?workload=a", b"x", Idempotency_Key=f"k{n}")
                assert answer.status == 200
        assert both.accepted("a") == 6
        both.processes[0].terminate()
        both.processes[0].wait(20)
        assert both.ask("/lines?workload=a", b"x").status == 200


def test_a_process_that_is_told_to_end_answers_what_it_has(settings: Settings) -> None:
    with running_intake(settings.replace(max_pending_batches=1)) as ending:
        assert ending.ask("/lines?workload=a", b"x").status == 200
        answers: list[int] = []
        waits = threading.Thread(target=lambda: answers.append(ending.ask("/lines?workload=a", b"y").status))
        waits.start()
        counts, client = ending.ledger().keys.counts, ending.ledger().client
        while not answers and ending.processes[0].poll() is None:
            ending.processes[0].terminate()
            waits.join(0.05)
        waits.join()
        assert answers == [503] and ending.processes[0].wait(20) == 0
        assert int(client.hget(counts, "batches") or 0) == 1  # type: ignore[arg-type]


def test_a_taken_port_is_one_sentence(intake: Intake, settings: Settings) -> None:
    environ = {
        **settings.to_environ(),
        "LOGWEIR_INTAKE": intake.url,
        "PATH": "",
        "PYTHONPATH": str(Path.cwd()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.workers.intake"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"the intake cannot listen at {intake.url} (Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_intake_needs_neither_polars_nor_torch_nor_tasks() -> None:
    forbidden = ("polars", "torch", "numpy", "transformers", "pipeline.tasks")
    code = (
        f"import sys, pipeline.workers.intake.server; print([m for m in {forbidden!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_address_that_a_header_gives_is_counted_under_its_beginning(intake: Intake, workload: str) -> None:
    path = f"/api/v1/lines?workload={workload}"
    assert intake.ask(path, b"one\n", X_Forwarded_For="9" * 5_000).status == 200
    client = connect(intake.settings)

    def counted() -> bool:
        return any(one.peer == "9" * MOST_ADDRESS for one in read_senders(client, intake.settings))

    assert wait_until(counted, timeout_s=20)
