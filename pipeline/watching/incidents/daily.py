"""Templates that come every day: errors that a service writes at a rate that is known are no news.

A template whose level or words alone make its lines anomalous raises no incident while it comes no oftener
than its past says: the stack's last LOOKED_BACK days, or the days of the training. Far above that it does.
One that comes at a few hours of the day alone is usual at these. Its lines stay anomalous results, and a
person's mark as anomalous holds. Days and hours are those of the lines' own time, UTC.
"""

import math
from typing import Annotated, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.watching.incidents.starts import Starts

LOOKED_BACK: Final = 7  # days
USUAL: Final = 2  # of them, for a template that the training does not know
MOST_TEMPLATES: Final = 2_000  # of a workload; those that were seen longest ago leave first
HOURS_DAYS: Final = 3  # days that show the hours of a template; by chance three lines share one in 1 of 576
# More than so many standard deviations of a Poisson number, and so many lines, are far above it.
FAR: Final = (4.0, 3.0)
_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000
_LAST_DAY: Final = 4_000_000
_MOST: Final = 1 << 40

_Day = Annotated[int, msgspec.Meta(ge=0, le=_LAST_DAY)]
_Counts = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=_MOST)]],
    msgspec.Meta(min_length=LOOKED_BACK + 1, max_length=LOOKED_BACK + 1),
]
_Hours = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class Days(msgspec.Struct, array_like=True):
    """One template: its lines on the newest day it was seen, on the day before that, and so on; and a bit for
    each hour of the day it came at."""

    newest: _Day
    counts: _Counts
    hours: _Hours = 0


class DailyTemplates(msgspec.Struct, array_like=True):
    """Of one workload."""

    seen: Annotated[dict[int, Days], msgspec.Meta(max_length=MOST_TEMPLATES)] = msgspec.field(
        default_factory=dict
    )

    starts: Starts = msgspec.field(default_factory=Starts)

    def note(self, template_id: int, first_ms: int, last_ms: int, n: int) -> None:
        """The template came n times between these times; the lines count for the last day."""
        first, last = (min(max(0, at // _DAY_MS), _LAST_DAY) for at in (first_ms, last_ms))
        days = self.seen.pop(template_id, None) or Days(last, [0] * (LOOKED_BACK + 1))
        if last > days.newest:
            moved = min(last - days.newest, LOOKED_BACK + 1)
            days.counts = [0] * moved + days.counts[: LOOKED_BACK + 1 - moved]
            days.newest = last
        for day in range(max(first, days.newest - LOOKED_BACK), last + 1):
            back = days.newest - day
            days.counts[back] = min(days.counts[back] + (n if day == last else 1), _MOST)
        for at_ms in (first_ms, last_ms):
            days.hours |= 1 << _hour(at_ms)
        self.seen[template_id] = days
        if len(self.seen) > MOST_TEMPLATES:
            del self.seen[min(self.seen, key=lambda one: self.seen[one].newest)]

    def is_usual(self, template_id: int, at_ms: int, learnt_per_day: float = 0.0) -> bool:
        """Whether the lines of the day of this time are no more than the past knows. Asked after `note`, with
        its hour asked by `at_its_hour` before. `learnt_per_day`: its lines a day in the training, 0 where it
        did not come all through it."""
        days = self.seen.get(template_id)
        if days is None:
            return False
        back = days.newest - at_ms // _DAY_MS  # the newest day may be another one: batches come in any order
        if not 0 <= back <= LOOKED_BACK:
            return False
        before = days.counts[back + 1 :]
        came = sum(n > 0 for n in before)
        usual = max(learnt_per_day, sum(before) / came if came >= USUAL else 0.0)
        deviations, lines = FAR
        return usual > 0 and days.counts[back] <= usual + deviations * math.sqrt(usual) + lines

    def at_its_hour(self, template_id: int, at_ms: int) -> bool:
        """False for a template that came only at other hours, at most one for every two days."""
        days = self.seen.get(template_id)
        came = 0 if days is None else sum(n > 0 for n in days.counts)
        if days is None or came < HOURS_DAYS or days.hours.bit_count() > came // 2:
            return True
        hour = _hour(at_ms)
        return any(days.hours >> (hour + near) % 24 & 1 for near in (-1, 0, 1))

    def pack(self) -> bytes:
        return _CODEC.pack(self)

    @classmethod
    def unpack(cls, blob: bytes | None) -> "DailyTemplates":
        """A new one for None. Raises BadPayload."""
        return cls() if blob is None else _CODEC.unpack(blob)


def _hour(at_ms: int) -> int:
    return at_ms // _HOUR_MS % 24


_CODEC: Final = Codec(DailyTemplates, version=2, what="the daily templates of a workload", newer=BadPayload)
