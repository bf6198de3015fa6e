"""Templates that come every day: a service's own FATAL that it writes each night is no news.

A known template whose level alone makes its lines anomalous raises no incident on a day, if it came on at
least USUAL of the LOOKED_BACK days before. Its lines stay anomalous results. A burst of it is told by the
rates, and a person's mark as anomalous holds. Days are those of the lines' own time, UTC.
"""

from typing import Annotated, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.watching.incidents.starts import Starts

LOOKED_BACK: Final = 7  # days
USUAL: Final = 5  # a service that works on weekdays has no more
MOST_TEMPLATES: Final = 2_000  # of a workload; those that were seen longest ago leave first
_DAY_MS: Final = 86_400_000
_KEPT: Final = (1 << (LOOKED_BACK + 1)) - 1
_LAST_DAY: Final = 4_000_000

_Day = Annotated[int, msgspec.Meta(ge=0, le=_LAST_DAY)]


class DailyTemplates(msgspec.Struct, array_like=True):
    """Of one workload: of each template the newest day it was seen, and a bit for each of the days before,
    that day's own the lowest."""

    seen: Annotated[
        dict[int, tuple[_Day, Annotated[int, msgspec.Meta(ge=0, le=_KEPT)]]],
        msgspec.Meta(max_length=MOST_TEMPLATES),
    ] = msgspec.field(default_factory=dict)

    starts: Starts = msgspec.field(default_factory=Starts)

    def note(self, template_id: int, first_ms: int, last_ms: int) -> bool:
        """The template was seen from one time to the other; whether that changed anything."""
        first, last = (min(max(0, at // _DAY_MS), _LAST_DAY) for at in (first_ms, last_ms))
        newest, bits = before = self.seen.get(template_id, (last, 0))
        if last > newest:
            newest, bits = last, bits << min(last - newest, LOOKED_BACK + 1) & _KEPT
        for day in range(max(first, newest - LOOKED_BACK), last + 1):
            bits |= 1 << (newest - day)
        if template_id in self.seen and before == (newest, bits):
            return False
        self.seen[template_id] = (newest, bits)
        if len(self.seen) > MOST_TEMPLATES:
            del self.seen[min(self.seen, key=lambda one: self.seen[one][0])]
        return True

    def is_usual(self, template_id: int, at_ms: int) -> bool:
        """Whether the template came on most days before that of this time."""
        newest, bits = self.seen.get(template_id, (0, 0))
        back = newest - at_ms // _DAY_MS  # the newest day may be another one: batches come in any order
        if abs(back) > LOOKED_BACK:
            return False
        days = bits >> (back + 1) if back >= 0 else bits << (-back - 1)
        return (days & ((1 << LOOKED_BACK) - 1)).bit_count() >= USUAL

    def pack(self) -> bytes:
        return _CODEC.pack(self)

    @classmethod
    def unpack(cls, blob: bytes | None) -> "DailyTemplates":
        """A new one for None. Raises BadPayload."""
        return cls() if blob is None else _CODEC.unpack(blob)


_CODEC: Final = Codec(DailyTemplates, version=1, what="the daily templates of a workload", newer=BadPayload)
