"""The values of a stored batch, as counts by bin: a sample of its records by template.

Reading the values of a record takes as much processor time as all other work on it. So at most MOST_RECORDS
of the records that are stored together are read: up to an equal number of each template of each workload,
spread evenly. A quantile of such a sample is a quantile of the template. One value far outside may be
missed.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.watching.table import ObservedTable, Schema
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.typed import MAX_CHARS, typed_values

MOST_RECORDS: Final = 320
MOST_ROWS: Final = (
    1_000  # of the values of one workload in them; more come from keys that are names themselves
)

VALUES: Final = Schema(
    {
        "minute": pl.Int64,  # of event time, since the epoch
        "template_id": pl.Int64,
        "name": pl.String,  # of the value (typed.py)
        "kind": pl.String,
        "bins": pl.List(pl.Int64),
        "counts": pl.List(pl.Int64),  # as many
    }
)

Ints = npt.NDArray[np.int64]
# (minute, template, name, kind)
_Key = tuple[int, int, str, str]


def chosen_rows(of: Ints, template: Ints, wanted: "npt.NDArray[np.bool_]", most: int = MOST_RECORDS) -> Ints:
    """The rows whose values are read, in their order: of the `wanted` ones, fairly by workload and
    template."""
    rows = np.flatnonzero(wanted)
    if rows.size <= most:
        return rows
    rows = rows[np.lexsort((template[rows], of[rows]))]
    changes = (np.diff(template[rows], prepend=-1) != 0) | (np.diff(of[rows], prepend=-1) != 0)
    starts = np.flatnonzero(changes)
    sizes = np.diff(starts, append=rows.size)
    share = _fair_share(sizes, most)
    steps = -(-sizes // share)
    places = np.arange(rows.size) - np.repeat(starts, sizes)
    return np.sort(rows[places % np.repeat(steps, sizes) == 0][:most])


def _fair_share(sizes: Ints, most: int) -> int:
    """The largest number of rows that each group may have, so that all have at most about `most`; at least
    1."""
    share, left = most, 0
    for done, size in enumerate(np.sort(sizes).tolist()):
        share = (most - left) // (sizes.size - done)
        if size >= share:
            break
        left += size
    return max(1, share)


def value_texts(records: pl.DataFrame) -> list[str]:
    """Where the values of records with `raw` and `message` stand: in the message, or in all of a record of
    fields, which does not end with its message."""
    message = pl.col("message").fill_null("")
    raw = pl.col("raw").fill_null(message)
    text = pl.when(raw.str.ends_with(message) & (message != "")).then(message).otherwise(raw)
    return records.select(text.str.head(MAX_CHARS)).to_series().to_list()


def value_tables(texts: Sequence[str], of: Ints, minute: Ints, template: Ints) -> dict[int, ObservedTable]:
    """VALUES of each workload that has some. `texts`: of the chosen records; the arrays are as long."""
    found: dict[int, dict[_Key, dict[int, int]]] = {}
    for text, number, at, template_id in zip(
        texts, of.tolist(), minute.tolist(), template.tolist(), strict=True
    ):
        for name, kind, value in typed_values(text):
            key = (at, template_id, name, kind)
            counts = found.setdefault(number, {}).setdefault(key, {})
            place = bin_of(kind, value)
            counts[place] = counts.get(place, 0) + 1
    return {number: _table(values) for number, values in found.items()}


def _table(values: dict[_Key, dict[int, int]]) -> ObservedTable:
    rows: list[tuple[Any, ...]] = [
        (*key, list(counts), list(counts.values())) for key, counts in sorted(values.items())[:MOST_ROWS]
    ]
    columns = map(list, zip(*rows, strict=True))
    return ObservedTable(VALUES, dict(zip(VALUES.types, columns, strict=True)))
