"""Lines: a search over what is stored, and one line among its neighbours."""

from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.records.batch import utc_now
from pipeline.service.lines import around_line
from pipeline.service.questions import LinesAsked, asked_moment, template_number
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import newest_span, some_lines, span_of, workload_filter
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Level = Literal["", "trace", "debug", "info", "notice", "warning", "error", "critical", "fatal"]
PAGE: Final = 100
AROUND: Final = 50


@router.get("/lines")
async def lines_page(
    request: Request,
    visitor: See,
    *,
    q: Annotated[str, Query(max_length=2_000)] = "",
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    workload: Annotated[str, Query(max_length=200)] = "",
    level: Level = "",
    template: Annotated[str, Query(max_length=20)] = "",
    anomalous: bool = False,
    cursor: Annotated[str | None, Query(max_length=2_000)] = None,
) -> Response:
    """Stored lines that match, the newest first."""
    span = span_of(since, until)
    page = await some_lines(
        request,
        LinesAsked(
            limit=PAGE,
            since=span.since,
            until=asked_moment(until, span.until, flag="until"),
            workload=await workload_filter(request, workload),
            level=level or None,
            text=q or None,
            template_id=template_number(template, flag="template") if template else None,
            anomalous=anomalous,
            cursor=cursor,
            only=visitor.asker.only,
        ),
    )
    return render(
        request, visitor, "lines.html",
        page=page, q=q, since=since, until=until or "", workload=workload, level=level, template=template,
        anomalous=anomalous, cursor=cursor,
        newest=None if page.lines else await newest_span(request, visitor, span),
    )  # fmt: skip


@router.get("/lines/{record_id:path}")
async def line_page(
    request: Request,
    visitor: See,
    record_id: str,
    *,
    at: Annotated[str | None, Query(max_length=40)] = None,
    records: Annotated[int, Query(ge=0, le=200)] = AROUND,
) -> Response:
    """One line among its neighbours of the same source."""
    api = api_of(request)
    ask = partial(
        around_line,
        settings=api.settings,
        record_id=record_id,
        at=asked_moment(at, utc_now(), flag="at"),
        records=records,
        only=visitor.asker.only,
    )
    page = await api.stored(request, ask)
    hit = next(line for line in page.lines if line.hit)
    return render(request, visitor, "line.html", page=page, hit=hit, records=records)
