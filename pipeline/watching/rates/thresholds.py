"""How often a workload has a score as high by chance, and the height that a score needs to be a finding.

A height is the higher of two. The first is the nats that a perfect model needs to be exceeded so often over
all its tests. The second is the score that the workload's history exceeded so often (peaks over threshold,
POT): a model of counts is never quite right. Which findings become alarms is decided for all workloads
together (watching/alarm_budget.py).
"""

import bisect
import math
from operator import itemgetter
from typing import Annotated, Final

from msgspec import Meta

from pipeline.records.verdict import Reason

# Findings of a workload a day by chance.
FOUND_PER_DAY: Final = {
    Reason.RATE_BURST: 0.5,
    Reason.RATE_SILENCE: 0.3,
    Reason.RATE_MIX: 0.2,
}
OVER: Final = 2.0  # Nats that a finding past these adds to what the next one of the workload needs.
DAYS_28: Final = 1 / (28 * 1440)  # Forgetting per minute of maxima.
_SHORT: Final = 360.0  # Minutes of history that ask for twice the nats: the tail is not known yet.
_PEAKS: Final = 64  # Highest scores remembered: a budget of one a day over 28 days asks for the 29th.
_MIN_PEAK: Final = 3.0  # Nats; lower peaks happen all the time and never set a threshold.
_HISTORY: Final = 28 * 1440  # Minutes; history is judged by its last four weeks.
_TOP: Final = 10  # Peaks behind an estimate of the tail's scale.

Peak = tuple[Annotated[float, Meta(ge=0.0, lt=1e300)], int, bool]  # score, minute, alerted
PackedPeaks = Annotated[list[Peak], Meta(max_length=_PEAKS)]


class PeaksOverThreshold:
    """The highest scores of a workload's history, one per episode."""

    def __init__(self, kind: Reason) -> None:
        self.allowed = FOUND_PER_DAY[kind]
        self.scores: list[Peak] = []  # sorted

    def threshold(self, tests_per_day: float, minutes: float, most_per_day: float = math.inf) -> float:
        """The height that a finding needs after `minutes` of history, and one that comes `most_per_day` times
        a day by chance, if that is less."""
        allowed = min(self.allowed, most_per_day)
        short = 1.0 + _SHORT / max(minutes, 1.0)
        return max(math.log(tests_per_day / allowed) * short, self.level(allowed, minutes))

    def per_day(self, score: float, tests_per_day: float, minutes: float) -> float:
        """How often a day a score is as high by chance: `threshold` is as high for so many a day."""
        short = 1.0 + _SHORT / max(minutes, 1.0)
        by_model = tests_per_day * math.exp(-score / short)
        days = max(min(minutes, _HISTORY) / 1440, 1 / 24)
        higher = len(self.scores) - bisect.bisect_right(self.scores, score, key=itemgetter(0))
        if higher > 1:
            return max(by_model, higher / days)
        tail = self._tail()
        if tail is None:
            return by_model
        highest, scale = tail
        return max(by_model, min(math.exp(-max(0.0, score - highest) / scale), 1.0) / days)

    def floor(self, tests_per_day: float) -> float:
        """A lower bound of every threshold with as many tests or more, -inf where there is none."""
        nats = math.log(tests_per_day / self.allowed)
        return nats if nats > 0 else -math.inf  # negative nats fall with a short history

    def add(self, score: float, minute: int, *, alerted: bool) -> None:
        if not _MIN_PEAK <= score < math.inf:
            return
        bisect.insort(self.scores, (float(score), minute, bool(alerted)))
        del self.scores[:-_PEAKS]

    def forget(self, minute: int) -> None:
        """Drop peaks older than four weeks, and those of a clock that ran ahead."""
        self.scores = [peak for peak in self.scores if abs(minute - peak[1]) <= _HISTORY]

    def level(self, per_day: float, minutes: float) -> float:
        """The score that `minutes` of history exceeded `per_day` times a day; -inf where nothing was high.

        Where history is shorter than the budget's return period, its tail continues as an exponential one.
        """
        days = min(minutes, _HISTORY) / 1440
        allowed = max(1, int(per_day * days))
        # A finding that is allowed does not make the next one harder; beyond, they are noise to shut out.
        beyond = self.scores[-1 - allowed][0] if allowed < len(self.scores) else -math.inf
        tail = self._tail()
        if per_day * days >= 1 or tail is None:
            return beyond
        highest, scale = tail
        return max(beyond, highest + scale * math.log(1 / (per_day * max(days, 1 / 24))))

    def _tail(self) -> tuple[float, float] | None:
        """The highest score without a finding, and the scale of the exponential tail that ends there."""
        top = [score for score, _, alerted in reversed(self.scores) if not alerted][: _TOP + 1]
        if not top:
            return None
        return top[0], max(1.0, sum(s - top[-1] for s in top[:-1]) / max(1, len(top) - 1))
