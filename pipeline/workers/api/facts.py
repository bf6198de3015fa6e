"""Routes about the pipeline: status, incidents, models, trainings, marks, dead letters, GPUs, events."""

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from pipeline.controller.training_status import Status
from pipeline.errors import BadInput
from pipeline.gpu.pool import Pool
from pipeline.models.registry import Registry
from pipeline.observe.events import EventPage, check_event_id, check_event_types, read_events
from pipeline.records.batch import utc_now
from pipeline.service.access.audit import read_audit
from pipeline.service.access.key_changes import read_keys
from pipeline.service.access.keys import ADMIN, GPU, OPERATE, READ
from pipeline.service.dead_letters import read_dead_batch, read_dead_letters
from pipeline.service.gpu import can_infer, job_output, job_rows, read_usage, served_rows
from pipeline.service.incidents import read_incident, read_incidents, silences_in_use
from pipeline.service.marks import read_marks
from pipeline.service.models import read_model, read_models
from pipeline.service.pool_facts import lease_rows, pool_facts, tenant_rows
from pipeline.service.questions import UsageColumn, asked_event, asked_moment
from pipeline.service.running.backfills import read_backfills
from pipeline.service.running.health import read_health
from pipeline.service.running.values import PipelineHealth
from pipeline.service.senders import senders_page
from pipeline.service.status import read_status
from pipeline.service.trainings import MAX_TRAININGS, read_trainings
from pipeline.service.values import (
    AuditPage,
    CanInfer,
    DeadBatch,
    DeadLetterPage,
    IncidentPage,
    KeyView,
    MarksView,
    ModelView,
    OneIncident,
    SenderPage,
    SilenceView,
    StackStatus,
    UsageView,
    WatchlistView,
)
from pipeline.service.watchlist import read_watchlist
from pipeline.sources.backfill.plans import BackfillView
from pipeline.workers.api.access import Asker, needs, while_admitted
from pipeline.workers.api.answering import StrictRoute, answers_with, as_json
from pipeline.workers.api.asking import Api, api_of
from pipeline.workers.api.problems import AskRefused
from pipeline.workers.api.stored import Cursor, Limit, Seeing, Since, Until

router: Final = APIRouter(tags=["pipeline"], route_class=StrictRoute)
WholeView = Annotated[Asker, Depends(needs(READ))]
Name = Annotated[str, Path(max_length=300)]


async def _told(request: Request, ask: Callable[[Api], Any]) -> Response:
    """The answer of a question to Redis, in a thread."""
    api = api_of(request)
    return as_json(request, await api.facts(ask, api))


@router.get("/status", responses=answers_with(StackStatus, "What runs and what waits."))
async def get_status(request: Request, _asker: WholeView) -> Response:
    """The workers, the waiting batches, the live models, and the next training with its reason."""
    return await _told(request, lambda api: read_status(api.settings, api.client))


@router.get("/health", responses=answers_with(PipelineHealth, "`ok`, and why not."))
async def get_health(
    request: Request,
    _asker: WholeView,
    target: Annotated[str, Query(max_length=300, description="A worker or a role; default: all.")] = "",
    ready: Annotated[bool, Query(description="It also serves the live model version.")] = False,
) -> Response:
    """Whether a worker, a role or everything is well, as `logweir health` says. The status is 200 always."""
    return await _told(request, lambda api: read_health(api.client, api.settings, target, ready=ready))


@router.get("/backfills", responses=answers_with(list[BackfillView], "The newest first."))
async def get_backfills(request: Request, _asker: WholeView) -> Response:
    """Archives that are or were read, and how far their readers are."""
    return await _told(request, lambda api: read_backfills(api.client, api.settings))


