"""Routes that change something. Each change goes to the audit log under the name of the key."""

import re
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from pipeline.controller.training_status import Status
from pipeline.controller.trainings import Trainings
from pipeline.errors import BadInput, NotFound
from pipeline.gpu.values import DeviceKind, LeaseMode, Need
from pipeline.marks.marks import Target
from pipeline.models.registry import Registry
from pipeline.records.batch import utc_now
from pipeline.redis.keys import SHARED
from pipeline.service.access.key_changes import KeyAsked, add_key, revoke_key
from pipeline.service.access.keys import ADMIN, GPU, MARK, OPERATE
from pipeline.service.dead_letters import change_dead_letters
from pipeline.service.gpu import release_lease, renew_lease, request_lease
from pipeline.service.incident_decisions import MAX_MORE, decide_incident
from pipeline.service.mark_target import Finder
from pipeline.service.marks import check_marks_of, mark_view, put_mark, revoke_marks
from pipeline.service.models import chosen_version, promote_model, roll_back_model
from pipeline.service.questions import asked_moment
from pipeline.service.silences import end_silence, put_silence
from pipeline.service.trainings import TrainingAsked, cancel_training, request_training
from pipeline.service.values import (
    Action,
    BatchesChanged,
    IncidentView,
    MarkView,
    Moved,
    NewKey,
    SilenceView,
    WatchlistChange,
)
from pipeline.service.watchlist import change_watchlist
from pipeline.workers.api.access import Asker, needs
from pipeline.workers.api.answering import StrictRoute, answers_with, as_json
from pipeline.workers.api.asking import api_of
from pipeline.workers.api.problems import AskRefused

router: Final = APIRouter(tags=["changes"], route_class=StrictRoute)
Marking = Annotated[Asker, Depends(needs(MARK))]
MarkingSome = Annotated[Asker, Depends(needs(MARK, whole=False))]
Operating = Annotated[Asker, Depends(needs(OPERATE))]
Lending = Annotated[Asker, Depends(needs(GPU))]
Ruling = Annotated[Asker, Depends(needs(ADMIN))]
TARGET: Final = r"^([Tt]-?)?[0-9]{1,20}$"  # of a mark
Name = Annotated[str, Path(max_length=300)]
Why = Annotated[str, Field(max_length=500)]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """A body refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid")


class MarkBody(Body):
    """`pattern`: a pattern id, T17, or the text of a line or template. `lasts`: 15m, 1h, 7d."""

    pattern: Annotated[str, Field(min_length=1, max_length=65_536)]
    state: Literal["normal", "anomalous"]
    workload: Annotated[str, Field(max_length=200)] = ""
    lasts: Annotated[str, Field(max_length=12)] | None = None
    why: Why = ""


class DecisionBody(Body):
    """`seen`: the last line that the person saw; default: the incident's last. `lasts`: of a snooze.
    `more`: so many more lines of the incident end a snooze before."""

    seen: AwareDatetime | None = None
    lasts: Annotated[str, Field(max_length=12)] | None = None
    more: Annotated[int, Field(ge=1, le=MAX_MORE)] | None = None
    why: Why = ""


class SilenceBody(Body):
    """`workload`: a pattern, as in the watchlist. `lasts`: 15m, 2h, 7d; at most 90d. `template`: T17.
    `service`: a pattern of the last part of a workload's name."""

    workload: Text
    lasts: Annotated[str, Field(max_length=12)]
    why: Annotated[str, Field(min_length=1, max_length=500)]
    template: Annotated[str, Field(max_length=24)] | None = None
    service: Annotated[str, Field(max_length=200)] = ""


class ReasonBody(Body):
    """Why it is done, for the audit log and the version."""

    reason: Why = ""


class RollbackBody(ReasonBody):
    """`model`: a workload with a model of its own, or the shared one."""

    model: Text = SHARED


class TrainingBody(Body):
    """`since` and `until`: spans or times, as for lines."""

    workloads: Annotated[list[Text], Field(max_length=100)] = []
    since: Annotated[str, Field(max_length=40)] | None = None
    until: Annotated[str, Field(max_length=40)] | None = None
    exclude: Annotated[list[Text], Field(max_length=100)] = []


class WatchlistBody(Body):
    """Patterns such as prod/shop/*."""

    add: Annotated[list[Text], Field(max_length=1_000)] = []
    remove: Annotated[list[Text], Field(max_length=1_000)] = []


