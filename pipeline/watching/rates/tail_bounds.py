"""Tail bounds and thresholds of the rate detector: how unlikely a count is, and what a budget of alarms allows.

Counts are modelled as negative binomial with a mean and a size (variance = mean + mean²/size; size to infinity is
Poisson). Everything is in nats, minus the logarithm of a probability, so nothing underflows. The bounds are Chernoff's,
which hold for every count: they claim less than the exact tail, never more.
"""

import bisect
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_TINY: Final = 1e-12
_PEAKS: Final = 64  # highest scores kept: a budget of one a day over 28 days asks for the 29th
_LEAST: Final = 3.0  # nats; lower peaks happen all the time and never set a threshold
_KEEP_MIN: Final = 28 * 1440  # minutes; history is judged by its last four weeks
_TOP: Final = 10  # peaks behind an estimate of the tail's scale


def tail(count: Floats, mean: Floats, size: Floats) -> Floats:
    """Nats by which seeing `count` or more is unlikely; 0 up to the mean. Chernoff's bound for negative binomials."""
    mean = np.maximum(mean, _TINY)
    over = np.maximum(count, mean)
    value = over * np.log(over / mean) - (over + size) * np.log1p((over - mean) / (mean + size))
    return np.maximum(value, 0.0)


def evidence(count: Floats, mean: Floats, size: Floats, ratio: float) -> Floats:
    """Log likelihood ratio in nats of a mean `ratio` times as high, at the same size, against the mean.

    A cumulative sum of it, never below 0, crosses h by chance at most once in exp(h) minutes on average (Lorden 1971).
    """
    growth = np.log1p((ratio - 1.0) * mean / (mean + size))
    return count * (math.log(ratio) - growth) - size * growth


def common_factor(count: Floats, mean: Floats, least: float, dispersion: Floats | float = 1.0) -> float:
    """By how much all of them moved together: the weighted median of count / mean where the mean is at least `least`.

    What scatters (variance over mean) weighs less by that. No entry weighs more than a fifth, so one that runs wild does not speak for the others; with fewer than five it is 1.
    """
    which = mean >= least
    if np.count_nonzero(which) < 5:
        return 1.0
    ratios, weights = count[which] / mean[which], (mean / dispersion)[which]
    weights = np.minimum(weights, (weights.sum() - weights) / 4)
    order = np.argsort(ratios, kind="stable")
    sums = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(sums, sums[-1] / 2)])


def deviance(count: Floats, mean: Floats, size: Floats) -> Floats:
    """Nats by which a count is unlikely, be it too high or too low: half the deviance of negative binomials."""
    mean = np.maximum(mean, _TINY)
    own = np.where(count > 0, count * np.log(np.maximum(count, _TINY) / mean), 0.0)
    return np.maximum(
        own - (count + size) * np.log1p(np.maximum((count - mean) / (mean + size), -1.0 + _TINY)), 0.0
    )


def gamma_tail(value: float, mean: float, variance: float) -> float:
    """Nats by which a gamma variable of this mean and variance is unlikely as high; Chernoff's bound, 0 up to the mean."""
    ratio = value / mean
    return mean**2 / variance * (ratio - 1.0 - math.log(ratio)) if ratio > 1 else 0.0


class Peaks:
    """The highest scores of a workload's own past, one per episode: what its alarms must exceed.

    A model of counts is never quite right, so its nats are only the least that is asked. The level that history exceeded
    as often as the budget allows is the other part; where history is shorter than that, the tail is continued as an
    exponential one (peaks over threshold).
    """

    def __init__(self) -> None:
        self._kept: list[tuple[float, int, bool]] = []  # score, minute, told: sorted

    def add(self, score: float, minute: int, *, told: bool) -> None:
        if not _LEAST <= score < math.inf:
            return
        bisect.insort(self._kept, (float(score), minute, bool(told)))
        del self._kept[:-_PEAKS]

    def forget(self, minute: int) -> None:
        """Drop what is older than four weeks, and what a clock that ran ahead left behind."""
        self._kept = [peak for peak in self._kept if abs(minute - peak[1]) <= _KEEP_MIN]

    def bar(self, per_day: float, minutes: float) -> float:
        """The score that a past of `minutes` exceeded `per_day` times a day; -inf where nothing was high."""
        days = min(minutes, _KEEP_MIN) / 1440
        allowed = max(1, int(per_day * days))
        # Within the budget a told alarm does not make the next one harder; past it they are the noise to be shut out.
        beyond = self._kept[-1 - allowed][0] if allowed < len(self._kept) else -math.inf
        if per_day * days >= 1:
            return beyond
        top = [score for score, _, told in reversed(self._kept) if not told][: _TOP + 1]
        if not top:
            return beyond
        scale = max(1.0, sum(s - top[-1] for s in top[:-1]) / max(1, len(top) - 1))
        return max(beyond, top[0] + scale * math.log(1 / (per_day * max(days, 1 / 24))))

    def pack(self) -> list[Any]:
        return self._kept

    @classmethod
    def unpack(cls, data: Any) -> "Peaks":
        """Raises ValueError or TypeError when it is not what `pack` gives."""
        made = cls()
        for score, minute, told in data:
            if not isinstance(score, float) or not math.isfinite(score) or not isinstance(minute, int):
                raise TypeError("a peak is not a number")
            bisect.insort(made._kept, (score, minute, bool(told)))
        if len(made._kept) > _PEAKS:
            raise ValueError(f"{len(made._kept)} peaks")
        return made
