"""How far the largest of a few values may lie: bounds and tails of small samples. Pure arithmetic.

Three ways to bound the next value, by how much is known: a rank among those seen (split conformal; Vovk et al.
2005) where there are enough of them, a Pareto tail fitted to the largest (peaks over threshold; Siffer et al., KDD
2017) where there are at least 200 but the wanted chance lies beyond them, and a normal prediction bound otherwise.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Self

TAIL_LEAST: Final = 200  # values; a tenth of fewer says nothing about the shape of a tail
_TAIL_SHARE: Final = 0.1  # the largest of them are the tail
# Shapes below 0 end somewhere: from twenty excesses that end is too near too often. Above 0.5 there is no variance.
_SHAPES: Final = (0.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoTail:
    """A generalised Pareto tail: P(X > x) = share * (1 + shape * (x - start) / scale) ** (-1 / shape)."""

    start: float
    share: float  # of all values that lie above `start`
    scale: float
    shape: float

    def chance(self, x: float) -> float:
        """P(X > x) for x at or above the start."""
        y = max(0.0, x - self.start) / self.scale
        if self.shape == 0.0:
            return self.share * math.exp(-y)
        return float(self.share * (1.0 + self.shape * y) ** (-1.0 / self.shape))

    def bound(self, chance: float) -> float:
        """The x that is exceeded with this chance, for a chance below `share`."""
        ratio = self.share / chance
        if self.shape == 0.0:
            return self.start + self.scale * math.log(ratio)
        return float(self.start + self.scale * (ratio**self.shape - 1.0) / self.shape)

    def to_json(self) -> list[float]:
        return [self.start, self.share, self.scale, self.shape]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError or TypeError when these are not the numbers of a tail."""
        start, share, scale, shape = (float(v) for v in data)
        if not (
            math.isfinite(start) and 0 < share <= 1 and 0 < scale < math.inf and 0 <= shape <= _SHAPES[1]
        ):
            raise ValueError(f"{data!r} is no tail")
        return cls(start=start, share=share, scale=scale, shape=shape)


def tail_of(ordered: Sequence[float]) -> ParetoTail | None:
    """The tail of ascending values by probability-weighted moments (Hosking and Wallis 1987).

    None for fewer than 200 values, or where the largest tenth of them does not differ.
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
    shape = 2.0 - mean / (mean - 2.0 * weighted)
    bounded = min(max(shape, _SHAPES[0]), _SHAPES[1])
    # With the shape moved, the scale that keeps the mean of the excesses.
    scale = mean * (1.0 - bounded)
    return ParetoTail(start=start, share=(1 + m) / (1 + n), scale=scale, shape=bounded) if scale > 0 else None


def bound(ordered: Sequence[float], chance: float) -> tuple[float, str]:
    """A value that the next one exceeds with at most about this chance, and the way it was found.

    `ordered`: at least two ascending values. "conformal", "pot" or "student".
    """
    n = len(ordered)
    rank = math.ceil((n + 1) * (1.0 - chance))
    if rank <= n:
        # Split conformal: the rank-th smallest bounds the next one.
        return ordered[rank - 1], "conformal"
    if tail := tail_of(ordered):
        return max(ordered[-1], tail.bound(chance)), "pot"
    mean = sum(ordered) / n
    sd = math.sqrt(sum((v - mean) ** 2 for v in ordered) / (n - 1))
    return mean + student(1.0 - chance, n - 1) * sd * math.sqrt(1 + 1 / n), "student"


def conformal(ordered: Sequence[float], x: float) -> float:
    """The chance that one more value is at least x, from ascending values: never below 1 / (n + 1)."""
    n = len(ordered)
    return (1 + n - bisect_left(ordered, x)) / (1 + n)


def student(p: float, df: int) -> float:
    """The p-quantile of Student's t for p above 0.5, to three digits (Hill, Algorithm 396, CACM 1970)."""
    two = 2.0 * (1.0 - p)
    if df == 1:
        return 1.0 / math.tan(two * math.pi / 2.0)
    if df == 2:
        return math.sqrt(2.0 / (two * (2.0 - two)) - 2.0)
    a = 1.0 / (df - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * df
    y = (d * two) ** (2.0 / df)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(two / 2.0)
        y = x * x
        if df < 5:
            c += 0.3 * (df - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (1.0 / (((df + 6.0) / (df * y) - 0.089 * d - 0.822) * (df + 2.0) * 3.0) + 0.5 / (df + 4.0)) * y
            - 1.0
        ) * (df + 1.0) / (df + 2.0) + 1.0 / y
    return math.sqrt(df * y)
