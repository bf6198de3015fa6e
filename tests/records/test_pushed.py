"""Pushed lines and records on their way to Redis and back: what is packed comes out, what is damaged is
refused."""

import zlib
from collections import deque
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgpack
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload, TooNew
from pipeline.records.batch import Batch, Purpose, digest
from pipeline.records.payload import MAGIC, Packed, pack, unpack
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


def packed(records: Pushed, workload: str = "shop") -> Packed:
    return pack(
        Batch(
            batch_id="b", workload=workload, source="push", source_key="k", purpose=Purpose.SCORE, arrived=NOW, formats=(),
            zone="UTC", records=records,
        )
    )  # fmt: skip


def sealed(version: int, *value: Any) -> bytes:
    return MAGIC + zlib.compress(msgpack.packb([version, list(value)]))


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


WHOLE = packed(PushedLines("a\nb" * 50)).blob


@pytest.mark.parametrize(
    "blob",
    [
        MAGIC,
        MAGIC + b"\xff" * 20,
        WHOLE[:-1],
        WHOLE[: len(MAGIC) + 3],
        MAGIC + zlib.compress(b"\xc1"),
        MAGIC + zlib.compress(b""),
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
