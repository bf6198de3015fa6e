"""The alarm budget of a deployment: which findings open incidents and ring.

A detector hands over what it finds with the number of findings as unlikely that its workload has a day by
chance. Each workload and each kind of finding has an equal share of the budget (Bonferroni), and a finding
rings where that number is within its share. So all workloads together have no more false alarms a day than
the budget, however many they are. Findings beyond it are stored, listed and counted, and join incidents that
are near.

A cause that recurs need not be unlikely each time: a finding also rings where so many of its cause within so
short a time are within the share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

KINDS: Final = 7  # warnings, sessions, bursts, silences, compositions, and shifts and outliers of numbers
DAY: Final = timedelta(days=1)
_SHORTEST: Final = timedelta(minutes=1)  # as short a time as any is taken for
# By as much a promise may be off, as the tests of the detectors allow: 2 % where 1 % was asked for.
_SLACK: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChanceRate:
    """How often a workload has such findings by chance, a day."""

    per_day: float  # as unlikely as this one; 0: it is not left to chance
    found_per_day: float  # of all that are found; inf: unknown, so their number says nothing


GRAVE: Final = ChanceRate(per_day=0.0, found_per_day=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmBudget:
    """`per_day`: false alarms of the deployment. `workloads`: those that had lines in the last day."""

    per_day: float
    workloads: int

    @property
    def share(self) -> float:
        """False alarms a day of one kind in one workload."""
        return self.per_day / (KINDS * max(1, self.workloads))

    def rings(self, chance: ChanceRate, last: datetime, sightings: Iterable[tuple[datetime, int]]) -> bool:
        """Whether a finding is an alarm. `sightings`: when findings of its cause began up to `last`, and how
        many, with this one."""
        if chance.per_day <= self.share:
            return True
        if math.isinf(chance.found_per_day):
            return False
        count = 0
        for first, n in sorted(sightings, reverse=True):
            count += n
            if last - first <= DAY and _repeated(chance, last - first, count) <= self.share:
                return True
        return False


def _repeated(chance: ChanceRate, span: timedelta, count: int) -> float:
    """How often a day so many findings come within such a span by chance: Chernoff's bound of a Poisson
    number, for each of the spans of a day."""
    spans = DAY / max(span, _SHORTEST)
    mean = _SLACK * chance.found_per_day / spans
    if count <= mean:
        return math.inf
    return spans * math.exp(count - mean + count * math.log(mean / count))
