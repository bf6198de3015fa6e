"""The lines that a workload is expected to write, from what its detector has learnt."""

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from pipeline.watching.rates.baseline import YOUNG
from pipeline.watching.rates.columns import TOTAL
from pipeline.watching.rates.detector import Detector
from pipeline.watching.rates.season import SLOTS, slot_of

SIGMAS: Final = 2.0  # about 95 of 100 spans of a normal deviation


class ExpectedLines(NamedTuple):
    """The bounds within which the lines of a span usually lie."""

    low: int
    high: int


def expected_lines(detector: Detector, ends: Sequence[datetime]) -> list[ExpectedLines]:
    """Of each span between two of these moments; [] where the workload is known for less than an hour.

    The mean is the level of two days times the factors of the hours. Its variance is that of lines which come
    in clumps, and that of the level itself."""
    row = slice(TOTAL, TOTAL + 1)
    if float(detector.baseline.age[TOTAL]) < YOUNG:
        return []
    scatter = detector.scatter.of_blocks()[row]
    level = float(detector.baseline.slow()[TOTAL])
    by_slot = level * detector.season.factors(int(detector.season.place[TOTAL]), scatter)
    unsure = float(detector.season.unsure()[TOTAL])
    found = []
    for begin, end in pairwise(ends):
        first, last = begin.timestamp() / 60, end.timestamp() / 60
        hours = range(int(first // 60), int(-(-last // 60)))
        mean = sum(
            (min(last, 60.0 * hour + 60) - max(first, 60.0 * hour)) * by_slot[slot_of(60 * hour) % SLOTS]
            for hour in hours
        )
        deviation = float(np.sqrt(mean * float(scatter[0]) + unsure * mean * mean))
        found.append(
            ExpectedLines(
                int(np.floor(max(0.0, mean - SIGMAS * deviation))), int(np.ceil(mean + SIGMAS * deviation))
            )
        )
    return found
