"""Loki's push in JSON of both versions and in protobuf."""

import json
import logging
from dataclasses import replace
from typing import Any

import cramjam
import pytest
from logging_loki.emitter import LokiEmitterV0, LokiEmitterV1

from bench._fuzz_requests import JSON_HINTS, NANOS, checked
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.loki import LOKI_MAX_BYTES, decode_push
from pipeline.sources.protocols.loki_messages import PushRequest
from pipeline.sources.pushed import framed
from pipeline.workers.intake.identity import of_request

RECORD = logging.LogRecord("shop.cart", logging.WARNING, "cart.py", 1, "disk full", (), None)
TRACE = "5b8efff798038103d269b633813fc60c"


def of_json(*streams: dict[str, Any]) -> Decoded:
    return checked(decode_push(json.dumps({"streams": streams}).encode(), JSON_HINTS))


def of_protobuf(request: Any, **hints: str) -> Decoded:
    body = bytes(cramjam.snappy.compress_raw(request.SerializeToString()))
    return checked(decode_push(body, Hints(**hints)))


@pytest.mark.parametrize("emitter", [LokiEmitterV0, LokiEmitterV1])
def test_the_handler_of_python_arrives_with_its_labels_and_its_time(emitter: type[LokiEmitterV1]) -> None:
    tags = {"app": "cart", "namespace": "shop", "said": 'a "b"', "host": "h1"}
    decoded = of_json(*emitter("http://localhost", tags).build_payload(RECORD, "disk full")["streams"])
    records = decoded.records
    assert (records.messages, records.texts) == ([None], ["disk full"])
    assert (records.workloads, records.levels) == (["shop/cart"], ["warning"])
    assert (records.hosts, records.services) == (["h1"], ["cart"])
    assert records.timestamps is not None
    assert records.timestamps[0] is not None
    assert decoded.distinct


def test_both_encodings_of_a_push_are_the_same_records() -> None:
    values = [[str(NANOS), "a"], [str(NANOS + 1000), "b", {"trace_id": TRACE, "detected_level": "error"}]]
    request = PushRequest()
    stream = request.streams.add(labels=b'{app="cart", namespace="shop"}')
    for number, (_, line, *metadata) in enumerate(values):
        entry = stream.entries.add(line=str(line).encode())
        entry.timestamp.seconds, nanos = divmod(NANOS + 1000 * number, 10**9)
        entry.timestamp.nanos = nanos
        for key, value in dict(*metadata).items():
            entry.metadata.add(name=key.encode(), value=value.encode())
    records = of_protobuf(request).records
    assert records == of_json({"stream": {"app": "cart", "namespace": "shop"}, "values": values}).records
    assert records.timestamps == [NANOS // 1000, NANOS // 1000 + 1]
    assert records.levels == [None, "error"]


def test_an_entry_that_comes_again_with_newer_ones_is_the_same() -> None:
    """winston-loki puts what failed before what came meanwhile."""
    hints = replace(JSON_HINTS, one_by_one=True)

    def identities(*numbers: int) -> tuple[bytes, ...]:
        values = [[str(NANOS + n * 1_000_000), "the same line"] for n in numbers]
        push = {"streams": [{"stream": {"app": "cart"}, "values": values}]}
        return of_request(decode_push(json.dumps(push).encode(), hints), b"").records

    first, again = identities(1, 2), identities(1, 2, 3)
    assert again[:2] == first
    assert len(set(again)) == 3


def test_structured_metadata_stands_around_the_line() -> None:
    (raw,) = of_json(
        {"stream": {"app": "a"}, "values": [[str(NANOS), 'say "x"', {"trace_id": TRACE, "date": 7}]]}
    ).records.texts
    assert json.loads(raw) == {
        "date": NANOS // 1000 / 1e6, "log": 'say "x"', "trace_id": TRACE, "metadata.date": 7,
    }  # fmt: skip


def test_every_other_content_type_is_protobuf_and_json_may_have_parameters() -> None:
    body = json.dumps({"streams": [{"stream": {"app": "a"}, "values": [["1", "x"]]}]}).encode()
    assert decode_push(body, Hints(content_type="application/json; charset=utf-8")).records.texts == ["x"]
    with pytest.raises(Undecodable, match="snappy"):
        decode_push(body, Hints(content_type=""))
    request = PushRequest()
    request.streams.add(labels=b"{}").entries.add(line=b"x")
    assert of_protobuf(request, content_type="application/x-protobuf").records.texts == ["x"]


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    request = PushRequest()
    request.streams.add(labels=b'{app="caf\xe9"}').entries.add(line=b"\xff\xfe")
    records = of_protobuf(request).records
    assert (records.texts, records.workloads) == (["\ufffd\ufffd"], ["caf\ufffd"])
    body = b'{"streams":[{"stream":{"app":"a\\ud800"},"values":[["1","\xff \\ud83d\\ude00"]]}]}'
    assert checked(decode_push(body, JSON_HINTS)).records.texts == ["\ufffd \U0001f600"]


def test_times_that_no_record_can_hold_are_none() -> None:
    values = [["soon", "a"], ["0", "b"], [10**30, "c"], ["9" * 5000, "d"], [str(NANOS), "e"], [-NANOS, "f"]]
    decoded = of_json({"stream": {}, "values": values})
    assert decoded.records.timestamps == [None, None, None, None, NANOS // 1000, -NANOS // 1000]
    assert not decoded.distinct


def test_lines_of_a_stack_trace_are_joined_within_their_stream() -> None:
    lines = ("ERROR boom", "\tat a.b(C.java:1)", "INFO up")
    one, two = ({"stream": {"pod": pod}, "values": [[str(NANOS), line] for line in lines]} for pod in "ab")
    joined = framed(of_json(one, two).records)[0]
    assert joined["raw"].to_list() == ["ERROR boom\n\tat a.b(C.java:1)", "INFO up"] * 2


def test_a_block_that_announces_more_than_the_limit_is_refused_before_it_is_unpacked() -> None:
    block = bytes(cramjam.snappy.compress_raw(bytes(LOKI_MAX_BYTES + 1)))
    with pytest.raises(Undecodable, match=r"20,971,521 bytes; send at most 20,971,520"):
        decode_push(block, Hints())
    with pytest.raises(Undecodable, match="send at most"):
        decode_push(b"\xff\xff\xff\xff\x0f" + b"x", Hints())


@pytest.mark.parametrize(
    "body",
    [b"", b"7", b'{"streams":{}}', b'{"streams":[{"values":[["1"]]}]}', b'{"streams":[{"labels":"{a","entries":[]}]}',
     b'{"streams":[{"values":[[NaN,"x"]]}]}', b'{"streams":' + b"[" * 100_000, b'{"streams":[{"values":[{"1":"x"}]}]}'],
)  # fmt: skip
def test_json_that_is_no_push_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable):
        decode_push(body, JSON_HINTS)


@pytest.mark.parametrize("body", [b"\x0a\xff\xff", b"\x0a\x05\x12", b"\x12"])
def test_protobuf_that_is_no_push_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable, match="protobuf"):
        decode_push(bytes(cramjam.snappy.compress_raw(body)), Hints())


def test_an_empty_push_is_a_success() -> None:
    assert of_json().records.height == 0
    assert decode_push(b"", Hints()).records.height == 0
