"""Patterns: the templates of workloads by frequency, beside another span; and one with all that is known."""

from dataclasses import asdict, dataclass, replace
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
Marked = Literal["", "marked", "normal", "anomalous", "unmarked"]
Order = Literal["count", "change", "new", "less"]
PAGE: Final = 50
SAMPLES: Final = 8
VALUED: Final = 500  # lines whose variables are counted
TREND: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternKinds:
    """The patterns that the page shows. `level`: "error" for those of error-like lines, which never share a
    template with others."""

    anomalous: bool
    level: str
    marked: Marked


def pattern_kinds(
    anomalous: bool = False, level: Literal["", "error"] = "", marked: Marked = ""
) -> PatternKinds:
    """The parameters of the page that choose kinds."""
    return PatternKinds(anomalous=anomalous, level=level, marked=marked)


@router.get("/patterns")
async def patterns_page(
    request: Request,
    visitor: See,
    *,
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    against: Annotated[str | None, Query(max_length=40)] = None,
    workload: Annotated[str, Query(max_length=200)] = "",
    kinds: Annotated[PatternKinds, Depends(pattern_kinds)],
    order: Order = "count",
    cursor: Annotated[str | None, Query(max_length=2_000)] = None,
) -> Response:
    """The frequency of patterns, beside the span before or another one."""
    span, marks = span_of(since, until), await the_marks(request)
    among = await _among(request, kinds, marks)
    asked = PatternsAsked(
        since=span.since,
        until=span.until,
        against=asked_moment(against, span.until, flag="against"),
        workload=await workload_filter(request, workload),
        among=among,
        anomalous=kinds.anomalous,
        order=order,
        limit=PAGE,
        buckets=24,
        cursor=cursor,
        only=visitor.asker.only,
    )
    question = (visitor.asker.only, span.text, against, workload, among, kinds.anomalous, order, cursor)
    page = await some_patterns(request, asked, question=question)
    rows = [(one, mark_of(one, marks)) for one in page.patterns]
    shown = [(one, mark) for one, mark in rows if _is_marked(mark, kinds.marked)]
    return render(
        request, visitor, "patterns.html",
        page=page, rows=shown, left_out=len(rows) - len(shown), since=since, workload=workload,
        **asdict(kinds), order=order, against=against or "", until=until or "",
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


async def _among(
    request: Request, kinds: PatternKinds, marks: dict[tuple[int, str], MarkView]
) -> tuple[int, ...] | None:
    """The templates that these filters leave, None for all."""
    found: set[int] | None = None
    if kinds.level:
        api = api_of(request)
        texts = await api.facts(read_templates, api.client, Keys(api.settings.redis.key_prefix))
        found = {one.template_id for one in texts if one.severe}
    if kinds.marked and kinds.marked != "unmarked":
        of_kind = {number for (number, _), mark in marks.items() if _is_marked(mark, kinds.marked)}
        found = of_kind if found is None else found & of_kind
    return None if found is None else tuple(sorted(found))


def _is_marked(mark: MarkView | None, wanted: Marked) -> bool:
    match wanted:
        case "":
            return True
        case "unmarked":
            return mark is None
        case "marked":
            return mark is not None
        case _:
            return mark is not None and mark.state == wanted


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
