"""Values of Kafka's records as records of logs: documents, text, OTLP, their workloads, times and places."""

import json
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from pipeline.records.payload import content_of
from pipeline.records.pushed import PushedRecords, joined_records
from pipeline.settings.kafka import KafkaSource
from pipeline.sources import formats
from pipeline.sources.kafka import values
from pipeline.sources.kafka.values import MANY, KafkaRecord, Read, read_values
from pipeline.sources.pushed import framed

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOON_MS = 1_795_176_000_000


def source(**options: str) -> KafkaSource:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return KafkaSource.parse(f"kafka://broker/app-logs?{query}" if query else "kafka://broker/app-logs")


def record(value: str | bytes | None, offset: int = 7, **more: Any) -> KafkaRecord:
    given = {"key": None, "headers": [], "millis": 0} | more
    return KafkaRecord(offset=offset, value=value.encode() if isinstance(value, str) else value, **given)


def read(*records: KafkaRecord, topic: str = "app-logs", **options: str) -> Read:
    return read_values(source(**options), topic, records)


def the_records(found: Read) -> PushedRecords:
    assert found.records is not None
    return found.records


def workload(*records: KafkaRecord, **options: str) -> list[str]:
    return the_records(read(*records, **options)).workloads or []


def test_a_line_is_a_record_of_its_topic_at_its_offset() -> None:
    found = the_records(read(record("INFO one", 41), record("WARN two", 43)))
    assert found.texts == ["INFO one", "WARN two"]
    assert (found.workloads, found.places) == (["app-logs"] * 2, [41, 43])


def test_documents_of_shippers_tell_their_workload_and_others_are_of_the_topic() -> None:
    filebeat = json.dumps(
        {"@timestamp": "2026-11-20T12:00:00.5Z", "message": "x", "service": {"name": "till"}}
    )
    fluent_bit = json.dumps(
        {
            "log": "y",
            "kubernetes": {"namespace_name": "shop", "container_name": "web"},
            "date": NOON_MS / 1000,
        }
    )
    vector = json.dumps({"message": "z", "timestamp": "2026-11-20T12:00:00Z", "source_type": "file"})
    found = the_records(read(record(filebeat, 1), record(fluent_bit, 2), record(vector, 3)))
    assert found.workloads == ["till", "shop/web", "app-logs"]
    assert found.timestamps == [NOON_MS * 1000 + 500_000, NOON_MS * 1000, NOON_MS * 1000]


def test_documents_and_text_keep_their_order() -> None:
    found = the_records(read(record("a", 1), record('{"message":"b"}', 2), record("c", 3), topic="t"))
    assert found.places == [1, 2, 3] and found.texts == ["a", '{"message":"b"}', "c"]


def test_a_document_of_many_lines_is_one_line() -> None:
    assert the_records(read(record('{\n "message": "b"\n}\n'))).texts == ['{"message":"b"}']
    assert the_records(read(record("{\n no json\n}"))).texts == ["{\n no json\n}"]


def test_headers_tell_the_workload_of_text() -> None:
    assert workload(record("x", headers=[("service.name", b"cart")])) == ["cart"]
    assert workload(
        record("x", headers=[("k8s.namespace.name", b"shop"), ("k8s.deployment.name", b"web")])
    ) == ["shop/web"]
    assert workload(record("x", headers=[("app", b"till"), ("message", b"no"), ("odd", None)])) == ["till"]
    assert workload(record("x", headers=[("app", b"\xff")])) == ["\ufffd"]


def test_a_topic_of_a_day_is_the_topic() -> None:
    (one,) = the_records(read(record("x"), topic="app-logs-2026.11.20")).workloads or []
    assert one == "app-logs"


def test_a_setting_chooses_the_workload_from_topic_key_and_headers() -> None:
    given = record('{"message":"x","app":"own"}', key=b"k-1", headers=[("team", b"red")])
    assert workload(given, workload="shop/web") == ["shop/web"]
    assert workload(given, workload="{topic}/{key}") == ["app-logs/k-1"]
    assert workload(given, record("y", 8), workload="{header.team}/{topic}") == ["red/app-logs", "app-logs"]


def test_a_key_alone_is_no_workload() -> None:
    assert workload(record("x", key=b"user-4711")) == ["app-logs"]


def test_a_stack_trace_sent_line_by_line_is_one_record_of_its_key() -> None:
    trace = ["java.lang.Error: no", "\tat a.B.c(B.java:1)", "Caused by: java.io.IOException"]
    records = [record(text, n, key=b"a") for n, text in enumerate(trace)]
    found = the_records(read(*records, record("\tat other(B.java:1)", 9, key=b"b")))
    assert found.places == [0, 1, 2, 9]
    joined = framed(found)[0]
    assert joined["raw"].to_list() == ["\n".join(trace), "\tat other(B.java:1)"]
    assert joined["line"].to_list() == [0, 9]


def test_tombstones_and_blanks_are_counted() -> None:
    found = read(record(None, 1), record("", 2), record(" \n", 3), record("x", 4))
    assert found.tombstones == 3 and the_records(found).places == [4]
    assert read(record(None)).records is None


def test_binary_is_unreadable_and_the_others_are_read() -> None:
    found = read(record("x", 1), record(b"\0\0\0\0\x07\xff", 2), record("y", 3))
    assert the_records(found).places == [1, 3]
    assert found.unreadable is not None and "binary" in found.why
    assert (found.unreadable.places, found.unreadable.texts) == ([2], ["AAAAAAf/"])


