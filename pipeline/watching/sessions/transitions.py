"""Transitions of sessions: pairs of consecutive events, the start and the end of a session included.

An unseen transition weighs -log of the greater of two chances (Witten and Bell 1991: distinct successors to
all successors). Something unseen follows its first event, or something unseen precedes its second. So it
weighs next to nothing beside events of any order, rare events, and events that training has not seen: the
rule of counts reports the latter.

Events are template ids, 0 and up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from pipeline.watching.sessions.count_vectors import CountVectors, VectorVocabulary
from pipeline.watching.sessions.prefixes import Prefixes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

START: Final = -1
END: Final = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenTransitions:
    """Per session: the number of distinct unseen transitions, and their summed weight in nats."""

    number: Ints
    nats: Floats

    def unexplained(self, explained: Ints) -> Floats:
        """The weight without so many transitions of average weight."""
        share = np.maximum(0, self.number - explained) / np.maximum(1, self.number)
        return np.asarray(self.nats * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """The transitions of training: (first, second), sorted, and the number of distinct sessions with each."""

    pairs: Ints  # (n, 2)
    times: Ints

    @classmethod
    def none(cls) -> Self:
        """Of no session."""
        return cls(pairs=np.empty((0, 2), dtype=np.int64), times=np.empty(0, dtype=np.int64))

    def check(self, limit: int) -> None:
        """Raises ValueError unless these are at most `limit` transitions with positive numbers."""
        if self.pairs.shape != (len(self.times), 2) or len(self.times) > limit or not (self.times > 0).all():
            raise ValueError("impossible transitions")

    @classmethod
    def fit(cls, prefixes: Prefixes) -> tuple[Self, UnseenTransitions]:
        """From distinct sessions; also the unseen transitions of each prefix if its session were left out."""
        rows, a, b = _distinct(prefixes.prefixes)
        pairs, at = np.unique(np.stack([a, b], axis=1), axis=0, return_inverse=True)
        at = at.reshape(-1)
        # A session counts each of its transitions once, and the transition to END of each prefix.
        last = prefixes.prefix[np.append(np.diff(prefixes.session) > 0, True)]
        size = np.bincount(rows, minlength=len(prefixes.prefixes))[last]
        cells = np.repeat(np.searchsorted(rows, last) - np.cumsum(size) + size, size) + np.arange(size.sum())
        ended = np.flatnonzero(b == END)[prefixes.prefix]
        had = np.concatenate(
            [
                np.repeat(np.arange(len(last)), size) * len(pairs) + at[cells],
                prefixes.session * len(pairs) + at[ended],
            ]
        )
        times = np.bincount(np.unique(had) % len(pairs), minlength=len(pairs)).astype(np.int64)
        fitted = cls(pairs=pairs.reshape(-1, 2), times=times)
        single = times[at] == 1
        return fitted, fitted._sum(rows[single], a[single], b[single], len(prefixes.prefixes), left_out=1)

    def unseen(self, sessions: Sequence[Sequence[int]]) -> UnseenTransitions:
        """Of each of these sessions."""
        rows, a, b = _distinct(sessions)
        new = ~self._learnt(a, b)
        return self._sum(rows[new], a[new], b[new], len(sessions), left_out=0)

    def heaviest(self, session: Sequence[int]) -> tuple[int, int]:
        """The first of the heaviest unseen transitions of a session that has one."""
        a = np.array([START, *session], dtype=np.int64)
        b = np.array([*session, END], dtype=np.int64)
        best = int(np.where(self._learnt(a, b), -1.0, self._nats(a, b, left_out=0)).argmax())
        return int(a[best]), int(b[best])

    def _learnt(self, a: Ints, b: Ints) -> npt.NDArray[np.bool_]:
        ids = np.unique(np.concatenate([self.pairs.reshape(-1), a, b]))
        codes = np.searchsorted(ids, self.pairs[:, 0]) * len(ids) + np.searchsorted(ids, self.pairs[:, 1])
        return np.isin(np.searchsorted(ids, a) * len(ids) + np.searchsorted(ids, b), codes)

    def _sum(self, rows: Ints, a: Ints, b: Ints, sessions: int, *, left_out: int) -> UnseenTransitions:
        nats = self._nats(a, b, left_out=left_out)
        return UnseenTransitions(
            number=np.bincount(rows, minlength=sessions).astype(np.int64),
            nats=np.bincount(rows, weights=nats, minlength=sessions).astype(np.float64),
        )

    def _nats(self, a: Ints, b: Ints, *, left_out: int) -> Floats:
        after, before = self._chance(a, 0, left_out), self._chance(b, 1, left_out)
        return np.asarray(-np.log(np.maximum(after, before)))

    def _chance(self, events: Ints, side: int, left_out: int) -> Floats:
        """Witten-Bell chance of an unseen successor (side 0) or predecessor (side 1) of each event, without
        `left_out` transitions that were seen once.
        """
        learnt, at = np.unique(self.pairs[:, side], return_inverse=True)
        if not len(learnt):
            return np.ones(len(events))
        distinct = np.bincount(at.reshape(-1), minlength=len(learnt))
        total = np.bincount(at.reshape(-1), weights=self.times, minlength=len(learnt))
        place = np.minimum(np.searchsorted(learnt, events), len(learnt) - 1)
        n = np.where(learnt[place] == events, total[place] - left_out, 0.0)
        t = np.where(learnt[place] == events, distinct[place] - left_out, 0.0)
        return np.asarray((t + 1.0) / (n + t + 1.0))


def explained_by_counts(
    vocabulary: VectorVocabulary, vectors: CountVectors, nearest: Ints, unseen: UnseenTransitions
) -> Ints:
    """Per session: the unseen transitions that its difference in counts to its nearest vector may cause.

    `nearest` is -1 for a session that has its nearest vector's counts.
    """
    found = np.zeros(vectors.rows, dtype=np.int64)
    some = np.flatnonzero((unseen.number > 0) & (nearest >= 0))
    found[some] = 2 * vocabulary.event_differences(vectors.take(some.tolist()), nearest[some])
    return found


def _distinct(sessions: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """(row, first, second) of the distinct transitions of each session, sorted by row."""
    filled = [(i, session) for i, session in enumerate(sessions) if session]
    lengths = np.array([len(session) + 1 for _, session in filled], dtype=np.int64)
    rows = np.repeat(np.array([i for i, _ in filled], dtype=np.int64), lengths)
    a = np.fromiter(chain.from_iterable((START, *s) for _, s in filled), dtype=np.int64, count=len(rows))
    b = np.fromiter(chain.from_iterable((*s, END) for _, s in filled), dtype=np.int64, count=len(rows))
    order = np.lexsort((b, a, rows))
    rows, a, b = rows[order], a[order], b[order]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (rows[1:] != rows[:-1]) | (a[1:] != a[:-1]) | (b[1:] != b[:-1])
    return rows[first], a[first], b[first]
