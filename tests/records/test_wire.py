"""Every wire value survives a round trip; a newer version and damaged bytes are refused with one sentence."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload, TooNew
from pipeline.records.wire import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    name: str
    count: Annotated[int, msgspec.Meta(ge=0)]
    parts: tuple[float, ...] = ()


CODEC = Codec(Box, version=2, what="the box")
NEWER = Codec(Box, version=3, what="the box")
boxes = st.builds(
    Box,
    name=st.text(),
    count=st.integers(0, 2**63 - 1),
    parts=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
)


@given(boxes)
def test_a_value_survives_msgpack_and_json(box: Box) -> None:
    assert CODEC.unpack(CODEC.pack(box)) == box
    assert CODEC.from_json(CODEC.to_json(box)) == box


def test_a_newer_version_is_refused_and_an_older_one_read() -> None:
    box = Box(name="a", count=1)
    with pytest.raises(TooNew, match=r"the box has wire version 3; this build reads up to 2: update it"):
        CODEC.unpack(NEWER.pack(box))
    with pytest.raises(TooNew, match="the box of shop has wire version 3"):
        CODEC.from_json(NEWER.to_json(box), what="the box of shop")
    assert NEWER.unpack(CODEC.pack(box)) == box


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_refused_in_one_way(blob: bytes) -> None:
    for read in (CODEC.unpack, CODEC.from_json):
        with pytest.raises((BadPayload, TooNew)):
            read(blob)


def test_deep_nesting_is_refused_like_other_damage() -> None:
    for text in ('{"v":1,"x":' + "[" * 100_000, '{"v":1,"name":' + '{"a":' * 100_000):
        with pytest.raises(BadPayload, match="the box is not readable"):
            CODEC.from_json(text)
    with pytest.raises(BadPayload, match="the box is not readable"):
        CODEC.unpack(b"\x92\x01" + b"\x91" * 100_000)


def test_a_bound_of_a_field_is_kept() -> None:
    with pytest.raises(BadPayload, match=r"the box is not readable: .*count"):
        CODEC.unpack(msgspec.msgpack.encode((2, {"name": "a", "count": -1})))
