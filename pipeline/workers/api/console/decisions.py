"""Forms: marks, and the states of incidents. Each answers with a note that offers to undo it."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from pipeline.errors import BadInput
from pipeline.marks.marks import Target
from pipeline.service.access.keys import MARK
from pipeline.service.handover.notes import add_note
from pipeline.service.incident_decisions import decide_incident
from pipeline.service.mark_target import Finder
from pipeline.service.marks import check_marks_of, put_mark, revoke_marks
from pipeline.service.questions import template_number
from pipeline.service.values import Action
from pipeline.units import listed
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.console.doors import ConsoleRoute, page_before, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
May = Annotated[Visitor, Depends(sees(MARK))]
MOST: Final = 200  # patterns of one form
_SAYS: Final = {
    Action.ACKNOWLEDGE: "acknowledged",
    Action.RESOLVE: "resolved",
    Action.SNOOZE: "snoozed",
    Action.REOPEN: "open again",
}


@router.post("/do/mark")
async def post_marks(
    request: Request,
    visitor: May,
    *,
    pattern: Annotated[list[str], Form()],
    state: Annotated[Literal["normal", "anomalous", ""], Form()] = "",
    why: Annotated[str, Form(max_length=500)] = "",
    lasts: Annotated[str, Form(max_length=12)] = "",
) -> Response:
    """Marks patterns, or takes their marks back. `pattern`: T17 for every workload, or "T17 shop/web"."""
    if len(pattern) > MOST:
        raise BadInput(f"{len(pattern)} patterns at a time are too many; choose at most {MOST}")
    api = api_of(request)
    wanted = [_target(one) for one in pattern]
    for _, workload in wanted:
        check_marks_of(visitor.asker.only, workload, by=visitor.asker.name)

    def act() -> set[str]:
        """The states that were replaced, "" for none."""
        replaced = set()
        for number, workload in wanted:
            if state:
                named = Finder(api.client, api.settings).find(f"T{number}")
                new = put_mark(
                    api.client, api.settings, named, state,
                    workload=workload, lasts=lasts or None, by=visitor.asker.name, why=why,
                )  # fmt: skip
                replaced.add(new.replaced.state.value if new.replaced is not None else "")
            else:
                revoke_marks(
                    api.client, api.settings, ([Target.template(number)], ""), workload,
                    by=visitor.asker.name,
                )  # fmt: skip
        return replaced

    replaced = await api.facts(act)
    api.shared.forget("marks")
    names = listed([f"T{number}" for number, _ in wanted])
    text = f"{names} marked {state}" if state else f"{names}: the mark is taken back"
    before = replaced.pop() if len(replaced) == 1 else ""  # several kinds: back to no mark
    undo = {"action": "/do/mark", "fields": [("state", before), *(("pattern", one) for one in pattern)]}
    return answer_change(request, visitor, text, undo if state else None)


@router.post("/do/incident/{name}/{action}")
async def post_incident(
    request: Request,
    visitor: May,
    *,
    name: str,
    action: Action,
    seen: Annotated[str, Form(max_length=40)] = "",
    lasts: Annotated[str, Form(max_length=12)] = "",
    more: Annotated[str, Form(max_length=12)] = "",
    why: Annotated[str, Form(max_length=500)] = "",
) -> Response:
    """Acknowledges, resolves, snoozes or opens again."""
    api = api_of(request)
    try:
        at = datetime.fromisoformat(seen) if seen else None
    except ValueError as exc:
        raise BadInput(f"seen {seen[:40]!r} is no time; open the page again") from exc
    if more and not (more.isascii() and more.isdecimal()):
        raise BadInput(f"{more!r} is no number of lines; write one such as 100, or nothing")
    await api.facts(
        decide_incident, api.client, api.settings, name, action, by=visitor.asker.name, seen=at,
        lasts=lasts or None, more=int(more) if more else None, why=why, only=visitor.asker.only,
    )  # fmt: skip
    api.shared.forget("incidents")
    undo = {"action": f"/do/incident/{name}/reopen", "fields": []}
    return answer_change(
        request, visitor, f"The incident is {_SAYS[action]}", None if action is Action.REOPEN else undo
    )


@router.post("/do/note/{name}")
async def post_note(
    request: Request, visitor: May, *, name: str, text: Annotated[str, Form(max_length=20_000)] = ""
) -> Response:
    """Writes a note on an incident."""
    api = api_of(request)
    await api.facts(
        add_note, api.client, api.settings, name, text, by=visitor.asker.name, only=visitor.asker.only
    )
    return answer_change(request, visitor, "The note is kept")


def _target(text: str) -> tuple[int, str]:
    name, _, workload = text.partition(" ")
    return template_number(name, flag="the pattern"), workload


def answer_change(
    request: Request, visitor: Visitor, text: str, undo: dict[str, Any] | None = None, *, to: str = ""
) -> Response:
    """A note on the page. Without scripts, or after a question, the page again; `to`: another one."""
    if to or not request.headers.get("hx-request"):
        return RedirectResponse(to or page_before(request), 303)
    answer = render(request, visitor, "toast.html", text=text, undo=undo, bad=False)
    answer.headers["HX-Trigger"] = "lw-changed"
    return answer
