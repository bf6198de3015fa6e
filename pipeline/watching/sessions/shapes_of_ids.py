"""Where ids without a word in front may stand: UUIDs, W3C trace contexts, and ids between commas.

All texts are one array of bytes, and a shape is looked for by its separators at their distances. That takes a
quarter of the time of a regular expression, which looks at each byte by itself. The results are those of the
expressions in `SHAPES`.
"""

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view

_HEX: Final = "[0-9a-fA-F]"
UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
# Hints of keys.py, which this module finds.
W3C: Final = "00-[0-9a-f]{8}"
BETWEEN_COMMAS: Final = r",[0-9a-f]{16},|,[0-9a-f]{16}\]"
VERSIONED: Final = "-[0-9a-fA-F]{4}-[1-7][0-9a-fA-F]{3}-[89abAB]"
SHAPES: Final = (W3C, BETWEEN_COMMAS, VERSIONED)
_DASH, _COMMA, _BRACKET, _ZERO, _NEWLINE = b"-,]0\n"
_BLOCK: Final = 1 << 17  # bytes that stay in the cache of a core
UUID_BYTES: Final = 36
_REACH: Final = UUID_BYTES - 1  # of the longest shape, behind its first byte

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def _table(characters: bytes) -> Bools:
    table = np.zeros(256, dtype=np.bool_)
    table[list(characters)] = True
    return table


_ANY_CASE: Final = _table(b"0123456789abcdefABCDEF")
_LOWER: Final = _table(b"0123456789abcdef")
_VERSIONS: Final = _table(b"1234567")
_VARIANTS: Final = _table(b"89abAB")
_DASHES_OF_UUID: Final = (8, 13, 18, 23)
# 1 for a hexadecimal digit, 2 for a dash; a UUID has these four at a time.
_KIND: Final = _ANY_CASE.astype(np.uint8) + 2 * _table(b"-").astype(np.uint8)
_KINDS_OF_UUID: Final = np.array(
    [2 if place in _DASHES_OF_UUID else 1 for place in range(UUID_BYTES)], dtype=np.uint8
).view(np.uint32)


class IdShapes:
    """The shapes in the texts of a column; a null has none.

    `wanted`: those of SHAPES that are looked for."""

    def __init__(self, text: pl.Series, wanted: Collection[str] = SHAPES) -> None:
        text = text.fill_null("") if text.null_count() else text
        sizes = text.str.len_bytes().to_numpy().astype(np.int64) + 1
        self._starts = np.cumsum(sizes) - sizes
        # No shape has a newline, so none reaches into the next text. NULs behind the last one belong to none.
        padded = pl.concat([text, pl.Series(text.name, ["\0" * (_REACH + 1)])])
        self._data = np.frombuffer(padded.str.join("\n").cast(pl.Binary).item(), dtype=np.uint8)
        separators = {shape: self._separators(shape) for shape in wanted}
        self._dashes = separators.get(VERSIONED, np.empty(0, dtype=np.int64))
        whole = {W3C: self._is_w3c, BETWEEN_COMMAS: self._is_between_commas, VERSIONED: self._is_versioned}
        self._hits = {shape: self._rows_of(at[whole[shape](at)]) for shape, at in separators.items()}

    def rows(self, shape: str) -> Ints:
        """The rows with this shape, a wanted one, ascending."""
        return self._hits[shape]

    def uuids(self) -> tuple[Ints, pl.Series]:
        """The rows with a UUID of any version, ascending, and the first UUID of each (String). VERSIONED is
        wanted."""
        begins = self._dashes[(self._dashes >= _DASHES_OF_UUID[0])] - _DASHES_OF_UUID[0]
        begins = begins[self._data[begins + _DASHES_OF_UUID[-1]] == _DASH]
        texts = sliding_window_view(self._data, UUID_BYTES)[begins]
        is_uuid = (np.take(_KIND, texts).view(np.uint32) == _KINDS_OF_UUID).all(axis=1)
        rows, texts = self._row_of(begins[is_uuid]), texts[is_uuid]
        first = np.diff(rows, prepend=-1) > 0
        found = pl.Series("uuid", texts[first].view(f"S{UUID_BYTES}").ravel(), dtype=pl.Binary)
        return rows[first], found.cast(pl.String)

    def _separators(self, shape: str) -> Ints:
        """Places where the separators of a shape begin at their distances."""
        found = [np.empty(0, dtype=np.int64)]
        for begin in range(0, self._data.size - _REACH, _BLOCK):
            data = self._data[begin : begin + _BLOCK + _REACH]
            size = min(_BLOCK, data.size - _REACH)
            if shape == W3C:
                zero = data == _ZERO
                some = zero[:size] & zero[1 : 1 + size]
                some &= data[2 : 2 + size] == _DASH
            elif shape == BETWEEN_COMMAS:
                comma = data == _COMMA
                some = comma[:size] & (comma | (data == _BRACKET))[17 : 17 + size]
            else:
                dash = data == _DASH
                some = dash[:size] & dash[5 : 5 + size]
                some &= dash[10 : 10 + size]
            found.append(np.flatnonzero(some) + begin)
        return np.concatenate(found)

    def _is_w3c(self, at: Ints) -> Bools:
        return self._all(at, range(3, 11), _LOWER)

    def _is_between_commas(self, at: Ints) -> Bools:
        return self._all(at, range(1, 17), _LOWER)

    def _is_versioned(self, at: Ints) -> Bools:
        some = self._all(at, (1, 2, 3, 4, 7, 8, 9), _ANY_CASE)
        some &= _VERSIONS[self._data[at + 6]]
        some &= _VARIANTS[self._data[at + 11]]
        return some

    def _all(self, begins: Ints, places: "range | tuple[int, ...]", characters: Bools) -> Bools:
        """True where all of these places behind a begin hold such characters."""
        some = np.ones(begins.size, dtype=np.bool_)
        for place in places:
            some &= characters[self._data[begins + place]]
        return some

    def _row_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._starts, places, side="right") - 1

    def _rows_of(self, places: Ints) -> Ints:
        rows = self._row_of(places)
        return rows[np.diff(rows, prepend=-1) > 0]
