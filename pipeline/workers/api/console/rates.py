"""Units and rates: how much each workload writes in the course of time, and where it has fallen silent."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.service.stored.expected import expected_rates
from pipeline.service.values import CauseView, WorkloadRate
from pipeline.units import span as length_of_span
from pipeline.watching.rates.outlook import ExpectedLines
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import (
    IncidentRow,
    Span,
    newest_span,
    some_rates,
    span_of,
    the_incidents,
    workload_filter,
)
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
PARTS: Final = 24
MINUTE: Final = timedelta(minutes=1)
LEAST_CELL: Final = timedelta(minutes=5)  # of the finest counts
SHOWN: Final = 60  # workloads
SHADES: Final = 6
BANDS: Final = 5  # workloads whose expected lines are worked out, some milliseconds each
MOVES: Final = 12  # causes of incidents in rates


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatPart:
    """A part of the span: where it begins and ends."""

    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """The lines of one workload in one part. `shade`: h1 to h6, or gap, before, none."""

    lines: int
    shade: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatRow:
    """One workload. `silent`: since when, where it wrote before and no longer does. `expected`: of each cell,
    where its rate is known."""

    rate: WorkloadRate
    cells: list[HeatCell]
    silent: datetime | None
    expected: list[ExpectedLines] = field(default_factory=list)


@router.get("/rates")
async def rates_page(
    request: Request,
    visitor: See,
    *,
    since: Annotated[str, Query(max_length=40)] = "24h",
    until: Annotated[str | None, Query(max_length=40)] = None,
    workload: Annotated[str, Query(max_length=200)] = "",
    all: bool = False,
) -> Response:
    """Workloads by time as a heat map, each cell of which leads to its patterns."""
    span = whole_cells(span_of(since, until), since, until)
    table = await some_rates(
        request, visitor, span, buckets=PARTS, workload=await workload_filter(request, workload)
    )
    step = timedelta(seconds=table.bucket_s)
    parts = [
        HeatPart(since=table.since + step * at, until=table.since + step * (at + 1)) for at in range(PARTS)
    ]
    shown = table.workloads if all else table.workloads[:SHOWN]
    api = api_of(request)
    usual = await api.facts(
        expected_rates, api.client, api.settings, [one.workload for one in shown] if len(shown) <= BANDS else [],
        [*(part.since for part in parts), parts[-1].until],
    )  # fmt: skip
    rows = [replace(heat_row(one, parts), expected=usual.get(one.workload, [])) for one in shown]
    incidents = await the_incidents(request, visitor)
    return render(
        request, visitor, "rates.html",
        table=table, rows=rows, parts=parts, since=since, until=until or "", workload=workload,
        hidden=len(table.workloads) - len(shown), moves=_moves(incidents, table.since, table.until)[:MOVES],
        newest=None if table.workloads else await newest_span(request, visitor, span),
    )  # fmt: skip


def whole_cells(looked_at: Span, since: str, until: str | None) -> Span:
    """A span such as 24h up to now, as PARTS cells of whole minutes.

    It was widened to whole five minutes, and the headings of uneven cells would drift."""
    cell = looked_at.length / PARTS // MINUTE * MINUTE
    if until or length_of_span(since) is None or cell < LEAST_CELL:
        return looked_at
    return replace(looked_at, since=looked_at.until - PARTS * cell)


def heat_row(rate: WorkloadRate, parts: Sequence[HeatPart]) -> HeatRow:
    """Shades by the square root of the share in the row's peak, so that quiet hours are still seen.

    A part without lines between others is a gap. Behind the last line it is one too, if it is not the running
    part alone."""
    peak = max(rate.trend, default=0) or 1
    seen = [at for at, lines in enumerate(rate.trend) if lines]
    first, last = (seen[0], seen[-1]) if seen else (len(parts), -1)
    silent = 0 <= last < len(parts) - 2
    cells = []
    for at, lines in enumerate(rate.trend):
        if lines:
            shade = f"h{max(1, min(SHADES, round(SHADES * (lines / peak) ** 0.5)))}"
        elif at < first:
            shade = "before"
        else:
            shade = "gap" if at < last or silent else "none"
        cells.append(HeatCell(lines=lines, shade=shade))
    return HeatRow(rate=rate, cells=cells, silent=parts[last].until if silent else None)


def _moves(
    rows: Sequence[IncidentRow], since: datetime, until: datetime
) -> list[tuple[IncidentRow, CauseView]]:
    """What the watcher found in rates and numbers, the newest first."""
    found = [
        (row, cause)
        for row in rows
        for cause in row.incident.causes
        if cause.kind.startswith(("rate", "number")) and cause.last >= since and cause.first < until
    ]
    return sorted(found, key=lambda one: one[1].first, reverse=True)
