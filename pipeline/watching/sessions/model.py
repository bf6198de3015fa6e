"""Sessions that go wrong although each of their lines is known: what normal sessions of one workload look like.

    session = template ids in order --> count vector, length, transitions --rule by rule--> one verdict

Three rules, each a number that is 0 for a session like those of training, each with its own tail from leave-one-out:

* counts: distance per event to the nearest count vector of training (`count_vectors.py`), events never seen included;
* length: how far outside the lengths of training, in powers of two (`session_lengths.py`);
* order: transitions that training never saw (`transitions.py`), less those that the differing counts explain.

A rule's p-value is the share of normal sessions that would score as high, from sessions of training when all equal
ones are left out: the chance of anything to score (by Good and Turing: a count vector, a length or a transition never
seen) times a tail. For counts that is the share of left-out count vectors as far away, of those that have half in
common with another; for length and order it is exponential, because only a handful of left-out sessions score at all.
The p-value of the session is that of its least likely rule, times three for having asked three times; it is anomalous
at or below `level`. Where training is too small to tell that apart, counts decide at 1/(sessions + 1).

A session that falls silent is judged as it is then, with all that came of it before, and again when more has come. So
what is learnt are the states in which normal sessions were silent (`distinct_sessions.States`). What is left out at a time
are all sessions that were ever in a state of one kind, unless that is most of them; chances are those of sessions, however
many states each had.

Pure: learning and judging mutate nothing, need numpy only, and give the same whatever the order of sessions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import BadBundle
from pipeline.records.verdict import Reason, reason
from pipeline.watching.sessions import lengths as session_lengths
from pipeline.watching.sessions.count_vectors import Counts, Kinds, within
from pipeline.watching.sessions.leave_one_out import NEVER, Decay, Tail
from pipeline.watching.sessions.prefixes import (
    MAX_EVENTS,
    Silent,
    States,
    apart,
    begin_anew,
    cleaned,
    ending,
    first_of_each,
    joined,
    most_frequent,
    pairs_once,
    silent,
)
from pipeline.watching.sessions.transitions import END, START, Transitions, explained

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL: Final = 0.0005  # of normal sessions: one in 2,000
MAX_KINDS: Final = 1_000  # count vectors; a table of 1,000 x 1,000 distances takes a fifth of a second
MAX_TRANSITIONS: Final = 200_000  # past it every order is normal: nothing can be told from them
_VERSION: Final = 1
# Of states: a build that knows version 1 alone would take each part of a session for a whole one.
_CARRIED_VERSION: Final = 2
_RULES: Final = 3
# Without anybody's word: the kinds that make up so much of all sessions are normal, if they are some, and one session in
# ten may be odd. With 0.9 the result hung on which kind came last among the common ones.
_COMMON_SHARE: Final = 0.85
_COMMON_LEAST: Final = 5
_ODD_SHARE: Final = 0.1
_ARRAYS: Final = {
    "row": "<i8", "event": "<i8", "n": "<i8", "events": "<i8", "weights": "<f8", "pairs": "<i8", "times": "<i8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionVerdict:
    """The answer for one session. `score` 0..1, above 0.5 when anomalous; `p_value` in (0, 1].

    `reasons` say which rule and what of it, most telling first: `session-event:17` (template 17 is in no session of
    training), `session-counts:17 2/3` (twice, where the nearest count vector has it three times),
    `session-length:43/13-42`, `session-order:17 after 9`. `cause` is short and the same for the same fault.
    """

    anomalous: bool
    score: float
    p_value: float
    reasons: tuple[str, ...]
    cause: str


NORMAL: Final = SessionVerdict(anomalous=False, score=0.0, p_value=1.0, reasons=(), cause="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What the rules found in some sessions: scores (sessions, 3), count vectors, and the nearest kind of each."""

    scores: Floats
    vectors: Counts
    nearest: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What training taught of one workload's sessions. Bounded by the limits above. Immutable."""

    sessions: int
    kinds: Kinds
    counts: Tail
    lengths: tuple[int, int]  # shortest and longest
    length: Decay
    transitions: Transitions | None  # None: too many to tell new ones
    order: Decay
    ends: frozenset[int]  # template ids that end a session
    level: float = LEVEL
    carried: bool = False  # learnt from states: what comes after a silence is judged with all before it

    @classmethod
    def fit(cls, sessions: Iterable[Sequence[int]], *, trusted: bool = True, level: float = LEVEL) -> Self:
        """From normal sessions, template ids in order; equal ones may come often. Raises ValueError without any.

        Not `trusted`, when nobody said that they are normal: what is unlike the common ones is not learnt.
        """
        return cls.of_parts(([session] for session in sessions), trusted=trusted, level=level)

    @classmethod
    def of_parts(
        cls, sessions: Iterable[Sequence[Sequence[int]]], *, trusted: bool = True, level: float = LEVEL
    ) -> Self:
        """The same from sessions that fell silent on their way: each is what came before, between and after its
        silences. Where most of them begin anew after one, each part is a session of its own."""
        times = Counter(map(silent, sessions))
        seen = most_frequent(apart(times) if begin_anew(times) else times)
        if not seen:
            raise ValueError("there is no session to learn from")
        return cls._of(States.of(seen if trusted else _believed(seen)), level)

    @classmethod
    def _of(cls, seen: States, level: float) -> Self:
        lengths = np.array([len(state) for state in seen.states], dtype=np.int64)
        vectors = Counts.of(lengths, joined(seen.states))
        kinds, counts, lost = _learn_kinds(seen, vectors)
        total = int(seen.times.sum())
        steps, new = Transitions.fit(seen)
        ordered = len(steps.times) <= MAX_TRANSITIONS
        order = np.zeros(len(seen.sessions))
        if ordered:
            order = seen.most(new.unexplained(explained(kinds, vectors, lost, new)))
        return cls(
            sessions=total,
            kinds=kinds,
            counts=counts,
            lengths=(int(lengths.min()), int(lengths.max())),
            length=session_lengths.left_out(seen),
            transitions=steps if ordered else None,
            order=Decay.of(
                order,
                int(seen.times[order > 0].sum()),
                total=total,
                prior=float(np.log(len(seen.sessions) + 1)),
            ),
            ends=frozenset(ending(zip(seen.sessions, seen.times.tolist(), strict=True))),
            level=level,
            carried=len(seen.state) > len(seen.sessions),
        )

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        """A verdict for each; equal sessions are looked at once. An empty session is normal."""
        distinct: dict[tuple[int, ...], int] = {}
        at = [distinct.setdefault(tuple(session), len(distinct)) for session in sessions]
        verdicts = self._judge([cleaned(session) for session in distinct]) if distinct else []
        return [verdicts[i] for i in at]

    def limits(self) -> tuple[float, float, float]:
        """The highest normal score of each rule: counts, length, order."""
        level = self.level / _RULES
        counts = self.counts.limit(max(level, 1.0 / (self.sessions + 1.0)))
        return counts, self.length.limit(level), self.order.limit(level)

    def scores(self, sessions: Sequence[Sequence[int]]) -> Floats:
        """(sessions, 3): what each rule finds, in the order of `limits`."""
        return self._look([cleaned(session) for session in sessions]).scores

    def _look(self, sessions: list[tuple[int, ...]]) -> _Look:
        lengths = np.array([len(session) for session in sessions], dtype=np.int64)
        vectors = Counts.of(lengths, joined(sessions))
        first, kind_of = first_of_each(vectors.keys())
        distances, nearest = self.kinds.nearest(vectors.take(first))
        nearest = nearest[kind_of]
        found = np.zeros((len(sessions), _RULES))
        found[:, 0] = distances[kind_of]
        found[:, 1] = session_lengths.outside(lengths, self.lengths)
        if self.transitions is not None:
            new = self.transitions.new(sessions)
            found[:, 2] = new.unexplained(explained(self.kinds, vectors, nearest, new))
        found[lengths == 0] = 0.0
        return _Look(scores=found, vectors=vectors, nearest=nearest)

    def _judge(self, sessions: list[tuple[int, ...]]) -> list[SessionVerdict]:
        look = self._look(sessions)
        limits = np.array(self.limits())
        tails: tuple[Tail | Decay, ...] = (self.counts, self.length, self.order)
        p = np.stack([tail.p_values(look.scores[:, i]) for i, tail in enumerate(tails)], axis=1)
        p_value = np.minimum(1.0, _RULES * p.min(axis=1))
        # 1 at the limit of a rule; where a rule has none, everything above 0 is anomalous.
        above = np.where(look.scores > 0, 1.0 + look.scores, 0.0)
        ratio = np.where(limits > 0, look.scores / np.where(limits > 0, limits, 1.0), above).max(axis=1)
        wrong = look.scores > limits
        verdicts = []
        for i, session in enumerate(sessions):
            if ratio[i] == 0.0:
                verdicts.append(NORMAL)
                continue
            reasons, cause = self._why(session, look, i, wrong[i].tolist()) if wrong[i].any() else ((), "")
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

    def _why(
        self, session: tuple[int, ...], look: _Look, row: int, wrong: list[bool]
    ) -> tuple[tuple[str, ...], str]:
        """Reasons and cause of an anomalous session; `wrong` says which rules it breaks."""
        told: list[tuple[Reason, str, str]] = []  # reason, its data, its cause
        if wrong[0]:
            told += self._counted(look, row)
        if wrong[1]:
            shortest, longest = self.lengths
            data = f"{len(session)}/{shortest}-{longest}"
            told.append((Reason.SESSION_LENGTH, data, "long" if len(session) > longest else "short"))
        if wrong[2] and self.transitions is not None:
            a, b = self.transitions.strangest(session)
            data = f"{b} first" if a == START else f"{a} last" if b == END else f"{b} after {a}"
            told.append((Reason.SESSION_ORDER, data, data.replace(" ", "-")))
        reasons = tuple(reason(name, data) for name, data, _ in told)
        return reasons, reason(told[0][0], told[0][2])

    def _counted(self, look: _Look, row: int) -> list[tuple[Reason, str, str]]:
        """The events behind a distance: those never seen, those in other numbers, the heavier ones first."""
        apart = self.kinds.apart(look.vectors, row, int(look.nearest[row]))
        known = self.kinds.known(np.array([event for event, *_ in apart])).tolist()
        found = []
        for name, seen in ((Reason.SESSION_EVENT, False), (Reason.SESSION_COUNTS, True)):
            part = [a for a, is_known in zip(apart, known, strict=True) if is_known is seen]
            if part:
                event, here, usual, _ = part[0]
                data = f"{event} {here}/{usual}" if seen else str(event)
                found.append((sum(weight for *_, weight in part), name, data, str(event)))
        found.sort(key=lambda f: -f[0])
        # The lighter half is worth a word when it weighs at least half as much.
        return [(name, data, cause) for weight, name, data, cause in found if 2 * weight >= found[0][0]]

    def to_bytes(self) -> bytes:
        """msgpack of version and fields; arrays as little-endian bytes."""
        vectors, order = self.kinds.vectors, self.transitions or Transitions.none()
        arrays = {
            "row": vectors.row, "event": vectors.event, "n": vectors.n, "events": self.kinds.events,
            "weights": self.kinds.weights, "pairs": order.pairs.reshape(-1), "times": order.times,
        }  # fmt: skip
        return bytes(
            msgpack.packb(
                {
                    "version": _CARRIED_VERSION if self.carried else _VERSION,
                    "sessions": self.sessions,
                    "level": self.level,
                    "lengths": list(self.lengths),
                    "any_order": self.transitions is None,
                    "ends": sorted(self.ends),
                    "rows": vectors.rows,
                    "arrays": {name: array.astype(_ARRAYS[name]).tobytes() for name, array in arrays.items()},
                    "counts": self.counts.pack(),
                    "decays": [[decay.chance, decay.mean] for decay in (self.length, self.order)],
                }
            )
        )

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Raises BadBundle when the bytes are not of `to_bytes`, or say what cannot be."""
        try:
            return cls._read(_unpacked(blob, _CARRIED_VERSION))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            raise _unreadable(exc) from exc

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Self:
        arrays = {name: np.frombuffer(data["arrays"][name], dtype=_ARRAYS[name]) for name in _ARRAYS}
        vectors = Counts(
            rows=_number(data["rows"], MAX_KINDS), row=arrays["row"], event=arrays["event"], n=arrays["n"]
        )
        vectors.check(MAX_EVENTS)
        kinds = Kinds(vectors=vectors, events=arrays["events"], weights=arrays["weights"])
        kinds.check()
        order = Transitions(pairs=arrays["pairs"].reshape(-1, 2), times=arrays["times"])
        order.check(MAX_TRANSITIONS)
        length, steps = (Decay.unpack(fields) for fields in data["decays"])
        shortest, longest = (_number(n, MAX_EVENTS) for n in data["lengths"])
        level = float(data["level"])
        if not 0 < shortest <= longest or not 0 < level < 1:
            raise ValueError("lengths or a level that cannot be")
        return cls(
            sessions=_number(data["sessions"], 1 << 62),
            kinds=kinds,
            counts=Tail.unpack(data["counts"]),
            lengths=(shortest, longest),
            length=length,
            transitions=None if data["any_order"] else order,
            order=steps,
            ends=frozenset(_number(event, 1 << 62) for event in data["ends"]),
            level=level,
            carried=data["version"] == _CARRIED_VERSION,
        )


def _learn_kinds(seen: States, vectors: Counts) -> tuple[Kinds, Tail, Ints]:
    """The kinds of these states, the tail of their distances, and the nearest kind that is left of each state without its
    session (-1: its own)."""
    first, kind_of = first_of_each(vectors.keys())
    had, by = pairs_once(kind_of[seen.state], seen.session)
    sessions = np.bincount(had, weights=seen.times[by], minlength=len(first)).astype(np.int64)
    kept = np.sort(np.argsort(-sessions, kind="stable")[:MAX_KINDS])
    place = np.full(len(first), -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    total = int(seen.times.sum())
    inside = within(place[had], by, len(kept))
    # Without most sessions nothing is left that could be called normal: their kind is left out alone.
    most = 2 * sessions[kept] > total
    inside[most] = np.eye(len(kept), dtype=np.bool_)[most]
    kinds = Kinds.fit(vectors.take([first[i] for i in kept]), inside)
    left_out, others = kinds.others(inside)
    distances = np.where(place >= 0, left_out[place], 0.0)[kind_of[seen.state]]
    # A kind unlike all others says nothing of how far normal sessions vary: it is not one that varies by nothing.
    weights = np.where(distances < NEVER, seen.times[seen.session], 0)
    singles = np.unique(by[sessions[had] == 1])
    chance = (float(seen.times[singles].sum()) + 1.0) / (total + 1.0)
    counts = Tail.of(distances, weights, total=int(weights.sum()), chance=chance)
    alone = (np.bincount(had)[kind_of] == 1) & (place[kind_of] >= 0) & (len(kept) > 1)
    return kinds, counts, np.where(alone, others[place[kind_of]], -1)


def dump(models: Mapping[str, Sequences]) -> bytes:
    """The file of a bundle: what is known of each workload's sessions."""
    packed = {name: model.to_bytes() for name, model in sorted(models.items())}
    return bytes(msgpack.packb({"version": _VERSION, "workloads": packed}))


