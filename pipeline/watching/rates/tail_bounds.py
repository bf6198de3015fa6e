"""Tail bounds of counts: how unlikely a count is under its expectation.

Counts are negative binomial with a mean and a size: variance = mean + mean²/size, Poisson for infinite size.
Values are nats, minus the logarithm of a probability, so that nothing underflows. Chernoff bounds hold for
every count: they claim less than the exact tail, never more.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_TINY: Final = 1e-12


def tail_nats(count: Floats, mean: Floats, size: Floats) -> Floats:
    """Chernoff bound of seeing `count` or more; 0 up to the mean."""
    mean = np.maximum(mean, _TINY)
    over = np.maximum(count, mean)
    value = over * np.log(over / mean) - (over + size) * np.log1p((over - mean) / (mean + size))
    return np.maximum(value, 0.0)


def log_likelihood_ratio(count: Floats, mean: Floats, size: Floats, ratio: float) -> Floats:
    """Log-likelihood ratio of a mean `ratio` times as high, at the same size, against the mean.

    Its CUSUM crosses h by chance at most once in exp(h) minutes on average (Lorden 1971).
    """
    growth = np.log1p((ratio - 1.0) * mean / (mean + size))
    return count * (math.log(ratio) - growth) - size * growth


def size_of(mean: Floats, lines: Floats, unsure: Floats, dispersion: Floats) -> Floats:
    """Size of the negative binomial, from three sources of variance.

    `dispersion` is that of clumps, `unsure` the relative variance of the level, `lines` the lines behind the
    level.
    """
    spread = dispersion - 1.0 + mean * (unsure + 1.0 / (lines + 1.0))
    size: Floats = mean / np.maximum(spread, 1e-9)
    return size


def common_factor(count: Floats, mean: Floats, smallest: float, dispersion: Floats | float = 1.0) -> float:
    """The factor by which all moved together: the weighted median of count / mean where mean >= `smallest`.

    Weights fall with the dispersion (variance over mean). No entry weighs more than a fifth, so one that runs
    wild does not decide. With fewer than five entries the factor is 1.
    """
    which = mean >= smallest
    if np.count_nonzero(which) < 5:
        return 1.0
    ratios, weights = count[which] / mean[which], (mean / dispersion)[which]
    weights = np.minimum(weights, (weights.sum() - weights) / 4)
    order = np.argsort(ratios, kind="stable")
    sums = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(sums, sums[-1] / 2)])


def deviance(count: Floats, mean: Floats, size: Floats) -> Floats:
    """Half the deviance of a negative binomial: the nats of a count too high or too low."""
    mean = np.maximum(mean, _TINY)
    log = np.where(count > 0, count * np.log(np.maximum(count, _TINY) / mean), 0.0)
    return np.maximum(
        log - (count + size) * np.log1p(np.maximum((count - mean) / (mean + size), -1.0 + _TINY)), 0.0
    )


def gamma_tail(value: float, mean: float, variance: float) -> float:
    """Chernoff bound of a gamma variable of this mean and variance being as high; 0 up to the mean."""
    ratio = value / mean
    return mean**2 / variance * (ratio - 1.0 - math.log(ratio)) if ratio > 1 else 0.0
