"""Events, causes and incidents. Causes and incidents are also the wire form of the live state.

Texts are cut and numbers clamped where an event becomes a cause. So no event can make the state larger than
its number of causes allows, or impossible to pack.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from pipeline.records.batch import digest
from pipeline.watching.alarm_budget import GRAVE, ChanceRate
from pipeline.watching.incidents.leading import Grade, Sign, count_step, lead_order
from pipeline.watching.incidents.named import MOST as MOST_NAMED
from pipeline.watching.incidents.onsets import BURST_SPAN, GAP, SPAN, Onset
from pipeline.watching.incidents.origins import MOST, Clue, LikelyOrigin, TraceShape, likely_origins
from pipeline.watching.incidents.starts import NEW_VERSION

MAX_CAUSES: Final = 50  # Listed with one incident, the most urgent; nobody reads more.
MAX_UNLISTED: Final = 1_000  # Further causes of one incident that are recognised, by their hash.
TEXT_BYTES: Final = 240  # Of a sample: the width of a table or a phone.
NAME_BYTES: Final = 200  # Of a workload, as records.MAX_NAME; of a cause and a kind.
MAX_COUNT: Final = 1 << 53  # The largest number that every reader of JSON keeps.
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)  # Times outside are mistakes, and could overflow.
LAST: Final = datetime(2200, 1, 1, tzinfo=UTC)

_GRADES: Final = {3: Grade.ERROR, 2: Grade.WARNING, 1: Grade.CALM}  # by severity
TEMPLATE: Final = "template"  # the kind of a cause that is a template
Key = tuple[str, str]  # workload, cause
Hash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_BYTES)]
_Id = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9A-Za-z]+\Z", max_length=TEXT_BYTES)
]  # safe to type and to print
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEvent:
    """One cause as one batch, session check or rate check saw it. Times are event times, aware UTC."""

    event_id: str  # the same at every delivery of the event
    workload: str
    cause: str  # "template:17", "session-event:17", "rate-silence:9": stable over restarts and trainings
    kind: str  # "template", or the Reason of a session or a rate
    first: datetime
    last: datetime
    count: int
    score: float
    severity: int  # 3 error-like, 2 warning, 1 neither, as `findings.finding_severity`
    text: str
    source: str = ""  # where the text stands, "" for no line
    line: int = 0
    new: bool = False  # no training has seen its template
    timed: bool = True  # false: no record has a time, and `first` and `last` are those of arrival
    named: tuple[str, ...] = ()  # other workloads that its text names
    grade: int = 0  # as `leading.Grade`; 0: as its severity says
    thrown: tuple[str, ...] = ()  # as `leading.thrown_in`
    chance: ChanceRate = GRAVE  # how often its workload has the like by chance


class Cause(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One cause in one incident."""

    workload: _Text
    cause: _Text
    kind: _Text
    first: _Time
    last: _Time
    count: _Count
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]  # the highest
    severity: Annotated[int, msgspec.Meta(ge=1, le=3)]  # the highest
    text: _Text  # of the earliest event
    source: _Text = ""  # where the text stands, "" for no line
    line: _Count = 0
    new: bool = False  # no training has seen its template
    timed: bool = True  # false: no record has a time, and `first` and `last` are those of arrival
    named: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()  # other workloads
    grade: Annotated[int, msgspec.Meta(ge=0, le=int(Grade.ERROR))] = 0  # the highest; 0: as its severity says
    thrown: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=2)] = ()  # of the earliest event

    def __post_init__(self) -> None:
        _check_order(self.first, self.last)

    @property
    def key(self) -> Key:
        return self.workload, self.cause

    def sign(self) -> Sign:
        """The facts that its place in an incident depends on."""
        return Sign(
            grade=self.grade or _GRADES[self.severity],
            workload=self.workload,
            new=self.new,
            first=self.first,
            last=self.last,
            count=self.count,
            text=self.text,
            thrown=self.thrown,
            tie=(self.source, self.line, self.workload, self.cause),
        )

    def clue(self) -> Clue:
        """The facts that the origin of an incident depends on."""
        return Clue(
            workload=self.workload,
            kind=self.kind,
            first=self.first,
            timed=self.timed,
            severity=self.severity,
            count=self.count,
            new=self.new,
            named=self.named,
        )


