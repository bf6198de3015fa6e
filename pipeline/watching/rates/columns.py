"""Sub-states of one workload's rates: float columns with a row per template; the table allots the rows.

Row TOTAL is the workload as a whole; row OTHER is every template without a row. Every column is finite and at
least 0. A table has at most ROWS rows: beyond, new templates take the rows of those with the fewest lines
lately.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from pipeline.watching.rates.tail_bounds import Bools, Floats

ROWS: Final = 768
TOTAL: Final = 0
OTHER: Final = 1
HEAD: Final = 2  # The first row of a template.
UNCOUNTED: Final = -(2**63)  # Template id for the templates beyond the limit of one minute.
NEW_ROWS: Final = 128  # Templates that get a row in one minute; the rest of a flood counts as OTHER.
DROP: Final = 64  # Rows freed at once, so that a stream of new templates does not move the table for each.
_MAX_VALUE: Final = 1e60  # Of any value, against damaged bytes.


class Columns:
    """Base of the sub-states. Each annotation `Floats` is a column, which only its sub-state changes."""

    def __init__(self) -> None:
        for name in self.columns():
            setattr(self, name, np.zeros(HEAD))

    @classmethod
    def columns(cls) -> list[str]:
        """Names in wire order."""
        return [name for name, kind in cls.__annotations__.items() if kind is Floats]

    def grow(self, n: int) -> None:
        for name in self.columns():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(n)]))

    def compact(self, keep: Bools) -> None:
        for name in self.columns():
            setattr(self, name, getattr(self, name)[keep])

    def clear(self, rows: Any, *names: str) -> None:
        for name in names:
            getattr(self, name)[rows] = 0.0


class Table:
    """Rows by template id, the same in every sub-state."""

    def __init__(self, *parts: Columns) -> None:
        self.parts = parts
        self.ids: list[int] = [0, 0]  # by row; the first two mean nothing
        self.rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def grow(self, ids: list[int]) -> None:
        for part in self.parts:
            part.grow(len(ids))
        self._number([*self.ids, *ids])

    def forget(self, rows: Iterable[int]) -> None:
        keep = np.ones(len(self), dtype=bool)
        keep[list(rows)] = False
        for part in self.parts:
            part.compact(keep)
        self._number([t for t, stays in zip(self.ids, keep, strict=True) if stays])

    def spread(self, counts: Mapping[int, int]) -> Floats:
        """The counts by row, their sum in TOTAL."""
        values = np.zeros(len(self))
        for template_id, n in counts.items():
            values[self.rows.get(template_id, OTHER)] += n
        values[TOTAL] = sum(counts.values())
        return values

    def _number(self, ids: list[int]) -> None:
        self.ids = ids
        self.rows = {t: row for row, t in enumerate(ids) if row >= HEAD}

    def pack(self) -> tuple[bytes, bytes]:
        """The ids (int64) and all columns (float64, one after the other), little-endian."""
        values = [getattr(part, name) for part in self.parts for name in part.columns()]
        return np.array(self.ids[HEAD:], dtype="<i8").tobytes(), np.stack(values).astype("<f8").tobytes()

    def unpack(self, ids: bytes, columns: bytes) -> None:
        """The inverse of `pack`. Raises ValueError."""
        found = np.frombuffer(ids, dtype="<i8").tolist()
        n = len(found) + HEAD
        if n > ROWS or len(set(found)) != len(found):
            raise ValueError(f"{n} rows, or a template twice")
        names = [(part, name) for part in self.parts for name in part.columns()]
        block = np.frombuffer(columns, dtype="<f8").reshape(-1, n)
        if len(block) != len(names):
            raise ValueError(f"{len(block)} columns instead of {len(names)}")
        if not np.isfinite(block).all() or (block < 0).any() or (block > _MAX_VALUE).any():
            raise ValueError("a value is negative or not finite")
        for (part, name), values in zip(names, block, strict=True):
            setattr(part, name, values.astype(np.float64))
        self._number([0, 0, *found])