def load(blob: bytes) -> dict[str, Sequences]:
    """What `dump` wrote, by workload. Raises BadBundle."""
    try:
        workloads = {
            str(name): bytes(packed) for name, packed in _unpacked(blob, _VERSION)["workloads"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise _unreadable(exc) from exc
    return {name: Sequences.from_bytes(packed) for name, packed in workloads.items()}


def _unpacked(blob: bytes, newest: int) -> Mapping[str, Any]:
    data = msgpack.unpackb(blob)
    if not isinstance(data, dict) or not _VERSION <= data["version"] <= newest:
        raise ValueError(f"it is of no version that this build reads, up to {newest}")
    return data


def _unreadable(exc: Exception) -> BadBundle:
    return BadBundle(f"the sessions of a bundle are not readable: {exc!r:.300}; publish the bundle again")


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no number from 0 to {most}")
    return value


def _believed(seen: list[tuple[Silent, int]]) -> list[tuple[Silent, int]]:
    """Of sessions that nobody vouches for: those of the commonest count vectors, and what has only their events and is no
    farther from them than they are from each other. All, where that would leave out more than a few, or where few are
    common or far too many. A session is looked at as a whole, whatever its states were."""
    whole = [session for (session, _), _ in seen]
    vectors = Counts.of(np.array([len(session) for session in whole], dtype=np.int64), joined(whole))
    times = np.array([n for _, n in seen], dtype=np.int64)
    first, kind_of = first_of_each(vectors.keys())
    of_kind = np.bincount(kind_of, weights=times, minlength=len(first))
    order = np.argsort(-of_kind, kind="stable")
    before = np.cumsum(of_kind[order]) - of_kind[order]
    common = np.zeros(len(first), dtype=bool)
    common[order[before < _COMMON_SHARE * times.sum()]] = True
    if common.all() or not _COMMON_LEAST <= common.sum() <= MAX_KINDS:
        return seen
    alike = Counter[Silent]()
    for session, n in zip(whole, np.where(common[kind_of], times, 0).tolist(), strict=True):
        alike[session, (len(session),)] += n
    core = Sequences._of(States.of(most_frequent(+alike)), LEVEL)
    odd = core.scores(whole)[:, 0] > max(core.counts.values, default=np.inf)
    odd[vectors.row[~core.kinds.known(vectors.event)]] = True
    if times[odd].sum() > _ODD_SHARE * times.sum():
        return seen
    return [item for item, is_odd in zip(seen, odd, strict=True) if not is_odd]
