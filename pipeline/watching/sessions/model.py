"""The session model of a workload: finds sessions that go wrong although each of their lines is known.

    session = template ids in order --> count vector, length, transitions --a p-value each--> one verdict

Each of three rules gives a score, 0 for a session like those of training, and a leave-one-out p-value:

* counts: distance per event to the nearest count vector of training (`count_vectors.py`);
* length: powers of two outside the range of lengths in training (`lengths.py`);
* order: weight of unseen transitions (`transitions.py`), less those that differing counts explain.

A p-value is the share of normal sessions that would score at least as high. It comes from sessions of
training, scored with all equal ones left out: the chance of a positive score (Good-Turing: a vector, length
or transition never seen) times a tail. The tail is empirical for counts, over left-out vectors that share
half of their events with another. It is exponential for length and order, because only a handful of left-out
sessions score at all. The session's p-value is the smallest of the three times 3 (Bonferroni); the session is
anomalous at or below `level`. If training is too small for this level, counts decide at 1/(sessions + 1).

Example. 1,000 sessions of training: 400 times 1 2 3 9, 300 times 1 2 3 2 3 9, 200 times 1 2 3 4 5 9 and 100
times 1 2 3 2 3 4 5 9. The session 1 2 3 4 4 4 5 9 is judged:

    counts  the nearest vector has 4 once. Event 4 is constant in training, so it weighs 1.79:
            Score 1.79 x |log2(1 + 3) - log2(1 + 1)| / 7 events = 0.256.
            Left-out scores are 0.153 (300 sessions) and 0.214 (700): no one of 1,000 is above 0.256.
            Chance of an unknown vector (0 + 1) / (1,000 + 1), so p = 1/1,001 x 1/1,001 = 0.000001.
    length  8 events are inside 4 to 8: score 0, p = 1.
    order   "4 after 4" is unseen, but two more of 4 explain up to four unseen transitions: score 0, p = 1.
    verdict p = 3 x 0.000001 <= 0.0005: anomalous, because of `session-counts:4 3/1`.

A session may go on after a gap. It is then judged with everything before the gap, so a stateful model is
trained on the *prefixes* of sessions (`prefixes.py`). Leaving out a vector leaves out all sessions with a
prefix of this vector, unless those are most sessions. Chances count sessions, however many prefixes each has.

Pure: learning and judging mutate nothing, need numpy only, and do not depend on the order of sessions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle, BadPayload
from pipeline.records.verdict import Reason, reason
from pipeline.records.wire import Codec
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.count_vectors import CountVectors, VectorVocabulary, leave_out_mask
from pipeline.watching.sessions.follow_ups import MAX_FOLLOW_UPS, FollowUp, FollowUps
from pipeline.watching.sessions.leave_one_out import ISOLATED, EmpiricalTail, ExponentialTail, TailWire
from pipeline.watching.sessions.lengths import fit_length_tail, length_excess
from pipeline.watching.sessions.prefixes import (
    MAX_EVENTS,
    Prefixes,
    SessionWithGaps,
    concatenate,
    end_events,
    factorize,
    most_frequent,
    normalise,
    reset_at_gaps,
    separate,
    unique_pairs,
    with_gaps,
)
from pipeline.watching.sessions.transitions import END, START, Transitions, explained_by_counts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL: Final = 0.0005  # Of normal sessions: one in 2,000.
MAX_VECTORS: Final = 1_000  # A table of 1,000 x 1,000 distances takes a fifth of a second.
# With more, no transition can be told from normal ones, so every order is normal.
MAX_TRANSITIONS: Final = 200_000
_RULES: Final = 3
# Unlabelled sessions: the most frequent vectors are normal up to this share of sessions, if there are a few
# of them, and one session in ten may be odd. At 0.9 the result hung on the last one of the common vectors.
_COMMON_SHARE: Final = 0.85
_MIN_COMMON: Final = 5
_ODD_SHARE: Final = 0.1
_NUMBER: Final = msgspec.Meta(ge=0, lt=1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionVerdict:
    """The answer for one session. `score` 0..1, above 0.5 when anomalous; `p_value` in (0, 1].

    `reasons`, heaviest first: `session-event:17` (template 17 is in no session of training),
    `session-counts:17 2/3` (twice, where the nearest count vector has it three times),
    `session-length:43/13-42`, `session-order:17 after 9`. `cause` is short and equal for equal faults.
    """

    anomalous: bool
    score: float
    p_value: float
    reasons: tuple[str, ...]
    cause: str


NORMAL: Final = SessionVerdict(anomalous=False, score=0.0, p_value=1.0, reasons=(), cause="")


class _ModelWire(msgspec.Struct, frozen=True, kw_only=True):
    """Wire form of a SessionModel; arrays are little-endian."""

    sessions: Annotated[int, _NUMBER]
    level: float
    lengths: tuple[int, int]
    any_order: bool
    stateful: bool
    ends: list[Annotated[int, _NUMBER]]
    rows: Annotated[int, msgspec.Meta(gt=0, le=MAX_VECTORS)]
    row: bytes
    event: bytes
    n: bytes
    events: bytes
    weights: bytes
    pairs: bytes
    times: bytes
    count_tail: TailWire
    length_tail: ExponentialTail
    order_tail: ExponentialTail
    places: list[tuple[Annotated[int, _NUMBER], str, int]] = []
    follow_ups: Annotated[tuple[FollowUp, ...], msgspec.Meta(max_length=MAX_FOLLOW_UPS)] = ()
    shape: TraceShape = TraceShape()


_MODELS: Final = Codec(dict[str, _ModelWire], version=1, what="the file of session models", newer=BadBundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The scores (sessions, 3) of some sessions, their count vectors, and the nearest vector of each."""

    scores: Floats
    vectors: CountVectors
    nearest: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    """One workload's normal sessions, bounded by the limits above. Immutable."""

    sessions: int
    vocabulary: VectorVocabulary
    count_tail: EmpiricalTail
    lengths: tuple[int, int]  # shortest and longest
    length_tail: ExponentialTail
    transitions: Transitions | None  # None: too many to tell unseen ones
    order_tail: ExponentialTail
    ends: frozenset[int]  # template ids that end a session
    level: float = LEVEL
    stateful: bool = (
        False  # trained on prefixes: a session after a gap is judged with everything before the gap
    )
    # Of a joint model: the workload and the template of each event.
    places: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    follow_ups: FollowUps = field(default_factory=FollowUps)
    shape: TraceShape = field(default_factory=TraceShape)  # of a joint model

    @classmethod
    def fit(cls, sessions: Iterable[Sequence[int]], *, trusted: bool = True, level: float = LEVEL) -> Self:
        """From normal sessions without gaps: template ids in order. Raises ValueError without any.

        `trusted=False`: no user vouches that these are normal, so sessions unlike the common ones are not
        learnt.
        """
        return cls.fit_segments(([session] for session in sessions), trusted=trusted, level=level)

    @classmethod
    def fit_segments(
        cls, sessions: Iterable[Sequence[Sequence[int]]], *, trusted: bool = True, level: float = LEVEL
    ) -> Self:
        """As `fit`, from sessions given as their segments between gaps. If most sessions reset at gaps, each
        segment is a session of its own.
        """
        counted = Counter(map(with_gaps, sessions))
        frequent = most_frequent(separate(counted) if reset_at_gaps(counted) else counted)
        if not frequent:
            raise ValueError("there is no session to learn from")
        return cls._fit(Prefixes.of(frequent if trusted else _without_odd(frequent)), level)

    @classmethod
    def _fit(cls, prefixes: Prefixes, level: float) -> Self:
        lengths = prefixes.lengths()
        vectors = CountVectors.of(lengths, concatenate(prefixes.prefixes))
        vocabulary, count_tail, nearest = _fit_counts(prefixes, vectors)
        total = int(prefixes.times.sum())
        transitions, unseen = Transitions.fit(prefixes)
        ordered = len(transitions.times) <= MAX_TRANSITIONS
        order = np.zeros(len(prefixes.sessions))
        if ordered:
            explained = explained_by_counts(vocabulary, vectors, nearest, unseen)
            order = prefixes.session_max(unseen.unexplained(explained))
        return cls(
            sessions=total,
            vocabulary=vocabulary,
            count_tail=count_tail,
            lengths=(int(lengths.min()), int(lengths.max())),
            length_tail=fit_length_tail(prefixes),
            transitions=transitions if ordered else None,
            order_tail=ExponentialTail.of(
                order,
                int(prefixes.times[order > 0].sum()),
                total=total,
                prior=float(np.log(len(prefixes.sessions) + 1)),
            ),
            ends=frozenset(end_events(zip(prefixes.sessions, prefixes.times.tolist(), strict=True))),
            level=level,
            stateful=len(prefixes.prefix) > len(prefixes.sessions),
        )

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        """A verdict for each; equal sessions are scored once. An empty session is normal."""
        distinct: dict[tuple[int, ...], int] = {}
        at = [distinct.setdefault(tuple(session), len(distinct)) for session in sessions]
        verdicts = self._judge([normalise(session) for session in distinct]) if distinct else []
        return [verdicts[i] for i in at]

    def limits(self) -> tuple[float, float, float]:
        """The highest normal score of each rule: counts, length, order."""
        level = self.level / _RULES
        counts = self.count_tail.limit(max(level, 1.0 / (self.sessions + 1.0)))
        return counts, self.length_tail.limit(level), self.order_tail.limit(level)

    def beside_nearest(self, session: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of events of the learnt session that is nearest by counts, and (event, its count here,
        its count there) where they differ, heaviest first. (0, []) where nothing was learnt."""
        learnt, events = self.vocabulary.vectors, normalise(session)
        if not learnt.rows or not events:
            return 0, []
        vectors = CountVectors.of(np.array([len(events)]), np.array(events, dtype=np.int64))
        _, nearest = self.vocabulary.nearest(vectors)
        differences = self.vocabulary.differences(vectors, 0, int(nearest[0]))
        return int(learnt.totals()[nearest[0]]), [(event, n, m) for event, n, m, _ in differences]

    def scores(self, sessions: Sequence[Sequence[int]]) -> Floats:
        """(sessions, 3): the score of each rule, in the order of `limits`."""
        return self._score([normalise(session) for session in sessions]).scores

    def _score(self, sessions: list[tuple[int, ...]]) -> _Scored:
        lengths = np.array([len(session) for session in sessions], dtype=np.int64)
        vectors = CountVectors.of(lengths, concatenate(sessions))
        first, vector_of = factorize(vectors.keys())
        distances, nearest = self.vocabulary.nearest(vectors.take(first))
        nearest = nearest[vector_of]
        scores = np.zeros((len(sessions), _RULES))
        scores[:, 0] = distances[vector_of]
        scores[:, 1] = length_excess(lengths, self.lengths)
        if self.transitions is not None:
            unseen = self.transitions.unseen(sessions)
            scores[:, 2] = unseen.unexplained(explained_by_counts(self.vocabulary, vectors, nearest, unseen))
        scores[lengths == 0] = 0.0
        return _Scored(scores=scores, vectors=vectors, nearest=nearest)

    def _judge(self, sessions: list[tuple[int, ...]]) -> list[SessionVerdict]:
        scored = self._score(sessions)
        limits = np.array(self.limits())
        tails: tuple[EmpiricalTail | ExponentialTail, ...] = (
            self.count_tail,
            self.length_tail,
            self.order_tail,
        )
        p = np.stack([tail.p_values(scored.scores[:, i]) for i, tail in enumerate(tails)], axis=1)
        p_value = np.minimum(1.0, _RULES * p.min(axis=1))
        # 1 at the limit of a rule. If the limit is 0, every positive score is anomalous.
        above = np.where(scored.scores > 0, 1.0 + scored.scores, 0.0)
        ratio = np.where(limits > 0, scored.scores / np.where(limits > 0, limits, 1.0), above).max(axis=1)
        broken = scored.scores > limits
        verdicts = []
        for i, session in enumerate(sessions):
            if ratio[i] == 0.0:
                verdicts.append(NORMAL)
                continue
            reasons, cause = (
                self._explain(session, scored, i, broken[i].tolist()) if broken[i].any() else ((), "")
            )
            verdicts.append(
                SessionVerdict(
                    anomalous=bool(reasons),
                    score=float(ratio[i] / (1.0 + ratio[i])),
                    p_value=float(p_value[i]),
                    reasons=reasons,
                    cause=cause,
                )
            )
        return verdicts

    def _explain(
        self, session: tuple[int, ...], scored: _Scored, row: int, broken: list[bool]
    ) -> tuple[tuple[str, ...], str]:
        """Reasons and cause of a session that breaks some rules."""
        found: list[tuple[Reason, str, str]] = []  # reason, its data, its cause
        if broken[0]:
            found += self._explain_counts(scored, row)
        if broken[1]:
            shortest, longest = self.lengths
            data = f"{len(session)}/{shortest}-{longest}"
            found.append((Reason.SESSION_LENGTH, data, "long" if len(session) > longest else "short"))
        if broken[2] and self.transitions is not None:
            a, b = self.transitions.heaviest(session)
            data = f"{b} first" if a == START else f"{a} last" if b == END else f"{b} after {a}"
            found.append((Reason.SESSION_ORDER, data, data.replace(" ", "-")))
        reasons = tuple(reason(name, data) for name, data, _ in found)
        return reasons, reason(found[0][0], found[0][2])

    def _explain_counts(self, scored: _Scored, row: int) -> list[tuple[Reason, str, str]]:
        """The events behind a distance, unknown ones or known ones with other counts; heavier group first."""
        differences = self.vocabulary.differences(scored.vectors, row, int(scored.nearest[row]))
        learnt = self.vocabulary.learnt_events(np.array([event for event, *_ in differences])).tolist()
        found = []
        for name, is_known in ((Reason.SESSION_EVENT, False), (Reason.SESSION_COUNTS, True)):
            group = [d for d, k in zip(differences, learnt, strict=True) if k is is_known]
            if group:
                event, n, usual, _ = group[0]
                data = f"{event} {n}/{usual}" if is_known else str(event)
                found.append((sum(weight for *_, weight in group), name, data, str(event)))
        found.sort(key=lambda f: -f[0])
        # The lighter group counts as a reason if it weighs at least half as much.
        return [(name, data, cause) for weight, name, data, cause in found if 2 * weight >= found[0][0]]

    def _to_wire(self) -> _ModelWire:
        vectors, order = self.vocabulary.vectors, self.transitions or Transitions.none()
        return _ModelWire(
            sessions=self.sessions,
            level=self.level,
            lengths=self.lengths,
            any_order=self.transitions is None,
            stateful=self.stateful,
            ends=sorted(self.ends),
            rows=vectors.rows,
            row=vectors.row.astype("<i8").tobytes(),
            event=vectors.event.astype("<i8").tobytes(),
            n=vectors.n.astype("<i8").tobytes(),
            events=self.vocabulary.events.astype("<i8").tobytes(),
            weights=self.vocabulary.weights.astype("<f8").tobytes(),
            pairs=order.pairs.astype("<i8").tobytes(),
            times=order.times.astype("<i8").tobytes(),
            count_tail=self.count_tail.to_wire(),
            length_tail=self.length_tail,
            order_tail=self.order_tail,
            places=[(event, *place) for event, place in sorted(self.places.items())],
            follow_ups=self.follow_ups.every,
            shape=self.shape,
        )

    @classmethod
    def _from_wire(cls, wire: _ModelWire) -> Self:
        """Raises ValueError."""
        vectors = CountVectors(rows=wire.rows, row=_ints(wire.row), event=_ints(wire.event), n=_ints(wire.n))
        vectors.check(MAX_EVENTS)
        weights = np.frombuffer(wire.weights, dtype="<f8")
        vocabulary = VectorVocabulary(vectors=vectors, events=_ints(wire.events), weights=weights)
        vocabulary.check()
        order = Transitions(pairs=_ints(wire.pairs).reshape(-1, 2), times=_ints(wire.times))
        order.check(MAX_TRANSITIONS)
        if not 0 < wire.lengths[0] <= wire.lengths[1] <= MAX_EVENTS or not 0 < wire.level < 1:
            raise ValueError("impossible lengths or an impossible level")
        return cls(
            sessions=wire.sessions,
            vocabulary=vocabulary,
            count_tail=EmpiricalTail.from_wire(wire.count_tail),
            lengths=wire.lengths,
            length_tail=wire.length_tail,
            transitions=None if wire.any_order else order,
            order_tail=wire.order_tail,
            ends=frozenset(wire.ends),
            level=wire.level,
            stateful=wire.stateful,
            places={event: (workload, template) for event, workload, template in wire.places},
            follow_ups=FollowUps(wire.follow_ups),
            shape=wire.shape,
        )


def dump(models: Mapping[str, SessionModel]) -> bytes:
    """The file of a bundle with the session models, by `keys.model_name`."""
    return _MODELS.pack({name: model._to_wire() for name, model in sorted(models.items())})


def load(blob: bytes) -> dict[str, SessionModel]:
    """The inverse of `dump`. Raises BadBundle."""
    try:
        return {name: SessionModel._from_wire(wire) for name, wire in _MODELS.unpack(blob).items()}
    except (BadPayload, ValueError) as exc:
        raise BadBundle(f"the session models of a bundle are not readable ({exc}); publish it again") from exc


def _ints(blob: bytes) -> Ints:
    return np.frombuffer(blob, dtype="<i8")


def _fit_counts(prefixes: Prefixes, vectors: CountVectors) -> tuple[VectorVocabulary, EmpiricalTail, Ints]:
    """The vocabulary of the prefixes' vectors, the tail of left-out distances, and the nearest vector of each
    prefix when its session is left out (-1: its own).
    """
    first, vector_of = factorize(vectors.keys())
    had, by = unique_pairs(vector_of[prefixes.prefix], prefixes.session)
    sessions = np.bincount(had, weights=prefixes.times[by], minlength=len(first)).astype(np.int64)
    frequent = np.sort(np.argsort(-sessions, kind="stable")[:MAX_VECTORS])
    place = np.full(len(first), -1, dtype=np.int64)
    place[frequent] = np.arange(len(frequent))
    total = int(prefixes.times.sum())
    mask = leave_out_mask(place[had], by, len(frequent))
    # Without most sessions no normal ones remain, so a vector of most sessions is left out alone.
    majority = 2 * sessions[frequent] > total
    mask[majority] = np.eye(len(frequent), dtype=np.bool_)[majority]
    vocabulary = VectorVocabulary.fit(vectors.take([first[i] for i in frequent]), mask)
    left_out, others = vocabulary.leave_one_out(mask)
    distances = np.where(place >= 0, left_out[place], 0.0)[vector_of[prefixes.prefix]]
    # An isolated vector gives no scale for deviations. It must not count as one that does not deviate.
    weights = np.where(distances < ISOLATED, prefixes.times[prefixes.session], 0)
    singles = np.unique(by[sessions[had] == 1])
    chance = (float(prefixes.times[singles].sum()) + 1.0) / (total + 1.0)
    tail = EmpiricalTail.of(distances, weights, total=int(weights.sum()), chance=chance)
    single = (np.bincount(had)[vector_of] == 1) & (place[vector_of] >= 0) & (len(frequent) > 1)
    return vocabulary, tail, np.where(single, others[place[vector_of]], -1)


def _without_odd(counted: list[tuple[SessionWithGaps, int]]) -> list[tuple[SessionWithGaps, int]]:
    """Unlabelled sessions without the odd ones: an odd session has an event that no common one has, or is
    farther from the common vectors than these are from each other. Prefixes do not count here.

    Returns all sessions if more than a few are odd, or if very few or far too many vectors are common.
    """
    sessions = [session for (session, _), _ in counted]
    vectors = CountVectors.of(np.array([len(s) for s in sessions], dtype=np.int64), concatenate(sessions))
    times = np.array([n for _, n in counted], dtype=np.int64)
    first, vector_of = factorize(vectors.keys())
    with_vector = np.bincount(vector_of, weights=times, minlength=len(first))
    order = np.argsort(-with_vector, kind="stable")
    before = np.cumsum(with_vector[order]) - with_vector[order]
    common = np.zeros(len(first), dtype=bool)
    common[order[before < _COMMON_SHARE * times.sum()]] = True
    if common.all() or not _MIN_COMMON <= common.sum() <= MAX_VECTORS:
        return counted
    core = Counter[SessionWithGaps]()
    for session, n in zip(sessions, np.where(common[vector_of], times, 0).tolist(), strict=True):
        core[session, (len(session),)] += n
    model = SessionModel._fit(Prefixes.of(most_frequent(+core)), LEVEL)
    odd = model.scores(sessions)[:, 0] > max(model.count_tail.values, default=np.inf)
    odd[vectors.row[~model.vocabulary.learnt_events(vectors.event)]] = True
    if times[odd].sum() > _ODD_SHARE * times.sum():
        return counted
    return [item for item, is_odd in zip(counted, odd, strict=True) if not is_odd]
