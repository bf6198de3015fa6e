"""Splunk's HTTP Event Collector."""

import json
import logging
from typing import Any

import pytest
from splunk_handler import SplunkHandler

from bench._fuzz_requests import checked
from pipeline.sources.protocols.answers.hec_answers import hec_acks, hec_answer
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.hec import HecRefused, decode_events, decode_raw
from pipeline.sources.pushed import framed

TRACE = "5b8efff798038103d269b633813fc60c"


def of_events(*events: dict[str, Any], between: str = "") -> Decoded:
    body = between.join(json.dumps(event) for event in events)
    return checked(decode_events(body.encode(), Hints()))


def test_the_handler_of_python_arrives_with_host_time_and_workload() -> None:
    handler = SplunkHandler(
        host="localhost", port=1, token="t", index="main", flush_interval=0, hostname="h1", source="cart.py", sourcetype="cart"
    )  # fmt: skip
    record = logging.LogRecord("shop", logging.ERROR, "cart.py", 1, "disk full", (), None)
    payload = handler.format_record(record) + handler.format_record(record)
    decoded = checked(decode_events(payload.encode(), Hints()))
    assert decoded.records.texts == ["disk full", "disk full"]
    assert decoded.records.workloads == ["main/cart"] * 2
    assert (decoded.records.hosts, decoded.records.services) == (["h1"] * 2, ["cart"] * 2)
    assert decoded.distinct


@pytest.mark.parametrize("between", ["", "\n", " \r\n\t"])
def test_events_stand_one_behind_another_and_may_hold_the_border_of_objects(between: str) -> None:
    texts = ["a }{ b", "}", '{"a":1}{"b":2}', 'say "}{"']
    assert of_events(*({"event": text} for text in texts), between=between).records.texts == texts


def test_an_event_that_is_an_object_is_stored_as_it_was_sent_with_its_fields() -> None:
    body = (
        b'{"event": {"msg":  "m"}}{"event":{"msg":"m","k":1},"fields":{"k":2,"trace_id":"%s"}}'
        % TRACE.encode()
    )
    first, second = checked(decode_events(body, Hints())).records.texts
    assert first == '{"msg":  "m"}'
    assert json.loads(second) == {"msg": "m", "k": 1, "trace_id": TRACE}


def test_fields_stand_around_an_event_that_is_a_line() -> None:
    records = of_events(
        {"event": "up", "time": 1763539200.5, "fields": {"trace_id": TRACE, "level": "warn"}}
    ).records
    assert json.loads(records.texts[0]) == {
        "date": 1763539200.5,
        "log": "up",
        "trace_id": TRACE,
        "level": "warn",
    }
    assert records.levels == ["warning"]


def test_the_events_of_docker_are_lines_and_their_stack_traces_are_joined() -> None:
    decoded = of_events(
        *(
            {"time": "1763539200.5", "host": "h", "event": {"line": line, "source": "stderr", "tag": "cart"}}
            for line in ("ERROR boom", "\tat a.b(C.java:1)", "INFO up")
        )
    )
    texts = framed(decoded.records)[0]["raw"].to_list()
    assert [json.loads(text)["log"] for text in texts] == ["ERROR boom\n\tat a.b(C.java:1)", "INFO up"]
    assert json.loads(texts[0])["stream"] == "stderr"


def test_the_query_holds_what_events_do_not_say() -> None:
    hints = Hints(query={"index": "main", "sourcetype": "cart", "host": "h"})
    records = decode_events(b'{"event":"a"}{"event":"b","index":"own"}', hints).records
    assert (records.workloads, records.hosts) == (["main/cart", "own/cart"], ["h", "h"])
    raw = decode_raw(b"a\n b\nc\n", hints).records
    assert (raw.texts, raw.workloads, raw.hosts) == (["a", " b", "c"], ["main/cart"] * 3, ["h"] * 3)
    assert framed(raw)[0]["raw"].to_list() == ["a\n b", "c"]


def test_a_request_with_whole_seconds_or_no_time_is_not_distinct() -> None:
    assert of_events({"event": "a", "time": 1763539200.000123}).distinct
    assert not of_events({"event": "a", "time": 1763539200}).distinct
    assert not of_events({"event": "a", "time": 1763539200.000123}, {"event": "b"}).distinct


@pytest.mark.parametrize(
    ("body", "code", "number"),
    [
        (b" \n", 5, None),
        (b'{"event":"a"} x', 6, 1),
        (b'{"event":"a"}{"event":', 6, 1),
        (b'[{"event":"a"}]', 6, 0),
        (b'{"event":"a"}{"event":NaN}', 6, 1),
        (b'{"event":' + b"[" * 100_000, 6, 0),
        (b'{"event":"a"}{"time":1}', 12, 1),
        (b'{"event":null}', 12, 0),
        (b'{"event":"a"}{"event":""}', 13, 1),
    ],
)
def test_a_refusal_has_the_code_of_splunk_and_the_number_of_the_event(
    body: bytes, code: int, number: int | None
) -> None:
    with pytest.raises(HecRefused) as refused:
        decode_events(body, Hints())
    assert (refused.value.code, refused.value.event) == (code, number)
    assert hec_answer(code)[0] == 400


def test_raw_lines_without_a_line_are_no_data() -> None:
    with pytest.raises(HecRefused, match="no data"):
        decode_raw(b"\n\n", Hints())


def test_half_surrogate_pairs_and_bytes_that_are_not_utf_8_are_replaced() -> None:
    records = checked(
        decode_events(b'{"event":"a\\ud800\xff","host":"\\ud83d\\ude00"}{"event":{"b":"\\udc00"}}', Hints())
    ).records
    assert records.texts == ["a\ufffd\ufffd", '{"b":"\\ufffd"}']
    assert records.hosts == ["\U0001f600", None]


def test_a_request_is_bounded_in_events() -> None:
    with pytest.raises(Undecodable, match="more than 100,000 records"):
        decode_events(b'{"event":1}' * 100_001, Hints())


def test_answers_have_text_and_code_and_every_acknowledgement_is_true() -> None:
    assert hec_answer(0) == (200, b'{"text":"Success","code":0}')
    assert hec_answer(0, ack_id=7) == (200, b'{"text":"Success","code":0,"ackId":7}')
    assert hec_answer(9) == (503, b'{"text":"Server is busy","code":9}')
    assert json.loads(hec_answer(6, event=2)[1])["invalid-event-number"] == 2
    assert json.loads(hec_acks(b'{"acks":[0,3]}')) == {"acks": {"0": True, "3": True}}
    with pytest.raises(Undecodable):
        hec_acks(b'{"acks":["x"]}')


def test_values_that_are_equal_in_python_and_not_in_json_name_different_workloads() -> None:
    events = [b'{"event":"a","source":1}', b'{"event":"b","source":true}', b'{"event":"c","source":["x"]}']
    found = decode_events(b"".join(events), Hints()).records
    assert found.services == ["1", "true", '["x"]']
