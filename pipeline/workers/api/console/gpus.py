"""GPU pool: devices and what holds them, needs that wait and why, tenants, and the use of the past."""

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from markupsafe import Markup

from pipeline.errors import LogweirError
from pipeline.gpu.pool import Pool
from pipeline.records.batch import utc_now
from pipeline.service.gpu import can_infer, read_usage
from pipeline.service.pool_facts import pool_facts, tenant_rows
from pipeline.service.questions import UsageColumn, asked_moment
from pipeline.workers.api.asking import Api, api_of
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
Whole = Annotated[Visitor, Depends(sees(whole=True))]
USED: Final = 30  # rows of the past
COLUMNS: Final = ("tenant", "kind", "device", "node")


@router.get("/gpu")
async def gpu_page(
    request: Request,
    visitor: Whole,
    by: UsageColumn = "tenant",
    since: Annotated[str, Query(max_length=40)] = "30d",
) -> Response:
    """Who holds which device, who waits, and who has used how much."""
    api = api_of(request)
    begin = asked_moment(since, utc_now(), flag="since")
    usage, away = None, ""
    try:
        usage = await api.facts(read_usage, api.settings, by, begin, None)
    except LogweirError as exc:  # the store of the past does not answer; the pool does
        away = str(exc)
    return render(
        request, visitor, "gpu.html",
        **await _pool(api), usage=usage, usage_away=away, used=USED, by=by, since=since, columns=COLUMNS,
    )  # fmt: skip


@router.get("/gpu/now")
async def pool_piece(request: Request, visitor: Whole) -> Response:
    """The pool at this moment, for pages that stay open."""
    return render(request, visitor, "pool.html", **await _pool(api_of(request)))


def memory_meter(total: int, leased: int, outside: int) -> Markup:
    """Memory of a device as a bar: what leases hold, and what others use. Its words stand beside it."""
    whole = max(total, 1)
    first = min(100.0, 100 * leased / whole)
    second = min(100.0 - first, 100 * max(0, outside) / whole)
    return Markup(
        '<svg class="meter" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="m1" width="{:.1f}" height="12"/><rect class="m3" x="{:.1f}" width="{:.1f}" height="12"/></svg>'
    ).format(first, first, second)


async def _pool(api: Api) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        snapshot = Pool(api.client, api.settings).snapshot()
        return {
            "pool": pool_facts(snapshot),
            "tenants": tenant_rows(snapshot),
            "half_life_s": snapshot.half_life_s,
            "scoring": can_infer(api.client, api.settings),
            "meter": memory_meter,
        }

    found: dict[str, Any] = await api.shared.ask("pool", partial(api.facts, read))
    return found
