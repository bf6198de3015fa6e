"""A client of the API of a pipeline, with the standard library and msgspec alone.

    from pipeline import Client
    client = Client("http://127.0.0.1:4380", key=Path("logweir-data/api.key").read_text().strip())
    for line in client.lines(LinesAsked(workload="shop/*", level="error")).lines:
        print(line.timestamp, line.message)

It answers as `Local` does, with the same values. Environment variables of proxies are ignored: a key goes to
the named server and to no other one.
"""

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from pipeline.controller.training_status import Status
from pipeline.errors import AnswerCancelled, BadInput, LeaseRefused, NotFound, SourceUnavailable
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
    TablePage,
    TemplateValues,
)
from pipeline.service.values import (
    Action,
    AuditPage,
    CanInfer,
    DeadBatch,
    DeadLetterPage,
    HeardSender,
    IncidentPage,
    IncidentView,
    KeyView,
    LinePage,
    MarksView,
    ModelView,
    OneIncident,
    PatternPage,
    RateTable,
    SenderPage,
    SilenceView,
    StackStatus,
    UsageView,
    WatchlistView,
)
from pipeline.sources.backfill.plans import BackfillView

PREFIX: Final = "/api/v1"
TIMEOUT_S: Final = 70.0  # more than the server takes at most
PAGE: Final = 1_000
MAX_ANSWER: Final = 256 << 20  # bytes

AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0)  # before a page of a table is asked for again

T = TypeVar("T")
TableKind = Literal["csv", "parquet"]


class Event(NamedTuple):
    """Something has changed. `id`: to come back with. `changed`: its name, "begin" at first."""

    id: str
    changed: str


