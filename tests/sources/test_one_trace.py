"""The same lines give the same records, whichever way they come: from a file, from a sender of lines, or from
a shipper that makes a record of each line."""

import json
from collections.abc import Callable
from itertools import count

import msgspec
import polars as pl
import pytest

from pipeline.nats.payloads import Payload, payload_bytes
from pipeline.records.pushed import PushedRecords, pushed
from pipeline.settings.kafka import KafkaSource
from pipeline.sources.chunks import Assembly, Cursor
from pipeline.sources.kafka.values import KafkaRecord, read_values
from pipeline.sources.nats.values import NatsMessage, read_messages
from pipeline.sources.protocols import otlp_json
from pipeline.sources.protocols.bulk import decode_bulk
from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.hec import decode_events
from pipeline.sources.protocols.journal import decode_journal
from pipeline.sources.protocols.lines import decode_posted
from pipeline.sources.protocols.loki import decode_push
from pipeline.sources.protocols.streams.syslog import syslog_records
from pipeline.sources.pushed import KnownFormats, framed, framed_by_workload
from tests.sources.traces import BELOW, CALM, CRASHES, ERROR

NANOS = 1_795_168_800_000_000_000
JSON = Hints(content_type="application/json")
HEADED = [CALM.format(i, i) for i in range(12)]

Found = list[tuple[str, str | None]]  # the text of each record without empty lines, and its level


def found_in(rows: pl.DataFrame, text: Callable[[str], str] = lambda raw: raw) -> Found:
    texts = [line for raw in rows["raw"] for line in ["\n".join(filter(str.strip, text(raw).split("\n")))]]
    return [one for one in zip(texts, rows["level"].to_list(), strict=True) if one[0]]


def found_in_records(records: PushedRecords | None, text: Callable[[str], str] = lambda raw: raw) -> Found:
    assert records is not None
    return found_in(framed(records)[0], text)


def member(*keys: str) -> Callable[[str], str]:
    def read(raw: str) -> str:
        document = json.loads(raw)
        return next(document[key] for key in keys if key in document)

    return read


def of_file(lines: list[str]) -> Found:
    assembly, text = Assembly(Cursor(path="a", identity="i")), "".join(f"{line}\n" for line in lines).encode()
    chunks = [chunk for at in range(0, len(text), 700) for chunk in assembly.push(text[at : at + 700], at)]
    return found_in(pl.concat([chunk.records for chunk in [*chunks, *assembly.finish(len(text))]]))


def of_producer(lines: list[str]) -> Found:
    return found_in(framed(pushed(lines))[0])


def of_lines(lines: list[str]) -> Found:
    return found_in_records(decode_posted("\n".join(lines).encode(), Hints(workload="shop")).records)


def bulk(documents: list[dict[str, object]]) -> PushedRecords:
    body = "".join(f'{{"create":{{"_index":"app"}}}}\n{json.dumps(one)}\n' for one in documents)
    return decode_bulk(body.encode(), JSON).records


def of_bulk(lines: list[str]) -> Found:
    """As Filebeat writes documents."""
    place = {"log": {"file": {"path": "/var/log/shop.log"}}, "host": {"name": "web1"}}
    return found_in_records(bulk([{"message": line, **place} for line in lines]), member("message"))


def of_fluent_bit(lines: list[str]) -> Found:
    pod = {"stream": "stderr", "kubernetes": {"pod_name": "shop-1", "container_name": "shop"}}
    return found_in_records(bulk([{"date": 1.5, "log": f"{line}\n", **pod} for line in lines]), member("log"))


def loki(lines: list[str], *beside: dict[str, str]) -> PushedRecords:
    values = [[str(NANOS + n), line, *beside] for n, line in enumerate(lines)]
    return decode_push(
        json.dumps({"streams": [{"stream": {"app": "shop"}, "values": values}]}).encode(), JSON
    ).records


def of_loki(lines: list[str]) -> Found:
    return found_in_records(loki(lines))


def of_loki_with_fields(lines: list[str]) -> Found:
    return found_in_records(loki(lines, {"trace_id": "a1"}), member("log"))


def of_otlp(lines: list[str], **beside: object) -> Found:
    records = [
        {"timeUnixNano": str(NANOS + n), "body": {"stringValue": line}, **beside}
        for n, line in enumerate(lines)
    ]
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()
    return found_in_records(otlp_json.decode_json(body, JSON).records, member("log") if beside else str)


def of_otlp_file(lines: list[str]) -> Found:
    return of_otlp(
        lines, attributes=[{"key": "log.file.path", "value": {"stringValue": "/var/log/shop.log"}}]
    )


def of_hec(lines: list[str]) -> Found:
    events = "".join(json.dumps({"event": line, "sourcetype": "shop"}) for line in lines if line.strip())
    return found_in_records(decode_events(events.encode(), Hints()).records)


def of_syslog(lines: list[str]) -> Found:
    head = "<134>Nov 20 10:00:01 web1 shop[812]: "
    records = syslog_records([(f"{head}{line}".encode(), "10.0.0.1") for line in lines]).records
    return found_in_records(records, lambda raw: raw.removeprefix(head))


def of_syslog_with_versions(lines: list[str]) -> Found:
    head = '<134>1 2026-11-20T10:00:01.5Z web1 shop 812 - [a@1 b="c"] '
    records = syslog_records([(f"{head}{line}".encode(), "10.0.0.1") for line in lines]).records
    return found_in_records(records, lambda raw: raw.removeprefix(head))


