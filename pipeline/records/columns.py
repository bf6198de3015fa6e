"""Work on whole columns of text: over the threads that there are, and once for values that repeat."""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar, overload

import numpy as np
import numpy.typing as npt
import polars as pl

PARALLEL_ROWS: Final = 2048  # Below this a second thread costs more than it saves.
LOOKED_AT: Final = 512  # Rows that tell whether a column repeats itself.
_MANY_LISTS: Final = 200  # Distinct ones; below this a query costs more than it saves.
FEW_ROWS: Final = 512  # Below this, loops of Python cost less than the queries that they spare.
WORTH: Final = 0.9  # Share of distinct rows up to which finding them costs less than working on all.


Rows = TypeVar("Rows", pl.DataFrame, pl.Series)


class Parts(Sequence[Rows]):
    """Parts of a frame or a column, one behind another. A part is cut when it is asked for.

    A slice and its columns cost more than the work on the five rows in it. So steps of a pass over many small
    batches work on `whole`, and cut no part. `stacked` and `gathered` of parts are of the whole."""

    __slots__ = ("heights", "starts", "whole")

    def __init__(self, whole: Rows, heights: Iterable[int]) -> None:
        """`heights`: rows of each part; they add up to those of the whole."""
        self.whole: Rows = whole
        self.heights = list(heights)
        *self.starts, end = itertools.accumulate(self.heights, initial=0)
        if end != len(whole):
            raise ValueError(f"the parts have {end} rows, the whole {len(whole)}")

    def __len__(self) -> int:
        return len(self.heights)

    @overload
    def __getitem__(self, place: int) -> Rows: ...
    @overload
    def __getitem__(self, place: slice) -> list[Rows]: ...
    def __getitem__(self, place: int | slice) -> Rows | list[Rows]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        return self.whole.slice(self.starts[place], self.heights[place])

    def chosen(self, places: Sequence[int]) -> "Parts[Rows]":
        """The parts at these places, in this order."""
        if len(places) == len(self) and all(map(operator.eq, places, itertools.count())):
            return self
        heights = [self.heights[place] for place in places]
        offsets = np.array([self.starts[place] for place in places], dtype=np.int64)
        before = np.cumsum(heights, dtype=np.int64) - heights
        rows = np.arange(sum(heights)) + np.repeat(offsets - before, heights)
        return Parts(self.whole[rows], heights)


def heights_of(parts: Sequence[pl.DataFrame]) -> list[int]:
    """The rows of each part."""
    return parts.heights if isinstance(parts, Parts) else [part.height for part in parts]


