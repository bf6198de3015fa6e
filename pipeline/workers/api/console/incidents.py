"""Incidents: a list by state, and one with its causes in order, lines of each, and what people decided."""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.errors import NotFound
from pipeline.records.batch import utc_now
from pipeline.service.handover.markdown import incident_markdown
from pipeline.service.handover.notes import MOST_CHARS, read_notes
from pipeline.service.handover.values import IncidentNote
from pipeline.service.lines import stored_lines
from pipeline.service.questions import LinesAsked, asked_moment, template_number
from pipeline.service.values import CauseView, IncidentState, IncidentView, Line, MarkView
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import (
    IncidentRow,
    shared_page,
    the_incidents,
    the_marks,
    workloads_like,
)
from pipeline.workers.api.console.charts import CauseLane
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render, safe_headers
from pipeline.workers.api.console.words import iso_time

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Wanted = Literal[
    "attention", "all", "open", "acknowledged", "snoozed", "resolved", "regressed", "ended", "silenced"
]
STATES: Final[tuple[Wanted, ...]] = (
    "attention", "all", "open", "acknowledged", "snoozed", "regressed", "resolved", "ended", "silenced"
)  # fmt: skip
ASKED: Final = 8  # causes whose lines are looked up; the text of the others stands in the incident
SAMPLES: Final = 2
BEFORE: Final = 5  # lines before the onset
LIMIT: Final = 200
NEAR: Final = timedelta(minutes=5)  # of an onset, where lines are looked up
SLACK: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow:
    """A cause with lines of it. `lane`: its place in the course of the incident."""

    cause: CauseView
    lane: CauseLane
    samples: list[Line]
    marked: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """An incident with its causes in the order of their onset, each with lines, and the lines before it."""

    row: IncidentRow
    causes: list[tuple[CauseView, list[Line]]]
    before: list[Line]
    notes: list[IncidentNote]


