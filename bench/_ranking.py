"""How well scores order anomalous before normal lines. Ties never help: they count half, or come as a
block."""

from collections.abc import Sequence

import numpy as np


def auroc(scores: Sequence[float], anomalous: Sequence[bool]) -> float:
    """The chance that an anomalous line is above a normal one, ties counting half: 0.5 for a constant. Both
    classes must be there."""
    values, bad = np.asarray(scores, dtype=np.float64), np.asarray(anomalous, dtype=np.bool_)
    up, down = values[bad][:, None], values[~bad][None, :]
    return float(np.mean((up > down) + 0.5 * (up == down)))


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
