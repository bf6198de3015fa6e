"""Collectors' objects that are decoded many at a time say what each says alone."""

import json
from datetime import UTC, datetime

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipeline.sources import wrappers
from pipeline.sources.wrappers import recognised, unwrap

ARRIVED = datetime(2026, 11, 26, 12, tzinfo=UTC)
POD = {"pod_name": "till-0", "container_name": "till", "host": "node-1"}


def document(line: object = "cash drawer open", **others: object) -> str:
    members = {"@timestamp": "2026-11-26T10:00:00.5Z", "log": line, "stream": "stdout", "kubernetes": POD}
    return json.dumps(members | others, separators=(",", ":"))


ALIKE = document('a \u00e4\t"quoted" \\ line\n')
ODD = (
    document(7),
    document(None),
    document({"log": "inner"}),
    document(level="error"),
    document(kubernetes=POD | {"host": "node-2"}),
    document(stream="stderr"),
    document(**{"@timestamp": 1764151200}),
    document(**{"@timestamp": "no time"}),
    document(message="another text"),
    document(t={"$date": "2026-11-26T09:00:00Z"}),
    document(time="2026-11-26T08:00:00Z"),
    ALIKE.replace('"log"', r'"l\u006fg"'),
    ALIKE.replace('"stream"', '"log":"the last one counts","stream"'),
    ALIKE.replace("quoted", r"\ud83d"),
    ALIKE.replace("quoted", r"\ud83d\ude00"),
    ALIKE.replace("quoted", "tab\t"),
    ALIKE.replace("quoted", r"\q"),
    ALIKE.replace("{", "{ ", 1),
    f" {ALIKE} ",
    ALIKE + ALIKE,
    f"{ALIKE} {ALIKE}",
    ALIKE[:-1],
    ALIKE[: ALIKE.index("pod_name") - 1] + "}",
    ALIKE.replace(",", ",\n", 1),
    document("x" * 2_000),
    '{"log":"no other member"}',
    "cash drawer open",
    "{}",
    "",
)


def one_by_one(texts: list[str], monkeypatch: pytest.MonkeyPatch, *, timed: bool = True) -> pl.DataFrame:
    with monkeypatch.context() as patch:
        patch.setattr(wrappers, "_layout_of", lambda _: None)
        return unwrap(pl.Series("raw", texts), "envelope", arrived=ARRIVED, with_times=timed)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("timed", [True, False])
def test_objects_of_one_layout_are_unwrapped_as_one_by_one(
    odd: str, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for texts in (
        [ALIKE, odd, ALIKE],
        [odd, ALIKE, ALIKE],
        [odd, odd],
        [ALIKE] * 600 + [odd] + [ALIKE] * 600,
    ):
        found = unwrap(pl.Series("raw", texts), "envelope", arrived=ARRIVED, with_times=timed)
        assert_frame_equal(found, one_by_one(texts, monkeypatch, timed=timed))


def test_objects_with_the_same_members_are_decoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [document(f"line {n}") for n in range(1_000)]
    expected = one_by_one(texts, monkeypatch)
    monkeypatch.setattr(wrappers._Contents, "_read", lambda _, text: pytest.fail(f"read {text} alone"))
    found = unwrap(pl.Series("raw", texts), "envelope", arrived=ARRIVED)
    assert_frame_equal(found, expected)
    assert found["inner"].to_list() == [f"line {n}" for n in range(1_000)]
    assert found["host"].unique().to_list() == ["node-1"]


def test_no_times_are_read_for_a_caller_that_needs_none() -> None:
    texts = pl.Series("raw", [ALIKE, *ODD])
    found, without = (unwrap(texts, "envelope", arrived=ARRIVED, with_times=timed) for timed in (True, False))
    assert without["timestamp"].null_count() == texts.len() > found["timestamp"].null_count()
    assert_frame_equal(found.drop("timestamp"), without.drop("timestamp"))


def test_a_member_with_a_name_that_no_decoder_takes_is_read_alone() -> None:
    texts = [document(f"line {n}", **{'a"b': n, "c\\d": n, "e\x07f": n}) for n in range(3)]
    found = unwrap(pl.Series("raw", texts), "envelope", arrived=ARRIVED)
    assert found["inner"].to_list() == ["line 0", "line 1", "line 2"]
    members = msgspec.json.decode(texts[0], type=dict[str, msgspec.Raw])
    assert wrappers._layout_of(members) is None


PIECES = st.sampled_from(
    (
        '"log":"', '"log" : "', '"kubernetes":{', ',"kubernetes":{', ',"stream":"stdout"',
        ',"stream":"stderr",', '"date":1', '"textPayload":"', '"message":"', '"ingestionTime":1', '"', ",", "{", "}", " ", "\n", "x",
    )
)  # fmt: skip


@given(st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=6), st.booleans())
def test_texts_written_as_fluent_bit_writes_them_are_told_as_the_patterns_tell(
    inner: list[str], braced: bool
) -> None:
    raw = pl.Series("raw", [f"{{{text}}}" if braced else text for text in inner])
    expected = raw.str.contains(wrappers._ENVELOPE_LINE) & raw.str.contains(wrappers._ENVELOPE_MARK)
    assert recognised(raw, "envelope").to_list() == expected.to_list()
