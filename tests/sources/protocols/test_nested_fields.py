"""The count of records in a body of protobuf."""

import cramjam
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.loki import decode_push
from pipeline.sources.protocols.nested_fields import check_nested
from pipeline.sources.protocols.otlp import decode_protobuf


def nested(tag: int, body: bytes) -> bytes:
    size = len(body)
    varint = b""
    while size > 0x7F:
        varint += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([tag]) + varint + bytes([size]) + body


EMPTY = b"\x12\x00" * 600_000


@pytest.mark.parametrize(
    "body",
    [nested(0x0A, nested(0x12, EMPTY)), nested(0x0A, EMPTY), b"\x0a\x00" * 600_000],
    ids=["records", "scopes", "resources"],
)
def test_a_body_of_empty_messages_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        check_nested(body, (1, 2, 2))
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        decode_protobuf(body, Hints())


def test_a_small_block_of_snappy_may_not_hold_more_entries_than_a_request() -> None:
    block = bytes(cramjam.snappy.compress_raw(nested(0x0A, EMPTY)))
    assert len(block) < 100_000
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        decode_push(block, Hints())


def test_a_large_request_within_the_limit_is_decoded() -> None:
    request = ExportLogsServiceRequest()
    scope_logs = request.resource_logs.add().scope_logs.add()
    for number in range(1_000):
        record = scope_logs.log_records.add(time_unix_nano=number + 1, severity_number=9, flags=1)
        record.body.string_value = "x" * 1_200
    assert decode_protobuf(request.SerializeToString(), Hints()).records.height == 1_000


@pytest.mark.parametrize("end", [b"\x12", b"\x12\xff\xff\xff\xff\x7f", b"\xff" * 20, b"\x0b", b"\x11\x00"])
def test_damaged_bytes_end_the_count(end: bytes) -> None:
    check_nested(b"\x08\x01" + nested(0x7A, bytes(2_000_000)) + end, (1, 2, 2))


def test_fields_that_hold_no_records_are_bounded_too() -> None:
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        check_nested(b"\x08\x01" * 600_000, (1, 2, 2))
