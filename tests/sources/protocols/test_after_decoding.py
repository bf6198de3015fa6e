"""Stage ingest on decoded records: lines inside envelopes are parsed, and session keys are found."""

import json

import polars as pl
import pytest

from bench._fuzz_requests import JSON_HINTS, NANOS, NOW
from pipeline import detect
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Meta
from pipeline.records.pushed import PushedRecords
from pipeline.records.structured import structured_fields, trace_ids
from pipeline.sources.protocols.bulk import decode_bulk
from pipeline.sources.protocols.contract import Hints
from pipeline.sources.protocols.hec import decode_events
from pipeline.sources.protocols.journal import decode_journal
from pipeline.sources.protocols.lines import decode_posted
from pipeline.sources.protocols.loki import decode_push
from pipeline.sources.protocols.otlp_json import decode_json
from pipeline.sources.protocols.streams.forward import forward_records
from pipeline.sources.protocols.streams.syslog import syslog_records
from pipeline.sources.pushed import framed
from pipeline.watching.sessions.keys import extract

TRACE = "5b8efff798038103d269b633813fc60c"
LINE = "2026-11-25 10:00:00,123 ERROR [main] shop.Cart: disk full"


def parsed(records: PushedRecords) -> pl.DataFrame:
    frame, formats = framed(records)
    meta = Meta(
        source="push", source_key="0" * 16, purpose=Purpose.SCORE, arrived=NOW, formats=formats, zone="UTC"
    )
    return detect._parsed(frame, meta)


def loki(*values: list[object]) -> PushedRecords:
    return decode_push(
        json.dumps({"streams": [{"stream": {"app": "a"}, "values": values}]}).encode(), JSON_HINTS
    ).records


def otlp() -> PushedRecords:
    record = {
        "timeUnixNano": NANOS,
        "body": {"stringValue": "disk full"},
        "traceId": TRACE.upper(),
        "spanId": "eee19b7ec3c1b174",
    }
    return decode_json(
        json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}).encode(), Hints()
    ).records


def hec() -> PushedRecords:
    event = {"event": {"msg": "disk full"}, "fields": {"trace_id": TRACE}}
    return decode_events(json.dumps(event).encode(), Hints()).records


@pytest.mark.parametrize(
    "records",
    [
        otlp(),
        loki([str(NANOS), "disk full", {"trace_id": TRACE}]),
        hec(),
        decode_events(
            json.dumps({"event": "disk full", "fields": {"trace_id": TRACE}}).encode(), Hints()
        ).records,
        decode_journal(f"MESSAGE=disk full\nTRACE_ID={TRACE}\n\n".encode(), Hints()).records,
        decode_posted(f'{{"msg":"disk full","trace_id":"{TRACE}"}}'.encode(), JSON_HINTS).records,
    ],
    ids=["otlp", "loki", "hec object", "hec line", "journal", "ndjson"],
)
def test_the_trace_of_a_record_is_its_session_key(records: PushedRecords) -> None:
    frame = parsed(records)
    assert extract(frame).to_list() == [TRACE]
    assert frame["message"][0].startswith("disk full")


SPAN = "eee19b7ec3c1b174"
IDS = {"trace_id": TRACE, "span_id": SPAN}
RFC_5424 = f'<14>1 2026-11-25T10:00:00.5Z h shop 7 - [ids@1 trace_id="{TRACE}" span_id="{SPAN}"][shop code="7\\"8"] disk full'


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        (
            decode_json(
                json.dumps(
                    {"resourceLogs": [{"scopeLogs": [{"logRecords": [
                        {"body": {"stringValue": "disk full"}, "traceId": TRACE, "spanId": SPAN, "severityNumber": 17,
                         "attributes": [{"key": "code", "value": {"intValue": "7"}}]}]}]}]}
                ).encode(), Hints(),
            ).records,
            {"code": 7, "severity": 17, **IDS},
        ),
        (loki([str(NANOS), "disk full", {"code": "7", **IDS}]), {"code": "7", **IDS}),
        (decode_bulk(f'{{"create":{{}}}}\n{json.dumps({"message": "disk full", "code": 7, **IDS})}\n'.encode(), Hints()).records,
         {"code": 7, **IDS}),
        (decode_bulk(f'{{"create":{{}}}}\n{json.dumps({"message": "disk full", "trace": {"id": TRACE}, "span": {"id": SPAN}})}\n'.encode(),
                     Hints()).records,
         {"trace": {"id": TRACE}, "span": {"id": SPAN}}),
        (decode_events(json.dumps({"event": "disk full", "fields": {"code": 7, **IDS}}).encode(), Hints()).records, {"code": 7, **IDS}),
        (decode_events(json.dumps({"event": {"msg": "disk full", "code": 7}, "fields": IDS}).encode(), Hints()).records,
         {"code": 7, **IDS}),
        (decode_journal(f"MESSAGE=disk full\nTRACE_ID={TRACE}\nSPAN_ID={SPAN}\nCODE=7\n\n".encode(), Hints()).records,
         {"TRACE_ID": TRACE, "SPAN_ID": SPAN, "CODE": "7"}),
        (syslog_records([(RFC_5424.encode(), "")]).records, {"ids@1": IDS, "shop": {"code": '7"8'}}),
        (forward_records([("t", [json.dumps({"date": 1.5, "log": "disk full", "code": 7, **IDS})])], Hints()).records,
         {"code": 7, **IDS}),
    ],
    ids=["otlp", "loki", "bulk", "bulk of ECS", "hec line", "hec object", "journal", "syslog", "forward"],
)  # fmt: skip
def test_trace_span_and_fields_of_a_record_are_kept_beside_its_message(
    records: PushedRecords, fields: dict[str, object]
) -> None:
    frame = parsed(records)
    assert "disk full" in frame["message"][0]
    kept = structured_fields(frame["raw"][0])
    assert {name: kept.get(name) for name in fields} == fields
    assert trace_ids(kept)._asdict() == IDS


def test_a_text_without_fields_has_none() -> None:
    for raw in (
        None,
        "",
        "disk full",
        '{"a":',
        "[1]",
        '{"message":"x"}',
        "<14>1 2026 h a 7 - - disk",
        "<14>1 2026 h a 7 - [x",
    ):
        assert structured_fields(raw) == {}
        assert trace_ids({}) == (None, None)


def test_a_line_is_parsed_as_in_a_file_with_or_without_metadata() -> None:
    rows = parsed(
        loki(*([str(NANOS + i), LINE, *([{"trace_id": TRACE}] if i % 2 else [])] for i in range(6)))
    )
    assert rows["message"].unique().to_list() == ["disk full"]
    assert rows["level"].unique().to_list() == ["error"]
    assert rows["timestamp"].to_physical().to_list() == [(NANOS + i) // 1000 for i in range(6)]


def test_the_level_that_loki_detected_is_that_of_the_record() -> None:
    rows = parsed(loki([str(NANOS), "disk full", {"detected_level": "warn"}], [str(NANOS), "disk full"]))
    assert rows["level"].to_list() == ["warning", None]


def test_joined_documents_are_parsed_as_one() -> None:
    lines = (LINE, "\tat a.b(C.java:1)", "Caused by: y")
    body = "\n".join(json.dumps({"log": line, "stream": "stderr", "date": 1763539200.5}) for line in lines)
    rows = parsed(decode_posted(body.encode(), JSON_HINTS).records)
    assert rows["message"].to_list() == ["disk full\n\tat a.b(C.java:1)\nCaused by: y"]
    assert rows["level"].to_list() == ["error"]