def numbers_of(heights: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The number of its part for each row."""
    return np.repeat(np.arange(len(heights)), heights)


def nulls_of(column: pl.Series) -> "npt.NDArray[np.bool_]":
    """The rows without a value; a query where only some have none."""
    count = column.null_count()
    if count in (0, column.len()):
        return np.full(column.len(), count > 0)
    return column.is_null().to_numpy()


def any_of_each(flags: "npt.NDArray[np.bool_]", heights: Sequence[int]) -> list[bool]:
    """Whether some row of each part has the flag."""
    counts = np.bincount(numbers_of(heights), weights=flags, minlength=len(heights))
    return [bool(count) for count in counts.tolist()]


def chosen(parts: Sequence[pl.DataFrame], places: Sequence[int]) -> Sequence[pl.DataFrame]:
    """The parts at these places, in this order."""
    return parts.chosen(places) if isinstance(parts, Parts) else [parts[place] for place in places]


def joined(parts: Sequence[pl.DataFrame], begin: int, end: int) -> pl.DataFrame:
    """The parts from the place `begin` up to `end`, one behind another."""
    if isinstance(parts, Parts):
        whole: pl.DataFrame = parts.whole
        return whole.slice(parts.starts[begin], sum(parts.heights[begin:end]))
    return stacked(parts[begin:end])


def stacked(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """All frames, one behind another, in one chunk: a query of 38 chunks takes eight times as long."""
    if isinstance(frames, Parts):
        whole: pl.DataFrame = frames.whole
        return whole.rechunk()
    return frames[0] if len(frames) == 1 else pl.concat(frames, rechunk=True)


def gathered(frames: Sequence[pl.DataFrame], names: Sequence[str]) -> pl.DataFrame:
    """These columns of all frames, one behind another, each in one chunk.

    One query of them, where one for each frame costs more than all other work on small ones. Frames of 20
    columns are not put together first: that takes as long as ten columns alone."""
    if isinstance(frames, Parts):
        return pl.DataFrame([frames.whole.get_column(name).rechunk() for name in names])
    return pl.DataFrame(
        [pl.concat([frame.get_column(name) for frame in frames], rechunk=True) for name in names]
    )


def spread(column: pl.Series, expression: pl.Expr) -> pl.Series:
    """`expression`, evaluated on this column row by row, in slices over Polars' threads when the rows are
    many.

    One expression alone uses one thread.
    """
    frame = column.to_frame()
    if column.len() < PARALLEL_ROWS or pl.thread_pool_size() == 1:
        return frame.select(expression).to_series()
    size = -(-column.len() // pl.thread_pool_size())
    slices = [frame.slice(start, size).lazy().select(expression) for start in range(0, column.len(), size)]
    return pl.concat([part.to_series() for part in pl.collect_all(slices)])


def per_distinct(column: pl.Series, work: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """`work`, which looks at each row alone, on the distinct values of a column when enough rows repeat.

    The result is in the column's order. No row is null.
    """
    if not repeats(column, WORTH):
        return work(column)
    few, which = kinds(column)
    return work(few)[which]


def kinds(column: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The distinct values of a String column, in the order of their first rows, and each row's number among
    them.

    No row is null. The numbers (UInt32) pick rows: `found[numbers]`; that costs a tenth of a join.
    """
    if column.len() < FEW_ROWS:
        numbers: dict[str, int] = {}
        which = [numbers.setdefault(value, len(numbers)) for value in column.to_list()]
        return pl.Series(column.name, list(numbers), dtype=pl.String), pl.Series(which, dtype=pl.UInt32)
    # Categories of their own count from 0 in the order they come, and go when the column goes.
    codes = column.rechunk().cast(pl.Categorical(pl.Categories.random())).to_physical()
    rows = codes.to_numpy()
    first = np.empty(int(rows.max()) + 1 if rows.size else 0, dtype=np.int64)
    first[rows[::-1]] = np.arange(rows.size - 1, -1, -1)  # of several rows the last one written stays
    return column[first], codes


def mapped_numbers(column: pl.Series, meaning: Callable[[int], str | None]) -> pl.Series:
    """The meaning of each number of a column of texts, null for other texts."""
    numbers = column.cast(pl.Int32, strict=False)
    known = {number: meaning(number) for number in numbers.unique().drop_nulls().to_list()}
    return numbers.replace_strict(known, default=None, return_dtype=pl.String)


def repeats(column: pl.Series, share: float) -> bool:
    """Whether at most this share of the first rows is distinct."""
    looked_at = column.head(LOOKED_AT)
    return looked_at.n_unique() <= share * looked_at.len()


def lists_of_text(rows: Sequence[Sequence[str]]) -> pl.Series:
    """A column of List(String).

    Polars makes a series of each distinct list, at 5 to 7 us; grouping a flat column takes 0.8 us a row from
    1,000 rows on."""
    kind = pl.List(pl.String)
    numbers: dict[tuple[str, ...], int] = {}
    which = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    if len(numbers) < _MANY_LISTS:
        return pl.Series(list(map(list, numbers)), dtype=kind)[which] if rows else pl.Series([], dtype=kind)
    # A row without texts has a null, or it would be missing.
    flat = [(i, text) for i, row in enumerate(rows) for text in (row or (None,))]
    frame = pl.DataFrame(
        {"row": [i for i, _ in flat], "text": [text for _, text in flat]},
        schema={"row": pl.UInt32, "text": pl.String},
    )
    return frame.group_by("row", maintain_order=True).agg(pl.col("text").drop_nulls()).get_column("text")
