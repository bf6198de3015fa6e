"""Lines: a search over what is stored, and one line among its neighbours."""

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
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
from pipeline.workers.api.console.words import iso_time, shown_chars
from pipeline.workers.api.stored import rows_of_lines

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Level = Literal["", "trace", "debug", "info", "notice", "warning", "error", "critical", "fatal"]
PAGE: Final = 100
AROUND: Final = 50
FOLLOW_FRESH_S: Final = 1.0
DOWNLOAD: Final = 10_000  # lines; the REST API gives more
DOWNLOAD_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilters:
    """The filters of the page, as its address has them."""

    q: str
    since: str
    until: str
    workload: str
    level: Level
    template: str
    anomalous: bool
    cursor: str | None


def line_filters(
    *,
    q: Annotated[str, Query(max_length=2_000)] = "",
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str, Query(max_length=40)] = "",
    workload: Annotated[str, Query(max_length=200)] = "",
    level: Level = "",
    template: Annotated[str, Query(max_length=20)] = "",
    anomalous: bool = False,
    cursor: Annotated[str | None, Query(max_length=2_000)] = None,
) -> LineFilters:
    """The parameters of the page and of its download."""
    return LineFilters(
        q=q, since=since, until=until, workload=workload, level=level, template=template,
        anomalous=anomalous, cursor=cursor,
    )  # fmt: skip


Filtered = Annotated[LineFilters, Depends(line_filters)]


@router.get("/lines")
async def lines_page(request: Request, visitor: See, filters: Filtered, follow: bool = False) -> Response:
    """Stored lines that match, the newest first. `follow`: open pages show new ones as they are stored."""
    span = span_of(filters.since, filters.until or None)
    follow = follow and not (filters.until or filters.cursor)
    asked, further = (await _asked(request, visitor, filters, limit=PAGE)).at_clock(utc_now())
    # Pages that follow the same lines share the answer.
    question = (visitor.asker.only, filters) if follow else ()
    page = await some_lines(request, asked, question=question, fresh_s=FOLLOW_FRESH_S)
    ahead = [] if further is None else (await some_lines(request, further)).lines
    return render(
        request, visitor, "lines.html", **asdict(filters), page=page, follow=follow, rows=DOWNLOAD,
        ahead=[(line, iso_time(line.timestamp + timedelta(seconds=1))) for line in ahead],
        chars=shown_chars(page.lines), newest=None if page.lines else await newest_span(request, visitor, span),
    )  # fmt: skip


@router.get("/lines.ndjson")
async def lines_file(request: Request, visitor: See, filters: Filtered) -> Response:
    """The lines that match, and not only those of a page, as a file of JSON a line."""
    asked = await _asked(request, visitor, replace(filters, cursor=None), limit=DOWNLOAD_PAGE)
    answer = await rows_of_lines(request, asked, DOWNLOAD)
    answer.headers["Content-Disposition"] = 'attachment; filename="lines.ndjson"'
    return answer


async def _asked(request: Request, visitor: Visitor, filters: LineFilters, *, limit: int) -> LinesAsked:
    span = span_of(filters.since, filters.until or None)
    return LinesAsked(
        limit=limit,
        since=span.since,
        until=asked_moment(filters.until, span.until, flag="until"),
        workload=await workload_filter(request, filters.workload),
        level=filters.level or None,
        text=filters.q or None,
        template_id=template_number(filters.template, flag="template") if filters.template else None,
        anomalous=filters.anomalous,
        cursor=filters.cursor,
        only=visitor.asker.only,
    )


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
    return render(
        request, visitor, "line.html", page=page, hit=hit, records=records, chars=shown_chars(page.lines)
    )
