"""The GPU pool and its use, for people and for programs of other machines."""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import redis

from pipeline.errors import BadInput, LeaseRefused, NotFound
from pipeline.gpu.jobs import ENDED, PoolJob, PoolJobs
from pipeline.gpu.policy.explain import device_views, wanted, why_it_waits
from pipeline.gpu.policy.fairness import is_name
from pipeline.gpu.pool import Pool
from pipeline.gpu.served import ServedModel, ServedModels
from pipeline.gpu.served_files import put_model_file
from pipeline.gpu.serving import read_pending
from pipeline.gpu.values import Need, PoolLease, PoolRequest, TenantBudget, scoring_need
from pipeline.messages.routing import QUEUE_GPU, GpuView, route
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence
from pipeline.redis.connection import now_ms
from pipeline.service.access.audit import record_change
from pipeline.service.access.key_changes import KeyAsked, add_key, revoke_key
from pipeline.service.access.keys import GPU, MAX_KEY_NAME
from pipeline.service.questions import UsageColumn
from pipeline.service.running.model_rows import model_rows, own_rows
from pipeline.service.values import CanInfer, NewKey, UsageView
from pipeline.settings import Settings
from pipeline.sinks.choose import usage_of
from pipeline.sinks.usage import usage_sums
from pipeline.store.choose import open_store
from pipeline.units import size

TENANT_KEY: Final = "gpu:"  # begins the name of a tenant's key
MAX_LEASE_S = 7 * 86_400.0  # as `logweir gpu request` allows


def read_usage(
    settings: Settings, by: UsageColumn, since: datetime | None, until: datetime | None
) -> UsageView:
    """Hours of ended leases by a column, the largest first. Raises StoreUnavailable, BadPayload."""
    table = usage_of(settings)
    sums = usage_sums(table, by, since, until)
    return UsageView(since=since, until=until, by=by, usage=sums.to_dicts(), stored_in=table.objects.url)


def can_infer(client: "redis.Redis", settings: Settings) -> CanInfer:
    """Where unknown lines would be scored at this moment. Raises RedisUnavailable."""
    need = scoring_need(settings)
    pool = Pool(client, settings)
    workers = sum(QUEUE_GPU in worker.queues for worker in Presence(client, settings).live())
    opened = pool.open_to_shared(need)
    queue = route(GpuView(workers=workers, open_to_shared=opened))
    if queue == QUEUE_GPU:
        why = "a GPU takes scoring now"
    elif not workers:
        why = "no worker scores on a GPU, so the CPU does"
    else:
        snapshot = pool.snapshot()
        request = PoolRequest(request_id="can-infer", holder="can-infer", need=need, ttl_ms=1)
        why = why_it_waits(snapshot, request, device_views(snapshot))
    return CanInfer(can_infer=queue == QUEUE_GPU, queue=queue, workers=workers, why=why)


def request_lease(
    client: "redis.Redis", settings: Settings, need: Need, *, holder: str, name: str, lasts_s: float, by: str
) -> PoolLease:
    """A lease at once, or LeaseRefused. It ends after `lasts_s` unless it is renewed, and is active from the
    start: its processes are not known. Raises BadInput, RedisUnavailable."""
    if not 0 < lasts_s <= MAX_LEASE_S:
        raise BadInput(f"a lease of {lasts_s:g} s cannot be had; ask for at most {MAX_LEASE_S:,.0f} s")
    pool = Pool(client, settings)
    lease = pool.request(need, holder=holder, request_id=name, ttl_ms=int(lasts_s * 1000), timeout_s=0.0)
    devices = {device.uuid: device.node for device in pool.snapshot().devices}
    if not pool.activate(lease, pids=(), host=devices.get(lease.parts[0].uuid, "")):
        raise LeaseRefused(f"lease {lease.lease_id} was taken away at once; ask again")
    record_change(client, settings, by=by, action="gpu.request", target=lease.lease_id, holder=holder)
    return lease


