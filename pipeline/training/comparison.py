"""Statistical tests that compare two models on the same lines.

All are exact or closed-form, without random draws. Free of torch.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

# One-sided 1 %: a judge runs about five tests a training, so that chance refuses an equal model in fewer than
# one training of twenty, even without the margins.
_ALPHA: Final = 0.01
_Z: Final = 2.326  # standard normal point of _ALPHA


def wilson_lower(hits: int, n: int) -> float:
    """Lower one-sided 99 % bound of a binomial share (score interval; Wilson, JASA 1927). 0 for n = 0.

    Five of five give 0.48: so few lines never prove a majority.
    """
    if n == 0:
        return 0.0
    share, z2 = hits / n, _Z * _Z
    middle = share + z2 / (2 * n)
    spread = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z2 / n))


def more_often(one: Sequence[bool], other: Sequence[bool]) -> bool:
    """Whether `one` is true on more of the same lines than chance explains.

    McNemar's exact one-sided test (Psychometrika 1947): only the lines on which the two differ count. For
    equal models their number on one side is binomial with p = 1/2. The test needs at least seven of them.
    """
    only_one = sum(a and not b for a, b in zip(one, other, strict=True))
    differ = only_one + sum(b and not a for a, b in zip(one, other, strict=True))
    tail = sum(math.comb(differ, k) for k in range(only_one, differ + 1))
    return differ > 0 and tail / 2**differ < _ALPHA


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """The chance that a positive scores above a negative, ties counting half; neither may be empty."""
    return float(_placements(positives, negatives)[0].mean())


def auc_upper(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Upper one-sided 99 % bound of the AUC (variance by DeLong et al., Biometrics 1988)."""
    above, below = _placements(positives, negatives)
    return min(1.0, float(above.mean()) + _Z * math.sqrt(_variance(above, below)))


def auc_falls(
    positives: Sequence[float],
    negatives: Sequence[float],
    other_positives: Sequence[float],
    other_negatives: Sequence[float],
) -> bool:
    """Whether the first AUC lies below the other, of the same lines, by more than chance explains.

    The paired test of DeLong, DeLong and Clarke-Pearson (Biometrics 1988), one-sided 1 %.
    """
    above, below = _placements(positives, negatives)
    other_above, other_below = _placements(other_positives, other_negatives)
    fall = float(other_above.mean() - above.mean())
    return fall > 0 and fall > _Z * math.sqrt(_variance(other_above - above, other_below - below))


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation (1904) with mean ranks for ties, -1..1.

    None for fewer than three values or a constant side.
    """
    if len(one) < 3 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    ranks = [pl.Series(v, dtype=pl.Float64).rank("average").to_numpy() for v in (one, other)]
    return float(np.clip(np.corrcoef(ranks[0], ranks[1])[0, 1], -1.0, 1.0))


def _placements(positives: Sequence[float], negatives: Sequence[float]) -> tuple["np.ndarray", "np.ndarray"]:
    """Per positive the share of negatives below it, per negative the share of positives above it."""
    up, down = np.asarray(positives, dtype=float)[:, None], np.asarray(negatives, dtype=float)[None, :]
    wins = (up > down) + 0.5 * (up == down)
    return wins.mean(axis=1), wins.mean(axis=0)


def _variance(above: "np.ndarray", below: "np.ndarray") -> float:
    """Variance of a mean placement, from its two independent samples."""
    return float(sum(v.var(ddof=1) / len(v) for v in (above, below) if len(v) > 1))
