"""Frames that are cut into parts and put together again."""

import gc

import polars as pl
import pytest

from pipeline.records import columns
from pipeline.records.columns import gathered, parted, stacked


@pytest.fixture
def whole() -> pl.DataFrame:
    return pl.DataFrame({"text": list("abcdef"), "number": range(6), "other": [None] * 6})


def test_the_parts_of_a_frame_are_put_together_without_a_copy(
    whole: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list(parted(whole, [1, 0, 3, 2]))
    monkeypatch.delattr(pl, "concat")
    assert gathered(parts, ["number", "text"]).equals(whole.select("number", "text"))
    assert stacked(parts).equals(whole)


@pytest.mark.parametrize("rows", [[1, 0, 2], [0, 1], [0, 1, 1], [2]])
def test_other_frames_are_put_together_as_they_come(whole: pl.DataFrame, rows: list[int]) -> None:
    parts = list(parted(whole, [1, 3, 2]))
    frames = [parts[row] for row in rows]
    assert stacked(frames).equals(pl.concat(frames))
    assert gathered(frames, ["text"]).equals(pl.concat(frames).select("text"))


def test_a_part_that_was_changed_is_no_part(whole: pl.DataFrame) -> None:
    parts = list(parted(whole, [2, 4]))
    parts[1] = parts[1].with_columns(text=pl.lit("x"))
    assert gathered(parts, ["text"])["text"].to_list() == ["a", "b", "x", "x", "x", "x"]


def test_parts_of_a_part_of_a_frame_are_put_together_as_they_are(whole: pl.DataFrame) -> None:
    assert stacked(list(parted(whole, [1, 2]))).height == 3


def test_a_frame_is_forgotten_with_its_first_part(whole: pl.DataFrame) -> None:
    gc.collect()
    before = len(columns._wholes)
    parts = list(parted(whole, [1, 5]))
    assert len(columns._wholes) == before + 1
    del parts[0]
    gc.collect()
    assert len(columns._wholes) == before
