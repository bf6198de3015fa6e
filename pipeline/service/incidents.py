"""Incidents of a running pipeline: open and past ones, as the watcher has grouped them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import cast

import redis
from msgspec.structs import asdict

from pipeline.controller.watchlist import covers
from pipeline.errors import BadInput, NotFound
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import Target
from pipeline.records.left_out import AHEAD
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.cursors import page_of
from pipeline.service.incident_states import incident_state, read_decisions
from pipeline.service.silences import SilenceCover, read_silences
from pipeline.service.status import in_flight
from pipeline.service.values import (
    CauseView,
    Decision,
    IncidentPage,
    IncidentView,
    OneIncident,
    OriginView,
    SilenceView,
)
from pipeline.settings import Settings
from pipeline.units import epoch_us, plural
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.values import Cause, Incident
from pipeline.watching.rows import marked_as


def read_incidents(
    client: "redis.Redis",
    settings: Settings,
    now: datetime,
    *,
    only_open: bool = False,
    since: datetime | None = None,
    limit: int | None = None,
    cursor: str | None = None,
    only: tuple[str, ...] = (),
) -> IncidentPage:
    """The newest first, and behind them those that are ahead of the clock. `limit` None: all. `only`: those
    whose workloads these patterns cover.

    Raises RedisUnavailable, BadInput."""
    found = _incidents(client, settings, now, only)
    wanted = [i for i in found if (i.open or not only_open) and (since is None or i.last >= since)]
    # One of a broken clock would be the newest for years.
    wanted.sort(key=lambda i: _is_ahead(i, now))
    rows = [((_is_ahead(i, now), -epoch_us(i.first), i.id), i) for i in wanted]
    rows.sort(key=lambda row: row[0])
    size = max(1, len(rows)) if limit is None else limit
    page, following = page_of(rows, size, cursor, "incidents", only_open, since, only)
    # A list keeps the order of the watcher; a page of it has one that stays.
    shown = wanted if limit is None and cursor is None else page
    decided = read_decisions(client, settings) if shown else {}
    cover = SilenceCover(read_silences(client, settings, now) if shown else (), now)
    return IncidentPage(
        incidents=[incident_view(i, decided.get(i.id), cover, now, only) for i in shown],
        kept=len(found),
        unseen=[] if only else unseen_lines(client, settings),
        next=following,
    )


def read_incident(
    client: "redis.Redis", settings: Settings, now: datetime, name: str, only: tuple[str, ...] = ()
) -> OneIncident:
    """By its id or the beginning of it. Raises BadInput, RedisUnavailable."""
    found = _incidents(client, settings, now, only)
    incident = _chosen(found, name)
    like = next((i.first for i in found if i.id == incident.seen_before), None)
    unseen = [] if only else unseen_lines(client, settings)
    decision = read_decisions(client, settings).get(incident.id)
    cover = SilenceCover(read_silences(client, settings, now), now)
    view = incident_view(incident, decision, cover, now, only)
    return OneIncident(incident=view, like_began=like, unseen=unseen)


def silences_in_use(client: "redis.Redis", settings: Settings, now: datetime) -> list[SilenceView]:
    """All silences, each with the number of incidents that it covers. Raises RedisUnavailable."""
    found = read_incidents(client, settings, now).incidents
    used = Counter(name for one in found for name in one.silences)
    return [replace(one, incidents=used[one.id]) for one in read_silences(client, settings, now)]


def incident_view(
    incident: Incident,
    decision: Decision | None,
    cover: SilenceCover,
    now: datetime,
    only: tuple[str, ...] = (),
) -> IncidentView:
    """An incident for programs; `only`: workloads that may be named."""
    origins = [one for one in incident.origins if not only or covers(only, one.workload)]
    causes = [_cause_view(cause) for cause in incident.causes]
    state = incident_state(decision, now, incident)
    state, silenced_by = cover.state_of(state, causes)
    return IncidentView(
        id=incident.id,
        first=incident.first,
        last=incident.last,
        timed=incident.timed,
        open=incident.open,
        severity=incident.severity,
        score=incident.score,
        title=incident.title,
        workloads=list(incident.workloads),
        count=incident.count,
        seen=incident.seen,
        seen_before=incident.seen_before,
        causes=causes,
        more_causes=incident.more,
        state=state,
        decision=decision,
        silences=silenced_by,
        origins=[OriginView(workload=one.workload, reasons=list(one.reasons)) for one in origins],
        origin_clear=incident.clear and origins == list(incident.origins),
        ahead=_is_ahead(incident, now),
    )


def _is_ahead(incident: Incident, now: datetime) -> bool:
    return incident.first > now + AHEAD


def unseen_lines(client: "redis.Redis", settings: Settings) -> list[str]:
    """Accepted lines and batches that may still change incidents, in words. Raises RedisUnavailable."""
    backlog = Ledger(client, settings).backlog
    totals = backlog.totals().values()
    lines = sum(in_flight(total) for total in totals)
    warming = sum(total.get("warming", 0) for total in totals)
    _, waiting = backlog.observed()
    parts = [plural(lines, "line")] if lines > 0 else []
    parts += [plural(waiting, "stored batch")] if waiting else []
    notes = [f"still looking at {' and '.join(parts)}"] if parts else []
    if warming > 0:
        notes.append(
            f"{plural(warming, 'stored line')} not judged yet; `logweir train` learns a model for them"
        )
    return notes


def _incidents(
    client: "redis.Redis", settings: Settings, now: datetime, only: tuple[str, ...]
) -> list[Incident]:
    with answering():
        blob = client.get(Keys(settings.redis.key_prefix).watching("incidents"))
    state = Incidents.unpack(cast("bytes | None", blob))
    state.close(now)  # of this copy: what is still open is a matter of now, not of the watcher's last look
    found = state.all()
    return [i for i in found if all(covers(only, name) for name in i.workloads)] if only else found


def _chosen(found: Sequence[Incident], name: str) -> Incident:
    matches = [i for i in found if i.id.startswith(name)] if name else []
    if len(matches) > 1:
        raise BadInput(f"{plural(len(matches), 'incident')} begin with {name!r}; write more of the id")
    if not matches:
        raise NotFound(f"there is no incident {name[:80]!r}; `logweir incidents` lists them")
    return matches[0]


def _cause_view(cause: Cause) -> CauseView:
    facts = asdict(cause)
    del facts["grade"], facts["thrown"]  # the place of a cause says it
    return CauseView(**facts, mark=_mark(cause))


def _mark(cause: Cause) -> str | None:
    """How `logweir mark` names it."""
    number = marked_as(cause.workload, cause.cause)
    return None if number is None else str(Target.template(number))
