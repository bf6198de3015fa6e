"""Units: which host, service or session is unusual compared with an earlier span, and why."""

from functools import partial
from typing import Annotated, Final, get_args

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.records.batch import utc_now
from pipeline.records.unit_query import UnitKind
from pipeline.service.stored.asked_units import units_asked
from pipeline.service.stored.units import stored_units
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import STORED_FRESH_S, newest_span, workload_filter
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Text = Annotated[str, Query(max_length=40)]
SHOWN: Final = 20
KINDS: Final = get_args(UnitKind)


@router.get("/units")
async def units_page(
    request: Request,
    visitor: See,
    *,
    by: UnitKind = "service",
    since: Text = "1h",
    until: Text = "",
    normal: Text = "",
    workload: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """The most unusual first, each with its reasons and its lines."""
    api, only = api_of(request), visitor.asker.only
    asked = units_asked(
        by, since, until.strip() or None, normal.strip() or None, utc_now(),
        workload=await workload_filter(request, workload), limit=SHOWN, only=only,
    )  # fmt: skip
    ask = partial(stored_units, client=api.client, settings=api.settings, asked=asked, now=utc_now())
    found = await api.shared_stored(
        ("units", only, by, since, until, normal, workload),
        ask,
        fresh_s=STORED_FRESH_S,
    )
    return render(
        request, visitor, "units.html",
        found=found, ranking=found.ranking, kinds=KINDS, by=by, since=since, until=until, normal=normal,
        workload=workload, newest=None if found.ranking.judged else await newest_span(request, visitor),
    )  # fmt: skip