def renew_lease(
    client: "redis.Redis", settings: Settings, lease_id: str, token: int, *, tenant: str = ""
) -> Mapping[str, Any]:
    """Keeps a lease for its whole time from now on; with `tenant` only one of this tenant.

    Raises BadInput, LeaseRefused, RedisUnavailable."""
    pool = Pool(client, settings)
    lease = _lease_of(pool, lease_id, tenant)
    if lease is None or lease.token != token:
        raise _unknown(lease_id, token, known=lease is not None)
    renewed = pool.renew(lease)
    if renewed.lost:
        raise LeaseRefused(f"lease {lease_id} is lost: {renewed.lost}")
    return {
        "lease": lease_id,
        "expires_ms": renewed.deadline_ms,
        "yield_by_ms": renewed.yield_by_ms,
        "yield_why": renewed.yield_why,
    }


def _lease_of(pool: Pool, lease_id: str, tenant: str) -> PoolLease | None:
    """A lease that lives; None too where it is not one of this tenant. "": of any."""
    found = (lease for lease in pool.snapshot().leases if lease.lease_id == lease_id)
    return next((lease for lease in found if tenant in ("", lease.need.tenant)), None)


def release_lease(
    client: "redis.Redis", settings: Settings, lease_id: str, token: int, *, by: str, tenant: str = ""
) -> None:
    """Gives a lease back; its processes are off the devices. With `tenant` only one of this tenant.

    Raises BadInput, RedisUnavailable."""
    pool = Pool(client, settings)
    if tenant and _lease_of(pool, lease_id, tenant) is None:
        raise _unknown(lease_id, token, known=False)
    if not pool.release_by_id(lease_id, token):
        raise _unknown(lease_id, token, known=any(x.lease_id == lease_id for x in pool.snapshot().leases))
    record_change(client, settings, by=by, action="gpu.release", target=lease_id)


def revoke_lease(client: "redis.Redis", settings: Settings, lease_id: str, why: str, *, by: str) -> None:
    """Takes a lease away. Raises BadInput, RedisUnavailable."""
    if not why.strip():
        raise BadInput("--why is empty; say in a few words why, its holder is told")
    if not Pool(client, settings).revoke(lease_id, why):
        raise _unknown(lease_id, 0, known=False)
    record_change(client, settings, by=by, action="gpu.revoke", target=lease_id, why=why)


def served_rows(client: "redis.Redis", settings: Settings) -> list[dict[str, Any]]:
    """Every version of every served model, by tenant and name, the newest first; then Logweir's own models.

    Raises RedisUnavailable.
    """
    view, live = read_pending(client, settings), Registry(client, settings).current()
    own = own_rows(view, Pool(client, settings).snapshot(), "" if live is None else live.version, settings)
    return [*model_rows(view), *own]


def serve_model(
    client: "redis.Redis", settings: Settings, path: Path, model: ServedModel, *, by: str
) -> tuple[ServedModel, list[ServedModel]]:
    """Stores a model's file and makes it a new version; also the versions that it removed. Hash and size are
    those of the file. Raises BadInput, StoreUnavailable, RedisUnavailable."""
    sha256, total = put_model_file(open_store(settings.data.store), path)
    if model.memory_mib < total >> 20:
        raise BadInput(
            f"--memory {size(model.memory_mib)} is less than the file itself, which has {size(total >> 20)}; "
            "a copy needs that and room for its work"
        )
    new, old = ServedModels(client, settings).put(replace(model, sha256=sha256, size=total, by=by))
    record_change(client, settings, by=by, action="gpu.model.put", target=new.field)
    return new, old


def remove_model(
    client: "redis.Redis", settings: Settings, tenant: str, name: str, version: int | None, *, by: str
) -> list[ServedModel]:
    """Removes a version of a model, or all. Raises NotFound, RedisUnavailable."""
    gone = ServedModels(client, settings).remove(tenant, name, version)
    for model in gone:
        record_change(client, settings, by=by, action="gpu.model.remove", target=model.field)
    return gone


def set_budget(
    client: "redis.Redis", settings: Settings, name: str, budget: TenantBudget | None, *, by: str
) -> None:
    """Gives a tenant GPU-hours per period, or takes the bound away. Raises BadInput, RedisUnavailable."""
    planner = Pool(client, settings).planner
    known = planner.snapshot().tenants
    if name not in known:
        raise BadInput(
            f"there is no tenant {name[:80]!r}; known are {', '.join(sorted(known))}, and "
            "`logweir gpu tenants add` or the setting gpu_tenants adds more"
        )
    planner.accounts.change(name, lambda account: replace(account, budget=budget))
    told = (
        {}
        if budget is None
        else {"gpu_hours": budget.gpu_hours, "per": budget.per, "refuses": budget.refuses}
    )
    record_change(client, settings, by=by, action="gpu.budget", target=name, **told)


