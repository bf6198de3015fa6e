"""Lengths of sessions: how far outside those of training one is, and how far a normal one may be."""

import numpy as np
import numpy.typing as npt

from pipeline.watching.sessions.leave_one_out import Decay
from pipeline.watching.sessions.prefixes import States

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def outside(lengths: Ints, known: tuple[int, int]) -> Floats:
    """Powers of two by which each length is less than the shortest or more than the longest known."""
    logs = np.log2(np.maximum(lengths, 1))
    short, long = np.log2(known[0]) - logs, logs - np.log2(known[1])
    return np.asarray(np.maximum(0.0, np.maximum(short, long)))


def left_out(seen: States) -> Decay:
    """Leaving out all sessions that were once of a length changes something for the shortest and the longest alone."""
    lengths = np.array([len(state) for state in seen.states], dtype=np.int64)[seen.state]
    gaps, sessions = [], []
    for edge in sorted({int(lengths.min()), int(lengths.max())}):
        gone = np.zeros(len(seen.sessions), dtype=bool)
        gone[seen.session[lengths == edge]] = True
        rest = lengths[~gone[seen.session]]
        if len(rest):
            gaps.append(float(outside(np.array([edge]), (int(rest.min()), int(rest.max())))[0]))
            sessions.append(int(seen.times[gone].sum()))
    # A length that several sessions have is no surprise when one of them is left out.
    alone = sum(n == 1 for n in sessions)
    return Decay.of(np.array(gaps), alone, total=int(seen.times.sum()), prior=1.0)  # taken once as a doubling
