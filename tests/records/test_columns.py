"""Frames that are cut into parts and put together again."""

import polars as pl
import pytest

from pipeline.records.columns import Parts, any_of_each, chosen, gathered, heights_of, joined, stacked


@pytest.fixture
def whole() -> pl.DataFrame:
    return pl.DataFrame({"text": list("abcdef"), "number": range(6), "other": [None] * 6})


def test_the_parts_of_a_frame_are_put_together_without_a_copy(
    whole: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(whole, [1, 0, 3, 2])
    monkeypatch.delattr(pl, "concat")
    assert gathered(parts, ["number", "text"]).equals(whole.select("number", "text"))
    assert stacked(parts).equals(whole)
    assert joined(parts, 1, 3).equals(whole[1:4])


@pytest.mark.parametrize("rows", [[1, 0, 2], [0, 1], [0, 1, 1], [2], [], [0, 1, 2]])
def test_some_parts_are_as_the_frames_at_their_places(whole: pl.DataFrame, rows: list[int]) -> None:
    parts = Parts(whole, [1, 3, 2])
    frames = [whole[:1], whole[1:4], whole[4:]]
    some, wanted = chosen(parts, rows), chosen(frames, rows)
    assert len(some) == len(wanted) and heights_of(some) == heights_of(wanted)
    assert all(one.equals(other) for one, other in zip(some, wanted, strict=True))
    if rows:
        assert stacked(some).equals(stacked(wanted))
        assert gathered(some, ["text"]).equals(gathered(wanted, ["text"]))
        assert joined(some, 0, len(rows)).equals(joined(wanted, 0, len(rows)))


def test_all_parts_in_their_order_are_the_parts_themselves(whole: pl.DataFrame) -> None:
    parts = Parts(whole, [1, 3, 2])
    assert parts.chosen([0, 1, 2]) is parts
    assert [len(part) for part in parts[1:]] == [3, 2] and parts[-1].equals(whole[4:])
    with pytest.raises(IndexError):
        parts[3]


def test_the_heights_of_parts_add_up(whole: pl.DataFrame) -> None:
    with pytest.raises(ValueError, match="have 3 rows, the whole 6"):
        Parts(whole, [1, 2])


def test_a_part_has_what_some_row_of_it_has(whole: pl.DataFrame) -> None:
    flags = (whole["number"] == 2).to_numpy()
    assert any_of_each(flags, [1, 0, 3, 2]) == [False, False, True, False]
