"""Follow-ups: the events that come soon after an event in nearly every normal session.

    event A, at its first place in a part of a session --> B is after it in 99 % of normal parts: a follow-up
    B does not come within its usual time              --> missing, and named in the finding

The first place, because events that are written several times in parallel come in any order. A part is what
stands between two gaps, so a follow-up comes before the next gap. Of each event the nearest follow-ups are
kept. The usual time is the conformal bound of the delays at `1 - USUAL`.

By itself a missing follow-up makes a session anomalous only where the chance that a normal part misses it
is small enough. The chance is (1 + parts that did) / (1 + parts with A), times the number of follow-ups
that are expected in the part (Bonferroni). That of a delay past the longest normal one falls by a Pareto
tail, whose index is found from the longest tenth (Hill 1975). Pure.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

MIN_PARTS: Final = 50  # with an event, before its follow-ups are told
SHARE: Final = 0.99  # of the parts with an event have its follow-up
USUAL: Final = 0.004  # of the delays may be longer than the usual time
MAX_PARTS: Final = 10_000  # of normal sessions, evenly spaced
MAX_EVENTS: Final = 300  # of a part: a longer one is a job, whose last events follow its first by chance
MAX_NEXT: Final = 3  # follow-ups of an event
MAX_FOLLOW_UPS: Final = 2_000
_LEAST_MS: Final = 1_000  # shorter times are those of clocks and buffers
_TAIL: Final = (
    1.0,
    4.0,
)  # the index of a tail: at 1 there is no mean, and a steeper one would need more delays
_COUNT = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

Part = tuple[Sequence[int], Sequence[int]]  # events, and their times in ms


class FollowUp(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`event` comes after `after` within `usual_ms` in `within` of `parts` normal parts, and at all in `came`
    of them, never later than `longest_ms`. `tail`: index of the Pareto tail of longer delays."""

    after: _COUNT
    event: _COUNT
    parts: _COUNT
    came: _COUNT
    within: _COUNT
    usual_ms: _COUNT
    longest_ms: _COUNT
    tail: Annotated[float, msgspec.Meta(ge=1, le=4)]

    @property
    def share(self) -> float:
        return self.within / self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A follow-up that did not come in time. `at`: the place of the event that it follows; `late_ms`: its
    delay, None where it did not come."""

    follow_up: FollowUp
    at: int
    late_ms: int | None
    p_value: float  # chance that a normal part misses it, or has it as late


def learn_follow_ups(parts: Iterable[Part]) -> "FollowUps":
    """From parts of normal sessions; the caller draws at most MAX_PARTS."""
    drawn = [part for part in parts if 1 < len(part[0]) <= MAX_EVENTS]
    found = []
    for after, nexts in _candidates(drawn).items():
        found += [_measured(after, event, drawn, seen) for event, seen in nexts]
    found.sort(key=lambda one: (-one.parts, one.after, one.event))
    return FollowUps(tuple(found[:MAX_FOLLOW_UPS]))


def _candidates(parts: Sequence[Part]) -> dict[int, list[tuple[int, list[int]]]]:
    """For each event its nearest follow-ups, each with the numbers of the parts that have the event."""
    sequences: dict[tuple[int, ...], list[int]] = {}
    for number, (events, _) in enumerate(parts):
        sequences.setdefault(tuple(events), []).append(number)
    having: dict[int, list[int]] = {}
    followed: Counter[tuple[int, int]] = Counter()
    steps: Counter[tuple[int, int]] = Counter()
    for events, numbers in sequences.items():
        for after, place in _places(events).items():
            having.setdefault(after, []).extend(numbers)
            for event, step in _firsts(events, place).items():
                followed[after, event] += len(numbers)
                steps[after, event] += step * len(numbers)
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for (after, event), times in followed.items():
        total = len(having[after])
        if after > 0 and event > 0 and total >= MIN_PARTS and times >= SHARE * total:
            found.setdefault(after, []).append((event, having[after]))
    return {
        after: sorted(nexts, key=lambda one: (steps[after, one[0]] / followed[after, one[0]], one[0]))[
            :MAX_NEXT
        ]
        for after, nexts in sorted(found.items())
    }


def _places(events: Sequence[int]) -> dict[int, int]:
    """The first place of each event."""
    places: dict[int, int] = {}
    for place, event in enumerate(events):
        places.setdefault(event, place)
    return places


def _firsts(events: Sequence[int], place: int) -> dict[int, int]:
    """Each event after this place, and how many steps after it."""
    firsts: dict[int, int] = {}
    for step, event in enumerate(islice(events, place + 1, None), 1):
        firsts.setdefault(event, step)
    firsts.pop(events[place], None)
    return firsts


def _measured(after: int, event: int, parts: Sequence[Part], numbers: Sequence[int]) -> FollowUp:
    delays = [delay for number in numbers if (delay := _delay(parts[number], after, event)[1]) is not None]
    ordered = np.sort(np.array(delays, dtype=np.int64))
    rank = min(len(ordered), math.ceil((len(ordered) + 1) * (1 - USUAL)))
    usual_ms = _round_up(int(ordered[rank - 1]))
    return FollowUp(
        after=after,
        event=event,
        parts=len(numbers),
        came=len(ordered),
        within=int((ordered <= usual_ms).sum()),
        usual_ms=usual_ms,
        longest_ms=int(ordered[-1]),
        tail=_tail_index(ordered),
    )


def _tail_index(ordered: npt.NDArray[np.int64]) -> float:
    """Hill's estimate from the longest tenth, of delays of at least a tenth of _LEAST_MS."""
    top = np.maximum(ordered[-max(5, len(ordered) // 10) :], _LEAST_MS // 10)
    excess = float(np.log(top / top[0]).mean())
    return float(np.clip(1 / excess if excess else _TAIL[1], *_TAIL))


def _delay(part: Part, after: int, event: int) -> tuple[int, int | None]:
    """(first place of `after`, ms until the next `event` or None); it may stand before in that moment."""
    events, at_ms = part
    place = begin = events.index(after)
    while begin and at_ms[begin - 1] == at_ms[place]:
        begin -= 1
    for later in range(begin, len(events)):
        if events[later] == event:
            return place, max(0, at_ms[later] - at_ms[place])
    return place, None


def _round_up(ms: int) -> int:
    """To 1, 2 or 5 times a power of ten, at least a second."""
    power: int = 10 ** (len(str(max(_LEAST_MS, ms) - 1)) - 1)
    return min(step * power for step in (1, 2, 5, 10) if step * power >= max(_LEAST_MS, ms))


@dataclass(frozen=True)
class FollowUps:
    """The follow-ups of a session model."""

    every: tuple[FollowUp, ...] = ()

    @cached_property
    def _after(self) -> dict[int, list[FollowUp]]:
        found: dict[int, list[FollowUp]] = {}
        for one in self.every:
            found.setdefault(one.after, []).append(one)
        return found

    def missing(self, events: Sequence[int], at_ms: Sequence[int], *, waited_ms: int) -> list[Missing]:
        """The follow-ups of a part that did not come in time; that of the latest event comes first.

        `waited_ms`: how long nothing has come since."""
        expected = [one for after in set(events) & self._after.keys() for one in self._after[after]]
        found = []
        for one in expected:
            at, delay = _delay((events, at_ms), one.after, one.event)
            if delay is None:
                if at_ms[-1] - at_ms[at] + waited_ms < one.usual_ms:
                    continue  # it may still come
                chance = (1 + one.parts - one.came) / (1 + one.parts)
            elif delay > one.usual_ms:
                longest_ms = max(one.longest_ms, _LEAST_MS)
                later = one.parts - (one.within if delay <= longest_ms else one.came)
                chance = (1 + later) / (1 + one.parts) * min(1.0, longest_ms / delay) ** one.tail
            else:
                continue
            p_value = min(1.0, chance * len(expected))
            found.append(Missing(follow_up=one, at=at, late_ms=delay, p_value=p_value))
        return sorted(found, key=lambda one: (-one.at, one.follow_up.usual_ms, one.follow_up.event))
