"""How much a round of the watcher does, and how much of its process' time the rounds take: it stores batches too. Pure.

Watching may fall behind, a line may not wait for it. So a round has about half a second: rates say themselves when their
part is over, and of sessions as much is taken as the rounds before show to be possible. While batches wait to be stored
there is one round at a time, or where that does not keep up, as many as take as long as the process had for batches.
"""

from dataclasses import dataclass
from typing import Final

ROUND_S: Final = 0.5
RATES_S: Final = 0.25  # of that, at most
BUDGET_S: Final = 1.0  # of rounds one after another
_START: Final = 0.25
_LEAST: Final = 1 / 32
_STEP: Final = 4.0  # times at most that one round makes it less: it may have waited for a busy machine
_GROWTH: Final = 2.0


@dataclass(slots=True, kw_only=True)
class Share:
    """Part of what a round may take in and judge at most."""

    part: float = _START

    def of(self, most: int) -> int:
        return max(1, round(most * self.part))

    def took(self, seconds: float, allowed_s: float, *, full: bool) -> None:
        """A round took so long where it had so much. `full`: there was more to do, so it shows how much may be done."""
        times = allowed_s / max(seconds, 1e-6)
        if times < 1:
            self.part = max(_LEAST, self.part * max(1 / _STEP, times))
        elif full:
            self.part = min(1.0, self.part * min(_GROWTH, times))


class Turns:
    """When the rounds of one process begin and end; `now` is a clock of seconds that never goes back."""

    def __init__(self) -> None:
        self._began = self._ended = -1e9
        self._worked = 0.0
        self._left = 1 << 62  # of the call before: they become fewer until shown otherwise

    def begin(self, now: float, *, waits: bool) -> bool:
        """Whether rounds may begin now. `waits`: batches wait to be stored."""
        if waits and now - self._ended < self._worked:
            return False
        self._began = now
        return True

    def goes_on(self, now: float, *, waits: bool, left: int) -> bool:
        """Whether another round may follow, with so many observations `left`; they are to become fewer."""
        worked = now - self._began
        if not waits:
            return worked < BUDGET_S
        return 0 < left >= self._left and worked < min(BUDGET_S, self._began - self._ended)

    def end(self, now: float, *, left: int) -> None:
        self._ended, self._worked, self._left = now, now - self._began, left
