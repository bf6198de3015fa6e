"""The watcher's share of its process' time, which also stores batches. Pure.

Watching may fall behind, a line may not wait for it. So a round has about half a second. Rates stop by
themselves at their part of it; the adaptive budget sizes the session work by the time of earlier rounds.
While batches wait, one call does one round. If observations pile up, rounds go on for as long as the process
had for batches before.
"""

from dataclasses import dataclass
from typing import Final

ROUND_S: Final = 0.5
RATES_S: Final = 0.25  # of that, at most
BUDGET_S: Final = 1.0  # of consecutive rounds
_START: Final = 0.25
_MIN: Final = 1 / 32
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


class FairRotation:
    """Alternates watching and storing in one process; `now` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self._began = self._ended = -1e9
        self._worked = 0.0
        self._unread = 1 << 62  # of the previous call

    def begin(self, now: float, *, waits: bool) -> bool:
        """Whether rounds may begin now. `waits`: batches wait to be stored."""
        if waits and now - self._ended < self._worked:
            return False
        self._began = now
        return True

    def goes_on(self, now: float, *, waits: bool, unread: int) -> bool:
        """Whether another round may follow. While batches wait, only if `unread` has not fallen."""
        worked = now - self._began
        if not waits:
            return worked < BUDGET_S
        return 0 < unread >= self._unread and worked < min(BUDGET_S, self._began - self._ended)

    def end(self, now: float, *, unread: int) -> None:
        """The rounds of this call are over."""
        self._ended, self._worked, self._unread = now, now - self._began, unread