def test_bytes_of_another_encoding_are_text_all_the_same() -> None:
    assert the_records(read(record(b"caf\xe9"))).texts == ["caf\ufffd"]


def test_values_of_several_lines_are_read_line_by_line_where_a_setting_says_so() -> None:
    found = the_records(read(record('a\nb\n{"message":"c"}', 5), record("d", 6), format="lines"))
    assert found.texts == ["a", "b", '{"message":"c"}', "d"]
    assert found.places == [5 * MANY, 5 * MANY + 1, 5 * MANY + 2, 6 * MANY]
    assert set(found.workloads or ()) == {"app-logs"}


def otlp() -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    pair = logs.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", "checkout"
    scope = logs.scope_logs.add()
    for n in (0, NOON_MS * 1_000_000 + 5_000):
        made = scope.log_records.add(severity_number=17, time_unix_nano=n)
        made.body.string_value = f"no money {n}"
    return request


def test_otlp_in_protobuf_is_read_where_a_setting_says_so() -> None:
    body = otlp().SerializeToString()
    found = read(record(body, 3, millis=NOON_MS), record(b"\x0a\xff\xff", 4), format="otlp")
    records = the_records(found)
    assert records.workloads == ["checkout"] * 2 and records.levels == ["error"] * 2
    assert records.timestamps == [NOON_MS * 1000, NOON_MS * 1000 + 5]
    assert records.places == [3 * MANY, 3 * MANY + 1]
    assert found.unreadable is not None and found.unreadable.places == [4] and "protobuf" in found.why


def test_otlp_in_json_is_read_where_a_setting_says_so() -> None:
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": {"stringValue": "x"}}]}]}]})
    found = read(record(body, 3, headers=[("app", b"till")]), format="otlp-json")
    assert the_records(found).workloads == ["till"]
    assert read(record("[]"), format="otlp-json").unreadable is not None


def parsed(records: PushedRecords) -> pl.DataFrame:
    frame, found = framed(records)
    return formats.parse(frame, found, arrived=datetime(2030, 1, 1, tzinfo=UTC))


def test_the_time_of_the_record_counts_where_the_text_has_none() -> None:
    texts = ["no time here", "2026-11-20 11:00:00,123 INFO a.b: own time", "again without"]
    rows = parsed(the_records(read(*(record(text, n, millis=NOON_MS + n) for n, text in enumerate(texts)))))
    assert [moment.replace(microsecond=0).hour for moment in rows["timestamp"]] == [12, 11, 12]
    assert rows["timestamp"][2] == NOON.replace(microsecond=2_000) and rows["timed"].to_list() == [True] * 3


def test_a_record_without_any_time_has_that_of_its_arrival() -> None:
    rows = parsed(the_records(read(record("no time here"))))
    assert rows["timestamp"][0].year == 2030 and rows["timed"].to_list() == [False]


def test_a_document_with_a_local_time_keeps_it() -> None:
    document = '{"time":"2026-11-20 11:00:00","message":"x","level":"info"}'
    rows = parsed(the_records(read(record(document, millis=NOON_MS))))
    assert rows["timestamp"][0].hour == 11


def test_the_newest_time_of_records_counts_both_kinds() -> None:
    found = PushedRecords(["a", "b"], timestamps=[5, None], untimed=[None, 9])
    assert found.latest is not None and found.latest.microsecond == 9
    assert PushedRecords(["a", "b"], timestamps=[5, None]).latest is None


def test_joined_records_have_a_column_where_one_part_has_it() -> None:
    joined = joined_records([PushedRecords(["a"], hosts=["h"]), PushedRecords(["b"], levels=["info"])])
    assert (joined.messages, joined.hosts, joined.levels) == (["a", "b"], ["h", None], [None, "info"])
    assert joined.places is None


ODD = [
    b"{", b"[", b"\0", b"\xff\xfe", b"{}" * 50, b"[" * 10_000, b'{"a":' * 5_000, b"\n\n", b"null", b"\xed\xa0\xbd",
    b'{"message":"\\ud800","app":"\\ud83d","host":"\\udfff"}',
    b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"body":{"stringValue":"\\ud800"}}]}]}]}',
]  # fmt: skip


@pytest.mark.parametrize("format_", ["record", "lines", "otlp", "otlp-json"])
def test_no_value_stops_the_reading(format_: str) -> None:
    found = read_values(source(format=format_), "t", [record(value, n) for n, value in enumerate(ODD)])
    parts = [part for part in (found.records, found.unreadable) if part]
    for part in parts:
        assert content_of("t", part)  # it can be packed
    seen = sum(part.height for part in parts)
    assert seen + found.tombstones >= len(ODD) - 2  # empty requests of OTLP hold no record


@pytest.mark.parametrize("format_", ["record", "lines"])
def test_a_value_on_which_a_decoder_fails_is_unreadable_and_the_others_are_read(
    format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lines: list[str], *_: object, **__: object) -> None:
        raise ValueError(f"cannot read {len(lines)}")

    monkeypatch.setattr(values, "posted_documents", fail)
    monkeypatch.setattr("pipeline.sources.protocols.lines.posted_documents", fail)
    records = [
        record(None, 0),
        record("a", 1),
        record('{"message":"b"}', 2),
        record("c", 3),
        record('{"d":1}', 4),
    ]
    found = read(*records, format=format_)
    assert the_records(found).texts == ["a", "c"] and found.tombstones == 1
    assert found.unreadable is not None and found.unreadable.places == [2, 4]
    assert found.why == "a decoder failed (ValueError: cannot read 1)"
