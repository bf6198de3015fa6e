"""The questions of a verb, answered from the Redis and the store of this machine's settings."""

import functools
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import redis

from pipeline.controller.training_status import Status
from pipeline.errors import BadSetting
from pipeline.observe.events import EventPage, read_events
from pipeline.records.batch import utc_now
from pipeline.redis.connection import connect
from pipeline.service.handover.values import IncidentNote
from pipeline.service.questions import BUCKETS, LinesAsked, PatternsAsked, UsageColumn
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
from pipeline.settings import Settings
from pipeline.sources.backfill.plans import BackfillView

if TYPE_CHECKING:
    from pipeline.sinks.answers.answers import Answers


class Local:
    """`PipelineReader` by settings, which are those of a running pipeline or of stored results.

    A question imports what it needs, so that most of them need no extra of the package."""

    def __init__(self, settings: Settings, *, timeout_s: float | None = None) -> None:
        """`timeout_s`: of Redis."""
        self.settings = settings
        self._timeout_s = timeout_s

    @functools.cached_property
    def client(self) -> "redis.Redis":
        """Connects with the first command."""
        if self._timeout_s is None:
            return connect(self.settings)
        return connect(self.settings, timeout_s=self._timeout_s)

    def _answers(self) -> "closing[Answers]":
        from pipeline.sinks.answers.choose import answers_of

        return closing(answers_of(self.settings))

    def _client_if_any(self) -> "redis.Redis | None":
        """None where no stack is known: results are read all the same."""
        with suppress(BadSetting):
            return self.client
        return None

    def status(self) -> StackStatus:
        """As the protocol says."""
        from pipeline.service.status import read_status

        return read_status(self.settings, self.client)

    def health(self, target: str = "", *, ready: bool = False) -> PipelineHealth:
        """As the protocol says."""
        from pipeline.service.running.health import read_health

        return read_health(self.client, self.settings, target, ready=ready)

    def lines(self, asked: LinesAsked) -> LinePage:
        """As the protocol says."""
        from pipeline.service.lines import stored_lines

        with self._answers() as answers:
            return stored_lines(answers, self.settings, asked)

    def around(self, record_id: str, records: int, at: datetime | None = None) -> LinePage:
        """As the protocol says."""
        from pipeline.service.lines import around_line

        with self._answers() as answers:
            return around_line(answers, self.settings, record_id=record_id, at=at, records=records)

    def patterns(self, asked: PatternsAsked) -> PatternPage:
        """As the protocol says."""
        from pipeline.service.lines import stored_patterns

        with self._answers() as answers:
            return stored_patterns(answers, self.client, self.settings, asked)

    def units(self, asked: UnitsAsked) -> UnitsFound:
        """As the protocol says."""
        from pipeline.service.stored.units import stored_units

        with self._answers() as answers:
            return stored_units(answers, self._client_if_any(), self.settings, asked, now=utc_now())

    def rates(
        self, since: datetime, until: datetime, workload: str | None = None, buckets: int = BUCKETS
    ) -> RateTable:
        """As the protocol says."""
        from pipeline.service.lines import stored_rates

        with self._answers() as answers:
            return stored_rates(answers, since=since, until=until, workload=workload, buckets=buckets)

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
        """As the protocol says."""
        from pipeline.service.stored.compare import compare_stored, compared_sides

        sides = compared_sides(a, b, utc_now(), workload=workload, other=other)
        with self._answers() as answers:
            return compare_stored(answers, self.client, self.settings, sides, kind=kind, limit=limit)

    def news(self, since: datetime, until: datetime, workload: str | None = None) -> NewsPage:
        """As the protocol says."""
        from pipeline.service.stored.news import stored_news

        with self._answers() as answers:
            return stored_news(
                answers, self._client_if_any(), self.settings,
                since=since, until=until, workload=workload, now=utc_now(),
            )  # fmt: skip

    def sessions(self, since: datetime, until: datetime, limit: int = 100) -> list[SessionFinding]:
        """As the protocol says."""
        from pipeline.service.stored.sessions import session_findings

        with self._answers() as answers:
            return session_findings(answers, since=since, until=until, limit=limit)

    def session(
        self, key: str, since: datetime, until: datetime, limit: int = SESSION_RECORDS
    ) -> SessionRecords:
        """As the protocol says."""
        from pipeline.service.stored.sessions import stored_session

        with self._answers() as answers:
            return stored_session(answers, self.client, self.settings, key, span=(since, until), limit=limit)

    def values(
        self,
        template_id: int,
        since: datetime,
        until: datetime,
        workload: str | None = None,
        lines: int = VALUED_LINES,
    ) -> TemplateValues:
        """As the protocol says."""
        from pipeline.service.variables import stored_values

        asked = LinesAsked(limit=lines, since=since, until=until, workload=workload, template_id=template_id)
        with self._answers() as answers:
            return stored_values(answers, self.client, self.settings, asked)

    def incidents(self, *, only_open: bool = False, since: datetime | None = None) -> IncidentPage:
        """As the protocol says."""
        from pipeline.service.incidents import read_incidents

        return read_incidents(self.client, self.settings, utc_now(), only_open=only_open, since=since)

    def incident(self, name: str) -> OneIncident:
        """As the protocol says."""
        from pipeline.service.incidents import read_incident

        return read_incident(self.client, self.settings, utc_now(), name)

    def incident_notes(self, name: str) -> list[IncidentNote]:
        """As the protocol says."""
        from pipeline.service.handover.notes import notes_of

        return notes_of(self.client, self.settings, name)

    def models(self) -> list[ModelView]:
        """As the protocol says."""
        from pipeline.models.registry import Registry
        from pipeline.service.models import read_models

        return read_models(Registry(self.client, self.settings))

    def model(self, version: str | None = None) -> dict[str, Any]:
        """As the protocol says."""
        from pipeline.models.registry import Registry
        from pipeline.service.models import read_model

        return read_model(Registry(self.client, self.settings), version)

    def trainings(self) -> list[Status]:
        """As the protocol says."""
        from pipeline.service.trainings import read_trainings

        return read_trainings(self.client, self.settings)

    def watchlist(self) -> WatchlistView:
        """As the protocol says."""
        from pipeline.service.watchlist import read_watchlist

        return read_watchlist(self.client, self.settings)

    def marks(self) -> MarksView:
        """As the protocol says."""
        from pipeline.service.marks import read_marks

        return read_marks(self.client, self.settings)

    def silences(self) -> list[SilenceView]:
        """As the protocol says."""
        from pipeline.service.incidents import silences_in_use

        return silences_in_use(self.client, self.settings, utc_now())

    def dead_letters(self, limit: int | None = None) -> DeadLetterPage:
        """As the protocol says."""
        from pipeline.service.dead_letters import read_dead_letters

        return read_dead_letters(self.client, self.settings, limit=limit)

    def dead_batches(self, batch_ids: Sequence[str]) -> list[DeadBatch]:
        """As the protocol says."""
        from pipeline.ledger.ledger import Ledger
        from pipeline.service.dead_letters import chosen_letters, read_dead_batch

        letters = chosen_letters(Ledger(self.client, self.settings), batch_ids)
        return [read_dead_batch(self.client, self.settings, letter.batch_id) for letter in letters]

    def senders(self) -> list[HeardSender]:
        """As the protocol says."""
        from pipeline.service.senders import read_senders

        return list(read_senders(self.client, self.settings))

    def backfills(self) -> list[BackfillView]:
        """As the protocol says."""
        from pipeline.service.running.backfills import read_backfills

        return read_backfills(self.client, self.settings)

    def keys(self) -> list[KeyView]:
        """As the protocol says."""
        from pipeline.service.access.key_changes import read_keys

        return read_keys(self.client, self.settings)

    def gpus(self) -> dict[str, Any]:
        """As the protocol says."""
        from pipeline.gpu.pool import Pool
        from pipeline.service.pool_facts import pool_facts

        return pool_facts(Pool(self.client, self.settings).snapshot())

    def gpu_leases(self) -> list[dict[str, Any]]:
        """As the protocol says."""
        from pipeline.gpu.pool import Pool
        from pipeline.service.pool_facts import lease_rows

        return lease_rows(Pool(self.client, self.settings).snapshot())

    def gpu_tenants(self) -> dict[str, Any]:
        """As the protocol says."""
        from pipeline.gpu.pool import Pool
        from pipeline.service.pool_facts import tenant_rows

        snapshot = Pool(self.client, self.settings).snapshot()
        return {"tenants": tenant_rows(snapshot), "half_life_s": snapshot.half_life_s}

    def gpu_jobs(self) -> list[dict[str, Any]]:
        """As the protocol says."""
        from pipeline.service.gpu import job_rows

        return job_rows(self.client, self.settings)

    def gpu_job_output(self, job: str, since: int = 0, rank: int = 0) -> dict[str, Any]:
        """As the protocol says."""
        from pipeline.service.gpu import job_output

        return job_output(self.client, self.settings, job, since, rank)

    def gpu_models(self) -> list[dict[str, Any]]:
        """As the protocol says."""
        from pipeline.service.gpu import served_rows

        return served_rows(self.client, self.settings)

    def gpu_usage(self, by: UsageColumn, since: datetime | None, until: datetime | None) -> UsageView:
        """As the protocol says."""
        from pipeline.service.gpu import read_usage

        return read_usage(self.settings, by, since, until)

    def audit(self, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """As the protocol says."""
        from pipeline.service.access.audit import read_audit

        return read_audit(self.client, self.settings, limit=limit, cursor=cursor)

    def event_log(self, since: str | None = None, limit: int = 100, types: Sequence[str] = ()) -> EventPage:
        """As the protocol says."""
        return read_events(self.client, self.settings, since=since, limit=limit, types=types)