class Client:
    """One API. Every method raises BadInput for what the server refuses (NotFound for what it lacks),
    and SourceUnavailable where it does not answer."""

    def __init__(
        self, url: str, key: str = "", *, timeout_s: float = TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> None:
        """`url`: http://host:4380 or https://host. Raises BadInput."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise BadInput(f"{url[:100]!r} is no address of an API; write it like http://127.0.0.1:4380")
        if not key.isascii() or not key.isprintable():
            raise BadInput("the key has characters that no key has; look for a line end or a quote")
        self.url = url.rstrip("/")
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._headers = {"Accept": "application/json", "User-Agent": "logweir-client"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def status(self) -> StackStatus:
        """The workers, the waiting batches and the live models."""
        return self._get("/status", StackStatus)

    def health(self, target: str = "", *, ready: bool = False) -> PipelineHealth:
        """Whether a worker or a role is well; "": everything. `ready`: it also serves the live model."""
        return self._get("/health", PipelineHealth, _query(target=target, ready=ready))

    def lines(self, asked: LinesAsked) -> LinePage:
        """Stored lines that match, the newest first; asks for as many pages as the limit needs."""
        query = _filters_of(asked) | _query(context=asked.context)
        cursor, left = asked.cursor, asked.limit
        page = self._get("/lines", LinePage, query | _query(limit=_size(left, asked), cursor=cursor))
        found, left, missing = list(page.lines), left - len(page.lines), page.missing
        while page.next is not None and left > 0:
            page = self._get("/lines", LinePage, query | _query(limit=min(left, PAGE), cursor=page.next))
            found += page.lines
            left -= len(page.lines)
            missing = max(missing, page.missing)  # pages may meet the same files
        return replace(page, lines=found, missing=missing)

    def tables(self, asked: LinesAsked, kind: TableKind) -> Iterator[TablePage]:
        """All stored lines that match, with all columns, as files: the pages of one CSV, or Parquet files.

        A page that does not come is asked for again, for half a minute. Raises SourceUnavailable then."""
        query = _filters_of(asked) | _query(format=kind)
        cursor, lines = asked.cursor, 0
        while True:
            page = self._table(f"/export?{urlencode(query | _query(cursor=cursor))}", lines)
            yield page
            lines += page.lines
            cursor = page.next
            if cursor is None:
                return

    def around(self, record_id: str, records: int, at: datetime | None = None) -> LinePage:
        """A stored line with so many before and after it. `at`: its time, which spares a search."""
        path = f"/lines/{quote(record_id, safe='')}/context"
        return self._get(path, LinePage, _query(records=records, at=at))

    def patterns(self, asked: PatternsAsked) -> PatternPage:
        """The frequency of patterns; asks for as many pages as the limit needs."""
        query = _query(
            since=asked.since, until=asked.until, against=asked.against, workload=asked.workload,
            template=asked.template_id, anomalous=asked.anomalous, order=asked.order, buckets=asked.buckets,
        )  # fmt: skip
        left = asked.limit
        first = page = self._get(
            "/patterns", PatternPage, query | _query(limit=min(left, PAGE), cursor=asked.cursor)
        )
        found = list(page.patterns)
        while page.next is not None and len(found) < left:
            more = _query(limit=min(left - len(found), PAGE), cursor=page.next)
            page = self._get("/patterns", PatternPage, query | more)
            found += page.patterns
        return replace(first, patterns=found, next=page.next)

    def units(self, asked: UnitsAsked) -> UnitsFound:
        """The units of a span compared with normal ones, the most unusual first."""
        query = _query(
            by=asked.by, since=asked.since, until=asked.until, normal=asked.normal, workload=asked.workload,
            limit=min(asked.limit, PAGE),
        )  # fmt: skip
        return self._get("/units", UnitsFound, query)

    def rates(
        self, since: datetime, until: datetime, workload: str | None = None, buckets: int = 24
    ) -> RateTable:
        """Lines by workload and time."""
        query = _query(since=since, until=until, workload=workload, buckets=buckets)
        return self._get("/rates", RateTable, query)

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
        query = _query(a=a, b=b, workload=workload, other=other, kind=kind, limit=limit)
        return self._get("/compare", Comparison, query)

    def news(self, since: datetime, until: datetime, workload: str | None = None) -> NewsPage:
        """Calm lines of a span that were never said before: they make no incident."""
        return self._get("/news", NewsPage, _query(since=since, until=until, workload=workload))

    def sessions(self, since: datetime, until: datetime, limit: int = 100) -> list[SessionFinding]:
        """Sessions that left the course of the others, the newest first."""
        return self._get("/sessions", list[SessionFinding], _query(since=since, until=until, limit=limit))

    def session(
        self, key: str, since: datetime, until: datetime, limit: int = SESSION_RECORDS
    ) -> SessionRecords:
        """The records that hold a key, such as the id of a trace, and what was found in such sessions."""
        query = _query(key=key, since=since, until=until, limit=limit)
        return self._get("/sessions/records", SessionRecords, query)

    def values(
        self,
        template_id: int,
        since: datetime,
        until: datetime,
        workload: str | None = None,
        lines: int = VALUED_LINES,
    ) -> TemplateValues:
        """The values of a pattern's variables in so many of its newest lines."""
        query = _query(since=since, until=until, workload=workload, lines=lines)
        return self._get(f"/patterns/T{template_id}/values", TemplateValues, query)

    def incidents(self, *, only_open: bool = False, since: datetime | None = None) -> IncidentPage:
        """All incidents, the newest first."""
        query = _query(open=only_open, since=since, limit=PAGE)
        page = self._get("/incidents", IncidentPage, query)
        found: list[IncidentView] = list(page.incidents)
        while page.next is not None:
            page = self._get("/incidents", IncidentPage, query | _query(cursor=page.next))
            found += page.incidents
        return IncidentPage(incidents=found, kept=page.kept, unseen=page.unseen)

    def incident(self, name: str) -> OneIncident:
        """One by its id, or the beginning of it."""
        if not name:
            raise BadInput("there is no incident ''; `logweir incidents` lists them")
        return self._get(f"/incidents/{quote(name, safe='')}", OneIncident)

    def decide(
        self,
        incident: str,
        action: Action,
        *,
        seen: datetime | None = None,
        lasts: str | None = None,
        why: str = "",
    ) -> IncidentView:
        """Acknowledges, resolves, snoozes or reopens an incident, by its id or the beginning of it. `seen`:
        the last line that the person saw; `lasts`: of a snooze, 15m, 1h, 7d. It needs the scope `mark`."""
        body = {"seen": seen, "lasts": lasts, "why": why}
        return self.call("POST", f"/incidents/{quote(incident, safe='')}/{action}", IncidentView, body)

    def incident_notes(self, name: str) -> list[IncidentNote]:
        """Notes on an incident, the oldest first, by its id or the beginning of it."""
        return self._get(f"/incidents/{quote(name, safe='')}/notes", list[IncidentNote])

    def write_note(self, incident: str, text: str) -> IncidentNote:
        """Writes a note on an incident, of at most 2,000 characters. It needs the scope `mark`."""
        return self.call("POST", f"/incidents/{quote(incident, safe='')}/notes", IncidentNote, {"text": text})

    def models(self) -> list[ModelView]:
        """Model versions and their states."""
        return self._get("/models", list[ModelView])

    def model(self, version: str | None = None) -> dict[str, Any]:
        """The manifest and state of a version; None: of the live one."""
        return self._get(f"/models/{quote(version or 'live', safe='')}", dict[str, Any])

    def trainings(self) -> list[Status]:
        """Trainings that wait, run or ran, the newest first."""
        return self._get("/trainings", list[Status])

    def watchlist(self) -> WatchlistView:
        """Whose logs get models by themselves."""
        return self._get("/watchlist", WatchlistView)

    def marks(self) -> MarksView:
        """The labels that people gave to patterns."""
        return self._get("/marks", MarksView)

    def silences(self) -> list[SilenceView]:
        """Incidents that people do not want to see for now; also those that ended within a week."""
        return self._get("/silences", list[SilenceView])

    def silence(
        self, workload: str, *, lasts: str, why: str, template: str | None = None, service: str = ""
    ) -> SilenceView:
        """Shows incidents of these causes apart for 15m, 2h or 7d. `workload`: a pattern; `template`: T17;
        `service`: a pattern of the last part of a workload's name. It needs the scope `mark`."""
        body = {"workload": workload, "lasts": lasts, "why": why, "template": template, "service": service}
        return self.call("POST", "/silences", SilenceView, body)

    def end_silence(self, name: str) -> SilenceView:
        """Ends one now, by its id or the beginning of it. It needs the scope `mark`."""
        return self.call("DELETE", f"/silences/{quote(name, safe='')}", SilenceView)

    def dead_letters(self, limit: int | None = None) -> DeadLetterPage:
        """Batches that could not be processed, the newest first; None: all."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            size = PAGE if limit is None else min(PAGE, limit - len(found))
            page = self._get("/dead-letters", DeadLetterPage, _query(limit=size, cursor=cursor))
            found += page.batches
            cursor = page.next
            if cursor is None or (limit is not None and len(found) >= limit):
                return DeadLetterPage(batches=found, total=page.total, next=cursor)

    def dead_batches(self, batch_ids: Sequence[str]) -> list[DeadBatch]:
        """These with their records; "all": every one."""
        names = batch_ids
        if list(batch_ids) == ["all"]:
            names = [letter.batch_id for letter in self.dead_letters().batches]
        return [self._get(f"/dead-letters/{quote(name, safe='')}", DeadBatch) for name in names]

    def senders(self) -> list[HeardSender]:
        """Who sends to the intake, the one that was heard last first."""
        page = self._get("/senders", SenderPage, _query(limit=PAGE))
        found = list(page.senders)
        while page.next is not None:
            page = self._get("/senders", SenderPage, _query(limit=PAGE, cursor=page.next))
            found += page.senders
        return sorted(found, key=lambda sender: sender.last, reverse=True)

    def backfills(self) -> list[BackfillView]:
        """Backfills and how far they are, the newest first."""
        return self._get("/backfills", list[BackfillView])

    def keys(self) -> list[KeyView]:
        """Keys without their secrets, by name. It needs the scope `admin`."""
        return self._get("/keys", list[KeyView])

    def gpus(self) -> dict[str, Any]:
        """The GPU pool: devices, leases, waiting needs."""
        return self._get("/gpu", dict[str, Any])

    def gpu_leases(self) -> list[dict[str, Any]]:
        """Leases that live; their tokens for a key with the scope `operate`."""
        return self._get("/gpu/leases", list[dict[str, Any]])

    def gpu_tenants(self) -> dict[str, Any]:
        """Who may use the pool (`tenants`), and after how many seconds use counts half (`half_life_s`)."""
        return self._get("/gpu/tenants", dict[str, Any])

    def gpu_jobs(self) -> list[dict[str, Any]]:
        """Jobs that ended lately, then those that live; their commands for a key with the scope `operate`."""
        return self._get("/gpu/jobs", list[dict[str, Any]])

    def gpu_job_output(self, job: str, since: int = 0, rank: int = 0) -> dict[str, Any]:
        """The kept output of a rank of a job from byte `since` on (`output`, in base64), where it goes on
        (`next`), and whether the job has ended. The key needs the scope `operate`. Raises NotFound."""
        path = f"/gpu/jobs/{quote(job, safe='')}/output"
        return self._get(path, dict[str, Any], _query(since=since, rank=rank))

    def gpu_models(self) -> list[dict[str, Any]]:
        """Every version of every served model, where its copies are, and why it has fewer than wanted."""
        return self._get("/gpu/models", list[dict[str, Any]])

    def gpu_usage(self, by: UsageColumn, since: datetime | None, until: datetime | None) -> UsageView:
        """Hours of ended leases."""
        return self._get("/gpu/usage", UsageView, _query(by=by, since=since, until=until))

    def can_infer(self) -> CanInfer:
        """Whether unknown lines would be scored on a GPU now."""
        return self.call("POST", "/gpu/can-infer", CanInfer)

    def audit(self, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Who changed what, the newest first."""
        return self._get("/audit", AuditPage, _query(limit=limit, cursor=cursor))

    def event_log(self, since: str | None = None, limit: int = 100, types: Sequence[str] = ()) -> EventPage:
        """The first `limit` events behind an id, or the newest without one; of these types, such as
        `model.*`. `last` of the page is `since` of the next one."""
        query = _query(since=since, limit=limit, type=",".join(types))
        return self._get("/events/log", EventPage, query)

    def call(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        """Any route below /api/v1, with a JSON body: `client.call("POST", "/marks", MarkView, {...})`."""
        payload = None if body is None else msgspec.json.encode(body)
        return self._decoded(self._answer(method, path, payload), kind)

    def events(self, last_id: str = "") -> Iterator[Event]:
        """Changes, for as long as the server sends. `last_id`: of the last event that was seen."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        connection, response = self._sent("GET", "/events", None, headers)
        try:
            self._check(response)
            event_id = name = ""
            for raw in response:
                field, _, value = raw.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
                if field == "id":
                    event_id = value
                elif field == "event":
                    name = value
                elif not field and name:
                    yield Event(event_id, name)
                    name = ""
        except (OSError, http.client.HTTPException) as exc:
            raise self._no_answer(exc) from exc
        finally:
            connection.close()

    def _get(self, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> T:
        return self._decoded(
            self._answer("GET", path + (f"?{urlencode(query)}" if query else ""), None), kind
        )

    def _decoded(self, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as exc:
            raise SourceUnavailable(
                f"{self.url} does not answer as this version expects ({exc}); see whether it is Logweir, and "
                "which version"
            ) from exc

    def _table(self, path: str, before: int) -> TablePage:
        """A page of a table. `before`: lines that have come already."""
        for pause_s in (*AGAIN_S, None):
            try:
                answer, headers = self._exchanged("GET", path, None)
            except (SourceUnavailable, AnswerCancelled) as exc:
                if pause_s is None:
                    raise SourceUnavailable(
                        f"the lines were cut off after {before:,}: {exc}; ask again, or for parts of the span"
                    ) from exc
                time.sleep(pause_s)
            else:
                break
        count = headers.get("X-Lines", "")
        if not (count.isascii() and count.isdecimal()):
            raise SourceUnavailable(
                f"{self.url} gives no tables; see whether it is Logweir, and which version"
            )
        missing = int(headers.get("X-Missing", 0))
        return TablePage(body=answer, lines=int(count), next=headers.get("X-Next"), missing=missing)

    def _answer(self, method: str, path: str, body: bytes | None) -> bytes:
        return self._exchanged(method, path, body)[0]

    def _exchanged(self, method: str, path: str, body: bytes | None) -> tuple[bytes, http.client.HTTPMessage]:
        connection, response = self._sent(method, path, body, {})
        try:
            self._check(response)
            answer = response.read(MAX_ANSWER + 1)
            cut = len(answer) <= MAX_ANSWER and bool(response.length)  # of bytes that were announced
        except (OSError, http.client.HTTPException) as exc:
            raise self._no_answer(exc) from exc
        finally:
            connection.close()
        if len(answer) > MAX_ANSWER:
            raise BadInput(f"{self.url} answers with more than {MAX_ANSWER:,} bytes; ask for less")
        if cut:
            raise SourceUnavailable(f"{self.url} broke its answer off after {len(answer):,} bytes; ask again")
        return answer, response.headers

    def _sent(
        self, method: str, path: str, body: bytes | None, more: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._tls
            )
        )
        headers = self._headers | dict(more)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, f"{self._path}{PREFIX}{path}", body, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise self._no_answer(exc) from exc

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status < 300:
            return
        try:
            sentence = str(json.loads(response.read(65_536))["detail"])
        except (ValueError, KeyError, TypeError):
            sentence = f"{self.url} answers with {response.status}; see whether it is the API of Logweir"
        match response.status:
            case 404:
                raise NotFound(sentence)
            case 409:
                raise LeaseRefused(sentence)
            case 504:
                raise AnswerCancelled(sentence)
            case status if status >= 500:
                raise SourceUnavailable(sentence)
        raise BadInput(sentence)

    def _no_answer(self, exc: Exception) -> SourceUnavailable:
        return SourceUnavailable(
            f"{self.url} does not answer ({exc}); see whether the API runs, and where, with `logweir status`"
        )


def _size(left: int, asked: LinesAsked) -> int:
    return left if asked.context else min(left, PAGE)


def _filters_of(asked: LinesAsked) -> dict[str, str]:
    """The parameters that choose lines."""
    return _query(
        since=asked.since, until=asked.until, workload=asked.workload, level=asked.level, text=asked.text,
        template=asked.template_id, anomalous=asked.anomalous,
    )  # fmt: skip


def _query(**values: Any) -> dict[str, str]:
    """Parameters of a URL, without those that are not given."""
    found = {}
    for name, value in values.items():
        if value is None or value is False or value == "":
            continue
        if isinstance(value, datetime):
            found[name] = value.isoformat()
        else:
            found[name] = "true" if value is True else str(value)
    return found
