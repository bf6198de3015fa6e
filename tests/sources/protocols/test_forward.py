"""The forward protocol: framing, the four modes, and the shared key."""

import gzip
import hashlib
import itertools
import json
import struct
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.streams import forward
from pipeline.sources.protocols.streams.forward import (
    ForwardFraming,
    acknowledgement,
    forward_lines,
    forward_message,
    forward_records,
    greeting,
    is_trusted,
    welcome,
)

AT = 1_795_168_800
EVENT_TIME = msgpack.ExtType(0, struct.pack(">II", AT, 123_456_789))
EVENTS = [[EVENT_TIME, {"log": f"order {n} failed\n", "container_name": "/shop"}] for n in range(3)]
PACKED = b"".join(map(msgpack.packb, EVENTS))


def lines_of(value: Any) -> list[str]:
    (message,) = map(forward_message, ForwardFraming().feed(msgpack.packb(value)))
    assert message is not None
    return forward_lines(message)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.binary(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(sent=st.lists(VALUES, max_size=5), places=st.lists(st.integers(0, 300), max_size=8))
def test_the_values_of_a_stream_do_not_depend_on_where_it_is_cut(sent: list[Any], places: list[int]) -> None:
    stream = b"".join(map(msgpack.packb, sent))
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    framing = ForwardFraming()
    assert [value for a, b in itertools.pairwise(edges) for value in framing.feed(stream[a:b])] == sent
    assert not framing.partial
    assert framing._unpacker is None


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_are_refused(stream: bytes) -> None:
    try:
        messages = [forward_message(value) for value in ForwardFraming().feed(stream)]
        forward_records([(message.tag, forward_lines(message)) for message in messages if message], Hints())
    except Undecodable as exc:
        assert str(exc)


@pytest.mark.parametrize(
    "value",
    [
        ["shop", EVENTS],
        ["shop", PACKED],
        ["shop", PACKED.decode("latin-1").encode("latin-1"), {"size": 3}],
        ["shop", gzip.compress(PACKED), {"compressed": "gzip"}],
        ["shop", gzip.compress(PACKED[:20]) + gzip.compress(PACKED[20:]), {"compressed": "gzip"}],
        ["shop", zstandard.compress(PACKED), {"compressed": "zstd"}],
        ["shop", [[[EVENT_TIME, {}], record] for _, record in EVENTS]],
    ],
)
def test_all_modes_say_the_same(value: Any) -> None:
    assert [json.loads(line) for line in lines_of(value)] == [
        {"date": AT + 0.123456, "log": f"order {n} failed\n", "container_name": "/shop"} for n in range(3)
    ]


@pytest.mark.parametrize(
    ("event", "document"),
    [
        ([AT, {"a": {"b": [1, b"\xff", None]}}], {"date": AT, "a": {"b": [1, "\ufffd", None]}}),
        ([AT + 0.5, {"date": "own"}], {"date": "own"}),
        ([None, {1: EVENT_TIME}], {"1": AT + 0.123456}),
        ([AT, "bare text"], {"date": AT, "message": "bare text"}),
        ([msgpack.Timestamp(AT, 5000), {}], {"date": AT + 5e-6}),
    ],
)
def test_an_event_of_any_shape_is_a_document(event: list[Any], document: dict[str, Any]) -> None:
    assert json.loads(lines_of(["shop", *event])[0]) == document
    assert json.loads(lines_of(["shop", [event]])[0]) == document


def test_records_have_time_and_workload() -> None:
    decoded = forward_records(
        [("kube.pod", lines_of(["kube.pod", EVENTS])), ("edge", ['{"log":"x"}'])], Hints(peer="192.0.2.7")
    )
    assert decoded.records.workloads == ["shop"] * 3 + ["edge"]
    assert decoded.records.timestamps == [AT * 1_000_000 + 123_456] * 3 + [None]
    assert not decoded.distinct
    assert forward_records([("t", lines_of(["t", EVENTS]))], Hints()).distinct


DEEP: Any = "x"
for _ in range(200):
    DEEP = {"k": DEEP}


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xc1",
        b"\x91" * 3_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(["tag"]),
        msgpack.packb([1, 2, 3]),
        msgpack.packb(["tag", AT, {}, {}, {}]),
        msgpack.packb(["tag", AT, DEEP]),
        msgpack.packb(["tag", PACKED[:-1]]),
        msgpack.packb(["tag", b"\x91\xc1"]),
        msgpack.packb(["tag", PACKED, {"compressed": "gzip"}]),
        msgpack.packb(["tag", gzip.compress(PACKED, mtime=0)[:-9], {"compressed": "gzip"}]),
        msgpack.packb(["tag", zstandard.compress(PACKED)[:9], {"compressed": "zstd"}]),
        msgpack.packb(["tag", PACKED, {"compressed": "lzma"}]),
        msgpack.packb(["tag", PACKED, {"fluent_signal": 1}]),
    ],
)
def test_a_stream_that_is_no_forward_is_refused(stream: bytes) -> None:
    with pytest.raises(Undecodable):
        for value in ForwardFraming().feed(stream):
            message = forward_message(value)
            assert message is not None
            forward_lines(message)


