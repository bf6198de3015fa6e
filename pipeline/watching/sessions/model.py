"""The session model of a workload: finds sessions that go wrong although each of their lines is known.

    session = template ids in order --> count vector, length, transitions --a p-value each--> one verdict

Each of two rules gives a score, 0 for a session like those of training, and a leave-one-out p-value:

* counts: distance per event to the nearest count vector of training (`count_vectors.py`);
* order: weight of unseen transitions (`transitions.py`), less those that differing counts explain.

A p-value is the share of normal sessions that would score at least as high. It comes from sessions of
training, scored with all equal ones left out: the chance of a positive score (Good-Turing: a vector or a
transition never seen) times a tail. The tail is empirical for counts, over left-out vectors that share half
of their events with another: vectors and not sessions, because 1,000 sessions of one vector are one case. It
is exponential for order, because only a handful of left-out sessions score at all. Counts may use up three
quarters of the level, order the rest. If training is too small for that, counts decide nothing.

Example. 1,000 sessions of training: 400 times 1 2 3 9, 300 times 1 2 3 2 3 9, 200 times 1 2 3 4 5 9 and 100
times 1 2 3 2 3 4 5 9. The session 1 2 3 4 4 4 5 9 is judged:

    counts  the nearest vector has 4 once. Event 4 is constant in training, so it weighs 1.79:
            Score 1.79 x |log2(1 + 3) - log2(1 + 1)| / 6.9 events = 0.261.
            Left-out scores are 0.156 (two vectors) and 0.223 (two): none of four is above 0.261.
            Chance of an unknown vector (0 + 1) / (1,000 + 1), so p = 1/1,001 x 1/5 = 0.0002.
    order   "4 after 4" is unseen, but two more of 4 explain up to four unseen transitions: score 0, p = 1.
    verdict p = 0.0002 / 0.75 = 0.00027 <= 0.0005: anomalous, because of `session-counts:4 3/1`.

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
# The share of the level that each rule may use up: counts, which find most, and order.
_SHARES: Final = (0.75, 0.25)
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
    `session-order:17 after 9`. `cause` is short and equal for equal faults.
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
    per_day: Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
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
    order_tail: ExponentialTail
    places: list[tuple[Annotated[int, _NUMBER], str, int]] = []
    follow_ups: Annotated[tuple[FollowUp, ...], msgspec.Meta(max_length=MAX_FOLLOW_UPS)] = ()
    shape: TraceShape = TraceShape()


_MODELS: Final = Codec(dict[str, _ModelWire], version=2, what="the file of session models", newer=BadBundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The scores (sessions, 2) of some sessions, their count vectors, and the nearest vector of each."""

    scores: Floats
    vectors: CountVectors
    nearest: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    """One workload's normal sessions, bounded by the limits above. Immutable."""

    sessions: int
    vocabulary: VectorVocabulary
    count_tail: EmpiricalTail
    transitions: Transitions | None  # None: too many to tell unseen ones
    order_tail: ExponentialTail
    ends: frozenset[int]  # template ids that end a session
    level: float = LEVEL
    per_day: float = 1.0  # sessions of the training, each at each of its gaps
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
        vectors = CountVectors.of(prefixes.lengths(), concatenate(prefixes.prefixes))
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

    def limits(self) -> tuple[float, float]:
        """The highest normal score of each rule: counts, order."""
        counts, order = (share * self.level for share in _SHARES)
        return self.count_tail.limit(counts), self.order_tail.limit(order)

    @property
    def decides(self) -> bool:
        """Whether some session could be anomalous by its counts: training is large enough for the level, and
        not of sessions that are all different."""
        return self.limits()[0] < np.inf

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
        """(sessions, 2): the score of each rule, in the order of `limits`."""
        return self._score([normalise(session) for session in sessions]).scores

    def _score(self, sessions: list[tuple[int, ...]]) -> _Scored:
        lengths = np.array([len(session) for session in sessions], dtype=np.int64)
        vectors = CountVectors.of(lengths, concatenate(sessions))
        first, vector_of = factorize(vectors.keys())
        distances, nearest = self.vocabulary.nearest(vectors.take(first))
        nearest = nearest[vector_of]
        scores = np.zeros((len(sessions), len(_SHARES)))
        scores[:, 0] = distances[vector_of]
        if self.transitions is not None:
            unseen = self.transitions.unseen(sessions)
            scores[:, 1] = unseen.unexplained(explained_by_counts(self.vocabulary, vectors, nearest, unseen))
        scores[lengths == 0] = 0.0
        return _Scored(scores=scores, vectors=vectors, nearest=nearest)

    def _judge(self, sessions: list[tuple[int, ...]]) -> list[SessionVerdict]:
        scored = self._score(sessions)
        limits = np.array(self.limits())
        tails: tuple[EmpiricalTail | ExponentialTail, ...] = self.count_tail, self.order_tail
        p = [tail.p_values(scored.scores[:, i]) / _SHARES[i] for i, tail in enumerate(tails)]
        p_value = np.minimum(1.0, np.min(p, axis=0))
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
        if broken[1] and self.transitions is not None:
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
            per_day=self.per_day,
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
        if not 0 < wire.level < 1:
            raise ValueError("an impossible level")
        return cls(
            sessions=wire.sessions,
            vocabulary=vocabulary,
            count_tail=EmpiricalTail.from_wire(wire.count_tail),
            transitions=None if wire.any_order else order,
            order_tail=wire.order_tail,
            ends=frozenset(wire.ends),
            level=wire.level,
            per_day=wire.per_day,
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
    # Sessions are judged by the kept vectors only, so the others enter the tail with their distance to those.
    kept = place >= 0
    distance, closest = np.where(kept, left_out[place], 0.0), np.where(kept, others[place], -1)
    if not kept.all():
        distance[~kept], closest[~kept] = vocabulary.nearest(
            vectors.take([first[i] for i in np.flatnonzero(~kept)])
        )
    # A known vector needs no judgement: a session scores by those of its vectors that no other one has.
    alone = (sessions[had] == 1) | ~kept[had]
    scores = np.zeros(len(prefixes.sessions))
    np.maximum.at(scores, by[alone], distance[had[alone]])
    apart = scores == ISOLATED
    apart[by[~kept[had]]] = True
    new = int(prefixes.times[(scores > 0) & ~apart].sum())
    tail = EmpiricalTail.of(distance[kept], new, scores[apart], prefixes.times[apart], total=total)
    single = ((np.bincount(had)[vector_of] == 1) & (len(frequent) > 1)) | ~kept[vector_of]
    return vocabulary, tail, np.where(single, closest[vector_of], -1)


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
