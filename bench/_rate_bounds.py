"""How small a burst can be and still be told: the least multiple that a count has to reach within a budget of
alarms.

A detector that knows the level, the scatter and even the minutes of a burst beforehand still has to keep its
false alarms within the budget. With M lines expected in these minutes, variance phi times the mean, and b
nats asked, it can tell k M lines only if the negative binomial tail of them is that unlikely: for phi = 1, M
(k ln k - k + 1) >= b. A real detector has to find level, scatter and minutes, too, so it needs more."""

import math
from typing import Any, Final

import numpy as np

from bench._rate_streams import Counts, Fault
from pipeline.watching.rates.tail_bounds import tail_nats

BURSTS_PER_DAY: Final = 0.5  # of a workload: half of the alarms a day that are allowed
_DAY: Final = 1440
_MOST: Final = 1000.0


def nats(count: float, mean: float, dispersion: float) -> float:
    one = np.array([count]), np.array([mean]), np.array([mean / max(dispersion - 1.0, 1e-9)])
    return float(tail_nats(*one)[0])


def asked(minutes: int, templates: int) -> float:
    """Nats that keep the tests of all templates, one each `minutes`, within the budget of bursts."""
    return math.log(_DAY / minutes * templates / BURSTS_PER_DAY)


def least_multiple(mean: float, dispersion: float, bar: float) -> float:
    """The smallest k with `bar` nats for k times the mean; 1,000 where that is not enough."""
    low, high = 1.0, _MOST
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if nats(middle * mean, mean, dispersion) >= bar else (middle, high)
    return high


def bound_of(counts: Counts, fault: Fault, begin: int) -> float:
    """The least multiple of this burst's own lines that could be told, by the template's past before row
    `begin`.

    The past is cut into blocks as long as the burst. The most favourable of three forecasts of a block
    counts: the mean of all, the mean of its hour (with two days of past), the block before it. More is asked
    than the highest score of any earlier block: what the template did by itself is no fault."""
    length = fault.end - fault.start
    column = counts[:, (fault.template_id or 1) - 1].astype(np.float64)
    lines = float(column[fault.start : fault.end].sum())
    n = begin // length
    blocks = column[begin - n * length : begin].reshape(n, length).sum(axis=1)
    overall = max(float(blocks.mean()), 1.0 / n)
    bar = asked(length, counts.shape[1])
    before = float(column[fault.start - length : fault.start].sum())
    forecasts = [
        (blocks, np.full(n, overall), overall),
        (blocks[1:], np.maximum(blocks[:-1], 1.0), max(before, 1.0)),
    ]
    if begin >= 2 * _DAY:
        hours = (np.arange(n) * length + begin - n * length) % _DAY // 60
        sums, times = (np.bincount(hours, weights=w, minlength=24) for w in (blocks, np.ones(n)))
        by_hour = (sums + overall) / (times + 1.0)  # one block's worth of the overall mean
        forecasts.append((blocks, by_hour[hours], float(by_hour[fault.start % _DAY // 60])))
    return min(_least(seen, expected, usual, bar) * usual / lines for seen, expected, usual in forecasts)


def _least(seen: Any, expected: Any, usual: float, bar: float) -> float:
    dispersion = max(1.0, float(((seen - expected) ** 2).sum() / expected.sum()))
    highest = float(tail_nats(seen, expected, expected / max(dispersion - 1.0, 1e-9)).max())
    return least_multiple(usual, dispersion, max(bar, highest))


def table(means: Any = (1, 3, 10, 30, 100), dispersions: Any = (1, 2, 5, 20)) -> dict[str, dict[str, float]]:
    """Least multiples of a burst of half an hour in one of 100 templates, by lines expected in it and
    dispersion."""
    bar = asked(30, 100)
    return {
        f"dispersion {phi}": {f"{mean} lines": round(least_multiple(mean, phi, bar), 1) for mean in means}
        for phi in dispersions
    }
