"""Transitions of sessions: which event came directly after which, and which were first and last.

A transition that training never saw says the more, the surer we are of what follows its first event and of what
precedes its second: of the two chances that something new does (Witten and Bell 1991: different ones seen to all seen)
the greater counts, as the logarithm of its inverse. Where events come in any order, or are rare, it is next to nothing;
beside an event that training has not seen it is nothing, for that is the event's own surprise.

Ids are those of templates, 0 and up; what begins and ends a session is below them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from pipeline.watching.sessions.count_vectors import Counts, Kinds
from pipeline.watching.sessions.prefixes import States

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

START: Final = -1
END: Final = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """Of each session: how many different transitions are new, and what they say together, in nats."""

    number: Ints
    nats: Floats

    def unexplained(self, explained: Ints) -> Floats:
        """What is left when so many of them need no surprise, taken as average ones."""
        share = np.maximum(0, self.number - explained) / np.maximum(1, self.number)
        return np.asarray(self.nats * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Those of training: (first, second), sorted, and in how many different sessions each was."""

    pairs: Ints  # (n, 2)
    times: Ints

    @classmethod
    def none(cls) -> Self:
        """Of no session."""
        return cls(pairs=np.empty((0, 2), dtype=np.int64), times=np.empty(0, dtype=np.int64))

    def check(self, most: int) -> None:
        """Raises ValueError when these are not at most `most` transitions that were seen."""
        if self.pairs.shape != (len(self.times), 2) or len(self.times) > most or not (self.times > 0).all():
            raise ValueError("transitions that cannot be")

    @classmethod
    def fit(cls, seen: States) -> tuple[Self, New]:
        """From different sessions; also what each of their states would have that is new, were its session left out."""
        rows, a, b = _different(seen.states)
        pairs, at = np.unique(np.stack([a, b], axis=1), axis=0, return_inverse=True)
        at = at.reshape(-1)
        # Each transition once of each session: those of the session itself, and with what it ended at each silence.
        last = seen.state[np.append(np.diff(seen.session) > 0, True)]
        size = np.bincount(rows, minlength=len(seen.states))[last]
        cells = np.repeat(np.searchsorted(rows, last) - np.cumsum(size) + size, size) + np.arange(size.sum())
        ended = np.flatnonzero(b == END)[seen.state]
        had = np.concatenate(
            [
                np.repeat(np.arange(len(last)), size) * len(pairs) + at[cells],
                seen.session * len(pairs) + at[ended],
            ]
        )
        had = np.unique(had)
        times = np.bincount(had % len(pairs), minlength=len(pairs)).astype(np.int64)
        made = cls(pairs=pairs.reshape(-1, 2), times=times)
        own = times[at] == 1
        return made, made._told(rows[own], a[own], b[own], len(seen.states), less=1)

    def new(self, sessions: Sequence[Sequence[int]]) -> New:
        """What is new in each of these."""
        rows, a, b = _different(sessions)
        new = ~self._known(a, b)
        return self._told(rows[new], a[new], b[new], len(sessions), less=0)

    def strangest(self, session: Sequence[int]) -> tuple[int, int]:
        """The new transition of a session that says most, the first of equals; there has to be one."""
        a = np.array([START, *session], dtype=np.int64)
        b = np.array([*session, END], dtype=np.int64)
        best = int(np.where(self._known(a, b), -1.0, self._surprise(a, b, less=0)).argmax())
        return int(a[best]), int(b[best])

    def _known(self, a: Ints, b: Ints) -> npt.NDArray[np.bool_]:
        ids = np.unique(np.concatenate([self.pairs.reshape(-1), a, b]))
        codes = np.searchsorted(ids, self.pairs[:, 0]) * len(ids) + np.searchsorted(ids, self.pairs[:, 1])
        mine = np.searchsorted(ids, a) * len(ids) + np.searchsorted(ids, b)
        return np.isin(mine, codes)

    def _told(self, rows: Ints, a: Ints, b: Ints, sessions: int, *, less: int) -> New:
        nats = self._surprise(a, b, less=less)
        return New(
            number=np.bincount(rows, minlength=sessions).astype(np.int64),
            nats=np.bincount(rows, weights=nats, minlength=sessions).astype(np.float64),
        )

    def _surprise(self, a: Ints, b: Ints, *, less: int) -> Floats:
        after, before = self._chance(a, 0, less), self._chance(b, 1, less)
        return np.asarray(-np.log(np.maximum(after, before)))

    def _chance(self, events: Ints, side: int, less: int) -> Floats:
        """That what follows (0) or precedes (1) these events is new; `less` seen once are not counted."""
        known, at = np.unique(self.pairs[:, side], return_inverse=True)
        different = np.bincount(at.reshape(-1), minlength=len(known))
        seen = np.bincount(at.reshape(-1), weights=self.times, minlength=len(known))
        place = np.minimum(np.searchsorted(known, events), max(0, len(known) - 1))
        there = known[place] == events if len(known) else np.zeros(len(events), dtype=bool)
        n = np.where(there, seen[place] - less, 0.0) if len(known) else np.zeros(len(events))
        t = np.where(there, different[place] - less, 0.0) if len(known) else np.zeros(len(events))
        return np.asarray((t + 1.0) / (n + t + 1.0))


def explained(kinds: Kinds, vectors: Counts, nearest: Ints, new: New) -> Ints:
    """How many new transitions of each session may come from events that it has more or less often than its nearest
    kind (-1: it has them as often)."""
    found = np.zeros(vectors.rows, dtype=np.int64)
    some = np.flatnonzero((new.number > 0) & (nearest >= 0))
    found[some] = 2 * kinds.events_apart(vectors.take(some.tolist()), nearest[some])
    return found


def _different(sessions: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """(row, first, second) of every different transition of each session, sorted by row."""
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
