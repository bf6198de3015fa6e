"""Lengths of sessions: the distance to the range of lengths in training, and the tail of this distance."""

import numpy as np
import numpy.typing as npt

from pipeline.watching.sessions.leave_one_out import ExponentialTail
from pipeline.watching.sessions.prefixes import Prefixes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def length_excess(lengths: Ints, usual: tuple[int, int]) -> Floats:
    """Powers of two by which each length is below the shortest or above the longest known."""
    logs = np.log2(np.maximum(lengths, 1))
    short, long = np.log2(usual[0]) - logs, logs - np.log2(usual[1])
    return np.asarray(np.maximum(0.0, np.maximum(short, long)))


def fit_length_tail(prefixes: Prefixes) -> ExponentialTail:
    """Leave out all sessions with a prefix of one length; only the shortest and the longest matter."""
    lengths = prefixes.lengths()[prefixes.prefix]
    excesses, sessions = [], []
    for edge in sorted({int(lengths.min()), int(lengths.max())}):
        left_out = np.zeros(len(prefixes.sessions), dtype=bool)
        left_out[prefixes.session[lengths == edge]] = True
        others = lengths[~left_out[prefixes.session]]
        if len(others):
            usual = int(others.min()), int(others.max())
            excesses.append(float(length_excess(np.array([edge]), usual)[0]))
            sessions.append(int(prefixes.times[left_out].sum()))
    # A length of several sessions is known even if one of them is left out.
    single = sum(n == 1 for n in sessions)
    total = int(prefixes.times.sum())
    return ExponentialTail.of(np.array(excesses), single, total=total, prior=1.0)  # a doubling, once
