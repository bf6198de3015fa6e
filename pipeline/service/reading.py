"""Every question that a verb asks, of the pipeline on this machine or of one behind an API.

`Local` and `Client` both answer it, with the same values: a test runs each verb with both and compares.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from pipeline.controller.training_status import Status
from pipeline.observe.events import EventPage
from pipeline.service.handover.values import IncidentNote
from pipeline.service.questions import LinesAsked, PatternsAsked, UsageColumn
from pipeline.service.running.values import PipelineHealth
from pipeline.service.stored.asked_units import UnitsAsked, UnitsFound
from pipeline.service.stored.values import (
    COMPARED_SPAN,
    SESSION_RECORDS,
    VALUED_LINES,
    ChangeKind,
    Comparison,
    NewsPage,
    SessionFinding,
    SessionRecords,
    TemplateValues,
)
from pipeline.service.values import (
    AuditPage,
    DeadBatch,
    DeadLetterPage,
    HeardSender,
    IncidentPage,
    KeyView,
    LinePage,
    MarksView,
    ModelView,
    OneIncident,
    PatternPage,
    RateTable,
    SilenceView,
    StackStatus,
    UsageView,
    WatchlistView,
)
from pipeline.sources.backfill.plans import BackfillView


class PipelineReader(Protocol):
    """The questions. They raise BadInput, and RedisUnavailable, SinkUnavailable or StoreUnavailable where
    something does not answer."""

    def status(self) -> StackStatus:
        """The workers, the waiting batches and the live models."""

    def health(self, target: str = "", *, ready: bool = False) -> PipelineHealth:
        """Whether a worker or a role is well; "": everything. `ready`: it also serves the live model."""

    def lines(self, asked: LinesAsked) -> LinePage:
        """Stored lines that match, the newest first."""

    def around(self, record_id: str, records: int, at: datetime | None = None) -> LinePage:
        """A stored line with so many before and after it. `at`: its time, which spares a search."""

    def patterns(self, asked: PatternsAsked) -> PatternPage:
        """The frequency of patterns."""

    def units(self, asked: UnitsAsked) -> UnitsFound:
        """The units of a span compared with normal ones, the most unusual first."""

    def rates(
        self, since: datetime, until: datetime, workload: str | None = None, buckets: int = 24
    ) -> RateTable:
        """Lines by workload and time."""

    def compare(
        self,
        a: str = COMPARED_SPAN,
        b: str | None = None,
        *,
        workload: str | None = None,
        other: str | None = None,
        kind: ChangeKind | None = None,
        limit: int = 1_000,
    ) -> Comparison:
        """How the patterns of two spans differ. `a`, `b`: 1h, 2h..1h, TIME..TIME; without
        `b` the span before. `other`: the workload of `b`, where it is another one."""

    def news(self, since: datetime, until: datetime, workload: str | None = None) -> NewsPage:
        """Calm lines of a span that were never said before: they make no incident."""

    def sessions(self, since: datetime, until: datetime, limit: int = 100) -> list[SessionFinding]:
        """Sessions that left the course of the others, the newest first."""

    def session(
        self, key: str, since: datetime, until: datetime, limit: int = SESSION_RECORDS
    ) -> SessionRecords:
        """The records that hold a key, such as the id of a trace, and what was found in such sessions."""

    def values(
        self,
        template_id: int,
        since: datetime,
        until: datetime,
        workload: str | None = None,
        lines: int = VALUED_LINES,
    ) -> TemplateValues:
        """The values of a pattern's variables in so many of its newest lines."""

    def incidents(self, *, only_open: bool = False, since: datetime | None = None) -> IncidentPage:
        """All incidents, the newest first."""

    def incident(self, name: str) -> OneIncident:
        """One by its id, or the beginning of it."""

    def incident_notes(self, name: str) -> list[IncidentNote]:
        """Notes on an incident, the oldest first."""

    def models(self) -> list[ModelView]:
        """Model versions and their states."""

    def model(self, version: str | None = None) -> dict[str, Any]:
        """The manifest and state of a version; None: of the live one."""

    def trainings(self) -> list[Status]:
        """Trainings that wait, run or ran, the newest first."""

    def watchlist(self) -> WatchlistView:
        """Whose logs get models by themselves."""

    def marks(self) -> MarksView:
        """The labels that people gave to patterns."""

    def silences(self) -> list[SilenceView]:
        """Incidents that people do not want to see for now; also those that ended within a week."""

    def dead_letters(self, limit: int | None = None) -> DeadLetterPage:
        """Batches that could not be processed, the newest first; None: all."""

    def dead_batches(self, batch_ids: Sequence[str]) -> list[DeadBatch]:
        """These with their records; "all": every one."""

    def senders(self) -> list[HeardSender]:
        """Who sends to the intake, the one that was heard last first."""

    def backfills(self) -> list[BackfillView]:
        """Backfills and how far they are, the newest first."""

    def keys(self) -> list[KeyView]:
        """Keys without their secrets, by name."""

    def gpus(self) -> dict[str, Any]:
        """The GPU pool: devices, leases, waiting needs."""

    def gpu_leases(self) -> list[dict[str, Any]]:
        """Leases that live."""

    def gpu_tenants(self) -> dict[str, Any]:
        """Who may use the pool (`tenants`), and after how many seconds use counts half (`half_life_s`)."""

    def gpu_jobs(self) -> list[dict[str, Any]]:
        """Jobs that ended lately, then those that live."""

    def gpu_job_output(self, job: str, since: int = 0, rank: int = 0) -> dict[str, Any]:
        """The kept output of a rank of a job from byte `since` on (`output`, in base64), where it goes on
        (`next`), and whether the job has ended. Raises NotFound."""

    def gpu_models(self) -> list[dict[str, Any]]:
        """Every version of every served model, where its copies are, and why it has fewer than wanted."""

    def gpu_usage(self, by: UsageColumn, since: datetime | None, until: datetime | None) -> UsageView:
        """Hours of ended leases."""

    def audit(self, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Who changed what, the newest first."""

    def event_log(self, since: str | None = None, limit: int = 100, types: Sequence[str] = ()) -> EventPage:
        """The first `limit` events behind an id, or the newest without one; of these types, such as
        `model.*`."""