class Incident(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Causes that began together, and their course."""

    id: _Id
    first: _Time
    last: _Time
    count: _Count  # of all causes
    causes: Annotated[
        tuple[Cause, ...], msgspec.Meta(min_length=1, max_length=MAX_CAUSES)
    ]  # in the order of `leading.lead_order`
    more: _Count = 0  # causes that are not among them
    seen_before: _Id | None = None  # id of the most similar earlier incident
    seen: _Count = 0  # earlier incidents that are similar
    open: bool = True
    unlisted: Annotated[
        tuple[Hash, ...], msgspec.Meta(max_length=MAX_UNLISTED)
    ] = ()  # hashes of keys of `more`
    # The workloads that it likely began in, the likeliest first; not `clear`: the first two are even.
    origins: Annotated[tuple[LikelyOrigin, ...], msgspec.Meta(max_length=MOST)] = ()
    clear: bool = False

    def __post_init__(self) -> None:
        _check_order(self.first, self.last)

    @property
    def severity(self) -> int:
        return max(c.severity for c in self.causes)

    @property
    def timed(self) -> bool:
        """False where no listed cause has a time: `first` and `last` are those of arrival then."""
        return any(c.timed for c in self.causes)

    @property
    def score(self) -> float:
        return max(c.score for c in self.causes)

    @property
    def quiet(self) -> bool:
        """Calm new lines and what the alarm budget kept back alone: findings, but nothing that anybody has to
        look at."""
        return all(c.severity == 1 and c.kind != NEW_VERSION for c in self.causes)

    @property
    def title(self) -> str:
        """The headline: the text of the leading cause."""
        return self.causes[0].text

    @property
    def workloads(self) -> tuple[str, ...]:
        """In order of their first cause."""
        return tuple(dict.fromkeys(c.workload for c in sorted(self.causes, key=lambda c: (c.first, c.key))))


class YoungCause(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A cause that began lately, so its onset may still be grouped with others."""

    cause: Cause
    bursts: tuple[tuple[_Time, _Time], ...]  # More than GAP apart, cut BURST_SPAN after the first.
    severe: _Time | None  # When it was first an error or a warning.
    sample: Hash  # Of the event with its text; the smaller one of two that begin at once.
    since: _Time | None = None  # The first `close` after its onset changed last.
    incident: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z]*\Z", max_length=TEXT_BYTES)] = (
        ""  # its id when shown
    )

    def __post_init__(self) -> None:
        if self.bursts != _bursts(self.bursts):
            raise ValueError("impossible bursts")
        _check_order(self.bursts[0][0], *(time for time in (self.severe, self.since) if time), ordered=False)

    def onset(self, *, noise: bool = False) -> Onset:
        """Its beginning alone: it leads if it was severe within BURST_SPAN and is no noise."""
        first, end = self.cause.first, self.cause.first + BURST_SPAN
        leads = self.severe is not None and self.severe <= end and not noise
        return Onset(first=first, burst_end=min(self.bursts[0][1], end), leads=leads, key=self.cause.key)


def young_cause(event: IncidentEvent, sample: bytes) -> YoungCause:
    """The cause that begins with an event."""
    first, last = sorted((clamped(event.first), clamped(event.last)))
    count = min(max(1, event.count), MAX_COUNT)
    # Two records an hour apart are no burst of an hour.
    dense = last - first <= GAP or (count > 1 and (last - first) / (count - 1) <= GAP)
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
        source=_tail(event.source, TEXT_BYTES),
        line=min(max(0, event.line), MAX_COUNT),
        new=event.new,
        timed=event.timed,
        named=tuple(_cut(name, NAME_BYTES) for name in event.named[:MOST_NAMED]),
        grade=min(max(event.grade, 0), Grade.ERROR),
        thrown=tuple(_cut(text, TEXT_BYTES) for text in event.thrown[:2]),
    )
    return YoungCause(
        cause=cause,
        bursts=_bursts(((first, last),) if dense else ((first, first), (last, last))),
        severe=first if cause.severity > 1 else None,
        sample=sample,
    )


