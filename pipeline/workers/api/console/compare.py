"""Compare: two spans or two workloads, and the patterns that are new, gone, more or fewer."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.records.batch import utc_now
from pipeline.service.stored.compare import compare_stored, compared_sides
from pipeline.service.stored.values import COMPARED_SPAN, ChangeKind, Difference
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import STORED_FRESH_S, newest_span, the_marks, workload_filter
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Text = Annotated[str, Query(max_length=200)]
SHOWN: Final = 20  # of each kind: four of them stay below 200 KB
PAGE: Final = 60  # differences of a page where all are asked for
HEADS: Final = {
    ChangeKind.NEW: ("New", "In A, and not in B."),
    ChangeKind.GONE: ("Gone", "In B, and no longer in A."),
    ChangeKind.MORE: ("More", "More frequent in A, by more than chance explains."),
    ChangeKind.FEWER: ("Fewer", "Less frequent in A, by more than chance explains."),
}
CHOICES: Final = (
    ("the last hour, the hour before", "1h", "2h..1h"),
    ("the last hour, that hour yesterday", "1h", "25h..24h"),
    ("the last day, the day before", "24h", "48h..24h"),
    ("the last day, that day a week ago", "24h", "8d..7d"),
)


@router.get("/compare")
async def compare_page(
    request: Request,
    visitor: See,
    *,
    a: Text = COMPARED_SPAN,
    b: Text = "",
    workload: Text = "",
    other: Text = "",
    all: bool = False,
    page: Annotated[int, Query(ge=1, le=10_000)] = 1,
) -> Response:
    """The patterns of A beside those of B, and how sure each difference is."""
    api, only = api_of(request), visitor.asker.only
    sides = compared_sides(
        a or COMPARED_SPAN,
        b.strip() or None,
        utc_now(),
        workload=await workload_filter(request, workload),
        other=await workload_filter(request, other),
    )
    ask = partial(compare_stored, client=api.client, settings=api.settings, sides=sides, only=only)
    found = await api.shared_stored(
        ("compare", only, a, b, workload, other),
        ask,
        fresh_s=STORED_FRESH_S,
    )
    marks = await the_marks(request)
    groups: list[tuple[ChangeKind, str, str, list[Difference], int, int]] = []
    for kind, (head, text) in HEADS.items():
        rows = [one for one in found.differences if one.kind is kind]
        # Pages go through the kinds one after the other.
        before = sum(count for *_, count, _ in groups)
        begin = (page - 1) * PAGE - before
        shown = rows[max(0, begin) : max(0, begin + PAGE)] if all else rows[:SHOWN]
        groups.append((kind, head, text, shown, len(rows), before // PAGE + 1))
    return render(
        request, visitor, "compare.html",
        found=found, groups=groups, marks=marks, a=a or COMPARED_SPAN, b=b, workload=workload, other=other,
        across=bool(other), choices=CHOICES, all=all, page=page,
        last_page=max(1, -(-len(found.differences) // PAGE)),
        newest=None if sum(found.lines) else await newest_span(request, visitor),
    )  # fmt: skip
