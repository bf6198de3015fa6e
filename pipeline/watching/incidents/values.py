"""Events, causes and incidents, and the wire forms of what the live state keeps of them.

Texts are cut and numbers held in bounds where an event is made into a cause, so that nothing that comes in can make the
state larger than its count of causes allows, or impossible to pack.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pipeline.records.batch import digest
from pipeline.watching.incidents.onsets import BURST_SPAN, GAP, Onset

CAUSES: Final = 50  # told of one incident, the most urgent; nobody reads more
UNTOLD: Final = 1_000  # further causes of one incident that are known again, by their hash
TEXT_BYTES: Final = 240  # of a sample: what a table or a phone shows
NAME_BYTES: Final = 200  # of a workload, as records.MAX_NAME; of a cause and a kind
COUNT: Final = 1 << 53  # the largest number that every reader of JSON keeps
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)  # times outside are mistakes, and could not be reckoned with
LAST: Final = datetime(2200, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

Key = tuple[str, str]  # workload, cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One cause as one batch, session check or rate check saw it. Times are event times, aware UTC."""

    event_id: str  # the same event carries the same id however often it is delivered
    workload: str
    cause: str  # "template:17", "session-event:17", "rate-silence:9": stable over restarts and trainings
    kind: str  # "template", or the `records.Reason` of a session or a rate
    first: datetime
    last: datetime
    count: int
    score: float
    severity: int  # 3 error-like, 2 warning, 1 neither, as `findings.severity`
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What one cause did in one incident."""

    workload: str
    cause: str
    kind: str
    first: datetime
    last: datetime
    count: int
    score: float  # the highest, 0..1
    severity: int  # the highest
    text: str  # of the earliest event

    @property
    def key(self) -> Key:
        return self.workload, self.cause

    @property
    def urgency(self) -> tuple[Any, ...]:
        """Sort key, most urgent first. Counts stay out of it: they change while somebody reads."""
        return -self.severity, -round(self.score, 1), self.first, self.workload, self.cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What began together, and what became of it."""

    id: str
    first: datetime
    last: datetime
    count: int  # of all causes
    causes: tuple[Cause, ...]  # the most urgent first, at most CAUSES
    more: int = 0  # causes that are not among them
    seen_before: str | None = None  # id of the earlier incident that is most like it
    seen: int = 0  # earlier incidents that are like it
    open: bool = True
    untold: frozenset[bytes] = field(default=frozenset(), repr=False)  # hashes of the keys of `more`

    @property
    def severity(self) -> int:
        return max(c.severity for c in self.causes)

    @property
    def score(self) -> float:
        return max(c.score for c in self.causes)

    @property
    def title(self) -> str:
        """Text of the most urgent cause."""
        return self.causes[0].text

    @property
    def workloads(self) -> tuple[str, ...]:
        """In the order in which they were hit."""
        return tuple(dict.fromkeys(c.workload for c in sorted(self.causes, key=lambda c: (c.first, c.key))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Young:
    """A cause that began lately: its onset may still find company."""

    cause: Cause
    bursts: tuple[
        tuple[datetime, datetime], ...
    ]  # with more than GAP between, cut BURST_SPAN after the first
    severe: datetime | None  # the first time it was an error or a warning
    sample: bytes  # hash of the event whose text it is; the smaller one where two begin at once
    since: datetime | None = None  # the first `close` after it last changed as an onset
    incident: str = ""  # the id under which it was shown

    def onset(self, *, noise: bool = False) -> Onset:
        """What it becomes later is no matter of how it began: it leads if it was severe within BURST_SPAN."""
        first, end = self.cause.first, self.cause.first + BURST_SPAN
        leads = self.severe is not None and self.severe <= end and not noise
        return Onset(first=first, burst_end=min(self.bursts[0][1], end), leads=leads, key=self.cause.key)


def young(event: Event, sample: bytes) -> Young:
    """An event as a cause that begins with it."""
    first, last = sorted((moment(event.first), moment(event.last)))
    count = min(max(1, event.count), COUNT)
    # Two records an hour apart are no burst that lasts an hour.
    dense = count > 1 and (last - first) / (count - 1) <= GAP
    apart = ((first, first), (last, last)) if last - first > GAP else ((first, last),)
    cause = Cause(
        workload=_cut(event.workload, NAME_BYTES),
        cause=_cut(event.cause, NAME_BYTES),
        kind=_cut(event.kind, NAME_BYTES),
        first=first,
        last=last,
        count=count,
        score=min(max(event.score, 0.0), 1.0) if math.isfinite(event.score) else 0.0,
        severity=min(max(event.severity, 1), 3),
        text=_cut(event.text, TEXT_BYTES),
    )
    return Young(
        cause=cause,
        bursts=_bursts(((first, last),) if dense else apart),
        severe=first if cause.severity > 1 else None,
        sample=sample,
    )


def merged(many: list[Young]) -> Young:
    """The same cause several times, as one; neither order nor steps change the result."""
    earliest, *others = sorted(many, key=lambda y: (y.cause.first, y.sample))
    cause = earliest.cause
    for other in others:
        cause = added(cause, other.cause)
    bursts = _bursts(tuple(burst for y in many for burst in y.bursts))
    severe = min((y.severe for y in many if y.severe is not None), default=None)
    same = [y for y in many if (y.cause.first, y.bursts, y.severe) == (cause.first, bursts, severe)]
    return Young(
        cause=cause,
        bursts=bursts,
        severe=severe,
        sample=earliest.sample,
        since=max((y.since for y in same if y.since is not None), default=None),
        incident=next((y.incident for y in (earliest, *others) if y.incident), ""),
    )


def added(cause: Cause, other: Cause) -> Cause:
    """Both as one; names and text stay those of the first."""
    return replace(
        cause,
        first=min(cause.first, other.first),
        last=max(cause.last, other.last),
        count=min(cause.count + other.count, COUNT),
        score=max(cause.score, other.score),
        severity=max(cause.severity, other.severity),
    )


def incident(name: str, causes: Sequence[Cause]) -> Incident:
    """Causes that began together, each once or more often, as an incident."""
    ranked = sorted(causes, key=lambda c: c.urgency)
    told, rest = ranked[:CAUSES], ranked[CAUSES:]
    return Incident(
        id=name,
        first=min(c.first for c in causes),
        last=max(c.last for c in causes),
        count=min(sum(c.count for c in causes), COUNT),
        causes=tuple(told),
        more=len(rest),
        untold=frozenset(key_hash(c.key) for c in rest[:UNTOLD]),
    )


def key_hash(key: Key) -> bytes:
    return hash8(*key)


def hash8(*parts: str) -> bytes:
    """Eight bytes: among the few thousand that are compared, two alike are no concern."""
    return bytes.fromhex(digest(*parts))


def weight(one: Incident | Young) -> int:
    """Bytes it takes when packed, at most."""
    if isinstance(one, Young):
        return _cause_weight(one.cause) + 120
    return 160 + sum(map(_cause_weight, one.causes)) + 10 * len(one.untold)


def _cause_weight(cause: Cause) -> int:
    return 60 + sum(len(text.encode()) for text in (cause.workload, cause.cause, cause.kind, cause.text))


# Wire forms: lists of plain values; times are microseconds since 1970.


def incident_wire(one: Incident) -> list[Any]:
    # Whether it is open is a matter of the moment it is looked at.
    return [
        one.id, number_of(one.first), number_of(one.last), one.count, [_cause_wire(c) for c in one.causes], one.more,
        one.seen_before, one.seen, b"".join(sorted(one.untold)),
    ]  # fmt: skip


def read_incident(wire: Any) -> Incident:
    """Raises ValueError, TypeError, OverflowError."""
    name, first, last, count, causes, more, before, seen, untold = wire
    if not causes or len(causes) > CAUSES or len(untold) > 8 * UNTOLD:
        raise ValueError(f"an incident of {len(causes)} causes and {len(untold) // 8} others")
    return Incident(
        id=_id(name),
        first=time_of(first),
        last=time_of(last),
        count=_whole(count),
        causes=tuple(_read_cause(c) for c in causes),
        more=_whole(more),
        seen_before=None if before is None else _id(before),
        seen=_whole(seen),
        untold=frozenset(hashes(untold)),
    )


def young_wire(one: Young) -> list[Any]:
    bursts = [[number_of(first), number_of(last)] for first, last in one.bursts]
    severe, since = (None if t is None else number_of(t) for t in (one.severe, one.since))
    return [_cause_wire(one.cause), bursts, severe, one.sample, since, one.incident]


def read_young(wire: Any) -> Young:
    """Raises ValueError, TypeError, OverflowError."""
    cause, bursts, severe, sample, since, name = wire
    begun = _bursts(tuple((time_of(first), time_of(last)) for first, last in bursts))
    return Young(
        cause=_read_cause(cause),
        bursts=begun,
        severe=None if severe is None else time_of(severe),
        sample=_bytes(sample),
        since=None if since is None else time_of(since),
        incident=_id(name) if name != "" else "",
    )


def hashes(blob: Any) -> list[bytes]:
    """The eight-byte hashes that were put together. Raises ValueError, TypeError."""
    if len(_bytes(blob)) % 8:
        raise ValueError(f"{len(blob)} bytes are no hashes of eight")
    return [blob[at : at + 8] for at in range(0, len(blob), 8)]


def _cause_wire(one: Cause) -> list[Any]:
    return [
        one.workload, one.cause, one.kind, number_of(one.first), number_of(one.last), one.count, one.score, one.severity,
        one.text,
    ]  # fmt: skip


def _read_cause(wire: Any) -> Cause:
    workload, cause, kind, first, last, count, score, severity, text = wire
    if not isinstance(score, float) or not 0 <= score <= 1:
        raise ValueError(f"score {score!r}")
    if severity not in (1, 2, 3) or _whole(first) > _whole(last):
        raise ValueError(f"a cause of severity {severity!r} from {first!r} to {last!r}")
    return Cause(
        workload=_text(workload),
        cause=_text(cause),
        kind=_text(kind),
        first=time_of(first),
        last=time_of(last),
        count=_whole(count),
        score=score,
        severity=_whole(severity),
        text=_text(text),
    )


def _bursts(spans: tuple[tuple[datetime, datetime], ...]) -> tuple[tuple[datetime, datetime], ...]:
    """Spans with no more than GAP between as one, as far as BURST_SPAN after the first. Raises ValueError for none."""
    end = min(first for first, _ in spans) + BURST_SPAN
    out: list[tuple[datetime, datetime]] = []
    for first, last in sorted((first, min(last, end)) for first, last in spans if first <= end):
        if out and first - out[-1][1] <= GAP:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return tuple(out)


def _cut(text: str, size: int) -> str:
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def moment(moment: datetime) -> datetime:
    return min(max(moment, FIRST), LAST)


def number_of(moment: datetime) -> int:
    return (moment - FIRST) // _MICROSECOND


def time_of(wire: Any) -> datetime:
    return FIRST + _MICROSECOND * _whole(wire, number_of(LAST))


def _whole(wire: Any, most: int = COUNT) -> int:
    if not isinstance(wire, int) or isinstance(wire, bool) or not 0 <= wire <= most:
        raise ValueError(f"{wire!r} is not a number from 0 to {most}")
    return wire


def _text(wire: Any) -> str:
    if not isinstance(wire, str) or len(wire) > TEXT_BYTES:
        raise ValueError("no short text")
    return wire


def _id(wire: Any) -> str:
    """What people type and terminals show."""
    if not _text(wire).isalnum() or not wire.isascii():
        raise ValueError("no id of an incident")
    return _text(wire)


def _bytes(wire: Any) -> bytes:
    if not isinstance(wire, bytes):
        raise TypeError(f"{type(wire).__name__} where bytes belong")
    return wire
