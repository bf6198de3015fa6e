"""Bins of values: DDSketch's logarithmic mapping (Masson et al., VLDB 2019), and exact bins for statuses and
codes.

A bin holds the values between two neighbouring powers of GROWTH, so its middle is within 5 % of each of them.
Counts by bin add up whatever their order, which t-digests do not.
"""

import math
from typing import Final

from pipeline.watching.values.typed import CODE, STATUS, ValueKind

GROWTH: Final = 1.1
ZERO: Final = 0  # the bin of zero
_LOG: Final = math.log(GROWTH)
_OFFSET: Final = 300  # of the bin of 1: 1e-12 and less share the first bin
LAST: Final = 1_000
EXACT: Final = frozenset({ValueKind.STATUS, ValueKind.CODE})
_EXACT: Final = (STATUS, CODE)


def bin_of(kind: str, value: float) -> int:
    """0 to LAST. Larger bins hold larger values. `kind`: of ValueKind."""
    if kind in _EXACT:
        return min(LAST, int(value))
    if value <= 0.0:
        return ZERO
    return min(LAST, max(1, _OFFSET + math.floor(math.log(value) / _LOG)))


def value_of(kind: ValueKind, number: int) -> float:
    """The value in the middle of a bin, geometrically."""
    if kind in EXACT or number == ZERO:
        return float(number)
    return math.exp((number - _OFFSET + 0.5) * _LOG)