def of_journal(lines: list[str]) -> Found:
    body = "\n".join(f"_PID=7\nSYSLOG_IDENTIFIER=shop\nMESSAGE={line}\n" for line in lines)
    return found_in_records(decode_journal(body.encode(), Hints()).records)


def kafka(values: list[str]) -> PushedRecords | None:
    source = KafkaSource.parse("kafka://broker/app")
    return read_values(
        source, "app", [KafkaRecord(n, value.encode(), b"k", (), 0) for n, value in enumerate(values)]
    ).records


def of_kafka(lines: list[str]) -> Found:
    return found_in_records(kafka(lines))


def of_kafka_documents(lines: list[str]) -> Found:
    return found_in_records(kafka([json.dumps({"message": line}) for line in lines]), member("message"))


def of_nats(lines: list[str]) -> Found:
    numbers = count(1)
    messages = [
        NatsMessage(n, payload_bytes(Payload(id=f"d{n}", log=line, pod_name="p", deployment="shop")), n)
        for line in lines
        if (n := next(numbers))
    ]
    return found_in_records(read_messages("raw_logs", messages).records, member("log"))


WAYS = [of_producer, of_lines, of_bulk, of_fluent_bit, of_loki, of_loki_with_fields, of_otlp, of_otlp_file, of_hec, of_syslog,
        of_syslog_with_versions, of_journal, of_kafka, of_kafka_documents, of_nats]  # fmt: skip
TRACES = [crash for _, crash in CRASHES.values()] + [f"{ERROR}\n{text}" for text in BELOW.values()]
LINES = [line for trace in TRACES for line in (*HEADED, *trace.split("\n"))]


def test_each_trace_is_one_record_of_a_file() -> None:
    assert [raw for raw, _ in of_file(LINES) if raw not in HEADED] == [
        "\n".join(filter(str.strip, trace.split("\n"))) for trace in TRACES
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_is_the_same_record_whichever_way_it_comes(way: Callable[[list[str]], Found]) -> None:
    assert way(LINES) == of_file(LINES)


def test_the_lines_of_two_streams_are_joined_apart() -> None:
    trace = BELOW["java"].split("\n")
    lines = [(name, text) for text in (ERROR, *trace) for name in ("one", "two")]
    records = bulk([{"message": text, "host": name} for name, text in lines])
    rows = framed(records)[0]
    assert rows["lines"].to_list() == [len(trace) + 1] * 2
    assert rows["line"].to_list() == [1, 2], "each has the place of its first line"


def test_requests_of_one_moment_do_not_continue_each_other() -> None:
    head, trace = loki([ERROR]), loki(["\tat shop.Cart.pay(Cart.java:12)"])
    known = KnownFormats()
    both = framed_by_workload([head, trace], known, ["shop", "shop"])
    assert both.records.heights == [1, 1]
    from pipeline.records.pushed import joined_records

    assert framed(joined_records([head, trace]))[0].height == 2


def test_a_record_that_was_made_as_one_takes_no_part() -> None:
    stated = {"severityNumber": 9}
    records = [
        {"body": {"stringValue": ERROR}},
        {"body": {"stringValue": "other"}, **stated},
        {"body": {"stringValue": "\tat a.B(C.java:1)"}},
    ]
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()
    rows = framed(otlp_json.decode_json(body, JSON).records)[0]
    assert rows["raw"].to_list()[0] == f"{ERROR}\n\tat a.B(C.java:1)"
    assert rows["line"].to_list() == [1, 2]


def test_a_blank_behind_a_tag_joins_nothing() -> None:
    calm = [f" {line}" for line in ("order 1", "order 2", "order 3")]
    assert framed(bulk([{"message": line} for line in calm]))[0].height == 3
    trace = [f" {line}" for line in (ERROR, *BELOW["java"].split("\n"))]
    assert framed(bulk([{"message": line} for line in [*calm, *trace, *calm]]))[0].height == 7


def test_a_joined_record_is_bounded_as_one_of_a_file() -> None:
    lines = [ERROR, *["\t" + "é" * 10_000] * 9]
    assert of_loki(lines) == of_file(lines)
    assert len(of_loki(lines)) > 1


def test_a_joined_record_keeps_what_stands_beside_its_first_line() -> None:
    lines = [ERROR, *BELOW["java"].split("\n")]
    documents = [
        {"@timestamp": f"2026-11-20T10:00:0{n}.5Z", "log": f"{line}\n", "stream": "stderr", "n": n}
        for n, line in enumerate(lines)
    ]
    rows = framed(bulk(documents))[0]
    assert json.loads(rows["raw"].item()) == documents[0] | {"log": "\n".join(lines)}
    assert rows["timestamp"].item().second == 0


def test_the_answer_to_a_joined_record_of_opni_is_one_to_each_payload() -> None:
    messages = [
        NatsMessage(n, payload_bytes(Payload(id=f"d{n}", log=line)), n)
        for n, line in enumerate([ERROR, "\tat a.B(C.java:1)"], 1)
    ]
    records = read_messages("raw_logs", messages).records
    assert records is not None
    document = msgspec.json.decode(framed(records)[0]["raw"].item())
    assert (document["_id"], document["joined_documents"]) == ("d1", [["d2", "\tat a.B(C.java:1)"]])
