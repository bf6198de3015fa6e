"""The answers of the service, as the command line, the API and its clients see them.

The module imports nothing heavy: a client without the packages of the workers reads them. Names of fields are
those of `--json`. Times are aware UTC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from pipeline.controller.training_status import Status
from pipeline.observe.losses import RedisLoss
from pipeline.observe.presence import Trouble, WorkerView
from pipeline.records.delivery import DeadLetter
from pipeline.records.versions import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A stored record. `hit` and `place`: in an answer with context, whether it matches, and its group."""

    record_id: str
    source: str | None
    line: int | None  # 1-based, the first physical line of the record
    lines: int | None  # physical lines that it spans
    timestamp: datetime
    timed: bool | None
    workload: str
    level: str | None
    message: str | None
    pattern_id: int | None
    template_id: int | None
    score: float | None
    anomalous: bool | None
    p_value: float | None
    reasons: list[str] | None
    model_version: str | None
    host: str | None = None
    process: str | None = None
    service: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # that stand beside the message in its raw text
    hit: bool | None = None
    place: int | None = None

    def facts(self) -> dict[str, Any]:
        """For programs, as `logweir results --json` prints it."""
        found = {name: getattr(self, name) for name in self.__slots__}
        if self.hit is None:
            del found["hit"], found["place"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePage:
    """Stored lines, the newest first; with context in groups, the oldest first. `next`: the cursor of the
    older ones, None at the end. `stored_in`: where results lie. `workloads`: those that have results, when
    no line matched. `missing`: stored lines that could not be looked at, because their files are gone."""

    lines: list[Line]
    next: str | None = None
    stored_in: str = ""
    workloads: list[str] = field(default_factory=list)
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCount:
    """How often a template of a workload came in a span, beside another span."""

    workload: str
    template_id: int  # 0: unclassified lines
    records: int
    before: int  # records in the other span
    change: float  # (records + 1) / (before + 1)
    anomalous: int
    severe: int  # at an error-like level
    score: float | None  # the greatest
    first: datetime
    last: datetime
    sample: str | None
    trend: list[int]  # records in equal parts of the span
    template: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPage:
    """Patterns in the order asked for. `since`, `until`: the span; `before_since`: where the other begins.
    `missing`: stored lines that could not be counted, because their files are gone."""

    patterns: list[PatternCount]
    since: datetime
    until: datetime
    before_since: datetime
    next: str | None = None
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRate:
    """The lines of a workload in equal parts of a span."""

    workload: str
    records: int
    anomalous: int
    severe: int
    trend: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """Lines by workload and time. `bucket_s`: the length of a part."""

    since: datetime
    until: datetime
    bucket_s: float
    workloads: list[WorkloadRate]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseView:
    """One cause of an incident. `mark`: how `logweir mark` names it, None where it cannot be marked."""

    workload: str
    cause: str
    kind: str
    first: datetime
    last: datetime
    count: int
    score: float
    severity: int  # 3 error-like, 2 warning, 1 neither
    text: str
    source: str
    line: int
    new: bool
    timed: bool
    mark: str | None
    named: tuple[str, ...] = ()  # other workloads that its text names


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginView:
    """A workload that an incident may have begun in, and why: sentences, the heaviest reason first."""

    workload: str
    reasons: list[str]


class Action(StrEnum):
    """The steps that a person can take."""

    ACKNOWLEDGE = "acknowledge"
    RESOLVE = "resolve"
    SNOOZE = "snooze"
    REOPEN = "reopen"  # as if nobody had decided


class IncidentState(StrEnum):
    """Where an incident is in the hands of people."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    SNOOZED = "snoozed"
    RESOLVED = "resolved"
    REGRESSED = "regressed"  # resolved, and its causes have come back
    ENDED = "ended"  # nobody decided, and nothing came for a while
    SILENCED = "silenced"  # silences cover all of its listed causes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One person's decision. `last_seen` and `workloads`: of the incident as that person saw it. `until`: the
    end of a snooze; `until_count`: the lines of the incident that end it before."""

    state: IncidentState
    by: str
    at: datetime
    last_seen: datetime
    workloads: tuple[str, ...]
    until: datetime | None = None
    why: str = ""
    until_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """An incident: causes that began together. The first cause is likely the first of them. `decision`: what
    somebody decided of it, and `state`: where that leaves it. `silences`: ids of those that cover causes of
    it now."""

    id: str
    first: datetime
    last: datetime
    timed: bool
    open: bool
    severity: int
    score: float
    title: str
    workloads: list[str]
    count: int
    seen: int
    seen_before: str | None
    causes: list[CauseView]
    more_causes: int
    state: IncidentState = IncidentState.OPEN
    decision: Decision | None = None
    silences: list[str] = field(default_factory=list)
    origins: list[OriginView] = field(default_factory=list)  # the likeliest first, at most three
    origin_clear: bool = False  # the first of them is ahead of the second
    ahead: bool = (
        False  # its time is so far ahead of the clock that some clock is broken; such ones come last
    )

    def began_in(self) -> str:
        """Where it began, in words; "" where nothing is known."""
        names = [origin.workload for origin in self.origins]
        if not names or len(self.workloads) == 1:
            return ""
        if self.origin_clear:
            return f"likely began in {names[0]}"
        return f"it is not clear whether it began in {' or '.join(names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPage:
    """Incidents, the newest first. `kept`: all that are kept. `unseen`: lines that may still change them, in
    sentences."""

    incidents: list[IncidentView]
    kept: int
    unseen: list[str]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneIncident:
    """An incident, and when the one that it is most like began."""

    incident: IncidentView
    like_began: datetime | None
    unseen: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model version: its state, and why."""

    version: str
    live: bool
    model: str
    created: datetime | None
    lines: int | None
    state: str
    reason: str
    judgement: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The live version of a model after a promotion or rollback. `before`: the one that it was."""

    version: str
    generation: int
    token: int
    published: str
    model: str
    previous: str
    how: str
    published_ms: int
    history: tuple[str, ...]
    before: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPattern:
    """A pattern of the watchlist and what it covers."""

    pattern: str
    added: datetime
    workloads: list[str]
    lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorkload:
    """A workload that is seen and not watched."""

    workload: str
    lines: int
    skipped: int
    last_seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchlistView:
    """The watchlist. `unwatched_are`: "score", or "skip" where they are only counted."""

    version: int
    watched: list[WatchedPattern]
    unwatched: list[SeenWorkload]
    unwatched_are: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchlistChange:
    """The patterns that changed and those that did not, and the list afterwards."""

    changed: list[str]
    unchanged: list[str]
    version: int
    patterns: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkView:
    """A person's label of a pattern or a template, "normal" or "anomalous"."""

    pattern_id: int | None
    template_id: int | None
    workload: str | None
    state: str
    text: str
    at: datetime
    until: datetime | None
    by: str
    why: str
    expired: bool = False

    @property
    def name(self) -> str:
        """As it is written on a command line."""
        return str(self.pattern_id) if self.template_id is None else f"T{self.template_id}"

    @property
    def of_lines(self) -> bool:
        """False for what was found in sessions or rates."""
        return self.template_id is None or self.template_id > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceView:
    """Not now: incidents of these causes are shown apart until the end. `workload`: a pattern. `template`:
    T17, None for all. `service`: a pattern of the last part of a workload's name, "" for all. `incidents`: so
    many of those that are kept have a cause that it covers now."""

    id: str
    workload: str
    template: str | None
    service: str
    until: datetime
    why: str
    by: str
    at: datetime
    expired: bool = False
    incidents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksView:
    """All marks. `version`: another text after every change. `unreadable`: why, of those that a newer build
    wrote."""

    version: str
    marks: list[MarkView]
    unreadable: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPage:
    """Batches that could not be processed, the newest first. `total`: all that there are."""

    batches: list[DeadLetter]
    total: int
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadBatch(DeadLetter):
    """A dead letter with its first 100 records. `unreadable`: why its payload cannot be read."""

    records: list[str]
    unreadable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesChanged:
    """The batches that were retried or discarded."""

    batches: list[str]
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardSender:
    """One sender as Redis knows it. `duplicates`: requests that were in already."""

    protocol: str
    key: str
    peer: str
    lines: int
    requests: int
    refused: int
    duplicates: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderPage:
    """Senders by protocol, key and address."""

    senders: list[HeardSender]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """GPU use of ended leases, by a column. Each row: its name, `leases`, and hours of leases, GPUs, GiB."""

    since: datetime | None
    until: datetime | None
    by: str
    usage: list[dict[str, Any]]
    stored_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanInfer:
    """Whether unknown lines would be scored on a GPU now, and by which queue they go."""

    can_infer: bool
    queue: str
    workers: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A change that somebody made. `by`: a user of a machine, or the name of a key."""

    id: str
    at: datetime
    by: str
    action: str
    target: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Changes, the newest first."""

    entries: list[AuditEntry]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """A key without its secret."""

    name: str
    scopes: tuple[str, ...]
    workload: str | None
    only: list[str]
    created: datetime
    expires: datetime | None = None
    tenant: str | None = None  # whose models it asks


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A new key, in the only place where it is ever said."""

    name: str
    key: str
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadLines:
    """Lines of one workload: accepted = stored + in flight + dead + discarded + skipped."""

    accepted: int = 0
    stored: int = 0
    dead: int = 0
    discarded: int = 0
    skipped: int = 0
    anomalous: int = 0
    normal: int = 0
    warming: int = 0
    unclassified: int = 0
    in_flight: int = 0
    watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutLines:
    """What was left out of the rates and numbers of one workload since its first line, and lines whose times
    were ahead of the clock."""

    ahead: int
    lead_minutes: int  # the most that these were ahead, of those that a time zone explains
    late: int
    out_of_range: int
    values: int  # of numbers
    session_events: int  # past a limit
    failed: int  # lines, events of sessions and findings that were lost with a failure
    at_ms: int  # when one of these last grew
    sentences: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedCount:
    """Something that was lost, counted since the deployment began."""

    kind: str
    count: int
    what: str  # what one of it is, as a plural


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorker(WorkerView):
    """A live worker with the version it serves of each model."""

    serves: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """The messages of a queue; `served`: a live worker takes from it."""

    queue: str
    messages: int
    served: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRoom:
    """The disk of a folder, in bytes."""

    folder: str
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """The GPU pool in numbers; `trouble` names each unusable device and its reason."""

    devices: int
    usable: int
    leases: int
    waiting: int
    trouble: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """Facts of a pipeline; `status --json` prints the fields under these names."""

    model: Live | None  # the shared one
    models: list[Live]
    model_faults: dict[str, dict[str, str]]  # live version -> machine -> why it cannot be read there
    training: Status  # the current or the last
    trainings_waiting: int
    decisions: dict[str, dict[str, Any]]  # model -> what the controller decided last
    retrained: dict[str, dict[str, Any]]  # model -> why it was trained again last
    versions_stored: int | None  # None while the store does not answer
    watchlist: dict[str, Any]  # version, patterns
    batches: int  # in flight
    bytes: int
    stages: dict[str, int]
    dead: dict[str, int]  # batches, bytes
    closed: str | None  # why intake is paused
    full: str | None  # why intake refuses fresh batches
    warming_batches: int
    trouble: Trouble | None
    redis_loss: RedisLoss | None  # shown for a week after Redis came up empty
    watching: dict[str, float]
    dropped: list[DroppedCount]  # lost on the way in, or on the way to the watcher
    left_out: dict[str, LeftOutLines]  # by workload, of those where something was left out in the last day
    gpus: PoolCounts
    flower: str | None
    metrics: str | None
    intake: list[str]  # where the stack takes lines in
    api: str | None  # where the stack is asked
    workers: list[ServingWorker]
    workloads: dict[str, WorkloadLines]
    unwatched: str  # "score" or "skip": lines of workloads that are not watched
    results: dict[str, int] | None  # rows, files, bytes; None without Parquet, or while the store is away
    results_keep: dict[str, float]  # seconds by table, and bytes (size); what is absent stays for ever
