"""The height that a score needs to be a detection, by a budget of false alarms.

A threshold is the higher of two. The first is the nats that a perfect model needs to stay within the budget
over all its tests. The second is the score that the workload's history exceeded as often as the budget allows
(peaks over threshold, POT): a model of counts is never quite right.
"""

import bisect
import math
from typing import Annotated, Final

from msgspec import Meta

from pipeline.records.verdict import Reason

ALARMS_PER_DAY: Final = 1.0  # false alarms of a workload that are allowed
# Each kind's share of these alarms.
ALLOWED: Final = {
    Reason.RATE_BURST: 0.5 * ALARMS_PER_DAY,
    Reason.RATE_SILENCE: 0.3 * ALARMS_PER_DAY,
    Reason.RATE_MIX: 0.2 * ALARMS_PER_DAY,
}
OVER: Final = 2.0  # Nats that an alarm past the budget adds to what the next one of the workload needs.
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
        self.allowed = ALLOWED[kind]
        self.scores: list[Peak] = []  # sorted

    def threshold(self, tests_per_day: float, minutes: float) -> float:
        """The height that a score needs after `minutes` of history: see the module's docstring."""
        short = 1.0 + _SHORT / max(minutes, 1.0)
        return max(math.log(tests_per_day / self.allowed) * short, self.level(self.allowed, minutes))

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
        # An alarm within the budget does not make the next one harder; beyond, alarms are noise to shut out.
        beyond = self.scores[-1 - allowed][0] if allowed < len(self.scores) else -math.inf
        if per_day * days >= 1:
            return beyond
        top = [score for score, _, alerted in reversed(self.scores) if not alerted][: _TOP + 1]
        if not top:
            return beyond
        scale = max(1.0, sum(s - top[-1] for s in top[:-1]) / max(1, len(top) - 1))
        return max(beyond, top[0] + scale * math.log(1 / (per_day * max(days, 1 / 24))))
