"""Pushed lines and records on their way to Redis and back: what is packed comes out, what is damaged is
refused."""

import zlib
from collections import deque
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgpack
import polars as pl
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload, TooNew
from pipeline.records.batch import Batch, Purpose, digest
from pipeline.records.payload import DENSE_MAGIC, MAGIC, Packed, pack, unpack
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords, pushed
from pipeline.records.schema import RAW_SCHEMA
from pipeline.sources.framing import Framer
from pipeline.sources.pushed import framed

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)
MAX = 1 << 20
texts = st.text(st.characters(codec="utf-8"), max_size=30)
fragments = st.sampled_from(
    [
        "2026-11-20T10:00:00Z ERROR boom",
        "\tat a.b(C.java:1)",
        "Traceback (most recent call last):",
        "",
        "x" * 70_000,
        "ok\r\n",
    ]
)
zones = st.integers(-23, 23).map(lambda hours: timezone(timedelta(hours=hours)))
known = st.fixed_dictionaries(
    {"message": texts},
    optional={
        "timestamp": st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=zones),  # noqa: DTZ001
        "level": st.none() | st.sampled_from(("info", "error")),
        "host": st.none() | texts,
        "service": st.none() | texts,
    },
)


def packed(records: Pushed, workload: str = "shop", *, zstd: bool = False) -> Packed:
    return pack(
        Batch(
            batch_id="b", workload=workload, source="push", source_key="k", purpose=Purpose.SCORE, arrived=NOW, formats=(),
            zone="UTC", records=records,
        ),
        zstd=zstd,
    )  # fmt: skip


def sealed(version: int, *value: Any) -> bytes:
    return MAGIC + zlib.compress(msgpack.packb([version, list(value)]))


def dense(data: bytes) -> bytes:
    return DENSE_MAGIC + zstandard.ZstdCompressor().compress(data)


@given(st.lists(texts | fragments, min_size=1, max_size=12))
def test_pushed_lines_become_the_records_that_a_reader_of_the_same_lines_makes(items: list[str]) -> None:
    lines = pushed(items)
    physical = [piece for item in items for piece in item.rstrip("\r\n").split("\n")]
    framer = Framer()
    expected = pl.concat([framer.feed(physical), framer.flush()])
    stored = packed(lines)
    frame, formats = framed(unpack(stored.blob, max_bytes=16 * MAX))
    assert frame.equals(expected)
    assert dict(frame.schema) == RAW_SCHEMA
    assert formats == framer.formats
    assert stored.lines == len(physical) == frame["lines"].sum()


@given(st.lists(known, min_size=1, max_size=8))
def test_pushed_records_keep_every_value(items: list[dict[str, Any]]) -> None:
    stored = packed(pushed(items))
    frame, formats = framed(unpack(stored.blob, max_bytes=MAX))
    assert dict(frame.schema) == RAW_SCHEMA and formats == ()
    assert (stored.records, stored.lines) == (len(items), frame["lines"].sum())
    for number, (row, item) in enumerate(zip(frame.to_dicts(), items, strict=True), start=1):
        lines = item["message"].count("\n") + 1
        assert row == {
            name: item.get(name) for name in ("timestamp", "level", "host", "process", "service", "message")
        } | {"raw": item["message"], "line": number, "lines": lines, "timed": None, "source": None}


def test_equal_records_have_equal_contents_and_others_do_not() -> None:
    lines = packed(pushed(["a", "b"]))
    assert packed(pushed(["a\nb"])).content == packed(pushed(deque(["a\n", "b"]))).content == lines.content
    others = [
        packed(pushed(["a", "c"])),
        packed(pushed(["a", "b"]), "bank"),
        packed(pushed([{"message": "a"}, {"message": "b"}])),
        packed(pushed([{"message": "a"}, {"message": "b", "host": "h"}])),
    ]
    assert len({lines.content, *(other.content for other in others)}) == 5
    assert lines.content != digest("shop", "a", "b")


def test_the_newest_timestamp_counts_only_where_all_are_known() -> None:
    early, late = {"message": "a", "timestamp": NOW}, {"message": "b", "timestamp": NOW + timedelta(hours=1)}
    assert pushed([late, early]).latest == NOW + timedelta(hours=1)
    assert pushed([early, {"message": "b"}]).latest is None
    assert pushed(["2026-11-20T10:00:00Z INFO a"]).latest is None


