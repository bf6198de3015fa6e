"""Wire forms: what is packed comes back, what is damaged is refused by name, ids never change."""

from datetime import datetime

import msgpack
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.batch import Batch, Purpose, digest, utc_now
from pipeline.records.payload import pack
from pipeline.records.schema import RAW_SCHEMA, pack_frame, raw_frame, unpack_frame
from pipeline.records.verdict import Reason, Verdict, pattern_ids, reason

texts = st.text(st.characters(codec="utf-8"), max_size=30)


@given(st.lists(texts, max_size=20), st.integers(1, 2**40))
def test_a_frame_comes_back_as_it_was_packed(lines: list[str], first: int) -> None:
    frame = raw_frame(lines, first_line=first)
    assert dict(frame.schema) == RAW_SCHEMA
    assert frame["line"].to_list() == list(range(first, first + len(lines)))
    assert unpack_frame(pack_frame(frame)).equals(frame)


stored_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def content_of(texts: list[str | None], levels: list[str | None]) -> str:
    frame = raw_frame([text or "" for text in texts]).with_columns(
        pl.Series("level", levels, dtype=pl.String)
    )
    batch = Batch(
        batch_id="b",
        workload="w",
        source="s",
        source_key="0" * 16,
        purpose=Purpose.SCORE,
        arrived=utc_now(),
        formats=(),
        zone="UTC",
        records=frame,
    )
    return pack(batch).content


@given(*[st.lists(st.tuples(stored_texts, st.none() | stored_texts), min_size=1, max_size=3)] * 2)
def test_frames_have_the_same_content_where_their_values_are_the_same(
    one: list[tuple[str, str | None]], other: list[tuple[str, str | None]]
) -> None:
    contents = [content_of(*map(list, zip(*rows, strict=True))) for rows in (one, other)]
    assert (contents[0] == contents[1]) == (one == other)


def test_a_frame_of_many_chunks_comes_back_as_one() -> None:
    frame = pl.concat([raw_frame(["a", "b"])] * 100, rechunk=False)
    assert frame.n_chunks() == 100
    assert unpack_frame(pack_frame(frame)).equals(frame)


@pytest.mark.parametrize("cut", [0, 1, 8, -1, -40])
def test_a_damaged_frame_is_refused_with_its_size(cut: int) -> None:
    blob = pack_frame(raw_frame(["a", "b"]))[:cut]
    with pytest.raises(BadPayload, match=f"a payload of {len(blob)} bytes is damaged"):
        unpack_frame(blob)


@given(
    st.builds(
        Verdict,
        template_id=st.integers(0, 2**40),
        score=st.none() | st.floats(0, 1),
        anomalous=st.none() | st.booleans(),
        reasons=st.lists(texts, max_size=3).map(tuple),
    )
)
def test_a_verdict_comes_back_as_it_was_packed(verdict: Verdict) -> None:
    assert Verdict.unpack(verdict.pack()) == verdict


@pytest.mark.parametrize(
    "blob", [b"", b"\xc1", b"\x01", b"\x92\x01\x02", msgpack.packb([1, 2, 3, 4, 5, 6])], ids=repr
)
def test_bytes_that_are_no_verdict_are_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload, match="is not readable"):
        Verdict.unpack(blob)


def test_a_verdict_of_a_newer_build_is_refused_with_its_version() -> None:
    blob = msgpack.packb([2, [7, 0.5, True, [], None, "new"]])
    with pytest.raises(BadPayload, match="wire version 2; this build reads up to 1"):
        Verdict.unpack(blob)


def test_a_verdict_on_the_wire_carries_no_field_names() -> None:
    blob = Verdict(template_id=7, score=0.5, anomalous=True, reasons=("rare",)).pack()
    assert msgpack.unpackb(blob) == [1, [7, 0.5, True, ["rare"], None]]


def test_pattern_ids_are_the_same_on_every_machine_and_in_every_version() -> None:
    # Stored results and published models hold such ids; a new value here would orphan them.
    assert pattern_ids(["user <NUM> in", "", "user <NUM> in"])[::2] == [673394634279998694] * 2


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4))
def test_different_part_lists_have_different_digests(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_a_digest_takes_names_that_are_no_text() -> None:
    assert digest("caf\udce9") == digest(b"caf\xe9")
    assert len(digest("a", size=4)) == 8


def test_a_reason_carries_its_data_after_a_colon() -> None:
    assert reason(Reason.WARMING) == "warming"
    assert reason(Reason.RARE, "1/9") == "rare:1/9"


def test_physical_lines_are_the_sum_of_what_records_span() -> None:
    frame = raw_frame(["a", "b"]).with_columns(pl.Series("lines", [3, 0], dtype=pl.UInt32))
    batch = Batch(
        batch_id="b", workload="w", source="s", source_key="k", purpose=Purpose.SCORE, arrived=utc_now(), formats=(),
        zone="UTC", records=frame,
    )  # fmt: skip
    assert batch.physical_lines == 3
    assert batch.arrived.tzinfo is not None
    assert isinstance(batch.arrived, datetime)
