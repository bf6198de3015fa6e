"""The values of a stored batch, as counts by bin: a sample of its records by template.

Reading the values of a record takes about as much processor time as all other work on it. So PROBES records
of each template tell whether it has values. Of all records that are stored together, at most MOST_RECORDS of
templates with values are read: up to an equal number of each template of each workload, spread evenly. A
quantile of such a sample is a quantile of the template. One value far outside may be missed.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.watching.table import ObservedTable, Schema
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.typed import MAX_CHARS, typed_values

MOST_RECORDS: Final = 320
PER_SLOT: Final = (
    16  # records, where those that are stored together span many slots, as in a replay of a slow log
)
MOST_OF_ALL: Final = 480
PROBES: Final = 2  # records of a template that tell whether it has values
MOST_KNOWN: Final = 10_000  # templates that a process knows to have values
SLOT_S: Final = 15  # seconds of event time that are counted together
MOST_ROWS: Final = (
    1_000  # of the values of one workload in them; more come from keys that are names themselves
)

VALUES: Final = Schema(
    {
        "slot": pl.Int64,  # of event time: SLOT_S seconds, since the epoch
        "template_id": pl.Int64,
        "name": pl.String,  # of the value (typed.py)
        "kind": pl.String,
        "bins": pl.List(pl.Int64),
        "counts": pl.List(pl.Int64),  # as many
    }
)

Ints = npt.NDArray[np.int64]
# (slot, template, name, kind)
_Key = tuple[int, int, str, str]


# Templates with values, so that a process need not find that out again in each batch.
_having: set[int] = set()


class ValueSample:
    """The records of some workloads whose values are read. `of`: the number of the workload of each record,
    `slot` and `template` as long."""

    def __init__(self, of: Ints, slot: Ints, template: Ints, wanted: "npt.NDArray[np.bool_]") -> None:
        self.of, self.slot, self.template = of, slot, template
        rows = np.flatnonzero(wanted)
        self._rows = rows[np.lexsort((template[rows], of[rows]))]
        changes = (np.diff(template[self._rows], prepend=-1) != 0) | (
            np.diff(of[self._rows], prepend=-1) != 0
        )
        self._starts = np.flatnonzero(changes)
        self._sizes = np.diff(self._starts, append=rows.size)

    def tables(self, texts_of: Callable[[Ints], list[str]]) -> dict[int, ObservedTable]:
        """VALUES of each workload that has some. `texts_of`: the texts of these records."""
        if not self._rows.size:
            return {}
        heads = self.template[self._rows[self._starts]]
        known = np.array([template in _having for template in heads.tolist()])
        probes = self._chosen(~known, PROBES)
        for text, template in zip(texts_of(probes), self.template[probes].tolist(), strict=True):
            if template not in _having and typed_values(text):
                if len(_having) >= MOST_KNOWN:
                    _having.clear()
                _having.add(template)
        with_values = np.array([template in _having for template in heads.tolist()])
        if not with_values.any():
            return {}
        share = _fair_share(self._sizes[with_values], self._most())
        chosen = self._chosen(with_values, share)[:MOST_OF_ALL]
        found: dict[int, dict[_Key, dict[int, int]]] = {}
        for text, number, at, template_id in zip(
            texts_of(chosen), self.of[chosen].tolist(), self.slot[chosen].tolist(), self.template[chosen].tolist(),
            strict=True,
        ):  # fmt: skip
            for name, kind, value in typed_values(text):
                counts = found.setdefault(number, {}).setdefault((at, template_id, name, kind), {})
                place = bin_of(kind, value)
                counts[place] = counts.get(place, 0) + 1
        return {number: _table(values) for number, values in found.items()}

    def _most(self) -> int:
        """How many records are read."""
        slots = self.slot[self._rows]
        return int(min(MOST_OF_ALL, max(MOST_RECORDS, PER_SLOT * (slots.max() - slots.min() + 1))))

    def _chosen(self, groups: "npt.NDArray[np.bool_]", share: int) -> Ints:
        """Up to about `share` records of each of these groups, spread evenly, in their order."""
        sizes = self._sizes
        steps = np.repeat(np.where(groups, -(-sizes // share), 0), sizes)
        places = np.arange(self._rows.size) - np.repeat(self._starts, sizes)
        return np.sort(self._rows[(steps > 0) & (places % np.maximum(steps, 1) == 0)])


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


def _table(values: dict[_Key, dict[int, int]]) -> ObservedTable:
    rows: list[tuple[Any, ...]] = [
        (*key, list(counts), list(counts.values())) for key, counts in sorted(values.items())[:MOST_ROWS]
    ]
    columns = map(list, zip(*rows, strict=True))
    return ObservedTable(VALUES, dict(zip(VALUES.types, columns, strict=True)))
