"""Ids that stand at the end of the raw text of a record, where the intake writes those of OTLP.

A shipper of OTLP gives each record the ids of its trace and its span. The intake writes them behind all other
members of the raw text (sources/protocols/otlp_records.py). A search for them in each whole text takes more
than half of the time of all session keys. The text in front of them is searched as ever.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

# No pattern of keys.py matches across the cut, and none within the end but for these two ids.
# The character in front of them is that of JSON: behind `session_id=` they are part of another key.
_IDS: Final = r'^[{,]"trace_id":"[0-9a-f]{32}","span_id":"[0-9a-f]{16}"\}$'
_SIZE: Final = 75  # characters, without the one in front
_END: Final = '"}'
# First character and size of each id in an end, by the hint of its pattern in keys.py.
TRACE: Final = "race|RACE"
SPAN: Final = "span|Span|SPAN"
_PLACES: Final = {TRACE: (13, 32), SPAN: (58, 16)}
_LOOKED_AT: Final = 64  # texts, evenly spread, that tell whether a look at all is worth its time


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedIds:
    """The texts of a column that end with the ids of their shipper."""

    heads: pl.Series  # the text in front of the ids, or the whole text
    _rows: pl.Series  # of the texts with ids
    _ends: pl.Series  # the ends of these texts

    @classmethod
    def of(cls, text: pl.Series) -> "ShippedIds | None":
        """None where no text has them, or so few that a sample shows none."""
        sample = text.gather_every(max(1, text.len() // _LOOKED_AT))
        if not sample.str.tail(_SIZE + 1).str.contains(_IDS).any():
            return None
        rows = text.str.ends_with(_END).fill_null(value=False).arg_true()
        some = text if rows.len() == text.len() else text.gather(rows)
        ends = some.str.tail(_SIZE + 1)
        fits = ends.str.contains(_IDS)
        heads = some.str.head(-_SIZE)
        if not fits.all():
            rows, ends, heads = rows.filter(fits), ends.filter(fits), heads.filter(fits)
        if rows.len() < text.len():
            heads = text.clone().scatter(rows, heads)
        return cls(heads=heads, _rows=rows, _ends=ends)

    def ids(self, hint: str) -> pl.Series | None:
        """The id of each text for the pattern with this hint, null for none; None for other patterns."""
        if hint not in _PLACES:
            return None
        ids = self._ends.str.slice(*_PLACES[hint])
        if ids.len() == self.heads.len():
            return ids
        nothing = pl.Series(ids.name, [None], dtype=pl.String).new_from_index(0, self.heads.len())
        return nothing.scatter(self._rows, ids)
