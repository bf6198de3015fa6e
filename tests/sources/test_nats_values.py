"""Messages of Opni's services as records.

`opni_exchanges.json` holds the bytes that Opni's own services sent over a real nats-server, as hex:
preprocessing, workload drain and training controller, unchanged, with a stand-in for inference. The commits
are 3e5a547 of rancher/opni-preprocessing-service, 83b2bdb of opni-drain-service, and 52e37de of
opni-training-controller."""

import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats_server import list_bytes

from pipeline.errors import BadInput, BadPayload
from pipeline.nats.payloads import (
    Payload,
    payload_bytes,
    payload_lists,
    read_payload,
    read_payloads,
)
from pipeline.nats.subjects import FLOWS, GPU_LOGS, family
from pipeline.sources.formats import parse
from pipeline.sources.nats.cursor import StreamCursor
from pipeline.sources.nats.values import MANY, NatsMessage, read_messages
from pipeline.sources.pushed import framed

EXCHANGES: Any = json.loads(Path(__file__).with_name("opni_exchanges.json").read_text())
AT = 1_795_000_000_000_000
DOCUMENTS = st.builds(
    Payload,
    id=st.text(),
    cluster_id=st.text(max_size=8),
    log=st.text(),
    masked_log=st.text(max_size=8),
    anomaly_level=st.sampled_from(["", "Normal", "Anomaly"]),
    log_type=st.text(max_size=8),
    template_matched=st.text(max_size=8),
    template_cluster_id=st.integers(-(2**63), 2**63 - 1),
    inference_model=st.text(max_size=8),
    opnilog_confidence=st.floats(width=32, allow_nan=False),
    pod_name=st.text(max_size=8),
    namespace_name=st.text(max_size=8),
    deployment=st.text(max_size=8),
    service=st.text(max_size=8),
)


def recorded() -> dict[str, list[bytes]]:
    found = defaultdict(list)
    for message in EXCHANGES["published"]:
        found[message["subject"]].append(bytes.fromhex(message["data"]))
    return found


def messages(*data: bytes) -> list[NatsMessage]:
    return [NatsMessage(number, one, AT) for number, one in enumerate(data, start=1)]


def test_what_opni_sent_is_read_and_written_again_byte_for_byte() -> None:
    found = recorded()
    lists = [*(subject for subject, flow in FLOWS.items() if flow.is_list and subject in found)]
    lists += ["inferenced_logs", "templates_index", "model_inferenced_workload_logs"]
    assert len(lists) >= 6
    for subject in lists:
        for data in found[subject]:
            assert list_bytes(read_payloads(data)) == data
    assert len(found["raw_logs"]) >= 8
    for data in found["raw_logs"]:
        assert payload_bytes(read_payload(data)) == data


def test_every_line_that_opni_sent_becomes_a_record_with_its_workload() -> None:
    found = recorded()
    read = read_messages("raw_logs", messages(*found["raw_logs"]))
    assert read.records is not None and read.unreadable is None and not read.empty
    assert read.records.height == len(found["raw_logs"])
    assert set(read.records.workloads or ()) == {"c1/shop/web", "c1/shop/other"}
    rows = parse(*framed(read.records), arrived=datetime(2026, 11, 25, tzinfo=UTC))
    by_message = {row["message"]: row for row in rows.to_dicts()}
    logged = by_message["user 7 logged in from 10.0.0.3"]
    assert (logged["level"], logged["host"]) == ("info", "web-1")
    assert logged["timestamp"] == datetime(2026, 11, 20, 10, tzinfo=UTC)
    failed = next(row for message, row in by_message.items() if message.endswith("ü€🔥"))
    assert failed["timestamp"] == datetime.fromtimestamp(AT / 1e6, UTC)  # when the server took it
    assert "panic: no\n at foo\n at bar" in by_message


def test_the_same_lines_come_from_each_stage_of_opni() -> None:
    found = recorded()
    for subject in ("preprocessed_logs_workload", "opnilog_workload_logs", GPU_LOGS):
        read = read_messages(subject, messages(*found[subject]))
        assert read.records is not None
        for place in read.records.places or []:
            assert place // MANY >= 1
        assert set(read.records.workloads or ()) == {"c1/shop/web"}
        assert all('"masked_log":"' in (raw or "") for raw in read.records.raws or [])


def test_requests_were_answered_in_these_words() -> None:
    replies = {subject: bytes.fromhex(one["reply"]) for subject, one in EXCHANGES["asked"].items()}
    assert replies == {
        "model_status": b"not started",
        "gpu_service_inference": b"YES",
        "train_model": b"model reset",
    }
    found = recorded()
    assert found["gpu_service_running"] == [b"check-up"]
    assert json.loads(found["model_workload_parameters"][0]) == {"workloads": {}, "status_type": "reset"}
    assert json.loads(found["model_update"][0]) == {"status": "reset"}


def test_a_message_that_cannot_be_read_leaves_the_others() -> None:
    good = list_bytes([Payload(id="a", log="one"), Payload(id="b", log="two")])
    read = read_messages("opnilog_workload_logs", messages(good, b"\x0a\xff", b"\xff\xfe", good))
    assert read.records is not None and read.unreadable is not None
    assert read.records.places == [MANY, MANY + 1, 4 * MANY, 4 * MANY + 1]
    assert read.unreadable.places == [2, 3]
    assert read.unreadable.messages == ["Cv8=", "//4="]
    assert read.why.startswith("the message is no protobuf PayloadList")


def test_a_list_of_too_many_payloads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.sources.nats import values

    monkeypatch.setattr(values, "MANY", 2)
    read = read_messages("opnilog_workload_logs", messages(list_bytes([Payload(log="x")] * 3)))
    assert read.why == "the message holds 3 payloads; send at most 2 in one"


def test_payloads_without_a_text_are_counted_and_left_out() -> None:
    read = read_messages(
        "raw_logs", messages(payload_bytes(Payload(id="a")), payload_bytes(Payload(log=" \n")))
    )
    assert read.records is None and read.empty == 2


def test_a_payload_without_a_place_is_of_the_workload_opni() -> None:
    read = read_messages("raw_logs", messages(payload_bytes(Payload(log="x"))))
    assert read.records is not None
    assert (read.records.workloads, read.records.hosts) == (["opni"], None)


@given(st.lists(DOCUMENTS, max_size=4))
def test_documents_survive_the_wire(documents: list[Payload]) -> None:
    assert read_payloads(list_bytes(documents)) == documents
    parts = payload_lists(documents, 40)
    assert [one for some, _ in parts for one in some] == documents
    assert all(read_payloads(data) == some for some, data in parts)
    assert all(len(data) <= 40 or len(some) == 1 for some, data in parts)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (read_payload, read_payloads):
        try:
            read(data)
        except BadInput:
            continue


def test_a_part_of_a_subject_belongs_to_its_family() -> None:
    assert family("raw_logs.17") == family("raw_logs") == "raw_logs"
    assert family("inferenced_logs") == family("raw_logsx") == ""


def test_a_cursor_is_its_text() -> None:
    cursor = StreamCursor("2026-11-25T22:05:48.59422282Z", 17)
    assert StreamCursor.parse(str(cursor)) == cursor
    for wrong in ("17", "x ", "x -1", "x 1.5"):
        with pytest.raises(BadPayload, match="is not of a stream of NATS"):
            StreamCursor.parse(wrong)