@router.get("/incidents")
async def incidents_page(
    request: Request,
    visitor: See,
    state: Annotated[Wanted, Query()] = "all",
    since: Annotated[str, Query(max_length=40)] = "30d",
    workload: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Incidents, those that need somebody first."""

    async def facts() -> dict[str, Any]:
        rows = await the_incidents(request, visitor)
        begin = asked_moment(since, utc_now(), flag="since")
        within = [
            row
            for row in rows
            if (begin is None or row.incident.last >= begin)
            and (not workload or any(workload in name for name in row.incident.workloads))
        ]
        shown = [row for row in within if _is(row, state)]
        return {
            "rows": shown[:LIMIT],
            "more": max(0, len(shown) - LIMIT),
            "counts": {name: sum(_is(row, name) for row in within) for name in STATES},
            "state": state,
            "since": since,
            "workload": workload,
        }

    return await shared_page(request, visitor, "incidents.html", facts)


@router.get("/incidents/{name}")
async def incident_page(request: Request, visitor: See, name: str) -> Response:
    """One incident: what began together, where, and in which order."""
    rows = await the_incidents(request, visitor)
    one = await _whole(request, visitor, rows, name)
    marks = await the_marks(request)
    incident = one.row.incident
    causes = [
        CauseRow(
            cause=cause,
            lane=CauseLane(cause.first, cause.last, cause.severity),
            samples=lines,
            marked=_marked(cause, marks),
        )
        for cause, lines in one.causes
    ]
    like = next((other for other in rows if other.incident.id == incident.seen_before), None)
    return render(
        request, visitor, "incident.html",
        row=one.row, incident=incident, causes=causes, like=like, before=one.before, notes=one.notes,
        note_chars=MOST_CHARS, likely=incident.causes[0],
        silenced_workloads=await workloads_like(request, incident.causes[0].workload), states=IncidentState, units=_units_link(incident),
        compared=_compare_link(incident),
    )  # fmt: skip


@router.get("/incidents/{name}/incident.md")
async def incident_file(request: Request, visitor: See, name: str) -> Response:
    """The incident as Markdown, to be kept or sent on."""
    one = await _whole(request, visitor, await the_incidents(request, visitor), name)
    page = str(request.url.replace(path=f"/incidents/{one.row.incident.id}", query=""))
    text = incident_markdown(one.row.incident, one.causes, before=one.before, notes=one.notes, link=page)
    name_of_file = f'attachment; filename="incident-{one.row.incident.id}.md"'
    return Response(
        text, headers=safe_headers("") | {"Content-Disposition": name_of_file}, media_type="text/markdown"
    )


async def _whole(request: Request, visitor: Visitor, rows: list[IncidentRow], name: str) -> _Whole:
    """The incident with this id among those that the visitor sees. Raises NotFound."""
    row = next((row for row in rows if row.incident.id == name), None)
    if row is None:
        raise NotFound(f"there is no incident {name[:80]!r} any more; the list has those that are kept")
    api, only = api_of(request), visitor.asker.only
    order = sorted(row.incident.causes, key=lambda cause: (cause.first, cause.workload))
    samples = await api.stored(
        request, partial(_samples, settings=api.settings, causes=order[:ASKED], only=only)
    )
    before = await api.stored(request, partial(_before, settings=api.settings, cause=order[0], only=only))
    notes = await api.facts(read_notes, api.client, api.settings, row.incident.id)
    return _Whole(
        row=row, before=before, notes=notes,
        causes=[(cause, samples[at] if at < len(samples) else []) for at, cause in enumerate(order)],
    )  # fmt: skip


def _compare_link(incident: IncidentView) -> str:
    """Of the page that compares the time of an incident with as long before it."""
    begin, end = incident.first, incident.last + timedelta(minutes=1)
    spans = [
        f"{iso_time(since)}..{iso_time(until)}"
        for since, until in ((begin, end), (begin - (end - begin), begin))
    ]
    words = {"a": spans[0], "b": spans[1]}
    only = {"workload": incident.workloads[0]} if len(incident.workloads) == 1 else {}
    return f"/compare?{urlencode(words | only)}"


def _units_link(incident: IncidentView) -> str:
    """Of the page that ranks the workloads of an incident, or what is within its only one."""
    several = len(incident.workloads) > 1
    words = {
        "by": "workload" if several else "host",
        "since": iso_time(incident.first),
        "until": iso_time(incident.last + timedelta(minutes=1)),  # at least so long a span
    }
    return f"/units?{urlencode(words if several else words | {'workload': incident.workloads[0]})}"


def _is(row: IncidentRow, wanted: Wanted) -> bool:
    if wanted == "attention":
        return row.state in ("open", "acknowledged", "regressed")
    return wanted in ("all", row.state)


def _samples(
    answers: Answers, settings: Settings, causes: list[CauseView], only: tuple[str, ...]
) -> list[list[Line]]:
    """Lines of each cause, the earliest of them first."""
    return [_lines_of(answers, settings, cause, only) for cause in causes]


def _lines_of(answers: Answers, settings: Settings, cause: CauseView, only: tuple[str, ...]) -> list[Line]:
    if cause.mark is None or cause.kind != "template":
        return []  # found in sessions or rates: no line alone shows it
    found: list[Line] = []
    for until in (cause.first, min(cause.last, cause.first + NEAR)):
        asked = LinesAsked(
            limit=SAMPLES,
            since=cause.first - SLACK,
            until=until + SLACK,
            workload=cause.workload,
            template_id=template_number(cause.mark),
            only=only,
        )
        found = stored_lines(answers, settings, asked).lines
        if len(found) >= min(SAMPLES, cause.count):
            break
    return found[::-1]


def _before(answers: Answers, settings: Settings, cause: CauseView, only: tuple[str, ...]) -> list[Line]:
    """The last lines of the workload before its first cause."""
    asked = LinesAsked(
        limit=BEFORE, since=cause.first - NEAR, until=cause.first, workload=cause.workload, only=only
    )
    return list(reversed(stored_lines(answers, settings, asked).lines))


def _marked(cause: CauseView, marks: dict[tuple[int, str], MarkView]) -> str | None:
    if cause.mark is None:
        return None
    number = template_number(cause.mark)
    found = marks.get((number, cause.workload)) or marks.get((number, ""))
    return None if found is None else found.state
