"""OTLP logs in both encodings, as SDKs and collectors write them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import strategies as st
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.sdk._logs import Logger, LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource

from bench._fuzz_requests import NANOS, checked, otlp_request
from pipeline.records.levels import LEVELS
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.otlp import _facts_of, decode_message, decode_protobuf
from pipeline.sources.protocols.otlp_json import decode_json
from pipeline.sources.pushed import framed

TRACE, SPAN = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"


@pytest.fixture
def sdk() -> Iterator[tuple[Logger, InMemoryLogRecordExporter]]:
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(
        resource=Resource({"service.name": "cart", "service.namespace": "shop", "host.name": "h1"})
    )
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    yield provider.get_logger("shop.cart"), exporter  # type: ignore[misc]
    provider.shutdown()


def of_json(*records: dict[str, Any], **hints: str) -> Decoded:
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    return checked(decode_json(json.dumps(body).encode(), Hints(**hints)))


def text(value: str) -> dict[str, str]:
    return {"stringValue": value}


def test_a_record_of_the_sdk_arrives_with_all_it_says(sdk: tuple[Logger, InMemoryLogRecordExporter]) -> None:
    logger, exporter = sdk
    logger.emit(
        LogRecord(
            timestamp=NANOS,
            severity_number=SeverityNumber.ERROR,
            severity_text="ERROR",
            body="disk full",
            attributes={"code.line.number": 42, "tags": ["a", "b"], "more": {"ok": True}},
        )
    )
    body = encode_logs(exporter.get_finished_logs()).SerializeToString()
    decoded = checked(decode_protobuf(body, Hints()))
    records = decoded.records
    assert records.messages == ["disk full"]
    assert json.loads(records.texts[0]) == {
        "body": "disk full", "severity": "ERROR", "code.line.number": 42, "tags": ["a", "b"], "more": {"ok": True},
    }  # fmt: skip
    assert (records.timestamps, records.levels) == ([NANOS // 1000], ["error"])
    assert (records.workloads, records.hosts, records.services) == (["shop/cart"], ["h1"], ["cart"])
    assert decoded.distinct


def test_the_stack_trace_of_an_exception_ends_the_message(
    sdk: tuple[Logger, InMemoryLogRecordExporter],
) -> None:
    logger, exporter = sdk
    try:
        raise ValueError(7)
    except ValueError as exc:
        logger.emit(body="failed", exception=exc)
    message = decode_message(encode_logs(exporter.get_finished_logs()), Hints()).records.messages[0]
    assert message is not None
    assert message.startswith("failed\nTraceback (most recent call last):\n")
    assert message.endswith("ValueError: 7")


def test_both_encodings_of_a_request_are_the_same_records() -> None:
    request = otlp_request()
    ratio = request.resource_logs[0].scope_logs[0].log_records[0].attributes[1]
    ratio.value.double_value = 0.5
    message: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for record in message["resourceLogs"][0]["scopeLogs"][0]["logRecords"]:
        for key in ("traceId", "spanId"):  # in hex, unlike all other bytes
            if key in record:
                number = bytes(range(1, 17 if key == "traceId" else 9))
                record[key] = number.hex().upper()
    of_protobuf = checked(decode_protobuf(request.SerializeToString(), Hints()))
    assert decode_json(json.dumps(message).encode(), Hints()) == of_protobuf
    assert '"trace_id":"0102030405060708090a0b0c0d0e0f10"' in of_protobuf.records.texts[0]


# Of records: a severity, its text, body, event, key and value of attributes, whether it has a trace.
values = st.sampled_from(["", "a", "a\n", "\u00e9", 0, 7, 0.5, True, ["x"], None, b"\x00"])
stated_ones = st.tuples(
    st.sampled_from([0, 9, 17, 30]),
    st.sampled_from(["", "INFO", "whatever"]),
    values,
    st.sampled_from(["", "paid"]),
    st.lists(
        st.tuples(
            st.sampled_from(["k", "body", "attributes.body", "trace_id", "exception.stacktrace", ""]), values
        ),
        max_size=4,
    ),
    st.booleans(),
)


def filled(target: common_pb2.AnyValue, value: object) -> None:
    match value:
        case bool():
            target.bool_value = value
        case str():
            target.string_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case bytes():
            target.bytes_value = value
        case list():
            for item in value:
                filled(target.array_value.values.add(), item)


def test_of_attributes_with_one_name_in_the_raw_text_that_of_the_key_met_later_stands() -> None:
    pairs = [("body", "a"), ("attributes.body", "b"), ("body", "c"), ("k", "d")]
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(severity_number=9)
    for key, value in pairs:
        record.attributes.add(key=key).value.string_value = value
    attributes = [{"key": key, "value": text(value)} for key, value in pairs]
    expected = '{"severity":9,"attributes.body":"b","k":"d"}'
    assert decode_message(request, Hints()).records.texts == [expected]
    assert of_json({"severityNumber": 9, "attributes": attributes}).records.texts == [expected]


def test_a_body_without_a_severity_is_a_line_that_stage_ingest_parses() -> None:
    pair = {"key": "log.file.name", "value": text("app.log")}
    plain = {"body": text("a line\n")}
    records = of_json(plain, {**plain, "attributes": [pair]}, {**plain, "severityNumber": 9}).records
    assert records.messages == [None, None, "a line"]
    assert records.texts[0] == "a line"
    assert json.loads(records.texts[1]) == {"stream": "stdout", "log": "a line", "log.file.name": "app.log"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"kvlistValue": {"values": [{"key": "msg", "value": text("a")}, {"key": "k", "value": {"intValue": 1}}]}}, "a"),
        ({"kvlistValue": {"values": [{"key": "event", "value": text("a")}]}}, "a"),
        ({"kvlistValue": {"values": [{"key": "k", "value": {"intValue": "1"}}]}}, '{"k":1}'),
        ({"arrayValue": {"values": [{"intValue": 1}, None, {}]}}, "[1,null,null]"),
        ({"boolValue": False}, "false"),
        ({"intValue": "not a number"}, "not a number"),
        ({"doubleValue": "Infinity"}, "Infinity"),
        ({"bytesValue": "/wA="}, "/wA="),
        ({}, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_a_body_that_is_no_text_becomes_a_message(body: dict[str, Any] | None, message: str) -> None:
    records = of_json({"body": body}).records
    assert [records.messages[0] if records.messages[0] is not None else records.texts[0]] == [message]


@pytest.mark.parametrize(
    ("number", "word", "level"),
    [(1, "", "trace"), (4, "", "trace"), (5, "", "debug"), (9, "", "info"), (13, "", "warning"), (17, "", "error"),
     (20, "INFO", "error"), (21, "", "fatal"), (24, "", "fatal"), (25, "Warning", "warning"), (0, "NOTICE", "notice"),
     (0, "whatever", None), (0, "", None), (-1, "", None)],
)  # fmt: skip
def test_the_number_of_a_severity_wins_over_its_word(number: int, word: str, level: str | None) -> None:
    levels = of_json({"severityNumber": number, "severityText": word, "body": text("a")}).records.levels
    assert (levels or [None])[0] == level
    assert level is None or level in LEVELS


def test_the_time_is_that_of_the_record_else_that_of_its_observation_else_none() -> None:
    decoded = of_json(
        {"timeUnixNano": str(NANOS), "observedTimeUnixNano": "1"},
        {"timeUnixNano": "0", "observedTimeUnixNano": NANOS},
        {"timeUnixNano": "soon"},
    )
    assert decoded.records.timestamps == [NANOS // 1000, NANOS // 1000, None]
    assert not decoded.distinct


def test_a_request_whose_times_are_whole_seconds_is_not_distinct() -> None:
    assert of_json({"timeUnixNano": NANOS}).distinct
    assert not of_json({"timeUnixNano": NANOS // 10**9 * 10**9}).distinct


def test_an_attribute_with_the_name_of_a_field_does_not_hide_the_field() -> None:
    pair = {"key": "trace_id", "value": text("mine")}
    (raw,) = of_json(
        {"body": text("a"), "severityNumber": 9, "attributes": [pair], "traceId": TRACE, "spanId": SPAN}
    ).records.texts
    assert json.loads(raw) == {
        "body": "a", "severity": 9, "attributes.trace_id": "mine", "trace_id": TRACE, "span_id": SPAN,
    }  # fmt: skip


def test_lines_of_a_stack_trace_are_joined_within_their_resource() -> None:
    lines = [
        {"body": text(line)} for line in ("ERROR boom", "\tat a.b(C.java:1)", "Caused by: x", "INFO next")
    ]
    joined = framed(of_json(*lines).records)[0]
    assert joined["raw"].to_list() == ["ERROR boom\n\tat a.b(C.java:1)\nCaused by: x", "INFO next"]
    stated = [{**line, "severityNumber": 9} for line in lines]
    assert framed(of_json(*stated).records)[0].height == len(lines)
    other = [
        {"attributes": [{"key": "log.file.path", "value": text(str(i))}], **line}
        for i, line in enumerate(lines)
    ]
    assert framed(of_json(*other).records)[0].height == 4


def test_the_workload_of_the_request_wins() -> None:
    assert of_json({"body": text("a")}, workload="shop/cart").records.workloads == ["shop/cart"]
    assert of_json({"body": text("a")}).records.workloads == ["unknown_service"]


@pytest.mark.parametrize(
    "body", [b"{}", b'{"resourceLogs":[]}', b'{"resourceLogs":[{"scopeLogs":[{}]}],"new":[1]}']
)
def test_an_empty_request_is_a_success(body: bytes) -> None:
    assert decode_json(body, Hints()).records.height == 0
    assert decode_protobuf(b"", Hints()).records.height == 0


def test_bytes_that_are_not_utf_8_are_replaced_in_texts_and_stay_in_ids() -> None:
    request = otlp_request()
    record = request.resource_logs[0].scope_logs[0].log_records[0]
    record.trace_id = b"\xff" * 16
    record.attributes.add(key="odd").value.array_value.values.add().string_value = "caf@"
    body = request.SerializeToString().replace(b"disk full", b"disk f\xff\xfel").replace(b"caf@", b"caf\xe9")
    with pytest.raises(Exception, match="UTF-8"):
        ExportLogsServiceRequest.FromString(body)
    records = checked(decode_protobuf(body, Hints())).records
    raw = json.loads(records.texts[0])
    assert raw["body"] == "disk f\ufffd\ufffdl"
    assert (raw["odd"], raw["trace_id"], raw["data"]) == (["caf\ufffd"], "ff" * 16, "/wA=")


def test_an_array_of_json_is_refused_with_the_setting_of_vector() -> None:
    with pytest.raises(Undecodable, match="codec otlp"):
        decode_json(b' [{"a":1}]', Hints())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"7", b'{"resourceLogs":7}', b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"severityNumber":[]}]}]}]}',
     b'{"resourceLogs":NaN}', b'{1:2}', b'{"x":' + b"9" * 5000 + b'"}'],
)  # fmt: skip
def test_a_body_that_is_not_otlp_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable, match="the OTLP request"):
        decode_json(body, Hints())
    with pytest.raises(Undecodable, match="the OTLP request"):
        decode_protobuf(b"\x0a\xff\x01" + body, Hints())


def test_values_are_bounded_in_number() -> None:
    many = [{}] * 10_001
    for record in ({"attributes": many}, {"body": {"arrayValue": {"values": many}}}):
        with pytest.raises(Undecodable, match="more than 10,000 values"):
            of_json(record)
    request = otlp_request()
    request.resource_logs[0].resource.attributes.extend([common_pb2.KeyValue()] * 10_001)
    with pytest.raises(Undecodable, match="more than 10,000 values"):
        decode_message(request, Hints())


def test_values_are_bounded_in_depth() -> None:
    deep: dict[str, Any] = text("a")
    for _ in range(60):
        deep = {"arrayValue": {"values": [deep]}}
    assert of_json({"body": deep}).records.height == 1
    for _ in range(60):
        deep = {"arrayValue": {"values": [deep]}}
    with pytest.raises(Undecodable, match="levels"):
        of_json({"body": deep})


def test_a_resource_that_comes_again_is_read_once_and_each_request_may_choose_its_workload() -> None:
    body = otlp_request().SerializeToString()
    first = decode_protobuf(body, Hints())
    read = _facts_of.cache_info().misses
    chosen = decode_protobuf(body, Hints(workload="mine"))
    again = decode_protobuf(body, Hints())
    assert _facts_of.cache_info().misses == read
    assert again == first and set(chosen.records.workloads or ()) == {"mine"}


def test_a_large_resource_is_not_remembered() -> None:
    request = otlp_request()
    request.resource_logs[0].resource.attributes.add(key="k").value.string_value = "x" * 4_096
    before = _facts_of.cache_info()
    assert decode_message(request, Hints()).records.height
    assert _facts_of.cache_info() == before
