"""Sessions: the records of a session or a trace in order of time, and sessions that left their course."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.service.stored.sessions import (
    KINDS,
    session_findings,
    stored_session,
)
from pipeline.service.stored.values import SESSION_RECORDS, SessionFinding, SessionRecords
from pipeline.service.values import Line
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import STORED_FRESH_S, Span, newest_span, span_of, the_status
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
SHOWN: Final = 30  # findings


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStep:
    """A record of a session. `after_s`: since the record before, None for the first."""

    line: Line
    after_s: float | None
    elsewhere: bool  # another workload than the record before


@router.get("/sessions")
async def sessions_page(
    request: Request,
    visitor: See,
    *,
    key: Annotated[str, Query(max_length=200)] = "",
    since: Annotated[str, Query(max_length=40)] = "7d",
    until: Annotated[str | None, Query(max_length=40)] = None,
) -> Response:
    """One session by its key, or those that were found odd."""
    span = span_of(since, until)
    key = key.strip()
    if not key:
        return await _list_page(request, visitor, span)
    api = api_of(request)
    found = await api.stored(
        request,
        partial(
            stored_session, client=api.client, settings=api.settings, key=key, span=(span.since, span.until),
            only=visitor.asker.only,
        ),
    )  # fmt: skip
    return render(
        request, visitor, "session.html",
        found=found, steps=session_steps(found), key=key, since=since, until=until or "", limit=SESSION_RECORDS, kinds=KINDS,
        newest=None if found.lines else await newest_span(request, visitor, span),
    )  # fmt: skip


def session_steps(found: SessionRecords) -> list[SessionStep]:
    """The records with the time that has passed between them."""
    steps, before = list[SessionStep](), None
    for line in found.lines:
        steps.append(
            SessionStep(
                line=line,
                after_s=None if before is None else (line.timestamp - before.timestamp).total_seconds(),
                elsewhere=before is not None and before.workload != line.workload,
            )
        )
        before = line
    return steps


async def _list_page(request: Request, visitor: Visitor, span: Span) -> Response:
    api, only = api_of(request), visitor.asker.only
    ask = partial(session_findings, since=span.since, until=span.until, limit=SHOWN, only=only)
    found: list[SessionFinding] = await api.shared_stored(
        ("sessions", only, span.text), ask, fresh_s=STORED_FRESH_S
    )
    status = await the_status(request)
    return render(
        request, visitor, "sessions.html",
        found=found, since=span.text[0], until=span.text[1], kinds=KINDS, shown=SHOWN,
        modelled=bool(status.models), newest=None if found else await newest_span(request, visitor, span),
    )  # fmt: skip