def test_sizes_are_bounded_before_and_after_decompression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MOST_INFLATED", 100_000)
    for how, compress in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        with pytest.raises(Undecodable, match="decompressed"):
            lines_of(["tag", compress(bytes(100_001)), {"compressed": how}])
    monkeypatch.setattr(forward, "MOST_BYTES", 5_000)
    framing = ForwardFraming()
    with pytest.raises(Undecodable, match="chunk_limit_size"):
        framing.feed(msgpack.packb(["tag", bytes(9_000)])[:5_100])


def test_memory_is_bounded_where_a_byte_is_a_list() -> None:
    many = [[[]] * 1_100] * 1_000
    with pytest.raises(Undecodable, match="lists and maps"):
        lines_of(["tag", AT, {"a": many}])
    with pytest.raises(Undecodable, match="1 MiB"):
        lines_of(["tag", gzip.compress(msgpack.packb([AT, many]) * 2), {"compressed": "gzip"}])


def test_a_heartbeat_is_no_message() -> None:
    assert forward_message(None) is None


def test_both_sides_show_that_they_have_the_shared_key() -> None:
    helo = msgpack.unpackb(greeting(b"nonce"))
    assert helo == ["HELO", {"nonce": "nonce", "auth": "", "keepalive": True}]
    shown = hashlib.sha512(b"salt" + b"web-1" + b"nonce" + b"secret").hexdigest()
    ping = [b"PING", b"web-1", b"salt", shown.encode(), b"", b""]
    assert is_trusted(ping, nonce=b"nonce", shared_key="secret")
    assert not is_trusted(ping, nonce=b"nonce", shared_key="other")
    assert not is_trusted(ping, nonce=b"later", shared_key="secret")
    pong = welcome(ping, name="logweir", nonce=b"nonce", shared_key="secret", trusted=True)
    answer = hashlib.sha512(b"salt" + b"logweir" + b"nonce" + b"secret").hexdigest()
    assert msgpack.unpackb(pong) == ["PONG", True, "", "logweir", answer]
    refusal = msgpack.unpackb(welcome(ping, name="logweir", nonce=b"", shared_key="", trusted=False))
    assert refusal[:2] == ["PONG", False]
    with pytest.raises(Undecodable):
        is_trusted(["tag", 0, {}], nonce=b"nonce", shared_key="secret")


def test_an_acknowledgement_repeats_the_chunk() -> None:
    assert msgpack.unpackb(acknowledgement(b"p8n9gmxTQVC8/nh2wlKKeQ==")) == {
        "ack": "p8n9gmxTQVC8/nh2wlKKeQ=="
    }
