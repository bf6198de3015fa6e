"""Routes about what is stored: lines, patterns, rates."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.access.keys import READ
from pipeline.service.lines import around_line, stored_lines, stored_patterns, stored_rates
from pipeline.service.questions import LinesAsked, PatternsAsked, asked_moment, pattern_span, template_number
from pipeline.service.values import LinePage, PatternPage, RateTable
from pipeline.workers.api.access import Asker, needs
from pipeline.workers.api.answering import Rows, StrictRoute, answers_with, as_json, wants_rows
from pipeline.workers.api.asking import api_of

PAGE: Final = 1_000
MOST_ROWS: Final = 100_000  # of a download
MOST_AROUND: Final = 500  # lines with context
router: Final = APIRouter(tags=["stored"], route_class=StrictRoute)

Since = Annotated[
    str | None, Query(max_length=40, description="The last 15m, 1h, 7d, or a time in ISO 8601.")
]
Until = Annotated[str | None, Query(max_length=40, description="Before that; written as `since`.")]
Workload = Annotated[
    str | None, Query(max_length=200, min_length=1, description="A pattern such as shop/* (* and ?).")
]
Cursor = Annotated[str | None, Query(max_length=2_000, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=PAGE, description="Items of a page.")]
Seeing = Annotated[Asker, Depends(needs(READ, whole=False))]


class Filters(BaseModel):
    """Query parameters of lines and patterns; unknown ones are refused, for a slip would give other lines."""

    model_config = ConfigDict(extra="forbid")
    until: str | None = Field(None, max_length=40, description="Before that; written as `since`.")
    workload: str | None = Field(
        None, min_length=1, max_length=200, description="A pattern such as shop/* (* and ?)."
    )
    template: str | None = Field(
        None, max_length=20, pattern=r"^[Tt]?-?[0-9]{1,17}$", description="T17 or 17."
    )
    anomalous: bool = Field(False, description="Only what is anomalous.")
    cursor: str | None = Field(None, max_length=2_000, description="`next` of the page before.")

    @property
    def template_id(self) -> int | None:
        return None if self.template is None else template_number(self.template, flag="template")


class LinesFilters(Filters):
    """Filters of lines, however they are answered."""

    since: str | None = Field(None, max_length=40, description="The last 15m, 1h, 7d, or a time in ISO 8601.")
    level: Literal["trace", "debug", "info", "notice", "warning", "error", "critical", "fatal"] | None = (
        Field(None, description="This level or a graver one.")
    )
    text: str | None = Field(None, max_length=2_000, description="A text of the message, whatever its case.")

    def asked(self, asker: Asker, *, limit: int, context: int = 0) -> LinesAsked:
        """What this asks of the store, for somebody. Raises BadInput."""
        now = utc_now()
        return LinesAsked(
            limit=limit,
            since=asked_moment(self.since, now, flag="since"),
            until=asked_moment(self.until, now, flag="until"),
            workload=self.workload,
            level=self.level,
            text=self.text or None,
            template_id=self.template_id,
            anomalous=self.anomalous,
            context=context,
            cursor=self.cursor,
            only=asker.only,
        )


class LinesQuery(LinesFilters):
    """Filters of lines in pages and rows."""

    context: int = Field(
        0, ge=0, le=50, description="Also so many lines before and after each, of its source."
    )
    limit: int = Field(50, ge=1, le=MOST_ROWS, description=f"Up to {PAGE:,} as a page; more as NDJSON.")


class PatternsQuery(Filters):
    """Filters of patterns."""

    since: str = Field("24h", max_length=40, description="The last 15m, 1h, 7d, or a time in ISO 8601.")
    against: str | None = Field(
        None, max_length=40, description="Begin of the span to compare with; default: the span before."
    )
    order: Literal["count", "change", "new", "less"] = "count"
    buckets: int = Field(24, ge=1, le=500, description="Parts of the trend.")
    limit: int = Field(30, ge=1, le=PAGE, description="Items of a page.")


@router.get("/lines", responses=answers_with(LinePage, "Lines, the newest first.", rows=True))
async def get_lines(request: Request, asker: Seeing, query: Annotated[LinesQuery, Query()]) -> Response:
    """Stored lines that match all filters. `Accept: application/x-ndjson` gives a line of JSON each."""
    rows, api, limit = wants_rows(request), api_of(request), query.limit
    if query.context and (limit > MOST_AROUND or query.cursor):
        raise BadInput(f"with context ask for at most {MOST_AROUND} lines, without a cursor")
    if not rows and limit > PAGE:
        raise BadInput(f"limit {limit:,} is more than a page; ask for {PAGE:,}, or for application/x-ndjson")
    asked = query.asked(asker, limit=min(limit, PAGE), context=query.context)
    if rows:
        return await rows_of_lines(request, asked, limit)
    ask = partial(stored_lines, settings=api.settings, asked=asked)
    return as_json(request, await api.stored(request, ask))


async def rows_of_lines(request: Request, asked: LinesAsked, limit: int) -> Rows:
    """Lines as NDJSON, `limit` at most, page by page as the client reads. Raises BadInput, AskRefused."""
    api = api_of(request)

    async def page_of_lines(asked: LinesAsked) -> LinePage:
        return await api.stored(request, partial(stored_lines, settings=api.settings, asked=asked))

    async def more(first: LinePage) -> AsyncIterator[LinePage]:
        page, left = first, limit - len(first.lines)
        while page.next is not None and left > 0:
            page = await page_of_lines(replace(asked, cursor=page.next, limit=min(left, PAGE)))
            left -= len(page.lines)
            yield page

    return Rows(await page_of_lines(asked), lambda page: page.lines, more, api.streams)


@router.get("/lines/{record_id}/context", responses=answers_with(LinePage, "The line among its neighbours."))
async def get_context(
    request: Request,
    asker: Seeing,
    record_id: Annotated[str, Path(max_length=300)],
    records: Annotated[int, Query(ge=0, le=200, description="So many before, and as many after.")] = 50,
    at: Annotated[
        str | None, Query(max_length=40, description="The line's time: it spares a search.")
    ] = None,
) -> Response:
    """A stored line and its neighbours in its source, oldest first."""
    api = api_of(request)
    when = asked_moment(at, utc_now(), flag="at")
    ask = partial(
        around_line, settings=api.settings, record_id=record_id, at=when, records=records, only=asker.only
    )
    return as_json(request, await api.stored(request, ask))


@router.get("/patterns", responses=answers_with(PatternPage, "Patterns in the order asked for.", rows=True))
async def get_patterns(request: Request, asker: Seeing, query: Annotated[PatternsQuery, Query()]) -> Response:
    """The frequency of patterns, beside another span. With `template`: a pattern in each workload."""
    api, now = api_of(request), utc_now()
    since, until = pattern_span(query.since, query.until, now)
    asked = PatternsAsked(
        since=since,
        until=until,
        against=asked_moment(query.against, now, flag="against"),
        workload=query.workload,
        template_id=query.template_id,
        anomalous=query.anomalous,
        order=query.order,
        limit=query.limit,
        buckets=query.buckets,
        cursor=query.cursor,
        only=asker.only,
    )
    ask = partial(stored_patterns, client=api.client, settings=api.settings, asked=asked)
    page = await api.stored(request, ask)
    if not wants_rows(request):
        return as_json(request, page)
    return Rows(page, lambda page: page.patterns, _no_more, api.streams)


@router.get("/rates", responses=answers_with(RateTable, "Lines by workload and time."))
async def get_rates(
    request: Request,
    asker: Seeing,
    *,
    since: Annotated[str, Query(max_length=40, description="As for lines.")] = "24h",
    until: Until = None,
    workload: Workload = None,
    buckets: Annotated[int, Query(ge=1, le=500)] = 24,
) -> Response:
    """How many lines each workload wrote in equal parts of a span."""
    api = api_of(request)
    begin, end = pattern_span(since, until, utc_now())
    ask = partial(
        stored_rates,
        since=begin,
        until=end,
        workload=workload,
        buckets=buckets,
        only=asker.only,
    )
    return as_json(request, await api.stored(request, ask))


async def _no_more(_first: PatternPage) -> AsyncIterator[PatternPage]:
    pages: tuple[PatternPage, ...] = ()
    for page in pages:
        yield page
