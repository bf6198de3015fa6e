"""Values of answers that are worked out from what is stored: comparisons, sessions, values of variables.

They need no package beside those of a plain installation, so a client reads them too."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from pipeline.service.values import Line

COMPARED_SPAN: Final = "1h"
NEWS_SPAN: Final = "24h"
SESSION_RECORDS: Final = 500
VALUED_LINES: Final = 500  # lines whose values are counted


class ChangeKind(StrEnum):
    """How a pattern differs in the first span."""

    NEW = "new"
    GONE = "gone"
    MORE = "more"
    FEWER = "fewer"


class Certainty(StrEnum):
    """How sure a difference is."""

    CLEAR = "clear"
    LIKELY = "likely"
    BURST = "burst"  # many lines at once, which may be one event
    FEW = "few"  # so few lines that chance explains them


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """[since, until) of the workloads that match a pattern; None: all."""

    since: datetime
    until: datetime
    workload: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One pattern. `workload`: "" where workloads are compared. `change`: its rate in `a` over that in `b`,
    with one line added to both. `p_value`: the chance without a change, of all compared patterns together.
    """

    kind: ChangeKind
    workload: str
    template_id: int
    template: str | None
    sample: str | None
    a: int
    b: int
    change: float
    p_value: float
    certainty: Certainty
    anomalous: int
    severe: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences of `a` from `b`, by kind, the surest first. `alike`: patterns without one. `lines`: of
    `a` and of `b`."""

    a: ComparedSide
    b: ComparedSide
    differences: list[Difference]
    compared: int
    alike: int
    lines: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    """A calm template unlike all that training has seen, with its strangest record, which came `at` a time.

    `why`: a sentence without a full stop. `usual`: the word that most often stood where the record has
    another one, "" where more differs. `first`, `last`: of all its records in the span."""

    workload: str
    template_id: int
    message: str
    level: str | None
    why: str
    usual: str
    score: float
    records: int
    first: datetime
    last: datetime
    at: datetime
    record_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsPage:
    """Calm lines never said before, the newest 24 hours of the span first, in each the strangest first.

    `missing`: stored lines that could not be looked at, because their files are gone."""

    news: list[NewLine]
    since: datetime
    until: datetime
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinding:
    """A session that left the course of the others: why, and its events as they came."""

    key: str
    workload: str
    at: datetime
    why: str
    events: list[str]
    score: float | None
    template_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInHand:
    """A session that is not judged yet: its events so far in one workload."""

    workload: str
    events: int
    began: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDifference:
    """A template that a session has `here` times, and the nearest normal session `there` times."""

    template_id: int
    template: str | None
    here: int
    there: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestSession:
    """The normal session that is nearest to one by how often each template occurs, of the distinct ones that
    the live model has learnt of a workload. `events`: of it. `differences`: the heaviest first, cut at 50."""

    workload: str
    version: str
    learnt: int  # sessions
    events: int
    differences: list[EventDifference]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecords:
    """The records that hold a key, the oldest first. `more`: there are older ones. `findings`: of sessions
    with this key. `in_hand`: where it is still open. `nearest`: of each workload whose sessions the live
    model has learnt, where all records are here."""

    key: str
    since: datetime
    until: datetime
    lines: list[Line]
    more: bool
    workloads: list[str]
    findings: list[SessionFinding]
    in_hand: list[SessionInHand]
    nearest: list[NearestSession] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableValues:
    """One variable: its place from 1, its mask ("*" where none is known), and its most frequent values with
    their counts. `distinct`: how many different ones the lines have."""

    place: int
    mask: str
    values: list[tuple[str, int]]
    distinct: int
    lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualValues:
    """The usual values of a typed variable of a template in a workload.
    `values`: the weight of those of the last hours. `kind` None: it is not followed, and `summary` says
    why."""

    workload: str
    name: str
    kind: str | None
    values: int
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateValues:
    """The values of a template's variables in its newest lines of a span, and the hosts and levels of these.
    `lines`: how many were looked at. `usual`: what the watcher has learnt of its numbers."""

    template_id: int
    template: str | None
    since: datetime
    until: datetime
    lines: int
    variables: list[VariableValues]
    hosts: dict[str, int]
    levels: dict[str, int]
    usual: list[UsualValues] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePage:
    """Stored lines as a file of a kind. `next`: the cursor of the older ones, None at the end. `missing`: of
    the first page, the stored lines of the whole span whose files are gone."""

    body: bytes
    lines: int
    next: str | None
    missing: int = 0
