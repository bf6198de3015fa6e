"""`logweir health [NAME|ROLE]`: health of a worker, a role or all, with an exit code for container probes.

Live: a recent heartbeat and no stall. A stalled worker takes nothing from a queue with work, or its loop
stands still. Ready, with --ready: it also answers under the live model version, where it answers under one.
"""

import argparse
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pipeline.commands.common import err, out, print_json, printable, reached, settings_of
from pipeline.errors import LogweirError
from pipeline.messages.routing import stage_queues
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence, WorkerView
from pipeline.records.delivery import Stage
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.redis.keys import SHARED, WORKER_TTL_S
from pipeline.settings import Settings
from pipeline.units import plural
from pipeline.workers.stack.data_dir import called

# Roles whose workers load a model version before they answer under it.
ANSWERING: Final = frozenset({"ingest", "infer-cpu", "infer-gpu", "drain"})
# Who probes waits for the answer, and kills the probe when it takes long.
PROBE_S: Final = 2.0
# Without these nothing that is accepted is stored.
NEEDED: Final = ("ingest", "infer-cpu", "drain", "store", "beat")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """One worker, and what is wrong with it; `why` is "" when it is well."""

    name: str
    role: str
    pid: int
    silent_s: float
    quiet_s: float | None
    why: str


def main(args: argparse.Namespace) -> int:
    try:
        # NAME@ is the worker of that name on this machine, for probes in containers.
        target = args.what + socket.gethostname() if args.what.endswith("@") else args.what
        found, missing = check_health(reached(settings_of(args), timeout_s=PROBE_S), target, ready=args.ready)
    except LogweirError as exc:
        return _answer(args, str(exc), [])
    wrong = [h for h in found if h.why]
    if missing:
        return _answer(args, missing, found)
    if wrong:
        return _answer(args, "; ".join(f"{h.name} {h.why}" for h in wrong), found)
    return _answer(args, "", found)


def check_health(settings: Settings, target: str, *, ready: bool) -> tuple[list[WorkerHealth], str]:
    """The matching workers, and a sentence that names the missing ones, or "". Raises LogweirError."""
    client = connect(settings, timeout_s=PROBE_S)
    presence = Presence(client, settings)
    heard = presence.heard()
    serving = {name: served.versions.get(SHARED, "") for name, served in presence.serving().items()}
    registry = Registry(client, settings)
    live, faults = registry.snapshot()
    version = "" if live is None or live.version in faults else live.version
    chosen = [
        WorkerHealth(
            name=w.name,
            role=w.role,
            pid=w.pid,
            silent_s=round(silent_s, 1),
            quiet_s=None if w.progress is None else round(w.progress.quiet_s + silent_s, 1),
            why=liveness_fault(w, silent_s, stall_s=settings.internal.stall_s)
            or (_behind(w, serving, version) if ready else ""),
        )
        for w, silent_s in heard
        if target in ("", w.name, w.role, *w.queues)
    ]
    well = {h.name for h in chosen if not h.why}
    idle = _unserved(settings, {queue for w, _ in heard if w.name in well for queue in w.queues})
    if not target:
        return _everybody(settings, chosen, idle)
    if not chosen:
        names = ", ".join(sorted({w.role for w, _ in heard})) or "none"
        return [], f"no worker or role {target!r} was heard of; the roles that were: {names}"
    if target == "drain" and idle and well:
        return chosen, f"nobody serves {', '.join(idle)}; see the logs of those, or start them"
    # Of several workers of a role, one that is well does the work; of a name there is one.
    if all(h.name != target for h in chosen) and any(not h.why for h in chosen):
        return [h for h in chosen if not h.why], ""
    return chosen, ""


def _unserved(settings: Settings, served: Collection[str]) -> list[str]:
    """The drain shards that no worker serves, if there are several: each has its own workloads."""
    if settings.drain.shards == 1:
        return []  # the role says it
    return [queue for queue in stage_queues(Stage.DRAIN, settings.drain.shards) if queue not in served]


def _everybody(
    settings: Settings, found: Sequence[WorkerHealth], unserved: Sequence[str]
) -> tuple[list[WorkerHealth], str]:
    """Checks the processes of the embedded stack, or without one every needed role."""
    well = {h.name for h in found if not h.why}
    state = running(settings.data.dir)
    if state is not None and state.get("redis_url") != settings.redis.url:
        state = None  # it works for others
    if state is not None and isinstance(names := state.get("workers"), Mapping):
        wanted = {called(settings, str(name), embedded=True) for name in names}
        missing = sorted(wanted - {h.name for h in found})
    else:
        missing = sorted((set(NEEDED) - {h.role for h in found if h.name in well}) | set(unserved))
    reporting = [h for h in found if h.silent_s < WORKER_TTL_S or (state is not None and h.name not in well)]
    if not missing:
        return reporting, ""
    return reporting, f"missing: {', '.join(missing)}; see the logs of those, or start them"


def liveness_fault(worker: WorkerView, silent_s: float, *, stall_s: float) -> str:
    """Why a worker is not live, "" when it is."""
    if silent_s >= WORKER_TTL_S:
        return f"was last heard of {silent_s:.0f} s ago"
    progress = worker.progress
    if progress is not None and progress.stalled_s >= stall_s:
        state = "takes nothing although work waits" if worker.queues else "stands still"
        return f"{state}, for {progress.stalled_s:.0f} s now"
    return ""


def _behind(worker: WorkerView, serving: Mapping[str, str], version: str) -> str:
    if worker.role not in ANSWERING or not version:
        return ""
    now = serving.get(worker.name, "")
    if now == version:
        return ""
    return f"answers under {now}, not yet under {version}" if now else f"has not loaded {version} yet"


def _answer(args: argparse.Namespace, why: str, found: Sequence[WorkerHealth]) -> int:
    if args.json:
        facts: dict[str, Any] = {"ok": not why, "why": why, "workers": [asdict(h) for h in found]}
        print_json(facts)
    elif why:
        err().print(f"logweir: {printable(why)}", markup=False, soft_wrap=True)
    else:
        out().print(_well(found), markup=False, soft_wrap=True)
    return 1 if why else 0


def _well(found: Sequence[WorkerHealth]) -> str:
    if len(found) != 1:
        return f"{plural(len(found), 'worker')} are well"
    one = found[0]
    last = "" if one.quiet_s is None else f", last at work {one.quiet_s:.0f} s ago"
    return f"{printable(one.name)} is well: heard of {one.silent_s:.0f} s ago{last}"
