"""Forms of operators: trainings, models, watchlist, marks by their target, dead letters, keys."""

from typing import Annotated, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import Response

from pipeline.errors import BadInput, NotFound
from pipeline.marks.marks import Kind, Target
from pipeline.models.registry import Registry
from pipeline.records.batch import utc_now
from pipeline.redis.keys import SHARED
from pipeline.service.access.keys import MARK, OPERATE
from pipeline.service.dead_letters import change_dead_letters
from pipeline.service.marks import restore_mark, revoke_marks
from pipeline.service.models import chosen_version, promote_model, roll_back_model
from pipeline.service.questions import asked_moment
from pipeline.service.trainings import TrainingAsked, cancel_training, request_training
from pipeline.service.values import MarkView
from pipeline.service.watchlist import change_watchlist
from pipeline.units import listed, plural
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.decisions import answer_change
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
Operator = Annotated[Visitor, Depends(sees(OPERATE, whole=True))]
Marker = Annotated[Visitor, Depends(sees(MARK, whole=True))]
Text = Annotated[str, Form(max_length=2_000)]
Short = Annotated[str, Form(max_length=300)]
MarkTarget = Annotated[str, Form(pattern=r"^T?-?[0-9]{1,20}$")]
MOST: Final = 200  # names in one field


@router.post("/do/training")
async def post_asked_training(
    request: Request,
    visitor: Operator,
    *,
    workloads: Text = "",
    since: Short = "",
    until: Short = "",
    exclude: Text = "",
) -> Response:
    """Asks for a training."""
    api, now = api_of(request), utc_now()
    asked = TrainingAsked(
        workloads=_names(workloads),
        since=asked_moment(since.strip(), now, flag="since"),
        until=asked_moment(until.strip(), now, flag="until"),
        exclude=_names(exclude),
    )
    by = visitor.asker.name
    await api.facts(request_training, api.client, api.settings, asked, by=by, why=f"asked by {by}")
    _forget(request, "trainings", "status")
    return answer_change(request, visitor, "", to="/learning?done=asked#trainings")


@router.post("/do/training/{training}/cancel")
async def post_cancelled_training(request: Request, visitor: Operator, training: str) -> Response:
    """Stops a training."""
    api = api_of(request)
    _, answer = await api.facts(
        cancel_training, api.client, api.settings, training[:100], by=visitor.asker.name
    )
    _forget(request, "trainings", "status")
    says = "is cancelled" if answer == "cancelled" else "ends at its next step"
    return answer_change(request, visitor, f"The training {says}")


@router.post("/do/model/promote")
async def post_promoted(request: Request, visitor: Operator, version: Short, reason: Short = "") -> Response:
    """Makes a version the live one."""
    api = api_of(request)

    def act() -> None:
        chosen_version(Registry(api.client, api.settings), version)
        promote_model(api.client, api.settings, version, by=visitor.asker.name, reason=reason)

    await api.facts(act)
    _forget(request, "models", "status")
    return answer_change(request, visitor, "", to="/learning?done=promoted")


@router.post("/do/model/rollback")
async def post_rolled_back(
    request: Request, visitor: Operator, model: Short = SHARED, reason: Short = ""
) -> Response:
    """Makes the version before the live one live again."""
    api = api_of(request)
    await api.facts(
        roll_back_model, api.client, api.settings, model=model, by=visitor.asker.name, reason=reason
    )
    _forget(request, "models", "status")
    return answer_change(request, visitor, "", to="/learning?done=rolled-back")