def merge_young(many: list[YoungCause]) -> YoungCause:
    """Several sightings of one cause as one. Associative and commutative."""
    earliest, *others = sorted(many, key=lambda y: (y.cause.first, y.sample))
    cause = earliest.cause
    for other in others:
        cause = add_cause(cause, other.cause)
    bursts = _bursts(tuple(burst for y in many for burst in y.bursts))
    severe = min((y.severe for y in many if y.severe is not None), default=None)
    same = [y for y in many if (y.cause.first, y.bursts, y.severe) == (cause.first, bursts, severe)]
    return YoungCause(
        cause=cause,
        bursts=bursts,
        severe=severe,
        sample=earliest.sample,
        since=max((y.since for y in same if y.since is not None), default=None),
        incident=next((y.incident for y in (earliest, *others) if y.incident), ""),
    )


def add_cause(cause: Cause, other: Cause) -> Cause:
    """Both as one; names, text and its place are those of the first."""
    return replace(
        cause,
        first=min(cause.first, other.first),
        last=max(cause.last, other.last),
        count=min(cause.count + other.count, MAX_COUNT),
        score=max(cause.score, other.score),
        severity=max(cause.severity, other.severity),
        new=cause.new or other.new,
        timed=cause.timed or other.timed,
        named=tuple(sorted({*cause.named, *other.named})[:MOST_NAMED]),
        grade=max(cause.grade, other.grade),
    )


def in_one_place(cause: Cause, counted: Cause) -> bool:
    """Whether a cause that was counted again surely has its place among the same others (`lead_order`)."""
    return cause is counted or (
        (cause.severity, cause.grade, cause.new, cause.first)
        == (counted.severity, counted.grade, counted.new, counted.first)
        and count_step(cause.count) == count_step(counted.count)
        and (cause.last - cause.first > SPAN) == (counted.last - counted.first > SPAN)
    )


def led(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The causes of one incident, its headline first."""
    every = list(causes)
    return tuple(every[at] for at in lead_order([cause.sign() for cause in every]))


def make_incident(name: str, causes: Sequence[Cause], shape: TraceShape) -> Incident:
    """An incident of causes that began together. `shape`: what traces show of their workloads."""
    ranked = led(causes)
    likely = likely_origins([cause.clue() for cause in causes], shape)
    others = ranked[MAX_CAUSES:]
    return Incident(
        id=name,
        first=min(c.first for c in causes),
        last=max(c.last for c in causes),
        count=min(sum(c.count for c in causes), MAX_COUNT),
        causes=ranked[:MAX_CAUSES],
        more=len(others),
        unlisted=tuple(sorted({key_hash(c.key) for c in others[:MAX_UNLISTED]})),
        origins=likely.origins,
        clear=likely.clear,
    )


def key_hash(key: Key) -> bytes:
    return hash8(*key)


def hash8(*parts: str) -> bytes:
    """Eight bytes: a collision among the few thousand that are compared is no concern."""
    return bytes.fromhex(digest(*parts))


def weight(value: Incident | YoungCause) -> int:
    """The most bytes that it takes when packed."""
    if isinstance(value, YoungCause):
        return _cause_weight(value.cause) + 120
    texts = [text for origin in value.origins for text in (origin.workload, *origin.reasons)]
    named = sum(len(text.encode()) + 5 for text in texts)
    return 170 + named + sum(map(_cause_weight, value.causes)) + 10 * len(value.unlisted)


def _cause_weight(cause: Cause) -> int:
    texts = (cause.workload, cause.cause, cause.kind, cause.text, cause.source, *cause.named, *cause.thrown)
    return 78 + sum(len(text.encode()) for text in texts) + 5 * (len(cause.named) + len(cause.thrown))


def _bursts(spans: tuple[tuple[datetime, datetime], ...]) -> tuple[tuple[datetime, datetime], ...]:
    """Merges spans with gaps of at most GAP, cut BURST_SPAN after the first. Raises ValueError for none."""
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


def _tail(text: str, size: int) -> str:
    return text.encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")


def clamped(time: datetime) -> datetime:
    """The nearest time from FIRST to LAST."""
    return min(max(time, FIRST), LAST)


def _check_order(*times: datetime, ordered: bool = True) -> None:
    """Raises ValueError for times outside FIRST to LAST, or out of order."""
    if min(times) < FIRST or max(times) > LAST or (ordered and list(times) != sorted(times)):
        raise ValueError(f"impossible times: {', '.join(map(str, times))}")