@router.get("/incidents", responses=answers_with(IncidentPage, "Incidents, the newest first."))
async def get_incidents(
    request: Request,
    asker: Seeing,
    *,
    open: Annotated[bool, Query(description="Only those that still go on.")] = False,
    since: Since = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Causes that began together, over all services."""
    begin = asked_moment(since, utc_now(), flag="since")
    return await _told(
        request,
        lambda api: read_incidents(
            api.client, api.settings, utc_now(),
            only_open=open, since=begin, limit=limit, cursor=cursor, only=asker.only,
        ),
    )  # fmt: skip


@router.get("/incidents/{incident}", responses=answers_with(OneIncident, "The incident with its causes."))
async def get_incident(request: Request, asker: Seeing, incident: Name) -> Response:
    """One incident by its id, or the beginning of it."""
    return await _told(
        request, lambda api: read_incident(api.client, api.settings, utc_now(), incident, only=asker.only)
    )


@router.get("/models", responses=answers_with(list[ModelView], "Model versions."))
async def get_models(request: Request, _asker: WholeView) -> Response:
    """Every model version in the store, with its state and why."""
    return await _told(request, lambda api: read_models(Registry(api.client, api.settings)))


@router.get("/models/{version}", responses=answers_with(dict[str, Any], "Manifest and state."))
async def get_model(request: Request, _asker: WholeView, version: Name) -> Response:
    """One model version; `live` is the live one."""
    name = None if version == "live" else version
    return await _told(request, lambda api: read_model(Registry(api.client, api.settings), name))


@router.get("/trainings", responses=answers_with(list[Status], "Trainings, the newest first."))
async def get_trainings(
    request: Request, _asker: WholeView, limit: Annotated[int, Query(ge=1, le=MAX_TRAININGS)] = 20
) -> Response:
    """Trainings that wait, run or ran."""
    return await _told(request, lambda api: read_trainings(api.client, api.settings, limit))


@router.get("/watchlist", responses=answers_with(WatchlistView, "The watchlist."))
async def get_watchlist(request: Request, _asker: WholeView) -> Response:
    """Whose logs get models by themselves, and what is seen but not watched."""
    return await _told(request, lambda api: read_watchlist(api.client, api.settings))


@router.get("/marks", responses=answers_with(MarksView, "Marks, the oldest first."))
async def get_marks(request: Request, _asker: WholeView) -> Response:
    """The labels that people gave to patterns."""
    return await _told(request, lambda api: read_marks(api.client, api.settings))


@router.get("/silences", responses=answers_with(list[SilenceView], "The one that ends last first."))
async def get_silences(request: Request, _asker: WholeView) -> Response:
    """Incidents that people do not want to see for now; also those that ended within a week."""
    return await _told(request, lambda api: silences_in_use(api.client, api.settings, utc_now()))


@router.get("/dead-letters", responses=answers_with(DeadLetterPage, "The newest first."))
async def get_dead_letters(
    request: Request, _asker: WholeView, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    """Batches that could not be processed."""
    return await _told(
        request, lambda api: read_dead_letters(api.client, api.settings, limit=limit, cursor=cursor)
    )


@router.get("/dead-letters/{batch}", responses=answers_with(DeadBatch, "With its first records."))
async def get_dead_letter(request: Request, _asker: WholeView, batch: Name) -> Response:
    """One of them with its first 100 records."""
    return await _told(request, lambda api: read_dead_batch(api.client, api.settings, batch))


@router.get("/senders", responses=answers_with(SenderPage, "By protocol, key and address."))
async def get_senders(
    request: Request, _asker: WholeView, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    """Who sends to the intake, how much, and when last."""
    return await _told(request, lambda api: senders_page(api.client, api.settings, limit, cursor))


@router.get("/gpu", responses=answers_with(dict[str, Any], "Devices, leases, waiting needs."))
async def get_gpus(request: Request, asker: WholeView) -> Response:
    """The GPU pool, as `logweir gpu top --json` shows it; tokens as for leases."""
    shown = asker.key.may(OPERATE)

    def ask(api: Api) -> dict[str, Any]:
        facts = pool_facts(Pool(api.client, api.settings).snapshot())
        return facts if shown else facts | {"leases": [_without_tokens(row) for row in facts["leases"]]}

    return await _told(request, ask)


@router.get("/gpu/leases", responses=answers_with(list[dict[str, Any]], "Leases, the oldest first."))
async def get_leases(request: Request, asker: Annotated[Asker, Depends(needs(READ, GPU))]) -> Response:
    """Leases that live. Tokens are shown to keys with the scope `operate`.

    A key of the scope `gpu` sees those of its tenant, with their tokens.
    """
    tenant = asker.key.bound_tenant
    shown = bool(tenant) or asker.key.may(OPERATE)

    def ask(api: Api) -> list[dict[str, Any]]:
        rows = lease_rows(Pool(api.client, api.settings).snapshot())
        if tenant:
            rows = [row for row in rows if row["tenant"] == tenant]
        return rows if shown else [_without_tokens(row) for row in rows]

    return await _told(request, ask)


@router.get("/gpu/tenants", responses=answers_with(dict[str, Any], "Tenants in the order of their turn."))
async def get_tenants(request: Request, _asker: WholeView) -> Response:
    """Who may use the GPUs, and has used them lately."""

    def ask(api: Api) -> dict[str, Any]:
        snapshot = Pool(api.client, api.settings).snapshot()
        return {"tenants": tenant_rows(snapshot), "half_life_s": snapshot.half_life_s}

    return await _told(request, ask)


@router.get("/gpu/jobs", responses=answers_with(list[dict[str, Any]], "Ended lately, then living."))
async def get_jobs(request: Request, asker: WholeView) -> Response:
    """Programs that run where they get a lease. Commands are shown to keys with the scope `operate`."""
    shown = asker.key.may(OPERATE)

    def ask(api: Api) -> list[dict[str, Any]]:
        rows = job_rows(api.client, api.settings)
        return rows if shown else [row | {"command": None} for row in rows]

    return await _told(request, ask)


@router.get("/gpu/jobs/{job}/output", responses=answers_with(dict[str, Any], "In base64."))
async def get_job_output(
    request: Request,
    _asker: Annotated[Asker, Depends(needs(OPERATE))],
    job: Annotated[str, Path(max_length=80)],
    since: Annotated[int, Query(ge=0, le=2**53)] = 0,
    rank: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    """The output of a rank of a job, as far as it is kept, from byte `since` on."""
    return await _told(request, lambda api: job_output(api.client, api.settings, job, since, rank))


@router.get("/gpu/models", responses=answers_with(list[dict[str, Any]], "By tenant and name."))
async def get_served_models(request: Request, _asker: WholeView) -> Response:
    """Models that are served on leases of the pool, and why one has fewer copies than wanted."""
    return await _told(request, lambda api: served_rows(api.client, api.settings))


@router.get("/gpu/usage", responses=answers_with(UsageView, "Hours of ended leases."))
async def get_usage(
    request: Request,
    _asker: WholeView,
    by: UsageColumn = "tenant",
    since: Since = None,
    until: Until = None,
) -> Response:
    """GPU-hours and GiB-hours of ended leases, the largest first."""
    now = utc_now()
    begin, end = asked_moment(since, now, flag="since"), asked_moment(until, now, flag="until")
    return await _told(request, lambda api: read_usage(api.settings, by, begin, end))


@router.post("/gpu/can-infer", responses=answers_with(CanInfer, "The queue of unknown lines."))
async def post_can_infer(request: Request, _asker: WholeView) -> Response:
    """Whether unknown lines would be scored on a GPU at this moment. It changes nothing."""
    return await _told(request, lambda api: can_infer(api.client, api.settings))


@router.get("/audit", responses=answers_with(AuditPage, "Changes, the newest first."))
async def get_audit(
    request: Request,
    _asker: Annotated[Asker, Depends(needs(ADMIN))],
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Who changed what."""
    return await _told(request, lambda api: read_audit(api.client, api.settings, limit=limit, cursor=cursor))


@router.get("/keys", responses=answers_with(list[KeyView], "Keys without their secrets."))
async def get_keys(request: Request, _asker: Annotated[Asker, Depends(needs(ADMIN))]) -> Response:
    """Who may send and who may ask."""

    return await _told(request, lambda api: read_keys(api.client, api.settings))


@router.get(
    "/events",
    responses={
        200: {
            "description": "Server-Sent Events; each names what changed.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **{k: v for k, v in answers_with(dict, "").items() if k == "default"},
    },
)
async def get_events(
    request: Request,
    asker: WholeView,
    last_event_id: Annotated[
        str, Query(max_length=2_000, description="As the header Last-Event-ID, for clients without it.")
    ] = "",
) -> Response:
    """The names of changes: incidents, marks, watchlist, models, trainings, dead-letters, status, audit.

    The first event is `begin`; a client that comes back with the last id gets what changed meanwhile."""
    feed = api_of(request).feed
    if feed.full:
        raise AskRefused(503, "too many clients follow events already; ask again later")
    last = request.headers.get("last-event-id", last_event_id)
    if len(last) > 2_000:
        raise BadInput("the Last-Event-ID is none of ours; leave it out")
    return StreamingResponse(
        while_admitted(feed.follow(last), api_of(request).doorkeeper, asker),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


@router.get(
    "/events/log",
    responses={
        200: {
            "description": "Events, the oldest first.",
            "model": EventPage,
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **{k: v for k, v in answers_with(EventPage, "").items() if k != 200},
    },
)
async def get_event_log(
    request: Request,
    asker: WholeView,
    *,
    since: Annotated[
        str | None,
        Query(
            max_length=60, description="Those behind this id, or since 15m, 1h, 7d, or a time in ISO 8601."
        ),
    ] = None,
    type: Annotated[
        str | None, Query(max_length=300, description="Types or patterns, such as model.*,training.ended.")
    ] = None,
    limit: Limit = 100,
    follow: Annotated[
        bool, Query(description="Go on, as Server-Sent Events, until the client leaves.")
    ] = False,
) -> Response:
    """What has happened, as CloudEvents. Without `since` the newest, or with `follow` those to come.

    `last` of the answer is `since` of the next question. Header Last-Event-ID goes before `since`."""
    types = [one.strip() for one in type.split(",")] if type else []
    check_event_types(types)
    begin = asked_event(since, utc_now(), flag="since")
    if not follow:
        return await _told(
            request, lambda api: read_events(api.client, api.settings, since=begin, limit=limit, types=types)
        )
    feed = api_of(request).events
    if feed.full:
        raise AskRefused(503, "too many clients follow events already; ask again later")
    if last := request.headers.get("last-event-id", ""):
        check_event_id(last)
    return StreamingResponse(
        while_admitted(feed.follow(last or begin, types), api_of(request).doorkeeper, asker),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _without_tokens(row: dict[str, Any]) -> dict[str, Any]:
    parts = [part | {"token": None} for part in row["parts"]]
    return row | {"token": None, "parts": parts}