@router.post("/do/watch")
async def post_watched(
    request: Request, visitor: Operator, action: Annotated[Literal["add", "remove"], Form()], pattern: Text
) -> Response:
    """Adds patterns to the watchlist, or removes them."""
    api, adding = api_of(request), action == "add"
    names = _names(pattern)
    if not names:
        raise BadInput("no pattern is named; write one such as prod/shop/*")
    done = await api.facts(
        change_watchlist, api.client, api.settings, names, adding=adding, by=visitor.asker.name
    )
    _forget(request, "status")
    if not done.changed:
        what = "is on the list already" if adding else "was not on the list"
        return answer_change(request, visitor, f"{listed(names)} {what}")
    undo = {
        "action": "/do/watch",
        "fields": [("action", "remove" if adding else "add"), ("pattern", " ".join(done.changed))],
    }
    text = f"{listed(done.changed)} {'is watched' if adding else 'is no longer watched'}"
    return answer_change(request, visitor, text, undo)


@router.post("/do/unmark")
async def post_unmarked(
    request: Request,
    visitor: Marker,
    target: MarkTarget,
    workload: Short = "",
) -> Response:
    """Takes one mark back, of a template (T17) or a pattern id."""
    api = api_of(request)
    wanted = [_target_of(target)]
    revoked = await api.facts(
        revoke_marks, api.client, api.settings, (wanted, ""), workload, by=visitor.asker.name
    )
    _forget(request, "marks")
    before = next((mark for _, _, mark in revoked if mark is not None), None)
    undo = None
    if before is not None:
        fields = {"target": target, "workload": workload, "state": before.state.value, "text": before.text}
        fields |= {"why": before.why, "until": before.until.isoformat() if before.until else ""}
        undo = {"action": "/do/remark", "fields": list(fields.items())}
    return answer_change(request, visitor, f"The mark of {target} is taken back", undo)


@router.post("/do/remark")
async def post_marked_again(
    request: Request,
    visitor: Marker,
    *,
    target: MarkTarget,
    state: Annotated[Literal["normal", "anomalous"], Form()],
    workload: Short = "",
    text: Text = "",
    why: Annotated[str, Form(max_length=500)] = "",
    until: Short = "",
) -> Response:
    """Puts a mark again that was taken back a moment ago."""
    api, chosen = api_of(request), _target_of(target)
    view = MarkView(
        pattern_id=chosen.number if chosen.kind is Kind.PATTERN else None,
        template_id=chosen.number if chosen.kind is Kind.TEMPLATE else None,
        workload=workload or None, state=state, text=text, at=utc_now(),
        until=asked_moment(until, utc_now(), flag="until"), by=visitor.asker.name, why=why,
    )  # fmt: skip
    await api.facts(restore_mark, api.client, api.settings, view, by=visitor.asker.name)
    _forget(request, "marks")
    return answer_change(request, visitor, f"{target} is marked {state} again")


@router.post("/do/dead/{action}")
async def post_dead(
    request: Request,
    visitor: Operator,
    action: Literal["retry", "discard"],
    batch: Annotated[list[str], Form(max_length=300)],
) -> Response:
    """Sends dead batches through the pipeline again, or deletes them. `all` stands for every one."""
    if len(batch) > MOST:
        raise BadInput(f"{len(batch)} batches at a time are too many; choose at most {MOST}, or all")
    api = api_of(request)
    done = await api.facts(
        change_dead_letters, api.client, api.settings, batch, action, by=visitor.asker.name
    )
    _forget(request, "status")
    text = f"{plural(len(done.batches), 'batch')} {'sent again' if action == 'retry' else 'discarded'}"
    asked = action == "discard" or not request.headers.get("hx-request")
    to = f"/pipeline?done={quote(action)}#dead" if asked else ""
    return answer_change(request, visitor, text, to=to)


def _target_of(text: str) -> Target:
    return (Target.template if text.startswith("T") else Target.pattern)(int(text.removeprefix("T")))


def _names(text: str) -> list[str]:
    """Names between blanks or commas."""
    found = list(dict.fromkeys(text.replace(",", " ").split()))
    if len(found) > MOST:
        raise BadInput(f"{len(found)} names are too many; write at most {MOST}")
    if long := next((name for name in found if len(name) > 200), None):
        raise NotFound(f"{long[:60]!r}... is longer than any name of a workload")
    return found


def _forget(request: Request, *names: str) -> None:
    for name in names:
        api_of(request).shared.forget(name)