@given(st.lists(known, min_size=1, max_size=8) | st.lists(texts, min_size=1))
def test_a_dense_payload_has_the_same_records_and_the_same_content(items: list[Any]) -> None:
    plain, dense_one = packed(pushed(items)), packed(pushed(items), zstd=True)
    assert unpack(dense_one.blob, max_bytes=MAX) == unpack(plain.blob, max_bytes=MAX)
    assert dense_one._replace(blob=b"") == plain._replace(blob=b"")


WHOLE = packed(PushedLines("a\nb" * 50)).blob
DENSE = packed(PushedLines("a\nb" * 50), zstd=True).blob


@pytest.mark.parametrize(
    "blob",
    [
        MAGIC,
        MAGIC + b"\xff" * 20,
        WHOLE[:-1],
        WHOLE[: len(MAGIC) + 3],
        MAGIC + zlib.compress(b"\xc1"),
        MAGIC + zlib.compress(b""),
        DENSE_MAGIC,
        DENSE_MAGIC + b"\xff" * 20,
        DENSE[:-1],
        DENSE[: len(DENSE_MAGIC) + 3],
        DENSE + b"x",
        DENSE + DENSE.removeprefix(DENSE_MAGIC),
        dense(b"\xc1"),
        dense(b""),
        dense(msgpack.packb([1, ["records", ["a"], [1, 2]]])),
        sealed(1, "lines", 5),
        sealed(1, "lines"),
        sealed(1, "texts", "a"),
        sealed(1, "lines", b"\xff"),
        sealed(1, "records", ["a", 5]),
        sealed(1, "records", ["a"], [2**62]),
        sealed(1, "records", ["a"], [1, 2]),
        sealed(1, "records", ["a", "b"], None, ["info"]),
    ],
    ids=repr,
)
def test_a_damaged_pushed_payload_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        unpack(blob, max_bytes=MAX)


def test_a_pushed_payload_that_unpacks_to_more_than_is_read_is_refused() -> None:
    bomb = packed(PushedLines("x" * (4 * MAX))).blob
    assert len(bomb) < MAX // 8
    with pytest.raises(BadPayload, match=f"unpacks to more than {MAX} bytes"):
        unpack(bomb, max_bytes=MAX)


def test_a_dense_payload_is_held_to_the_size_that_it_states() -> None:
    bomb = packed(PushedLines("x" * (4 * MAX)), zstd=True).blob
    assert len(bomb) < MAX // 8
    at = len(DENSE_MAGIC) + 6  # behind the mark of a frame, its descriptor and its window
    assert 4 * MAX < int.from_bytes(bomb[at : at + 4], "little") < 5 * MAX
    lies = bomb[:at] + (MAX // 2).to_bytes(4, "little") + bomb[at + 4 :]
    vast = bomb[:at] + (2**32 - 1).to_bytes(4, "little") + bomb[at + 4 :]
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * (4 * MAX))
    for blob in (bomb, vast, DENSE_MAGIC + silent):
        with pytest.raises(BadPayload, match=f"does not say that it unpacks to at most {MAX} bytes"):
            unpack(blob, max_bytes=MAX)
    with pytest.raises(BadPayload, match="is not readable"):
        unpack(lies, max_bytes=MAX)


def test_a_pushed_payload_of_a_newer_build_is_left_to_its_workers() -> None:
    with pytest.raises(TooNew, match="a pushed batch has wire version 2"):
        unpack(sealed(2, "columns", {}), max_bytes=MAX)


def test_an_empty_column_takes_no_room() -> None:
    records = pushed([{"message": "a", "host": None}, {"message": "b", "level": "info"}])
    assert isinstance(records, PushedRecords)
    assert (records.hosts, records.levels, records.timestamps) == (None, [None, "info"], None)


def test_the_raw_text_of_a_record_may_differ_from_its_message_and_counts_once_where_it_does_not() -> None:
    alike = PushedRecords(["a\nb", "c"])
    apart = PushedRecords(["a\nb", None], raws=['{"m":"a"}', "c"])
    assert (alike.texts, alike.lines, alike.size) == (["a\nb", "c"], 3, 4)
    assert (apart.texts, apart.lines, apart.size) == (['{"m":"a"}', "c"], 2, 13)
