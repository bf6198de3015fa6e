"""Where ids without a word in front may stand: UUIDs, W3C trace contexts, and ids between commas.

All texts are one array of bytes, and a shape is looked for by its separators at their distances. That takes a
quarter of the time of a regular expression, which looks at each byte by itself. The results are those of the
expressions in `SHAPES`.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

_HEX: Final = "[0-9a-fA-F]"
UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
# Hints of keys.py, which this module finds.
W3C: Final = "00-[0-9a-f]{8}"
BETWEEN_COMMAS: Final = r",[0-9a-f]{16},|,[0-9a-f]{16}\]"
VERSIONED: Final = "-[0-9a-fA-F]{4}-[1-7][0-9a-fA-F]{3}-[89abAB]"
SHAPES: Final = (W3C, BETWEEN_COMMAS, VERSIONED)
_DASH, _COMMA, _BRACKET, _ZERO, _NEWLINE = b"-,]0\n"
_BLOCK: Final = 1 << 17  # bytes that stay in the cache of a core
_UUID_BYTES: Final = 36
_REACH: Final = _UUID_BYTES - 1  # of the longest shape, behind its first byte

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
_HEX_OF_UUID: Final = [place for place in range(_UUID_BYTES) if place not in _DASHES_OF_UUID]


class IdShapes:
    """The shapes in the texts of a column; a null has none."""

    def __init__(self, text: pl.Series) -> None:
        text = text.fill_null("") if text.null_count() else text
        sizes = text.str.len_bytes().to_numpy().astype(np.int64) + 1
        self._starts = np.cumsum(sizes) - sizes
        # No shape has a newline, so none reaches into the next text. NULs behind the last one belong to none.
        padded = pl.concat([text, pl.Series(text.name, ["\0" * (_REACH + 1)])])
        self._data = np.frombuffer(str(padded.str.join("\n").item()).encode(), dtype=np.uint8)
        places = range(0, self._data.size - _REACH, _BLOCK)
        found: list[tuple[Ints, Ints, Ints]] = [self._separators(begin) for begin in places]
        columns = zip(*found, strict=True) if found else ((), (), ())
        w3c, commas, self._dashes = (
            np.concatenate([*parts, np.empty(0, dtype=np.int64)]) for parts in columns
        )
        self._hits = {
            W3C: self._rows_of(w3c[self._all(w3c, range(3, 11), _LOWER)]),
            BETWEEN_COMMAS: self._rows_of(commas[self._all(commas, range(1, 17), _LOWER)]),
            VERSIONED: self._rows_of(self._dashes[self._is_versioned()]),
        }

    def rows(self, shape: str) -> Ints:
        """The rows with this shape, one of SHAPES, ascending."""
        return self._hits[shape]

    def uuids(self) -> tuple[Ints, pl.Series]:
        """The rows with a UUID of any version, ascending, and the first UUID of each (String)."""
        begins = self._dashes[(self._dashes >= _DASHES_OF_UUID[0])] - _DASHES_OF_UUID[0]
        begins = begins[self._data[begins + _DASHES_OF_UUID[-1]] == _DASH]
        begins = begins[self._all(begins, _HEX_OF_UUID, _ANY_CASE)]
        rows = self._row_of(begins)
        first = np.diff(rows, prepend=-1) > 0
        whole = self._data[begins[first][:, None] + np.arange(_UUID_BYTES)].tobytes().decode("ascii")
        texts = [whole[at : at + _UUID_BYTES] for at in range(0, len(whole), _UUID_BYTES)]
        return rows[first], pl.Series("uuid", texts, dtype=pl.String)

    def _separators(self, begin: int) -> tuple[Ints, Ints, Ints]:
        """Places in a block where the separators of each shape begin at their distances."""
        data = self._data[begin : begin + _BLOCK + _REACH]
        size = min(_BLOCK, data.size - _REACH)
        dash, comma, zero = data == _DASH, data == _COMMA, data == _ZERO
        ends = comma | (data == _BRACKET)
        three_dashes = dash[:size] & dash[5 : 5 + size]
        three_dashes &= dash[10 : 10 + size]
        zeros = zero[:size] & zero[1 : 1 + size]
        zeros &= dash[2 : 2 + size]
        found = (zeros, comma[:size] & ends[17 : 17 + size], three_dashes)
        w3c, commas, dashes = (np.flatnonzero(places) + begin for places in found)
        return w3c, commas, dashes

    def _is_versioned(self) -> Bools:
        at = self._dashes
        some = self._all(at, (1, 2, 3, 4, 7, 8, 9), _ANY_CASE)
        some &= _VERSIONS[self._data[at + 6]]
        some &= _VARIANTS[self._data[at + 11]]
        return some

    def _all(self, begins: Ints, places: "range | tuple[int, ...] | list[int]", characters: Bools) -> Bools:
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
