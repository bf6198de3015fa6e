"""How well scores order anomalous before normal lines. Ties never help: they count half, or come as a
block."""

from collections.abc import Sequence

import numpy as np

from pipeline.training.comparison import auc


def auroc(scores: Sequence[float], anomalous: Sequence[bool]) -> float:
    """0.5 for a constant; both classes must be there."""
    return auc(*_parted(scores, anomalous))


def average_precision(scores: Sequence[float], anomalous: Sequence[bool]) -> float:
    """Area under the steps of precision over recall; equal scores are one step. A constant gives the share of
    anomalies."""
    values = np.asarray(scores, dtype=np.float64)
    order = np.argsort(-values, kind="stable")
    hits = np.cumsum(np.asarray(anomalous, dtype=np.float64)[order])
    last = np.append(np.diff(values[order]) != 0, True)  # of each block of equal scores
    recall = hits[last] / hits[-1]
    precision = hits[last] / (np.flatnonzero(last) + 1)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def _parted(scores: Sequence[float], anomalous: Sequence[bool]) -> tuple[list[float], list[float]]:
    pairs = list(zip(scores, anomalous, strict=True))
    return [s for s, bad in pairs if bad], [s for s, bad in pairs if not bad]
