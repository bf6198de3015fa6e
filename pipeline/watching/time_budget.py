"""The watcher's share of its process' time, which also stores batches. Pure.

Watching may fall behind, a line may not wait for it. So a round has about half a second. Rates stop by
themselves at their part of it; the adaptive budget sizes the session work by the time of earlier rounds.
While batches wait for this process, one call does one round. If observations pile up, rounds go on for as
long as the process had for batches before.

A flood of lines needs the processors. While many batches are on their way, watching takes a small share of
the time. The share grows with the age of the oldest observation and with the memory that observations take.
So alarms come later under a flood, by less than a minute, and no observation is dropped for it.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

ROUND_S: Final = 0.5
RATES_S: Final = 0.25  # of that, at most
# Of that, for minutes of old logs while observations wait, or in a flood. They would take all of it.
BUSY_OLD_S: Final = 0.02
BUDGET_S: Final = 1.0  # of consecutive rounds
CATCH_UP_S: Final = 1.6  # the same where no batch is on its way and observations wait; calls come every 2 s
ALL: Final = 1.0  # of the time of this process
HALF: Final = 0.5
LEAST: Final = 1 / 16
# Batches on their way that are a flood. A stream that the stages keep up with has fewer.
FLOOD: Final = 8
# The longest rest in a flood, unless a round took longer. `send --wait` and `drain` wait 10 s for a round.
REST_S: Final = 6.0
PATIENCE_S: Final = 10.0  # the age of the oldest observation up to which watching takes LEAST in a flood
LATE_S: Final = 40.0  # the age from which it takes HALF
FULL: Final = 0.5  # the part of the observations' memory from which it takes HALF
_START: Final = 0.25
# Beyond the smallest round what is alike in every round, and what is read in vain, takes most of its time.
_MIN: Final = 1 / 8
_SHRINK: Final = 4.0  # most that one slow round shrinks the part by: the machine may have been busy
_GROWTH: Final = 2.0


@dataclass(slots=True, kw_only=True)
class AdaptiveBudget:
    """The part of each limit that a round may take."""

    part: float = _START

    def of(self, limit: int) -> int:
        """This part of a limit, at least 1."""
        return max(1, round(limit * self.part))

    def record(self, seconds: float, allowed_s: float, *, full: bool) -> None:
        """Adapt to the time of a round. `full`: the round had more to do than it was allowed to take."""
        times = allowed_s / max(seconds, 1e-6)
        if times < 1:
            self.part = max(_MIN, self.part * max(1 / _SHRINK, times))
        elif full:
            self.part = min(1.0, self.part * min(_GROWTH, times))


class ObservationAge:
    """How long the oldest observation has waited, from their numbers. `now`: a monotonic clock in seconds."""

    def __init__(self) -> None:
        # (when, observations of all time) of the first look that saw the oldest one that waits, and of later
        # ones. A look every 2 s for half an hour.
        self._looks: deque[tuple[float, int]] = deque(maxlen=1_000)

    def note(self, now: float, *, taken: int, waiting: int) -> float:
        """The age in seconds; 0 where none waits. `taken`: by the watcher, ever."""
        looks = self._looks
        if looks and looks[-1][1] > taken + waiting:  # Redis lost its last moments, or dropped some
            looks.clear()
        while looks and looks[0][1] <= taken:
            looks.popleft()
        if not waiting:
            return 0.0
        looks.append((now, taken + waiting))
        return now - looks[0][0]


def flood_share(*, age_s: float, full: float) -> float:
    """The share of the time for watching in a flood. `full`: the part of the observations' memory in use."""
    late = (age_s - PATIENCE_S) / (LATE_S - PATIENCE_S)
    return LEAST + (HALF - LEAST) * min(1.0, max(0.0, late, full / FULL))


class FairRotation:
    """Alternates watching and storing in one process; `now` is a monotonic clock in seconds.

    `share`: of the time for watching; ALL while nothing waits, HALF while batches wait to be stored by this
    process, less in a flood."""

    def __init__(self) -> None:
        self._began = self._ended = -1e9
        self._worked = 0.0
        self._unread = 1 << 62  # of the previous call

    def begin(self, now: float, *, share: float) -> bool:
        """Whether rounds may begin now."""
        rest = self._worked * (1 / share - 1)
        if share < HALF:
            rest = max(self._worked, min(rest, REST_S))
        if share < ALL and now - self._ended < rest:
            return False
        self._began = now
        return True

    def goes_on(self, now: float, *, share: float, unread: int) -> bool:
        """Whether another round may follow. While batches wait, only if `unread` has not fallen."""
        worked = now - self._began
        if share >= ALL:
            return worked < (CATCH_UP_S if unread else BUDGET_S)
        return (
            share >= HALF and 0 < unread >= self._unread and worked < min(BUDGET_S, self._began - self._ended)
        )

    def end(self, now: float, *, unread: int) -> None:
        """The rounds of this call are over."""
        self._ended, self._worked, self._unread = now, now - self._began, unread