def add_tenant(client: "redis.Redis", settings: Settings, name: str, weight: float, *, by: str) -> NewKey:
    """Lets a tenant use the pool, by a key of its own that no other tenant's name goes with.

    Raises BadInput, RedisUnavailable."""
    if not is_name(name) or len(name) > MAX_KEY_NAME - len(TENANT_KEY):
        raise BadInput(
            f"{name[:80]!r} is no name of a tenant; use letters, digits, dots, dashes and underscores, at most "
            f"{MAX_KEY_NAME - len(TENANT_KEY)}"
        )
    if not 0 <= weight < 1_000_000:
        raise BadInput(f"--weight {weight:g} is no weight; write a number from 0 up, as in 2")
    asked = KeyAsked(name=f"{TENANT_KEY}{name}", scopes=(GPU,), tenant=name)
    new = add_key(client, settings, asked, by=by)
    accounts = Pool(client, settings).planner.accounts
    accounts.change(name, lambda account: replace(account, member=True, weight=weight))
    record_change(client, settings, by=by, action="gpu.tenant.add", target=name)
    return new


def remove_tenant(client: "redis.Redis", settings: Settings, name: str, *, by: str) -> None:
    """Its key is refused within a second, and new leases too. Those that live go on. Raises NotFound,
    RedisUnavailable."""
    revoke_key(client, settings, f"{TENANT_KEY}{name}", by=by, remedy="`logweir keys list` shows")
    Pool(client, settings).planner.accounts.remove(name)
    record_change(client, settings, by=by, action="gpu.tenant.remove", target=name)


def _unknown(lease_id: str, token: int, *, known: bool) -> BadInput:
    if known:
        return BadInput(
            f"--token {token} is not the token of lease {lease_id[:80]!r}; it was given with the lease"
        )
    return NotFound(
        f"there is no lease {lease_id[:80]!r} (any more); `logweir gpu leases` shows those that live"
    )


def job_facts(job: PoolJob, now: int) -> dict[str, Any]:
    """One job, JSON-ready. `now`: of the Redis clock, in milliseconds; times in seconds."""
    return {
        "job": job.job_id,
        "state": job.state,
        "why": job.why,
        "user": job.user,
        "tenant": job.need.tenant,
        "node": job.node,
        "needs": wanted(job.need),
        "ranks": job.size,
        "command": list(job.command),
        "image": job.image,
        "attempt": job.attempt,
        "retries": job.retries,
        "exit_code": job.exit_code,
        "lease": job.lease_id,
        "results": None if job.results is None else job.results.size,
        "age_s": (now - job.submitted_ms) / 1000 if job.submitted_ms else 0.0,
        "ran_s": ((job.ended_ms or now) - job.started_ms) / 1000 if job.started_ms else None,
    }


def job_rows(client: "redis.Redis", settings: Settings) -> list[dict[str, Any]]:
    """Those that ended lately, then those that live, each the oldest first. Raises RedisUnavailable."""
    jobs, now = PoolJobs(client, settings), now_ms(client)
    return [job_facts(job, now) for job in (*jobs.ended(), *jobs.live())]


def job_output(
    client: "redis.Redis", settings: Settings, job_id: str, since: int, rank: int = 0
) -> dict[str, Any]:
    """The kept output of a rank from byte `since` on, in base64. `first` is the number of its first byte;
    `ended` says that no more comes. Raises NotFound, BadInput, RedisUnavailable."""
    jobs = PoolJobs(client, settings)
    job = jobs.known(job_id)
    if not 0 <= rank < job.size:
        raise BadInput(f"job {job_id!r} has no rank {rank}; its ranks are 0 to {job.size - 1}")
    ended = job.state in ENDED  # before reading: what comes with the end is read then
    first, output = jobs.read(job_id, since, rank=rank)
    return {
        "job": job_id,
        "rank": rank,
        "state": job.state,
        "why": job.why,
        "ended": ended,
        "first": first,
        "next": first + len(output),
        "output": b64encode(output).decode(),
    }
