"""Learning: models and their judge, trainings, why none is made yet, drift, watchlist and marks."""

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from pipeline.controller.facts import RetrainRules
from pipeline.controller.training_status import Status
from pipeline.errors import BadInput, NotFound
from pipeline.models.registry import Registry
from pipeline.redis.keys import SHARED
from pipeline.service.access.keys import OPERATE
from pipeline.service.marks import read_marks
from pipeline.service.models import read_models
from pipeline.service.trainings import read_trainings
from pipeline.service.values import ModelView, StackStatus
from pipeline.service.watchlist import read_watchlist
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.asks import the_status
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
Whole = Annotated[Visitor, Depends(sees(whole=True))]
Operator = Annotated[Visitor, Depends(sees(OPERATE, whole=True))]
TRAININGS: Final = 12
FIGURES: Final = (  # of the judge: the name, its field, and whether more is better
    ("alerts on calm lines of the stream now", "alerts_stream", False),
    ("alerts on held-out normal lines", "alerts_held_out", False),
    ("injected anomalies found", "found", True),
)
DONE: Final = {
    "promoted": "The version is live. Workers load it before their next batch.",
    "rolled-back": "The version before is live again. Workers load it before their next batch.",
    "asked": "The training waits. It begins when the machine has room for it.",
}
Done = Literal["", "promoted", "rolled-back", "asked"]


@router.get("/learning")
async def learning_page(request: Request, visitor: Whole, done: Done = "") -> Response:
    """What has been learnt, what comes next, and what people have said."""
    api = api_of(request)
    status = await the_status(request)
    trainings = await _trainings(request)
    models = await _models(request)
    watchlist = await api.facts(read_watchlist, api.client, api.settings)
    marks = await api.facts(read_marks, api.client, api.settings)
    return render(
        request, visitor, "learning.html",
        status=status, models=models, trainings=trainings, watchlist=watchlist, marks=marks,
        rules=RetrainRules.of_settings(api.settings), said=DONE.get(done, ""), figures=FIGURES,
        running=[one for one in trainings if one.running], lasting=_lasting(status),
    )  # fmt: skip


@router.get("/learning/trainings")
async def trainings_piece(request: Request, visitor: Whole) -> Response:
    """The trainings alone, for pages that watch one."""
    trainings = await _trainings(request)
    return render(request, visitor, "trainings.html", trainings=trainings)


@router.get("/learning/promote")
async def promote_page(
    request: Request, visitor: Operator, version: Annotated[str, Query(max_length=300)]
) -> Response:
    """The question before a version becomes the live one."""
    models = await _models(request)
    chosen = next((one for one in models if one.version == version), None)
    if chosen is None:
        raise NotFound(f"there is no model {version[:80]!r}; the page of learning lists what there is")
    if chosen.live:
        raise BadInput(f"{version} is the live version already")
    live = next((one for one in models if one.live and one.model == chosen.model), None)
    return render(
        request, visitor, "promote.html", chosen=chosen, live=live, action="promote", figures=FIGURES
    )


@router.get("/learning/rollback")
async def rollback_page(
    request: Request, visitor: Operator, model: Annotated[str, Query(max_length=300)] = SHARED
) -> Response:
    """The question before the version before the live one becomes live again."""
    status = await the_status(request)
    models = await _models(request)
    now = next((one for one in status.models if one.model == model), None)
    if now is None:
        raise NotFound(f"there is no live model {model[:80]!r}, so nothing can be rolled back")
    chosen = next((one for one in models if one.version == now.previous), None)
    if chosen is None:
        raise BadInput(f"{now.version} has no version before it that is still stored")
    live = next((one for one in models if one.version == now.version), None)
    return render(
        request, visitor, "promote.html", chosen=chosen, live=live, action="rollback", figures=FIGURES
    )


async def _models(request: Request) -> list[ModelView]:
    api = api_of(request)
    ask = partial(api.facts, read_models, Registry(api.client, api.settings))
    found = await api.shared.ask("models", ask)
    return sorted(found, key=lambda one: (one.model != SHARED, one.model, not one.live, one.version))


async def _trainings(request: Request) -> list[Status]:
    api = api_of(request)
    ask = partial(api.facts, read_trainings, api.client, api.settings, TRAININGS)
    return await api.shared.ask("trainings", ask, fresh_s=0.5)


def _lasting(status: StackStatus) -> dict[str, dict[str, Any]]:
    """The last decision that asked for a training, of each model."""
    return {model: entry for model, entry in status.retrained.items() if entry.get("reason")}
