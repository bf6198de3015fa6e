"""How often a workload has numbers as unusual by chance, and the height that a score needs to be a finding.

It is the highest of two, and more for a workload or a variable that had more findings than allowed. The first
are the nats that a perfect model needs to be exceeded so often over all its tests. The second continues the
tail of the highest scores of each quarter of an hour. That tail is read between quantiles, so that one fault
below the height does not hide the next.
"""

import math
from typing import Annotated, Final

import msgspec

from pipeline.records.verdict import Reason
from pipeline.watching.rates.detection import EpochMinute, Positive

FOUND_PER_DAY: Final = {Reason.NUMBER_SHIFT: 0.6, Reason.NUMBER_OUTLIER: 0.3}  # of a workload, by chance
BLOCK: Final = 15  # minutes

_DAY: Final = 1440
_WEEK: Final = 7 * _DAY
_BLOCKS: Final = _DAY / BLOCK  # a day
_LEAST_TESTS: Final = 1440.0  # a day
_FEW: Final = 8.0  # blocks that tell nothing of a tail
_FROM, _TO = 0.75, 0.95  # quantiles between which the tail is read
_REMAINS: Final = 0.5 ** (1 / (14 * _BLOCKS))  # of the weight of a block after the next one
_MOST: Final = 63  # nats
_MOST_ALERTS: Final = 64
_OVER: Final = 2.0  # nats by which a past with e times as many findings as allowed raises the height
_AGAIN: Final = (
    5.0  # nats that each finding of a variable adds to what its next one needs; a day takes one back
)


class NumberScores(msgspec.Struct, array_like=True):
    """The scores and findings of one kind in one workload."""

    per_day: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)]
    maxima: Annotated[
        dict[Annotated[int, msgspec.Meta(ge=0, le=_MOST)], Positive], msgspec.Meta(max_length=_MOST + 1)
    ] = msgspec.field(default_factory=dict)  # whole nats -> weight of the blocks with this highest score
    highest: Positive = 0.0  # score without an alarm of the block that goes on
    alerts: Annotated[list[EpochMinute], msgspec.Meta(max_length=_MOST_ALERTS)] = msgspec.field(
        default_factory=list
    )  # of the last week

    def add(self, score: float) -> None:
        """A score that is no finding."""
        self.highest = max(self.highest, score)

    def turn(self, minute: int) -> None:
        """A block of minutes ends."""
        top = min(_MOST, int(self.highest))
        self.maxima = {nats: weight * _REMAINS for nats, weight in self.maxima.items()}
        self.maxima[top] = self.maxima.get(top, 0.0) + 1.0
        self.highest = 0.0
        self.alerts = [at for at in self.alerts if abs(minute - at) < _WEEK]

    def found(self, minute: int) -> None:
        """A finding is reported."""
        self.alerts = [*self.alerts, minute][-_MOST_ALERTS:]

    def chance(self, score: float, tests_per_day: float, minutes: float, repeats: float) -> float:
        """How often a day a score is as high by chance, after `minutes` of history; `repeats`: earlier
        findings of the same cause. It is a finding up to `per_day`."""
        score -= _AGAIN * repeats
        over = len(self.alerts) / max(1.0, self.per_day * min(minutes, _WEEK) / _DAY)
        nats = score - _OVER * math.log(max(1.0, over))
        return max(max(_LEAST_TESTS, tests_per_day) * math.exp(-nats), self._by_past(score))

    def _by_past(self, score: float) -> float:
        """How often a day the past exceeds a score, by an exponential tail."""
        total = sum(self.maxima.values())
        if total < _FEW:
            return 0.0
        low, high = self._quantile(_FROM * total), self._quantile(_TO * total)
        scale = max(1.0, (high - low) / math.log((1.0 - _FROM) / (1.0 - _TO)))
        return (1.0 - _TO) * _BLOCKS * math.exp(-(score - high) / scale)

    def _quantile(self, weight: float) -> float:
        below = 0.0
        for nats in sorted(self.maxima):
            below += self.maxima[nats]
            if below >= weight:
                return nats + 1.0
        return 0.0
