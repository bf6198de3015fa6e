"""Count vectors: the distance between a session's event counts and those of the nearest training session.

The distance of two count vectors is the sum over events of weight x |log2(1 + n) - log2(1 + m)|. Divided by
the harmonic mean of the numbers of events of the two, it is the session's score. It differs from the plain
distance of ait-aecid's ECVC (Landauer et al. 2023) in three things:

* Counts are on a logarithmic scale: 200 for 190 reads is nothing, 2 for 1 is much.
* Weights are learnt. An event whose count differs between neighbouring vectors of training weighs little, a
  constant one much. The weight is log(1 + 1/m), m the mean difference to the nearest other vector (a
  geometric distribution). An event that training has not seen weighs most.
* Calibration leaves out a whole vector with all its sessions, never one session. A session with a known
  vector scores 0, so only the distance of an unknown normal vector shows how far normal sessions vary.

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
LeaveOutMask = npt.NDArray[np.bool_]  # (vectors, vectors): leaving out row i leaves out column j too

_MAX_ROUNDS: Final = 10  # Weights and neighbours converge after three to five.
_CELLS: Final = 4_000_000  # Of a table of distances: 32 MB at a time.
_ROWS: Final = 4_096  # Sessions of one matrix product.
_ZERO: Final = 1e-9  # Distances that differ by less are equal; weights are above 0.6.


@dataclass(frozen=True, slots=True, kw_only=True)
class CountVectors:
    """Sparse count vectors: row `row[i]` has `n[i]` of event `event[i]`; sorted by row and event."""

    rows: int
    row: Ints
    event: Ints
    n: Ints

    @classmethod
    def of(cls, lengths: Ints, events: Ints) -> Self:
        """From the lengths of all sessions and their concatenated events."""
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
        """One per vector, equal for equal vectors."""
        cells = np.stack([self.event, self.n], axis=1)
        ends = np.searchsorted(self.row, np.arange(self.rows + 1))
        return [cells[a:b].tobytes() for a, b in pairwise(ends)]

    def take(self, rows: Sequence[int]) -> "CountVectors":
        """These rows, ascending, numbered from 0."""
        wanted = np.full(self.rows, -1, dtype=np.int64)
        wanted[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows))
        new = wanted[self.row]
        keep = new >= 0
        return CountVectors(rows=len(rows), row=new[keep], event=self.event[keep], n=self.n[keep])

    def check(self, limit: int) -> None:
        """Raises ValueError unless there is at least one vector, each with counts of 1 to `limit`."""
        if not len(self.row) == len(self.event) == len(self.n) > 0 or not self.rows:
            raise ValueError("count vectors of different lengths")
        if (
            not np.array_equal(np.unique(self.row), np.arange(self.rows))
            or not (np.diff(self.row) >= 0).all()
        ):
            raise ValueError("rows out of order")
        inside = self.row[1:] == self.row[:-1]
        if not (np.diff(self.event)[inside] > 0).all() or not (self.event >= 0).all():
            raise ValueError("events out of order")
        if not ((self.n > 0) & (self.n <= limit)).all():
            raise ValueError("impossible counts")

    def totals(self) -> Floats:
        """Events of each row."""
        return np.bincount(self.row, weights=self.n, minlength=self.rows).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorVocabulary:
    """The distinct count vectors of training, and the weight of each event (`events` ascending)."""

    vectors: CountVectors
    events: Ints
    weights: Floats

    @classmethod
    def fit(cls, vectors: CountVectors, mask: LeaveOutMask) -> Self:
        """From distinct vectors, in order of preference. `mask` as of `leave_out_mask`."""
        events, at = np.unique(vectors.event, return_inverse=True)
        weights = np.ones(len(events))
        for _ in range(_MAX_ROUNDS if vectors.rows > 1 else 0):
            rows, others = _all_nearest(vectors, weights[at], mask)
            differences = _differences(vectors, rows, others, events)
            before, weights = weights, np.log1p((vectors.rows + 1) / (1.0 + differences))
            if np.allclose(before, weights, rtol=0, atol=_ZERO):
                break
        if vectors.rows < 2:
            weights = np.full(len(events), _unseen_weight(vectors.rows))
        return cls(vectors=vectors, events=events, weights=weights)

    def leave_one_out(self, mask: LeaveOutMask) -> tuple[Floats, Ints]:
        """(score of each vector had training missed its sessions, its nearest other one), `mask` as in `fit`.

        Infinite if no other vector shares half of its events: an isolated vector gives no scale for
        deviations.
        """
        vectors = self.vectors
        if vectors.rows < 2:
            return np.full(vectors.rows, np.inf), np.zeros(vectors.rows, dtype=np.int64)
        weights = self.weigh(vectors.event)
        distances, nearest = _nearest(vectors, vectors, weights, weights, mask=mask)
        sizes = np.bincount(vectors.row, weights=weights * np.log2(1.0 + vectors.n), minlength=vectors.rows)
        related = distances < (sizes + sizes[nearest]) / 2.0
        return np.where(related, distances / _mean_totals(vectors, vectors, nearest), np.inf), nearest

    def check(self) -> None:
        """Raises ValueError unless these can be of `fit`."""
        if not np.array_equal(self.events, np.unique(self.vectors.event)):
            raise ValueError("events that no vector has")
        fits = len(self.weights) == len(self.events) and bool(np.isfinite(self.weights).all())
        if not fits or not (self.weights > 0).all():
            raise ValueError("impossible weights")

    def weigh(self, events: Ints) -> Floats:
        """The weight of each of these events."""
        learnt = self.learnt_events(events)
        at = np.where(learnt, np.searchsorted(self.events, events), 0)
        return np.where(learnt, self.weights[at], _unseen_weight(self.vectors.rows))

    def learnt_events(self, events: Ints) -> npt.NDArray[np.bool_]:
        """Whether training has seen each of these events."""
        at = np.minimum(np.searchsorted(self.events, events), len(self.events) - 1)
        return np.asarray(self.events[at] == events)

    def nearest(self, vectors: CountVectors) -> tuple[Floats, Ints]:
        """(score, nearest vector of training) of each vector; the first of equally near ones."""
        weights = self.weigh(self.vectors.event)
        distances, nearest = _nearest(vectors, self.vectors, self.weigh(vectors.event), weights)
        return distances / _mean_totals(vectors, self.vectors, nearest), nearest

    def differences(
        self, vectors: CountVectors, row: int, reference: int
    ) -> list[tuple[int, int, int, float]]:
        """(event, count in a row, count in a known vector, weighted difference), heaviest first."""
        counts, expected = _row(vectors, row), _row(self.vectors, reference)
        events = sorted(set(counts) | set(expected))
        weights = self.weigh(np.array(events, dtype=np.int64)).tolist()
        found = []
        for event, weight in zip(events, weights, strict=True):
            n, m = counts.get(event, 0), expected.get(event, 0)
            if n != m:
                found.append((event, n, m, weight * float(abs(_log(n) - _log(m)))))
        return sorted(found, key=lambda difference: (-difference[3], difference[0]))

    def event_differences(self, vectors: CountVectors, nearest: Ints) -> Ints:
        """Unweighted number of events by which each vector differs from its nearest vector."""
        found = np.zeros(vectors.rows, dtype=np.int64)
        for row, reference in enumerate(nearest.tolist()):
            counts, expected = _row(vectors, row), _row(self.vectors, reference)
            found[row] = sum(abs(counts.get(e, 0) - expected.get(e, 0)) for e in set(counts) | set(expected))
        return found


def leave_out_mask(vector: Ints, session: Ints, vectors: int) -> LeaveOutMask:
    """mask[i, j]: every session with vector j has vector i too, so leaving out those of i leaves out j.

    The pairs say that `session[k]` has `vector[k]`; a negative vector is none of these.
    """
    vector, session = vector[vector >= 0], session[vector >= 0]
    names, row = np.unique(session, return_inverse=True)
    row = row.reshape(-1)
    both = np.zeros((vectors, vectors), dtype=np.float32)
    for begin in range(0, len(names), _ROWS):
        some = (row >= begin) & (row < begin + _ROWS)
        table = np.zeros((_ROWS, vectors), dtype=np.float32)
        table[row[some] - begin, vector[some]] = 1.0
        both += table.T @ table
    return np.asarray(both >= np.diagonal(both)[None, :])


def _unseen_weight(vectors: int) -> float:
    return float(np.log1p(vectors + 1))


def _log(n: int) -> float:
    return float(np.log2(1 + n))


def _row(vectors: CountVectors, row: int) -> dict[int, int]:
    begin, end = np.searchsorted(vectors.row, [row, row + 1])
    return dict(zip(vectors.event[begin:end].tolist(), vectors.n[begin:end].tolist(), strict=True))


def _mean_totals(vectors: CountVectors, references: CountVectors, nearest: Ints) -> Floats:
    """Harmonic mean of the numbers of events of each vector and its nearest one: twice the smaller one at
    most, so that an event that repeats for ever does not hide itself among its own repetitions."""
    a, b = vectors.totals(), references.totals()[nearest]
    return np.asarray(np.maximum(1.0, 2.0 * a * b / np.maximum(1.0, a + b)))


def _tables(
    vectors: CountVectors, references: CountVectors, a: Floats, b: Floats
) -> Iterator[tuple[int, Floats]]:
    """Distances of some rows of `vectors` at a time: (first row, (rows, references)).

    `a` and `b` are weighted values of the cells. Only common events are compared, one event at a time: |a -
    b| is a + b - 2 min(a, b), and min is 0 if one of the two lacks the event.
    """
    sums_a = np.bincount(vectors.row, weights=a, minlength=vectors.rows)
    sums_b = np.bincount(references.row, weights=b, minlength=references.rows)
    by_event = np.argsort(references.event, kind="stable")
    events = references.event[by_event]
    step = max(1, _CELLS // max(1, references.rows))
    for begin in range(0, vectors.rows, step):
        end = min(begin + step, vectors.rows)
        table = sums_a[begin:end, None] + sums_b[None, :]
        low, high = np.searchsorted(vectors.row, [begin, end])
        order = low + np.argsort(vectors.event[low:high], kind="stable")
        present, starts = np.unique(vectors.event[order], return_index=True)
        stops = np.append(starts[1:], len(order))[: len(present)]
        for event, start, stop in zip(present, starts, stops, strict=True):
            first, last = np.searchsorted(events, [event, event + 1])
            if first == last:
                continue
            rows, columns = order[start:stop], by_event[first:last]
            common = 2.0 * np.minimum(a[rows][:, None], b[columns][None, :])
            table[np.ix_(vectors.row[rows] - begin, references.row[columns])] -= common
        table[table < _ZERO] = 0.0  # rounding errors
        yield begin, np.asarray(table, dtype=np.float64)


def _nearest(
    vectors: CountVectors,
    references: CountVectors,
    weights: Floats,
    reference_weights: Floats,
    *,
    mask: LeaveOutMask | None = None,
) -> tuple[Floats, Ints]:
    """(distance, index) of the nearest known vector outside the mask; the first of equally near ones."""
    a = np.log2(1.0 + vectors.n) * weights
    b = np.log2(1.0 + references.n) * reference_weights
    distances, nearest = np.empty(vectors.rows), np.empty(vectors.rows, dtype=np.int64)
    for begin, table in _tables(vectors, references, a, b):
        rows = np.arange(len(table))
        if mask is not None:
            table[mask[begin : begin + len(table)]] = np.inf
        columns = np.asarray(table <= table.min(axis=1, keepdims=True) + _ZERO).argmax(axis=1)
        nearest[begin : begin + len(table)] = columns
        distances[begin : begin + len(table)] = table[rows, columns]
    return distances, nearest


def _all_nearest(vectors: CountVectors, weights: Floats, mask: LeaveOutMask) -> tuple[Ints, Ints]:
    """(row, other row) of all equally near others of each row outside the mask."""
    values = np.log2(1.0 + vectors.n) * weights
    rows, others = [], []
    for begin, table in _tables(vectors, vectors, values, values):
        table[mask[begin : begin + len(table)]] = np.inf
        row, other = np.nonzero((table <= table.min(axis=1, keepdims=True) + _ZERO) & np.isfinite(table))
        rows.append(row + begin)
        others.append(other)
    return np.concatenate(rows), np.concatenate(others)


def _differences(vectors: CountVectors, rows: Ints, others: Ints, events: Ints) -> Floats:
    """Sum over rows of |difference| of logarithmic counts per event; equally near others share the weight."""
    places = np.searchsorted(events, vectors.event)
    dense = np.zeros((vectors.rows, len(events)))
    dense[vectors.row, places] = np.log2(1.0 + vectors.n)
    share = 1.0 / np.maximum(1, np.bincount(rows, minlength=vectors.rows))
    found = np.zeros(len(events))
    step = max(1, _CELLS // len(events))
    for begin in range(0, len(rows), step):
        some, other = rows[begin : begin + step], others[begin : begin + step]
        found += share[some] @ np.abs(dense[some] - dense[other])
    return found
