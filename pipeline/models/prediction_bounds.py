"""Upper prediction bounds: how far the next of a few values may lie. Pure arithmetic.

Three methods, by how much is known. Split conformal (Vovk et al. 2005): a rank among the values, where there
are enough of them. Peaks over threshold (extreme value theory; Siffer et al., KDD 2017): a generalised Pareto
tail, where there are at least 200 but the wanted chance lies beyond them. Otherwise Student's prediction
bound for normal values.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

TAIL_LEAST: Final = 200  # Values; a tenth of fewer says nothing about the shape of a tail.
_TAIL_SHARE: Final = 0.1  # The largest of them are the tail.
# Below 0 the tail ends, from twenty excesses often too near. Above 0.5 the variance is infinite.
_SHAPE_MOST: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoTail:
    """A generalised Pareto tail: P(X > x) = share * (1 + shape * (x - start) / scale) ** (-1 / shape).

    (Pickands 1975; Coles 2001, equation 4.10). As shape -> 0: share * exp(-(x - start) / scale).
    """

    start: Annotated[float, Meta(ge=-1e300, le=1e300)]
    share: Annotated[float, Meta(gt=0, le=1)]  # of all values that lie above `start`
    scale: Annotated[float, Meta(gt=0, le=1e300)]
    shape: Annotated[float, Meta(ge=0, le=_SHAPE_MOST)]

    def chance(self, x: float) -> float:
        """P(X > x) for x at or above the start."""
        y = max(0.0, x - self.start) / self.scale
        if self.shape == 0.0:
            return self.share * math.exp(-y)
        return float(self.share * (1.0 + self.shape * y) ** (-1.0 / self.shape))

    def quantile(self, chance: float) -> float:
        """The x that is exceeded with this chance, for a chance below `share`."""
        ratio = self.share / chance
        if self.shape == 0.0:
            return self.start + self.scale * math.log(ratio)
        return float(self.start + self.scale * (ratio**self.shape - 1.0) / self.shape)


def fit_pareto(ordered: Sequence[float]) -> ParetoTail | None:
    """The tail of ascending values by probability-weighted moments (Hosking and Wallis, Technometrics 1987).

    For the i-th smallest of m excesses y: a0 = mean(y), a1 = mean((1 - (i - 0.35) / m) * y), then shape = 2 -
    a0 / (a0 - 2 * a1) and scale = a0 * (1 - shape). None for fewer than 200 values, or where the largest
    tenth does not differ.
    """
    n = len(ordered)
    if n < TAIL_LEAST:
        return None
    start = ordered[n - 1 - int(_TAIL_SHARE * n)]
    excesses = [v - start for v in ordered if v > start]
    m = len(excesses)
    if m < _TAIL_SHARE * TAIL_LEAST / 2:
        return None
    mean = sum(excesses) / m
    weighted = sum((1.0 - (i + 0.65) / m) * y for i, y in enumerate(excesses)) / m
    if mean <= 2.0 * weighted:  # no shape below 1 has such moments
        return None
    shape = min(max(2.0 - mean / (mean - 2.0 * weighted), 0.0), _SHAPE_MOST)
    scale = mean * (1.0 - shape)  # also for a bounded shape: the mean of the excesses stays
    return ParetoTail(start=start, share=(1 + m) / (1 + n), scale=scale, shape=shape) if scale > 0 else None


def upper_bound(
    ordered: Sequence[float], chance: float
) -> tuple[float, Literal["conformal", "pot", "student"]]:
    """A value that the next one exceeds with at most about this chance, and the method used.

    `ordered`: at least two ascending values.
    """
    n = len(ordered)
    rank = math.ceil((n + 1) * (1.0 - chance))
    if rank <= n:
        return ordered[rank - 1], "conformal"
    if tail := fit_pareto(ordered):
        return max(ordered[-1], tail.quantile(chance)), "pot"
    mean = sum(ordered) / n
    sd = math.sqrt(sum((v - mean) ** 2 for v in ordered) / (n - 1))
    return mean + student(1.0 - chance, n - 1) * sd * math.sqrt(1 + 1 / n), "student"


def conformal(ordered: Sequence[float], x: float) -> float:
    """The conformal p-value of x among ascending values: never below 1 / (n + 1)."""
    n = len(ordered)
    return (1 + n - bisect_left(ordered, x)) / (1 + n)


def student(p: float, df: int) -> float:
    """The p-quantile of Student's t for p above 0.5 and whole degrees of freedom, by bisection of its closed
    form (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    low, high = 0.0, math.pi / 2.0  # of the angle whose tangent is t / sqrt(df)
    for _ in range(60):
        angle = (low + high) / 2.0
        odd = df % 2
        term = total = math.cos(angle) if odd else 1.0
        for j in range(2 + odd, df - 1, 2):
            term *= (j - 1) / j * math.cos(angle) ** 2
            total += term
        within = math.sin(angle) * (total if df > 1 else 0.0)
        within = (angle + within) * 2.0 / math.pi if odd else within
        low, high = (angle, high) if within < 2.0 * p - 1.0 else (low, angle)
    return math.sqrt(df) * math.tan(low)
