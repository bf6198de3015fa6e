"""Silences: which incidents are shown apart, until when, and why; and the forms that begin and end them."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import Response

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.access.keys import MARK
from pipeline.service.incidents import silences_in_use
from pipeline.service.silences import end_silence, put_silence
from pipeline.units import listed, plural
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import workloads_like
from pipeline.workers.api.console.decisions import answer_change
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
Whole = Annotated[Visitor, Depends(sees(whole=True))]
Marker = Annotated[Visitor, Depends(sees(MARK, whole=True))]
MOST: Final = 20  # silences of one form; there may be 200 in all
Short = Annotated[str, Form(max_length=300)]


@router.get("/silences")
async def silences_page(request: Request, visitor: Whole) -> Response:
    """Those that hold and those that ended lately."""
    api = api_of(request)
    ask = partial(api.facts, silences_in_use, api.client, api.settings, utc_now())
    found = await api.shared.ask("silences", ask, fresh_s=0.5)
    return render(
        request, visitor, "silences.html",
        holding=[one for one in found if not one.expired], ended=[one for one in found if one.expired],
    )  # fmt: skip


@router.post("/do/silence")
async def post_silenced(
    request: Request,
    visitor: Marker,
    *,
    workload: Short,
    lasts: Short,
    why: Annotated[str, Form(max_length=500)] = "",
    template: Short = "",
    service: Short = "",
) -> Response:
    """Begins a silence."""
    api = api_of(request)
    made = await api.facts(
        put_silence, api.client, api.settings, workload.strip(), lasts=lasts, why=why, by=visitor.asker.name,
        template=template.strip() or None, service=service.strip(),
    )  # fmt: skip
    _forget_silences(request)
    undo = {"action": f"/do/silence/{made.id}/end", "fields": []}
    count = await workloads_like(request, made.workload)
    words = f"Incidents of {made.workload} ({plural(count, 'workload')}) are shown apart"
    return answer_change(request, visitor, words, undo)


@router.post("/do/silence-patterns")
async def post_patterns_silenced(
    request: Request,
    visitor: Marker,
    *,
    pattern: Annotated[list[str], Form()],
    silence_for: Short,
    silence_why: Annotated[str, Form(max_length=500)] = "",
) -> Response:
    """Begins a silence for each of the chosen patterns. `pattern`: "T17 shop/web", as for marks."""
    if len(pattern) > MOST:
        raise BadInput(f"{len(pattern)} silences at a time are too many; choose at most {MOST} patterns")
    api = api_of(request)
    named = [(template, workload) for template, _, workload in (one.partition(" ") for one in pattern)]
    if not all(workload for _, workload in named):
        raise BadInput("a silence is of a workload; choose patterns that name theirs, as T17 shop/web does")

    def act() -> None:
        for template, workload in named:
            put_silence(
                api.client, api.settings, workload, lasts=silence_for, why=silence_why, by=visitor.asker.name,
                template=template,
            )  # fmt: skip

    await api.facts(act)
    _forget_silences(request)
    names = listed([template for template, _ in named])
    return answer_change(request, visitor, f"Incidents of {names} are shown apart; Silences ends that")


@router.post("/do/silence/{name}/end")
async def post_silence_end(request: Request, visitor: Marker, name: str) -> Response:
    """Ends a silence now."""
    api = api_of(request)
    ended = await api.facts(end_silence, api.client, api.settings, name[:40], by=visitor.asker.name)
    _forget_silences(request)
    fields = [
        ("workload", ended.workload), ("template", ended.template or ""), ("service", ended.service),
        ("why", ended.why), ("lasts", "1h"),
    ]  # fmt: skip
    undo = {"action": "/do/silence", "fields": fields, "words": "Silence for 1 h"}
    return answer_change(request, visitor, f"Incidents of {ended.workload} count again", undo)


def _forget_silences(request: Request) -> None:
    for name in ("silences", "incidents"):
        api_of(request).shared.forget(name)
