"""The first page: is something wrong, since when, and can the answer be trusted?"""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from pipeline.controller.watchlist import covers
from pipeline.records.batch import utc_now
from pipeline.service.lines import newest_patterns
from pipeline.service.senders import has_fallen_silent, read_senders
from pipeline.service.values import HeardSender, IncidentView, PatternCount, RateTable, StackStatus
from pipeline.units import plural
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import (
    ATTENTION,
    IncidentRow,
    Span,
    newest_span,
    shared_page,
    some_rates,
    span_of,
    the_incidents,
    the_news,
    the_status,
)
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor
from pipeline.workers.api.console.words import ago, length_of, total

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
HOUR: Final = timedelta(hours=1)
PART: Final = timedelta(minutes=5)
PARTS: Final = 12
SHOWN: Final = 8
ENDED: Final = 5
# Pages that stay open ask again with each change of an incident; what the store answers may be older.
RATES_FRESH_S: Final = 10.0
NEW_FRESH_S: Final = 30.0
STRIP_FRESH_S: Final = 2.0
_APART: Final = ("snoozed", "silenced")  # shown separately, whether or not they go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """The first sentence of the page. `kind`: waiting, warming, trouble, open, calm."""

    kind: str
    title: str
    text: str


@router.get("/")
async def now_page(request: Request, visitor: See) -> Response:
    """What is open, what is new, and how the pipeline does."""
    return await shared_page(request, visitor, "now.html", partial(_facts_of_now, request, visitor))


@router.get("/strip")
async def strip_piece(request: Request, visitor: See) -> Response:
    """The line of figures at the top, for pages that stay open."""

    async def facts() -> dict[str, Any]:
        status, rates = await the_status(request), await _last_hour(request, visitor)
        return {"facts": strip_facts(status, rates, visitor.asker.only), "status": status}

    return await shared_page(request, visitor, "strip.html", facts, fresh_s=STRIP_FRESH_S)


async def _facts_of_now(request: Request, visitor: Visitor) -> dict[str, Any]:
    rows, status, rates, fresh, news = await asyncio.gather(
        the_incidents(request, visitor),
        the_status(request),
        _last_hour(request, visitor),
        _new_patterns(request, visitor),
        the_news(request, visitor),
    )
    urgent = [row for row in rows if row.state in ATTENTION]
    seen = _seen_by(visitor, status)
    return {
        "mood": mood_of(urgent, rows, seen, status),
        "seen": seen,
        "urgent": urgent,
        "snoozed": sum(row.state == "snoozed" for row in rows),
        "silenced": sum(row.state == "silenced" for row in rows),
        "newest": None if rates.workloads else await newest_span(request, visitor),
        "ended": [row for row in rows if row.state not in (*ATTENTION, *_APART)][:ENDED],
        "fresh": fresh,
        "news": news,
        "facts": strip_facts(status, rates, visitor.asker.only),
        "trend": total([one.trend for one in rates.workloads]) if rates.workloads else [],
        "rates": rates,
        "trend_of": trend_of,
        "status": status,
        "silent": [] if visitor.asker.only else await _silent(request),
        "first_line": status.intake[0] if status.intake else None,
    }


def trend_of(incident: IncidentView, rates: RateTable) -> list[int]:
    """Lines of the workloads of an incident by the parts of the table, none where it has none of them."""
    found = [one.trend for one in rates.workloads if one.workload in incident.workloads]
    return total(found) if found else []


def strip_facts(
    status: StackStatus, rates: RateTable, only: tuple[str, ...] = ()
) -> list[tuple[str, str, str]]:
    """(name, value, class) of the figures that say whether answers can be trusted. `only`: the workloads that
    the key sees."""
    lines = sum(sum(one.trend[-2:]) for one in rates.workloads)
    latest = lines / max(1.0, (utc_now() - rates.until + 2 * PART).total_seconds())
    warming = sum(one.warming for name, one in status.workloads.items() if not only or covers(only, name))
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
    if status.dead["batches"] and not only:
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
    apart = [row for row in rows if row.state in _APART]
    if apart:
        text += f"; {plural(len(apart), 'incident')} silenced or snoozed"
    last = max(
        (row.incident.last for row in rows if row.state not in _APART and not row.incident.ahead),
        default=None,
    )
    if last is not None:
        text += f"; the last incident ended {ago(last)}"
    return Mood(kind="calm", title="Calm", text=text)


async def _last_hour(request: Request, visitor: Visitor) -> RateTable:
    """The last whole five minutes, eleven of them, and those that run: counts are kept for these."""
    return await some_rates(request, visitor, last_parts(utc_now()), buckets=PARTS, fresh_s=RATES_FRESH_S)


def last_parts(now: datetime) -> Span:
    """An hour of five minutes each, the last of which runs."""
    until = now - (now - datetime.min.replace(tzinfo=UTC)) % PART + PART
    return Span(text=("1h", ""), since=until - HOUR, until=until)


async def _new_patterns(request: Request, visitor: Visitor) -> list[PatternCount]:
    """Patterns that came in the last hour for the first time in a day."""
    api, only, span = api_of(request), visitor.asker.only, span_of("24h", None)
    ask = partial(
        newest_patterns, client=api.client, settings=api.settings, since=span.since, until=span.until,
        limit=SHOWN, only=only,
    )  # fmt: skip
    found = await api.shared_stored(("newest-patterns", only), ask, fresh_s=NEW_FRESH_S)
    return [one for one in found if one.first >= span.until - HOUR]


async def _silent(request: Request) -> list[HeardSender]:
    """Senders that were steady and have gone silent."""
    api = api_of(request)
    heard = await api.shared.ask("senders", partial(api.facts, read_senders, api.client, api.settings))
    now = utc_now()
    return [one for one in heard if has_fallen_silent(one, now)]


def _seen_by(visitor: Visitor, status: StackStatus) -> int:
    only = visitor.asker.only
    return sum(one.accepted for name, one in status.workloads.items() if not only or covers(only, name))
