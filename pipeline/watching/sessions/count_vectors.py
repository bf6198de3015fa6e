"""Nearest count vector: how far the numbers of a session's events are from those of any session in training.

A *kind* is a count vector: how often each event comes in a session, whatever the order. The distance of two kinds is
the sum over events of weight x |log2(1 + n) - log2(1 + m)|; divided by the mean number of events of the two it is the
session's score. Three things make it more than the plain distance of ait-aecid's ECVC (Landauer et al. 2023):

* counts on a logarithmic scale: 200 for 190 reads is nothing, 2 for 1 is much;
* weights from training: an event whose number differs between neighbouring kinds of normal sessions is forgiven, one
  that never does is not (log(1 + 1/m), m the mean difference to the nearest other kind: as a geometric distribution
  would have it). An event that training has not seen weighs most;
* the leave-one-out that calibrates it leaves out a whole kind with all its sessions, never one session: a session
  whose kind is known is no question, so only the distance of an unknown normal kind says where normal ends.

Pure and deterministic; needs numpy only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Within = npt.NDArray[np.bool_]  # (kinds, kinds)

_ROUNDS: Final = 10  # weights and neighbours stand still after three to five
_CELLS: Final = 4_000_000  # of a table of distances: 32 MB at a time
_ROWS: Final = 4_096  # sessions that are looked at together
_ZERO: Final = 1e-9  # distances that differ by less are equal; weights are above 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Count vectors without their zeros: rows `row[i]` has `n[i]` of event `event[i]`; sorted by row and event."""

    rows: int
    row: Ints
    event: Ints
    n: Ints

    @classmethod
    def of(cls, lengths: Ints, events: Ints) -> Self:
        """`events` of all sessions, one behind the other."""
        rows = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort((events, rows))
        rows, events = rows[order], events[order]
        first = np.ones(len(rows), dtype=bool)
        first[1:] = (rows[1:] != rows[:-1]) | (events[1:] != events[:-1])
        at = np.flatnonzero(first)
        return cls(
            rows=len(lengths),
            row=rows[at],
            event=events[at],
            n=np.diff(np.append(at, len(rows))).astype(np.int64),
        )

    def keys(self) -> list[bytes]:
        """Equal for equal count vectors."""
        cells = np.stack([self.event, self.n], axis=1)
        ends = np.searchsorted(self.row, np.arange(self.rows + 1))
        return [cells[a:b].tobytes() for a, b in pairwise(ends)]

    def take(self, rows: Sequence[int]) -> "Counts":
        """These rows, ascending, counted anew from 0."""
        wanted = np.full(self.rows, -1, dtype=np.int64)
        wanted[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows))
        new = wanted[self.row]
        keep = new >= 0
        return Counts(rows=len(rows), row=new[keep], event=self.event[keep], n=self.n[keep])

    def check(self, most: int) -> None:
        """Raises ValueError when these are not at least one count vector, each of 1 to `most` events."""
        if not len(self.row) == len(self.event) == len(self.n) > 0 or not self.rows:
            raise ValueError("count vectors of different lengths")
        if (
            not np.array_equal(np.unique(self.row), np.arange(self.rows))
            or not (np.diff(self.row) >= 0).all()
        ):
            raise ValueError("rows that are not counted")
        inside = self.row[1:] == self.row[:-1]
        if not (np.diff(self.event)[inside] > 0).all() or not (self.event >= 0).all():
            raise ValueError("events out of order")
        if not ((self.n > 0) & (self.n <= most)).all():
            raise ValueError("counts that cannot be")

    def totals(self) -> Floats:
        """Events of each row."""
        return np.bincount(self.row, weights=self.n, minlength=self.rows).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The kinds of training, and what a difference in each event weighs (`events` ascending)."""

    vectors: Counts
    events: Ints
    weights: Floats

    @classmethod
    def fit(cls, vectors: Counts, within: Within | None = None) -> Self:
        """From distinct count vectors, in the order in which equally near ones are preferred.

        `within[i, j]`: no session of training was of kind j that was not of kind i too, so that without the sessions
        of i there is no j either. Without it each session was of one kind.
        """
        events, at = np.unique(vectors.event, return_inverse=True)
        weights = np.ones(len(events))
        for _ in range(_ROUNDS if vectors.rows > 1 else 0):
            rows, others = _tied(vectors, weights[at], _itself(vectors, within))
            differences = _differences(vectors, rows, others, events)
            before, weights = weights, np.log1p((vectors.rows + 1) / (1.0 + differences))
            if np.allclose(before, weights, rtol=0, atol=_ZERO):
                break
        if vectors.rows < 2:
            weights = np.full(len(events), _unseen(vectors.rows))
        return cls(vectors=vectors, events=events, weights=weights)

    def others(self, within: Within | None = None) -> tuple[Floats, Ints]:
        """The score of each kind had training missed the sessions that were of it, and its nearest other; endless where
        there is no other, or none that it has half in common with: what does not vary around anything says nothing of how
        far what varies may be. `within` as in `fit`."""
        if self.vectors.rows < 2:
            return np.full(self.vectors.rows, np.inf), np.zeros(self.vectors.rows, dtype=np.int64)
        own = self.weigh(self.vectors.event)
        distances, nearest = _nearest(
            self.vectors, self.vectors, own, own, without=_itself(self.vectors, within)
        )
        sizes = np.bincount(
            self.vectors.row, weights=own * np.log2(1.0 + self.vectors.n), minlength=self.vectors.rows
        )
        near = distances < (sizes + sizes[nearest]) / 2.0
        scores = distances / _sizes(self.vectors, self.vectors, nearest)
        return np.where(near, scores, np.inf), nearest

    def check(self) -> None:
        """Raises ValueError when these are not what `fit` makes."""
        if not np.array_equal(self.events, np.unique(self.vectors.event)):
            raise ValueError("events that no kind has")
        if (
            len(self.weights) != len(self.events)
            or not (self.weights > 0).all()
            or not np.isfinite(self.weights).all()
        ):
            raise ValueError("weights that cannot be")

    @property
    def unseen(self) -> float:
        """What an event weighs that training has not seen."""
        return _unseen(self.vectors.rows)

    def weigh(self, events: Ints) -> Floats:
        """The weight of each of these events."""
        at = np.searchsorted(self.events, events)
        known = self.known(events)
        return np.where(known, self.weights[np.where(known, at, 0)], self.unseen)

    def known(self, events: Ints) -> npt.NDArray[np.bool_]:
        """Whether training has seen each of these events."""
        at = np.minimum(np.searchsorted(self.events, events), len(self.events) - 1)
        return np.asarray(self.events[at] == events)

    def nearest(self, vectors: Counts) -> tuple[Floats, Ints]:
        """The score of each vector, and its nearest kind; of equally near ones the first."""
        own = self.weigh(self.vectors.event)
        distances, nearest = _nearest(vectors, self.vectors, self.weigh(vectors.event), own)
        return distances / _sizes(vectors, self.vectors, nearest), nearest

    def apart(self, vectors: Counts, row: int, kind: int) -> list[tuple[int, int, int, float]]:
        """How a vector differs from a kind: (event, its count, the kind's, weighted difference), heaviest first."""
        mine, theirs = _row(vectors, row), _row(self.vectors, kind)
        events = sorted(set(mine) | set(theirs))
        weights = self.weigh(np.array(events, dtype=np.int64)).tolist()
        found = [
            (event, mine.get(event, 0), theirs.get(event, 0), weight * float(abs(_log(mine.get(event, 0)) - _log(theirs.get(event, 0)))))
            for event, weight in zip(events, weights, strict=True)
        ]  # fmt: skip
        return sorted((f for f in found if f[3] > 0), key=lambda f: (-f[3], f[0]))

    def events_apart(self, vectors: Counts, nearest: Ints) -> Ints:
        """By how many events, unweighted, each vector differs from its nearest kind."""
        found = np.zeros(vectors.rows, dtype=np.int64)
        for row, kind in enumerate(nearest.tolist()):
            mine, theirs = _row(vectors, row), _row(self.vectors, kind)
            found[row] = sum(abs(mine.get(e, 0) - theirs.get(e, 0)) for e in set(mine) | set(theirs))
        return found


def within(kind: Ints, session: Ints, kinds: int) -> Within:
    """What `Kinds.fit` wants: whether every session that was of the second kind was of the first too. `kind[i]` is one that
    `session[i]` was of, below 0 for none of these."""
    kind, session = kind[kind >= 0], session[kind >= 0]
    names, row = np.unique(session, return_inverse=True)
    row = row.reshape(-1)
    both = np.zeros((kinds, kinds), dtype=np.float32)
    for begin in range(0, len(names), _ROWS):
        some = (row >= begin) & (row < begin + _ROWS)
        table = np.zeros((_ROWS, kinds), dtype=np.float32)
        table[row[some] - begin, kind[some]] = 1.0
        both += table.T @ table
    return np.asarray(both >= np.diagonal(both)[None, :])


def _unseen(kinds: int) -> float:
    return float(np.log1p(kinds + 1))


def _log(n: int) -> float:
    return float(np.log2(1 + n))


def _row(vectors: Counts, row: int) -> dict[int, int]:
    begin, end = np.searchsorted(vectors.row, [row, row + 1])
    return dict(zip(vectors.event[begin:end].tolist(), vectors.n[begin:end].tolist(), strict=True))


def _sizes(mine: Counts, theirs: Counts, nearest: Ints) -> Floats:
    """Mean number of events of each vector and its nearest: what a distance is divided by."""
    return np.maximum(1.0, (mine.totals() + theirs.totals()[nearest]) / 2.0)


def _tables(mine: Counts, theirs: Counts, a: Floats, b: Floats) -> Iterator[tuple[int, Floats]]:
    """Distances, some rows of `mine` at a time: the first of them and (rows, theirs).

    `a` and `b` are weighted values of the cells. |a - b| is a + b - 2 min(a, b), and min is 0 wherever one of the two
    lacks the event: so only common events are looked at, one event at a time.
    """
    own = np.bincount(mine.row, weights=a, minlength=mine.rows)
    other = np.bincount(theirs.row, weights=b, minlength=theirs.rows)
    by_event = np.argsort(theirs.event, kind="stable")
    events = theirs.event[by_event]
    step = max(1, _CELLS // max(1, theirs.rows))
    for begin in range(0, mine.rows, step):
        end = min(begin + step, mine.rows)
        table = own[begin:end, None] + other[None, :]
        low, high = np.searchsorted(mine.row, [begin, end])
        order = low + np.argsort(mine.event[low:high], kind="stable")
        present, starts = np.unique(mine.event[order], return_index=True)
        stops = np.append(starts[1:], len(order))[: len(present)]
        for event, start, stop in zip(present, starts, stops, strict=True):
            first, last = np.searchsorted(events, [event, event + 1])
            if first == last:
                continue
            rows, kinds = order[start:stop], by_event[first:last]
            common = 2.0 * np.minimum(a[rows][:, None], b[kinds][None, :])
            table[np.ix_(mine.row[rows] - begin, theirs.row[kinds])] -= common
        # What rounding leaves of a distance of zero.
        table[table < _ZERO] = 0.0
        yield begin, np.asarray(table, dtype=np.float64)


def _itself(vectors: Counts, within: Within | None) -> Within:
    return np.eye(vectors.rows, dtype=np.bool_) if within is None else within


def _nearest(
    mine: Counts,
    theirs: Counts,
    mine_weights: Floats,
    theirs_weights: Floats,
    *,
    without: Within | None = None,
) -> tuple[Floats, Ints]:
    """Distance to and index of the nearest of `theirs`, the first of equally near ones; those of `without` are no choice."""
    a = np.log2(1.0 + mine.n) * mine_weights
    b = np.log2(1.0 + theirs.n) * theirs_weights
    found, at = np.empty(mine.rows), np.empty(mine.rows, dtype=np.int64)
    for begin, table in _tables(mine, theirs, a, b):
        rows = np.arange(len(table))
        if without is not None:
            table[without[begin : begin + len(table)]] = np.inf
        near = np.asarray(table <= table.min(axis=1, keepdims=True) + _ZERO).argmax(axis=1)
        at[begin : begin + len(table)] = near
        found[begin : begin + len(table)] = table[rows, near]
    return found, at


def _tied(vectors: Counts, weights: Floats, without: Within) -> tuple[Ints, Ints]:
    """(row, other row) of every nearest other, all of those that are equally near; none of `without`."""
    values = np.log2(1.0 + vectors.n) * weights
    rows, others = [], []
    for begin, table in _tables(vectors, vectors, values, values):
        table[without[begin : begin + len(table)]] = np.inf
        near, other = np.nonzero((table <= table.min(axis=1, keepdims=True) + _ZERO) & np.isfinite(table))
        rows.append(near + begin)
        others.append(other)
    return np.concatenate(rows), np.concatenate(others)


def _differences(vectors: Counts, rows: Ints, others: Ints, events: Ints) -> Floats:
    """|difference| on the logarithmic scale in each event, summed over rows; equally near others share a row."""
    places = np.searchsorted(events, vectors.event)
    dense = np.zeros((vectors.rows, len(events)))
    dense[vectors.row, places] = np.log2(1.0 + vectors.n)
    share = 1.0 / np.maximum(1, np.bincount(rows, minlength=vectors.rows))
    found = np.zeros(len(events))
    step = max(1, _CELLS // len(events))
    for begin in range(0, len(rows), step):
        mine, theirs = rows[begin : begin + step], others[begin : begin + step]
        found += share[mine] @ np.abs(dense[mine] - dense[theirs])
    return found
