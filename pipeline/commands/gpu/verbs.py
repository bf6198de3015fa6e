"""`logweir gpu ...`: shows the GPU pool, lends and takes back; larger verbs have modules of their own."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.commands.common import (
    err,
    out,
    print_json,
    print_outcome,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput, Retryable
from pipeline.gpu.values import Device, Orphan

if TYPE_CHECKING:
    from pipeline.settings import Settings


READING: Final = frozenset({"top", "leases", "tenants", "jobs", "logs", "models", "usage"})


def main(args: argparse.Namespace) -> int:
    reads = args.action in READING and not getattr(args, "change", None)
    if args.url is not None and not reads:
        raise BadInput(f"`logweir gpu {args.action}` works on the machine itself; leave out --url")
    if args.action == "selftest":
        from pipeline.commands.gpu import selftest as gpu_selftest

        return gpu_selftest.main(args)
    if args.action == "usage":
        from pipeline.commands.gpu import usage as gpu_usage

        return gpu_usage.main(args)
    if reads:
        with redis_explained():
            return _read(args)
    code = 1
    try:
        code = _reached(args)
    finally:
        if code and getattr(args, "shell", False):
            out().print("false", markup=False)  # `eval "$(...)"` of nothing would succeed
    return code


def _reached(args: argparse.Namespace) -> int:
    """Run the verb; for `run` and `request` the exit code LATER says that a later try may succeed."""
    try:
        return _done_with_pool(args)
    except (Retryable, BadInput) as exc:
        if args.action not in ("run", "request") or not (isinstance(exc, Retryable) or _no_answer(exc)):
            raise
        from pipeline.commands.gpu.request import LATER

        err().print(f"logweir: {printable(exc)}", markup=False, soft_wrap=True)
        return LATER


def _no_answer(exc: BadInput) -> bool:
    """A Redis that is away, not one that refuses us."""
    import redis

    unreachable = isinstance(exc.__cause__, redis.ConnectionError | redis.TimeoutError)
    return unreachable and not isinstance(exc.__cause__, redis.AuthenticationError)


def _done_with_pool(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    from pipeline.gpu.pool import Pool
    from pipeline.redis.connection import connect

    pool = Pool(connect(settings), settings)
    with redis_explained():
        match args.action:
            case "run":
                from pipeline.commands.gpu import run as gpu_run

                return gpu_run.main(args, pool, settings)
            case "request":
                from pipeline.commands.gpu import request as gpu_request

                return gpu_request.main(args, pool, settings)
            case "submit" | "jobs" | "logs" | "cancel" | "wait":
                from pipeline.commands.gpu import jobs as gpu_jobs

                return gpu_jobs.main(args, pool, settings)
            case "models":
                from pipeline.commands.gpu import models as gpu_models

                return gpu_models.main(args, pool, settings)
            case "mps":
                from pipeline.commands.gpu import mps as gpu_mps

                return gpu_mps.main(args, pool)
            case "agents":
                from pipeline.commands.gpu.agents import change_agents

                return change_agents(args, pool, settings)
            case "tenants":
                from pipeline.commands.gpu.tenants import change_tenant

                return change_tenant(args, pool, settings)
            case "release":
                return _release(args, pool, settings)
            case "revoke":
                return _revoke(args, pool, settings)
            case _:
                return _clear(args, pool, settings)


def _read(args: argparse.Namespace) -> int:
    at = reading(args)
    if args.action == "top":
        from pipeline.commands.gpu import top as gpu_top

        return gpu_top.main(args, at.gpus)
    if args.action == "models":
        from pipeline.commands.gpu.models import show_served

        return show_served(args, at.gpu_models())
    if args.action in ("jobs", "logs"):
        from pipeline.commands.gpu.job_view import show_jobs, show_output

        return show_jobs(args, at) if args.action == "jobs" else show_output(args, at)
    if args.action == "tenants":
        from pipeline.commands.gpu.tenants import show_tenants

        return show_tenants(args, at.gpu_tenants())
    return _leases(args, at.gpu_leases())


def _leases(args: argparse.Namespace, found: Sequence[Mapping[str, Any]]) -> int:
    from pipeline.gpu.policy.explain import short
    from pipeline.units import seconds, size

    if args.json:
        print_json(list(found))
        return 0
    console = out()
    for lease in found:
        # Never cut: ids and tokens are there to be copied.
        console.print(printable(lease["lease"]), style="bold", markup=False, soft_wrap=True)
        parts = ", ".join(
            f"{short(part['device'])} {size(part['memory_mib'])}"
            + (f" {part['compute_percent']} %" if part["compute_percent"] else "")
            for part in lease["parts"]
        )
        until = lease["yields_in_s"]
        yielding = (
            "" if until is None else f"; asked to give back within {seconds(until)}: {lease['yield_why']}"
        )
        preemptible = ", preemptible" if lease["preemptible"] else ""
        lines = [
            f"token {lease['token']}, {lease['mode']}, {lease['state']}{preemptible}, {parts}",
            f"{lease['holder']} for {lease['tenant']}, {seconds(lease['age_s'])} old, "
            f"expires in {seconds(lease['expires_in_s'])}{yielding}",
            f"on {lease['node'] or 'several machines'}, processes "
            f"{', '.join(map(str, lease['pids'])) or 'unknown'}",
        ]
        for line in lines:
            console.print(f"  {printable(line)}", markup=False, soft_wrap=True)
    if not found:
        console.print("no leases; `logweir gpu top` shows the devices", markup=False)
    return 0


def _release(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.gpu import release_lease

    release_lease(pool.client, settings, args.lease, args.token, by=user_of_machine())
    return print_outcome(args, {"released": args.lease}, f"released {args.lease}")


def _revoke(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.gpu import revoke_lease

    revoke_lease(pool.client, settings, args.lease, args.why, by=user_of_machine())
    words = f"revoked {args.lease}; its devices are free again when its processes are gone"
    return print_outcome(args, {"revoked": args.lease, "why": args.why}, words)


def _clear(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    from pipeline.commands.gpu.request import device_of
    from pipeline.service.access.audit import record_change, user_of_machine

    snapshot = pool.snapshot()
    device = device_of(args.device, snapshot)
    orphans = [x for x in snapshot.orphans if x.uuid == device.uuid]
    if not orphans:
        raise BadInput(
            f"nothing is left of an ended lease on {device.uuid}; `logweir gpu top` shows why it is taken"
        )
    there = _still_there(device, orphans)
    if there and not args.yes:
        raise BadInput(
            f"process {', '.join(map(str, there[:5]))} may still be on {device.uuid}; end what belongs to "
            "the lease first, "
            "or say --yes when nothing of it is there"
        )
    cleared = pool.clear(device.uuid)
    record_change(pool.client, settings, by=user_of_machine(), action="gpu.clear", target=device.uuid)
    return print_outcome(
        args, {"cleared": device.uuid, "parts": cleared}, f"{device.uuid} is free for new leases"
    )


def _still_there(device: Device, orphans: Sequence[Orphan]) -> list[int]:
    """Processes that may be those of the ended leases, as far as the driver or this machine can tell."""
    named = {pid for x in orphans for pid in x.pids}
    if device.processes is None:
        from pipeline.gpu.node.inventory import this_node

        return sorted(pid for pid in named if device.node != this_node() or psutil.pid_exists(pid))
    on_device = {process.pid for process in device.processes}
    return sorted(on_device & named if all(x.pids for x in orphans) else on_device)
