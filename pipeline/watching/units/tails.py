"""Tails of a unit's evidence on normal units: how surprising a value is, in nats.

Student's tail is predictive: with few normal units it shrinks, and it never saturates. The conformal tail
counts normal units, and is worth about log(n + 1) nats at most. Closed forms, accurate far out.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_FREEDOM: Final = 4  # more would make one odd value of many normal units worth hundreds of nats
# Normal units of which a distance beyond the largest is worth half: few units show little of what is normal.
HALF_KNOWN: Final = 20
EXCESS: Final = 2.0  # nats; of a sum of surprises as these are
PRIOR: Final = 3.0
_SMALL: Final = 0.02  # below it, differences of the cubic form lose digits


def student_tail(t: Floats, freedom: int) -> Floats:
    """P(T > t) of Student's distribution with 1 to 4 degrees of freedom. Raises ValueError."""
    if not 1 <= freedom <= MOST_FREEDOM:
        raise ValueError(f"{freedom} degrees of freedom; use 1 to {MOST_FREEDOM}")
    size = np.abs(t)
    if freedom == 1:
        upper = np.arctan2(1.0, size) / np.pi
    elif freedom == 3:
        angle = np.arctan2(np.sqrt(3.0), size)
        near = angle - np.sin(angle) * np.cos(angle)
        upper = np.where(angle < _SMALL, angle**3 * (2 / 3) * (1 - angle**2 / 5), near) / np.pi
    else:  # by the sine of the angle: 1 - s = (freedom / (freedom + t^2)) / (1 + s)
        s = size / np.sqrt(freedom + size**2)
        rest = freedom / (freedom + size**2) / (1.0 + s)
        upper = rest / 2 if freedom == 2 else rest**2 * (2.0 + s) / 4
    tail: Floats = np.where(t >= 0, upper, 1.0 - upper)
    return tail


def student_nats(values: Floats, normal: Floats, least_scale: float) -> Floats:
    """-log of the predictive tail of each value, given the values of normal units; 0 with fewer than two.

    The scale is that of a new value, sqrt(var (1 + 1/n) + s0^2). `least_scale`: s0."""
    n = normal.size
    if n < 2:
        return np.zeros_like(values)
    scale = np.sqrt(normal.var(ddof=1) * (1 + 1 / n) + least_scale**2)
    nats: Floats = -np.log(student_tail((values - normal.mean()) / scale, min(n - 1, MOST_FREEDOM)))
    return nats


def student_nats_left_out(values: Floats, least_scale: float) -> Floats:
    """`student_nats` of each value, given all others; 0 with fewer than three."""
    n = values.size
    if n < 3:
        return np.zeros_like(values)
    others = n - 1
    mean = (values.sum() - values) / others
    squares = ((values**2).sum() - values**2) / others - mean**2
    variance = np.maximum(0.0, squares) * others / (others - 1)
    scale = np.sqrt(variance * (1 + 1 / others) + least_scale**2)
    nats: Floats = -np.log(student_tail((values - mean) / scale, min(others - 1, MOST_FREEDOM)))
    return nats


def tail_of(values: Floats, normal: Floats) -> Floats:
    """The p-value of each value: the share of normal ones that are as large, itself among them.

    Beyond the largest one it falls exponentially, by the mean excess of the largest tenth over the others;
    EXCESS counts as PRIOR values of that tenth."""
    ordered = np.sort(normal)
    n = ordered.size
    above = n - np.searchsorted(ordered, values, side="left")
    shares: Floats = np.divide(1.0 + above, 1.0 + n)
    if not n:
        return shares
    tail = max(1, n // 10)
    over = float((ordered[-tail:] - ordered[max(0, n - tail - 1)]).sum()) + PRIOR * EXCESS
    beyond: Floats = np.exp(-np.maximum(0.0, values - ordered[-1]) * ((tail + PRIOR) / over))
    found: Floats = shares * beyond
    return found


def conformal_nats(values: Floats, normal: Floats, scale: float) -> Floats:
    """-log of the share of normal values at or above each, and what it exceeds the largest by.

    `scale`: the excess that is worth log 2 with many normal units, and half as much with HALF_KNOWN."""
    ordered = np.sort(normal)
    above = ordered.size - np.searchsorted(ordered, values, side="left")
    return _with_excess(values, above, ordered.size, ordered[-1] if ordered.size else 0.0, scale)


def conformal_nats_left_out(values: Floats, scale: float) -> Floats:
    """`conformal_nats` of each value, given all others."""
    if values.size < 2:
        return np.zeros_like(values)
    ordered = np.sort(values)
    above = values.size - np.searchsorted(ordered, values, side="left") - 1
    largest = np.where(values >= ordered[-1], ordered[-2], ordered[-1])
    return _with_excess(values, above, values.size - 1, largest, scale)


def _with_excess(
    values: Floats, above: npt.NDArray[np.int64], n: int, largest: "Floats | float", scale: float
) -> Floats:
    share = -np.log((1.0 + above) / (1.0 + n))
    excess = np.log1p(np.maximum(0.0, values - largest) / scale)
    nats: Floats = share + excess * n / (n + HALF_KNOWN)
    return nats
