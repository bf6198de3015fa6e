"""Patterns: the templates of workloads by frequency, beside another span; and one with all that is known."""

from dataclasses import replace
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.drain.learner import read_templates
from pipeline.errors import NotFound
from pipeline.redis.keys import Keys
from pipeline.service.questions import LinesAsked, PatternsAsked, asked_moment, template_number
from pipeline.service.values import IncidentState, MarkView, PatternCount
from pipeline.service.variables import values_of
from pipeline.units import time_of
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import (
    newest_span,
    some_lines,
    some_patterns,
    span_of,
    the_incidents,
    the_marks,
    workload_filter,
)
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Order = Literal["count", "change", "new", "less"]
PAGE: Final = 50
SAMPLES: Final = 8
VALUED: Final = 500  # lines whose variables are counted
TREND: Final = 120


@router.get("/patterns")
async def patterns_page(
    request: Request,
    visitor: See,
    *,
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    against: Annotated[str | None, Query(max_length=40)] = None,
    workload: Annotated[str, Query(max_length=200)] = "",
    anomalous: bool = False,
    order: Order = "count",
    cursor: Annotated[str | None, Query(max_length=2_000)] = None,
) -> Response:
    """The frequency of patterns, beside the span before or another one."""
    span = span_of(since, until)
    asked = PatternsAsked(
        since=span.since,
        until=span.until,
        against=asked_moment(against, span.until, flag="against"),
        workload=await workload_filter(request, workload),
        anomalous=anomalous,
        order=order,
        limit=PAGE,
        buckets=24,
        cursor=cursor,
        only=visitor.asker.only,
    )
    question = (visitor.asker.only, span.text, against, workload, anomalous, order, cursor)
    page = await some_patterns(request, asked, question=question)
    marks = await the_marks(request)
    return render(
        request, visitor, "patterns.html",
        page=page, rows=[(one, mark_of(one, marks)) for one in page.patterns], since=since, workload=workload,
        anomalous=anomalous, order=order, against=against or "", until=until or "",
        earlier=any(one.before for one in page.patterns),
        newest=None if page.patterns else await newest_span(request, visitor, span),
    )  # fmt: skip


@router.get("/patterns/{template}")
async def template_page(
    request: Request,
    visitor: See,
    template: str,
    *,
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    workload: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """One pattern: its trend, the values of its variables, lines, marks, and its incidents."""
    number = template_number(template, flag="the pattern")
    api, span = api_of(request), span_of(since, until)
    asked = PatternsAsked(
        since=span.since, until=span.until, workload=await workload_filter(request, workload), template_id=number, limit=PAGE,
        buckets=TREND, only=visitor.asker.only,
    )  # fmt: skip
    page = await some_patterns(request, asked)
    lines = await some_lines(
        request,
        LinesAsked(
            limit=VALUED, since=span.since, until=span.until, workload=await workload_filter(request, workload),
            template_id=number, only=visitor.asker.only,
        ),
    )  # fmt: skip
    texts = await api.facts(read_templates, api.client, Keys(api.settings.redis.key_prefix))
    text = next((one.text for one in texts if one.template_id == number), None)
    incidents = [
        row
        for row in await the_incidents(request, visitor)
        if any(cause.mark == f"T{number}" for cause in row.incident.causes)
    ]
    told = [cause.text for row in incidents for cause in row.incident.causes if cause.mark == f"T{number}"]
    if not page.patterns and not told:
        # It may have lines at other times: the page says so, and offers a longer span.
        longer = replace(asked, since=time_of("30d", span.until), until=span.until)
        # The text of a pattern in other workloads has their words.
        if (text is None or asked.only) and not (await some_patterns(request, longer)).patterns:
            raise NotFound(f"there is no pattern T{number}, or none whose workload you see")
    marks = await the_marks(request)
    return render(
        request, visitor, "pattern.html",
        number=number, text=text or next(filter(None, [*(one.sample for one in page.patterns), *told]), ""),
        rows=[(one, mark_of(one, marks)) for one in page.patterns], page=page, since=since,
        workload=workload, lines=lines.lines[:SAMPLES], counted=len(lines.lines),
        values=values_of(text or "", [one.message or "" for one in lines.lines]),
        hosts=values_of_column([one.host for one in lines.lines]),
        levels=values_of_column([one.level for one in lines.lines]),
        incidents=incidents[:20], trend=_trend(page.patterns), span=span, states=IncidentState,
        everywhere=marks.get((number, "")),
    )  # fmt: skip


def mark_of(one: PatternCount, marks: dict[tuple[int, str], MarkView]) -> MarkView | None:
    """The mark of a pattern in its workload, or everywhere."""
    return marks.get((one.template_id, one.workload)) or marks.get((one.template_id, ""))


def values_of_column(values: list[str | None]) -> list[tuple[str, int]]:
    """The most frequent values with their counts, none where there is only one."""
    counts: dict[str, int] = {}
    for value in values:
        if value:
            counts[value] = counts.get(value, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10] if len(counts) > 1 else []


def _trend(rows: list[PatternCount]) -> list[int]:
    return [sum(column) for column in zip(*(one.trend for one in rows), strict=True)] if rows else []
