"""The first page: is something wrong, since when, and can the answer be trusted?"""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from pipeline.controller.watchlist import covers
from pipeline.records.batch import utc_now
from pipeline.service.questions import PatternsAsked
from pipeline.service.senders import has_fallen_silent, read_senders
from pipeline.service.values import HeardSender, PatternCount, RateTable, StackStatus
from pipeline.units import plural
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import (
    ATTENTION,
    IncidentRow,
    newest_span,
    some_patterns,
    some_rates,
    span_of,
    the_incidents,
    the_status,
)
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render
from pipeline.workers.api.console.words import ago, length_of, total

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
HOUR: Final = timedelta(hours=1)
SHOWN: Final = 8
ENDED: Final = 5
# Pages that stay open ask again with each change of an incident; what the store answers may be older.
RATES_FRESH_S: Final = 10.0
NEW_FRESH_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """The first sentence of the page. `kind`: waiting, warming, trouble, open, calm."""

    kind: str
    title: str
    text: str


@router.get("/")
async def now_page(request: Request, visitor: See) -> Response:
    """What is open, what is new, and how the pipeline does."""
    rows, status, rates, fresh = await asyncio.gather(
        the_incidents(request, visitor),
        the_status(request),
        _last_hour(request, visitor),
        _new_patterns(request, visitor),
    )
    urgent = [row for row in rows if row.state in ATTENTION]
    return render(
        request,
        visitor,
        "now.html",
        mood=mood_of(urgent, rows, _seen_by(visitor, status), status),
        urgent=urgent,
        snoozed=sum(row.state == "snoozed" for row in rows),
        newest=None if rates.workloads else await newest_span(request, visitor),
        ended=[row for row in rows if row.state not in (*ATTENTION, "snoozed")][:ENDED],
        fresh=fresh,
        facts=strip_facts(status, rates),
        trend=total([one.trend for one in rates.workloads]) if rates.workloads else [],
        rates=rates,
        status=status,
        silent=[] if visitor.asker.only else await _silent(request),
        first_line=status.intake[0] if status.intake else None,
    )


@router.get("/strip")
async def strip_piece(request: Request, visitor: See) -> Response:
    """The line of figures at the top, for pages that stay open."""
    status = await the_status(request)
    rates = await _last_hour(request, visitor)
    return render(request, visitor, "strip.html", facts=strip_facts(status, rates), status=status)


def strip_facts(status: StackStatus, rates: RateTable) -> list[tuple[str, str, str]]:
    """(name, value, class) of the figures that say whether answers can be trusted."""
    minutes = [sum(column) for column in zip(*(one.trend for one in rates.workloads), strict=True)]
    latest = sum(minutes[-6:-1]) / 300 if minutes else 0.0
    warming = sum(one.warming for one in status.workloads.values())
    late = status.batches
    made = status.model.published_ms / 1000 if status.model else None
    found = [
        ("lines a second", f"{latest:,.1f}" if latest < 10 else f"{latest:,.0f}", ""),
        ("on their way", plural(late, "batch"), "warn" if late > 200 else ""),
        (
            "model",
            "none yet" if made is None else f"{length_of(utc_now().timestamp() - made)} old",
            "warn" if made is None else "",
        ),
    ]
    if warming:
        found.append(("not judged yet", f"{warming:,} lines", "warn"))
    if status.dead["batches"]:
        found.append(("dead letters", f"{status.dead['batches']:,}", "bad"))
    return found


def mood_of(urgent: list[IncidentRow], rows: list[IncidentRow], lines: int, status: StackStatus) -> Mood:
    """The one sentence that an operator reads first."""
    if status.trouble is not None:
        return Mood(kind="trouble", title="The pipeline is in trouble", text=status.trouble.reason)
    if status.closed is not None:
        return Mood(kind="trouble", title="Intake is paused", text=status.closed)
    if not lines:
        return Mood(
            kind="waiting",
            title="Waiting for the first line",
            text="Nothing has been sent to this pipeline yet.",
        )
    if urgent:
        open_now = [row for row in urgent if row.state != "acknowledged"]
        worst = max(urgent, key=lambda row: (row.incident.severity, row.incident.score)).incident
        title = f"{plural(len(urgent), 'incident')} {'needs' if len(urgent) == 1 else 'need'} a look"
        if not open_now:
            title = f"{plural(len(urgent), 'incident')} acknowledged"
        return Mood(kind="open", title=title, text=f"The gravest: {worst.workloads[0]}")
    if status.model is None and not status.models:
        return Mood(
            kind="warming",
            title="Warming up: no model yet",
            text="Lines are stored, and none is judged. A model is learnt as soon as there are enough lines.",
        )
    text = f"{plural(lines, 'line')} looked at"
    last = max((row.incident.last for row in rows), default=None)
    if last is not None:
        text += f"; the last incident ended {ago(last)}"
    return Mood(kind="calm", title="Calm", text=text)


async def _last_hour(request: Request, visitor: Visitor) -> RateTable:
    return await some_rates(request, visitor, span_of("1h", None), buckets=60, fresh_s=RATES_FRESH_S)


async def _new_patterns(request: Request, visitor: Visitor) -> list[PatternCount]:
    """Patterns that came in the last hour for the first time in a day."""
    span = span_of("24h", None)
    asked = PatternsAsked(
        since=span.since, until=span.until, order="new", limit=SHOWN, buckets=24, only=visitor.asker.only
    )
    page = await some_patterns(request, asked, question=("new", visitor.asker.only), fresh_s=NEW_FRESH_S)
    return [one for one in page.patterns if one.first >= span.until - HOUR and one.before == 0]


async def _silent(request: Request) -> list[HeardSender]:
    """Senders that were steady and have gone silent."""
    api = api_of(request)
    heard = await api.shared.ask("senders", partial(api.facts, read_senders, api.client, api.settings))
    now = utc_now()
    return [one for one in heard if has_fallen_silent(one, now)]


def _seen_by(visitor: Visitor, status: StackStatus) -> int:
    only = visitor.asker.only
    return sum(one.accepted for name, one in status.workloads.items() if not only or covers(only, name))
