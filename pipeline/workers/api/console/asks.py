"""The questions that several pages ask, each shared by the pages that are open."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from pipeline.controller.watchlist import covers
from pipeline.errors import AnswerCancelled
from pipeline.records.batch import utc_now
from pipeline.service.incidents import read_incidents
from pipeline.service.lines import last_stored, stored_lines, stored_patterns, stored_rates
from pipeline.service.marks import read_marks
from pipeline.service.questions import LinesAsked, PatternsAsked, pattern_span
from pipeline.service.status import read_status
from pipeline.service.stored.news import stored_news
from pipeline.service.stored.values import NEWS_SPAN, NewsPage
from pipeline.service.values import (
    Decision,
    IncidentState,
    IncidentView,
    LinePage,
    MarkView,
    PatternPage,
    RateTable,
    StackStatus,
)
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.views import Visitor, for_one, written_for_all
from pipeline.workers.api.console.words import iso_time
from pipeline.workers.api.sharing import PAGES

PAGE_FRESH_S: Final = 0.5
STORED_FRESH_S: Final = 5.0
NEWS_FRESH_S: Final = 60.0  # it reads the findings of four days
ATTENTION: Final = (IncidentState.REGRESSED, IncidentState.OPEN, IncidentState.ACKNOWLEDGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    """An incident with its state and the decision behind it."""

    incident: IncidentView
    state: IncidentState
    decision: Decision | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The span of a page: as it is written, and its two ends."""

    text: tuple[str, str]
    since: datetime
    until: datetime

    @property
    def length(self) -> timedelta:
        return self.until - self.since


def span_of(since: str, until: str | None) -> Span:
    """The span of the parameters `since` and `until`. Raises BadInput."""
    begin, end = pattern_span(since, until, utc_now())
    return Span(text=(since, until or ""), since=begin, until=end)


async def shared_page(
    request: Request,
    visitor: Visitor,
    template: str,
    facts: Callable[[], Awaitable[dict[str, Any]]],
    *,
    fresh_s: float = PAGE_FRESH_S,
) -> Response:
    """A page that is written once for all open pages of the same address and access, until something changes
    or `fresh_s` have passed. `facts`: gives the names of its template."""
    asker = visitor.asker
    address = (request.url.path, request.url.query)
    question = (PAGES, template, *address, asker.name, asker.only, tuple(asker.key.scopes))

    async def write() -> str:
        return written_for_all(request, visitor, template, await facts())

    return for_one(request, visitor, await api_of(request).shared.ask(question, write, fresh_s=fresh_s))


async def workload_filter(request: Request, text: str) -> str | None:
    """The pattern of workloads that a person means: a name, a pattern, or a part of names. None for all."""
    text = text.strip()
    if not text:
        return None
    if "*" in text or "?" in text or text in (await the_status(request)).workloads:
        return text
    return f"*{text}*"


async def the_status(request: Request) -> StackStatus:
    """What runs and what waits."""
    api = api_of(request)
    ask = partial(api.facts, read_status, api.settings, api.client)
    return await api.shared.ask("status", ask)


async def workloads_like(request: Request, pattern: str) -> int:
    """How many workloads of the pipeline a pattern covers."""
    status = await the_status(request)
    return sum(covers([pattern], name) for name in status.workloads)


async def the_incidents(request: Request, visitor: Visitor) -> list[IncidentRow]:
    """All incidents: those that need somebody first, else in the order of `read_incidents`."""
    api, only = api_of(request), visitor.asker.only

    def read() -> list[IncidentRow]:
        found = read_incidents(api.client, api.settings, utc_now(), only=only).incidents
        rows = [IncidentRow(incident=one, decision=one.decision, state=one.state) for one in found]
        rank = {state: at for at, state in enumerate(ATTENTION)}
        return sorted(rows, key=lambda row: rank.get(row.state, 9))

    return await api.shared.ask(("incidents", only), partial(api.facts, read), fresh_s=0.5)


async def the_marks(request: Request) -> dict[tuple[int, str], MarkView]:
    """The marks of templates that hold, by template and workload ("" for all)."""
    api = api_of(request)
    marks = await api.shared.ask(
        "marks", partial(api.facts, read_marks, api.client, api.settings), fresh_s=0.5
    )
    return {
        (mark.template_id, mark.workload or ""): mark
        for mark in marks.marks
        if mark.template_id is not None and not mark.expired
    }


async def some_rates(
    request: Request,
    visitor: Visitor,
    span: Span,
    *,
    buckets: int,
    workload: str | None = None,
    fresh_s: float = STORED_FRESH_S,
) -> RateTable:
    """Lines by workload and time."""
    api, only = api_of(request), visitor.asker.only
    ask = partial(
        stored_rates, since=span.since, until=span.until, workload=workload, buckets=buckets, only=only
    )
    question = ("rates", only, span.text, workload, buckets)
    return await api.shared_stored(question, ask, fresh_s=fresh_s)


async def some_patterns(
    request: Request,
    asked: PatternsAsked,
    *,
    question: Sequence[object] = (),
    fresh_s: float = STORED_FRESH_S,
) -> PatternPage:
    """A page of patterns. `question`: shares the answer with pages that ask the same; none without."""
    api = api_of(request)
    ask = partial(stored_patterns, client=api.client, settings=api.settings, asked=asked)
    if not question:
        return await api.stored(request, ask)
    return await api.shared_stored(("patterns", *question), ask, fresh_s=fresh_s)


async def the_news(request: Request, visitor: Visitor) -> NewsPage | None:
    """Calm lines of the last day that were never said before. None where the answer takes too long: a page
    about what is wrong does not fail for it."""
    api, only, span = api_of(request), visitor.asker.only, span_of(NEWS_SPAN, None)
    ask = partial(
        stored_news, client=api.client, settings=api.settings, since=span.since, until=span.until,
        only=only, now=utc_now(),
    )  # fmt: skip
    with suppress(AnswerCancelled):
        return await api.shared_stored(("news", only), ask, fresh_s=NEWS_FRESH_S)
    return None


async def newest_span(request: Request, visitor: Visitor, looked_at: Span | None = None) -> Span | None:
    """The day that ends with the newest stored line, None where nothing is stored, and where the line lies in
    the span that was looked at: another day has nothing newer."""
    api, only = api_of(request), visitor.asker.only
    ask = partial(last_stored, only=only)
    last = await api.shared_stored(("newest", only), ask, fresh_s=STORED_FRESH_S)
    if last is None or (looked_at is not None and looked_at.since <= last < looked_at.until):
        return None
    until = last.replace(microsecond=0) + timedelta(seconds=1)
    since = until - timedelta(days=1)
    return Span(text=(iso_time(since), iso_time(until)), since=since, until=until)


async def some_lines(
    request: Request,
    asked: LinesAsked,
    *,
    question: Sequence[object] = (),
    fresh_s: float = STORED_FRESH_S,
) -> LinePage:
    """Stored lines that match. `question`: as of `some_patterns`."""
    api = api_of(request)
    ask = partial(stored_lines, settings=api.settings, asked=asked)
    if not question:
        return await api.stored(request, ask)
    return await api.shared_stored(("lines", *question), ask, fresh_s=fresh_s)
