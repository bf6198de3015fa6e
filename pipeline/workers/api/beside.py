"""Routes about what is stored beside something else: comparisons, units, sessions, values of variables."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from pipeline.records.batch import utc_now
from pipeline.records.unit_query import UnitKind
from pipeline.service.questions import LinesAsked, pattern_span, template_number
from pipeline.service.stored.asked_units import UnitsFound, units_asked
from pipeline.service.stored.compare import (
    compare_stored,
    compared_sides,
)
from pipeline.service.stored.news import stored_news
from pipeline.service.stored.sessions import (
    session_findings,
    stored_session,
)
from pipeline.service.stored.units import stored_units
from pipeline.service.stored.values import (
    COMPARED_SPAN,
    NEWS_SPAN,
    SESSION_RECORDS,
    VALUED_LINES,
    ChangeKind,
    Comparison,
    NewsPage,
    SessionFinding,
    SessionRecords,
    TemplateValues,
)
from pipeline.service.variables import stored_values
from pipeline.workers.api.answering import StrictRoute, answers_with, as_json
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.stored import PAGE, Limit, Seeing, Until, Workload

router: Final = APIRouter(tags=["stored"], route_class=StrictRoute)
Week = Annotated[str, Query(max_length=40, description="As for lines.")]


@router.get("/compare", responses=answers_with(Comparison, "Differences of A from B, by kind."))
async def get_comparison(
    request: Request,
    asker: Seeing,
    *,
    a: Annotated[str, Query(max_length=100, description="1h, 2h..1h, or TIME..TIME.")] = COMPARED_SPAN,
    b: Annotated[str | None, Query(max_length=100, description="Default: the same span before.")] = None,
    workload: Workload = None,
    other: Annotated[
        str | None, Query(max_length=200, min_length=1, description="Of B, where it is another one.")
    ] = None,
    kind: ChangeKind | None = None,
    limit: Limit = PAGE,
) -> Response:
    """Patterns that are new, gone, more or fewer in A, with the chance of each where nothing has changed."""
    api = api_of(request)
    sides = compared_sides(a, b or None, utc_now(), workload=workload, other=other)
    ask = partial(
        compare_stored, client=api.client, settings=api.settings, sides=sides, only=asker.only,
        kind=kind, limit=limit,
    )  # fmt: skip
    return as_json(request, await api.stored(request, ask))


@router.get("/news", responses=answers_with(NewsPage, "The strangest of each 24 hours."))
async def get_news(
    request: Request,
    asker: Seeing,
    *,
    since: Annotated[str, Query(max_length=40, description="As for lines.")] = NEWS_SPAN,
    until: Until = None,
    workload: Workload = None,
) -> Response:
    """Calm lines that were never said before, at most `news_per_day` a day. They make no incident."""
    api, now = api_of(request), utc_now()
    begin, end = pattern_span(since, until, now)
    ask = partial(
        stored_news, client=api.client, settings=api.settings, since=begin, until=end, workload=workload,
        only=asker.only, now=now,
    )  # fmt: skip
    return as_json(request, await api.stored(request, ask))


@router.get("/sessions", responses=answers_with(list[SessionFinding], "The newest first."))
async def get_sessions(
    request: Request, asker: Seeing, since: Week = "7d", until: Until = None, limit: Limit = 100
) -> Response:
    """Sessions that left the course of the others."""
    begin, end = pattern_span(since, until, utc_now())
    ask = partial(session_findings, since=begin, until=end, limit=limit, only=asker.only)
    return as_json(request, await api_of(request).stored(request, ask))


@router.get("/sessions/records", responses=answers_with(SessionRecords, "Its records, the oldest first."))
async def get_session_records(
    request: Request,
    asker: Seeing,
    *,
    key: Annotated[str, Query(min_length=4, max_length=200, description="Of a session, trace or request.")],
    since: Week = "7d",
    until: Until = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = SESSION_RECORDS,
) -> Response:
    """The records whose message or fields hold a key, across workloads, and what was found in the session."""
    api = api_of(request)
    ask = partial(
        stored_session, client=api.client, settings=api.settings, key=key,
        span=pattern_span(since, until, utc_now()), limit=limit, only=asker.only,
    )  # fmt: skip
    return as_json(request, await api.stored(request, ask))


@router.get("/units", responses=answers_with(UnitsFound, "The most unusual first, each with its reasons."))
async def get_units(
    request: Request,
    asker: Seeing,
    *,
    by: UnitKind = "host",
    since: Annotated[str, Query(max_length=40, description="As for lines.")] = "1h",
    until: Until = None,
    normal: Annotated[
        str | None, Query(max_length=40, description="Normal is from then to `since`; default: 6 spans.")
    ] = None,
    workload: Workload = None,
    limit: Limit = 20,
) -> Response:
    """Hosts, pods, services or sessions compared with an earlier span, in order of how unusual they are."""
    api = api_of(request)
    asked = units_asked(by, since, until, normal, utc_now(), workload=workload, limit=limit, only=asker.only)
    ask = partial(stored_units, client=api.client, settings=api.settings, asked=asked, now=utc_now())
    return as_json(request, await api.stored(request, ask))


@router.get("/patterns/{template}/values", responses=answers_with(TemplateValues, "The most frequent."))
async def get_values(
    request: Request,
    asker: Seeing,
    template: Annotated[str, Path(pattern=r"^[Tt]?[0-9]{1,17}$", description="T17 or 17.")],
    *,
    since: Week = "24h",
    until: Until = None,
    workload: Workload = None,
    lines: Annotated[int, Query(ge=1, le=PAGE, description="So many of its newest lines.")] = VALUED_LINES,
) -> Response:
    """The values of a pattern's variables in its newest lines, and their hosts and levels."""
    api = api_of(request)
    begin, end = pattern_span(since, until, utc_now())
    asked = LinesAsked(
        limit=lines, since=begin, until=end, workload=workload,
        template_id=template_number(template, flag="template"), only=asker.only,
    )  # fmt: skip
    ask = partial(stored_values, client=api.client, settings=api.settings, asked=asked)
    return as_json(request, await api.stored(request, ask))