class KeyBody(Body):
    """`only`: patterns of the workloads that it sends for or sees. `lasts`: 12h, 90d. `tenant`: whose models
    it asks, with the scope `infer`, and whose leases it has, with `gpu`."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    scopes: Annotated[
        list[Literal["send", "read", "mark", "operate", "admin", "infer", "gpu"]],
        Field(min_length=1, max_length=7),
    ]
    workload: Annotated[str, Field(max_length=200)] = ""
    only: Annotated[list[Text], Field(max_length=100)] = []
    lasts: Annotated[str, Field(max_length=12)] | None = None
    tenant: Annotated[str, Field(max_length=63)] = ""


class LeaseBody(Body):
    """A need of `logweir gpu request`. The lease ends after `lasts_s` unless it is renewed."""

    holder: Text
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    tenant: Annotated[str, Field(min_length=1, max_length=60)] = "logweir"
    mode: LeaseMode = LeaseMode.SHARED
    memory_mib: Annotated[int, Field(ge=0, le=1_048_576)] = 0
    compute_percent: Annotated[int, Field(ge=0, le=100)] = 0
    devices: Annotated[int, Field(ge=1, le=1_024)] = 1
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    preemptible: bool = False
    node: Annotated[str, Field(max_length=200)] = ""
    device: Annotated[str, Field(max_length=200)] = ""
    device_kind: DeviceKind = DeviceKind.ANY
    model: Annotated[
        str, Field(max_length=120, pattern=r"^([A-Za-z0-9]([A-Za-z0-9 ._|-]*[A-Za-z0-9])?)?$")
    ] = ""
    cpu_milli: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    node_memory_mib: Annotated[int, Field(ge=0, le=1_073_741_824)] = 0
    same_node: bool = False
    lasts_s: Annotated[float, Field(gt=0, le=604_800)] = 3_600.0


class TokenBody(Body):
    """The first token of a lease."""

    token: Annotated[int, Field(ge=0, le=2**53)]


@router.post("/marks", responses=answers_with(MarkView, "The mark.", status=201), status_code=201)
async def post_mark(request: Request, asker: MarkingSome, body: MarkBody) -> Response:
    """Says that lines are normal or anomalous, whatever a model says.

    A key with workloads marks a template (T17) in one of these, and gets no text of it.
    """
    api = api_of(request)
    check_marks_of(asker.only, body.workload, by=asker.name)
    if asker.only:
        _check_names(body.pattern)

    def act() -> MarkView:
        new = put_mark(
            api.client, api.settings, Finder(api.client, api.settings).find(body.pattern), body.state,
            workload=body.workload, lasts=body.lasts, by=asker.name, why=body.why,
        )  # fmt: skip
        return _shown(mark_view(new.mark), asker)

    return as_json(request, await api.facts(act), status=201)


@router.delete("/marks/{target}", responses=answers_with(list[MarkView], "The marks that were revoked."))
async def delete_mark(
    request: Request,
    asker: MarkingSome,
    target: Annotated[str, Path(pattern=TARGET, description="A pattern id, or T17.")],
    workload: Annotated[str | None, Query(max_length=200, description="Only in this one.")] = None,
) -> Response:
    """Takes the marks of a pattern or template back: the model's answer counts again.

    A key with workloads names one of these.
    """
    api = api_of(request)
    check_marks_of(asker.only, workload or "", by=asker.name)

    def act() -> list[MarkView]:
        numbered = Target.template if target[0] in "Tt" else Target.pattern
        wanted = [numbered(int(target.lstrip("Tt")))]
        revoked = revoke_marks(api.client, api.settings, (wanted, ""), workload, by=asker.name)
        if not revoked:
            raise NotFound(f"there is no mark of {target}; /api/v1/marks lists what is marked")
        return [_shown(mark_view(mark), asker) for _, _, mark in revoked if mark is not None]

    return as_json(request, await api.facts(act))


def _check_names(pattern: str) -> None:
    """A text would be looked for in the lines of all workloads. Raises BadInput."""
    if re.fullmatch(TARGET, pattern) is None:
        raise BadInput(
            f"pattern {pattern[:60]!r} is a text; a key with workloads names a template such as T17"
        )


def _shown(mark: MarkView, asker: Asker) -> MarkView:
    """Templates are shared by all workloads, so that a text may hold words of another one."""
    return replace(mark, text="") if asker.only else mark


@router.post("/silences", responses=answers_with(SilenceView, "The silence.", status=201), status_code=201)
async def post_silence(request: Request, asker: Marking, body: SilenceBody) -> Response:
    """Shows incidents apart until a time, where silences cover all of their causes. Nothing else changes."""
    api = api_of(request)
    made = await api.facts(
        put_silence, api.client, api.settings, body.workload, lasts=body.lasts, why=body.why, by=asker.name,
        template=body.template, service=body.service,
    )  # fmt: skip
    return as_json(request, made, status=201)


@router.delete("/silences/{silence}", responses=answers_with(SilenceView, "The silence, which has ended."))
async def delete_silence(request: Request, asker: Marking, silence: Name) -> Response:
    """Ends a silence now, by its id or the beginning of it."""
    api = api_of(request)
    return as_json(request, await api.facts(end_silence, api.client, api.settings, silence, by=asker.name))


@router.post("/incidents/{incident}/{action}", responses=answers_with(IncidentView, "The incident then."))
async def post_decision(
    request: Request,
    asker: MarkingSome,
    incident: Name,
    action: Action,
    body: DecisionBody,
) -> Response:
    """Acknowledges, resolves or snoozes an incident, or takes such a decision back (reopen)."""
    api = api_of(request)
    found = await api.facts(
        decide_incident, api.client, api.settings, incident, action,
        by=asker.name, seen=body.seen, lasts=body.lasts, more=body.more, why=body.why, only=asker.only,
    )  # fmt: skip
    return as_json(request, found)


@router.post("/models/{version}/promote", responses=answers_with(Moved, "The live version now."))
async def post_promote(request: Request, asker: Operating, version: Name, body: ReasonBody) -> Response:
    """Makes a version the live one."""
    api = api_of(request)

    def act() -> Moved:
        chosen_version(Registry(api.client, api.settings), version)
        return promote_model(api.client, api.settings, version, by=asker.name, reason=body.reason)

    return as_json(request, await api.facts(act))


@router.post("/models/rollback", responses=answers_with(Moved, "The live version now."))
async def post_rollback(request: Request, asker: Operating, body: RollbackBody) -> Response:
    """Makes the version before the live one live again."""
    api = api_of(request)
    moved = await api.facts(
        roll_back_model, api.client, api.settings, model=body.model, by=asker.name, reason=body.reason
    )
    return as_json(request, moved)


@router.post("/trainings", responses=answers_with(Status, "The training.", status=202), status_code=202)
async def post_training(request: Request, asker: Operating, body: TrainingBody) -> Response:
    """Asks for a training; an equal one that waits is the same."""
    api, now = api_of(request), utc_now()
    asked = TrainingAsked(
        workloads=body.workloads,
        since=asked_moment(body.since, now, flag="since"),
        until=asked_moment(body.until, now, flag="until"),
        exclude=body.exclude,
    )

    def act() -> Status:
        name, _ = request_training(
            api.client, api.settings, asked, by=asker.name, why=f"asked by {asker.name}"
        )
        return Trainings(api.client, api.settings).status(name)

    return as_json(request, await api.facts(act), status=202)


@router.post("/trainings/{training}/cancel", responses=answers_with(dict[str, str], "`answer`."))
async def post_cancel(request: Request, asker: Operating, training: Name) -> Response:
    """Stops a training: at once while it waits, at its next step while it runs."""
    api = api_of(request)
    name, answer = await api.facts(cancel_training, api.client, api.settings, training, by=asker.name)
    return as_json(request, {"request_id": name, "answer": answer})


@router.post("/watchlist", responses=answers_with(list[WatchlistChange], "The changes."))
async def post_watchlist(request: Request, asker: Operating, body: WatchlistBody) -> Response:
    """Adds and removes patterns."""
    api = api_of(request)
    if not body.add and not body.remove:
        raise BadInput("neither `add` nor `remove` names a pattern; give one such as prod/shop/*")

    def act() -> list[WatchlistChange]:
        return [
            change_watchlist(api.client, api.settings, patterns, adding=adding, by=asker.name)
            for patterns, adding in ((body.add, True), (body.remove, False))
            if patterns
        ]

    return as_json(request, await api.facts(act))


@router.post("/dead-letters/{batch}/{action}", responses=answers_with(BatchesChanged, "What changed."))
async def post_dead_letter(
    request: Request, asker: Operating, batch: Name, action: Literal["retry", "discard"]
) -> Response:
    """Sends a dead batch through the pipeline again, or deletes it. `all` stands for every one."""
    api = api_of(request)
    changed = await api.facts(change_dead_letters, api.client, api.settings, [batch], action, by=asker.name)
    return as_json(request, changed)


@router.post("/gpu/leases", responses=answers_with(dict[str, Any], "The lease.", status=201), status_code=201)
async def post_lease(request: Request, asker: Lending, body: LeaseBody) -> Response:
    """A lease at once, or 409. `logweir gpu request` also gives the variables that bound a program.

    A key of the scope `gpu` gets leases of its tenant alone. Holder and name then begin with the tenant.
    """
    api = api_of(request)
    need = Need(max_duration_s=body.lasts_s, **body.model_dump(exclude={"holder", "name", "lasts_s"}))
    holder, name = body.holder, body.name
    if tenant := asker.key.bound_tenant:
        named = body.tenant if "tenant" in body.model_fields_set else tenant
        need = _of_tenant(replace(need, tenant=named), tenant, asker.name)
        # Who gives the holder and the name of a lease gets it again: neither may be another tenant's.
        holder, name = f"{tenant}/{holder}", f"{tenant}.{name}"
    lease = await api.facts(
        request_lease, api.client, api.settings, need,
        holder=holder, name=name, lasts_s=body.lasts_s, by=asker.name,
    )  # fmt: skip
    shown = {
        "lease": lease.lease_id,
        "token": lease.token,
        "expires_ms": lease.deadline_ms,
        "devices": [part.uuid for part in lease.parts],
    }
    return as_json(request, shown, status=201)


def _of_tenant(need: Need, tenant: str, key: str) -> Need:
    """The need, where a key that is bound to this tenant may ask for it. Raises AskRefused."""
    if need.tenant != tenant:
        raise AskRefused(
            403, f"the key {key!r} asks for tenant {tenant!r} alone, and not for {need.tenant!r}"
        )
    if need.priority > 0:
        raise AskRefused(
            403, f"priority {need.priority} goes before other tenants; the key {key!r} may ask for 0 and less"
        )
    return need


@router.post("/gpu/leases/{lease}/renew", responses=answers_with(dict[str, Any], "Its new end."))
async def post_renew(request: Request, asker: Lending, lease: Name, body: TokenBody) -> Response:
    """Keeps a lease for its whole time from now on. It says by when it has to be given back, if so."""
    api = api_of(request)
    renewed = await api.facts(
        renew_lease, api.client, api.settings, lease, body.token, tenant=asker.key.bound_tenant
    )
    return as_json(request, renewed)


@router.post("/gpu/leases/{lease}/release", responses=answers_with(dict[str, str], "`released`."))
async def post_release(request: Request, asker: Lending, lease: Name, body: TokenBody) -> Response:
    """Gives a lease back; its processes are off the devices."""
    api = api_of(request)
    await api.facts(
        release_lease, api.client, api.settings, lease, body.token,
        by=asker.name, tenant=asker.key.bound_tenant,
    )  # fmt: skip
    return as_json(request, {"released": lease})


@router.post("/keys", responses=answers_with(NewKey, "The key, this once.", status=201), status_code=201)
async def post_key(request: Request, asker: Ruling, body: KeyBody) -> Response:
    """A new key. Only its SHA-256 is kept."""
    api = api_of(request)
    asked = KeyAsked(
        name=body.name,
        scopes=body.scopes,
        workload=body.workload,
        only=body.only,
        lasts=body.lasts,
        tenant=body.tenant,
    )
    new = await api.facts(add_key, api.client, api.settings, asked, by=asker.name)
    return as_json(request, new, status=201)


@router.delete("/keys/{name}", responses=answers_with(dict[str, str], "`revoked`."))
async def delete_key(request: Request, asker: Ruling, name: Name) -> Response:
    """Revokes a key; within a second it is refused everywhere."""
    api = api_of(request)

    await api.facts(revoke_key, api.client, api.settings, name, by=asker.name)
    return as_json(request, {"revoked": name})
