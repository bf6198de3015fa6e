"""The health of a worker, a role or all of them.

Live: a recent heartbeat and no stall. A stalled worker takes nothing from a queue with work, or its loop
stands still. Ready: it also answers under the live model version, or an earlier one if this machine cannot
read that, where it answers under one.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import redis

from pipeline.models.registry import Registry
from pipeline.observe.embedded import called
from pipeline.observe.presence import Presence, WorkerView
from pipeline.redis.attach import running
from pipeline.redis.keys import SHARED, WORKER_TTL_S
from pipeline.service.running.values import PipelineHealth, WorkerHealth
from pipeline.settings import Settings

# Roles whose workers load a model version before they answer under it.
ANSWERING: Final = frozenset({"ingest", "infer-cpu", "infer-gpu", "drain"})
# Without these nothing that is accepted is stored.
NEEDED: Final = ("ingest", "infer-cpu", "drain", "store", "beat")


def read_health(
    client: "redis.Redis", settings: Settings, target: str, *, ready: bool = False
) -> PipelineHealth:
    """The health of a worker or role; `target` "": of all there should be. Raises RedisUnavailable."""
    found, missing = _looked_at(client, settings, target, ready=ready)
    why = missing or "; ".join(f"{one.name} {one.why}" for one in found if one.why)
    if ready and not why:
        why = _without_model(client, settings, found)
    return PipelineHealth(ok=not why, why=why, workers=found)


def _looked_at(
    client: "redis.Redis", settings: Settings, target: str, *, ready: bool
) -> tuple[list[WorkerHealth], str]:
    """The matching workers, and a sentence that names the missing ones, or ""."""
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
    if not target:
        return _everybody(settings, chosen)
    if not chosen:
        names = ", ".join(sorted({w.role for w, _ in heard})) or "none"
        return [], f"no worker or role {target!r} was heard of; the roles that were: {names}"
    # Of several workers of a role, one that is well does the work; of a name there is one.
    if all(h.name != target for h in chosen) and any(not h.why for h in chosen):
        return [h for h in chosen if not h.why], ""
    return chosen, ""


def _without_model(client: "redis.Redis", settings: Settings, found: Sequence[WorkerHealth]) -> str:
    """That none of the workers can read any version of the shared model; "" if one can, or none has to."""
    live, faults = Registry(client, settings).snapshot()
    answering = [one.name for one in found if one.role in ANSWERING]
    if live is None or live.version not in faults or not answering:
        return ""
    serving = Presence(client, settings).serving()
    if any(SHARED in serving[name].versions for name in answering if name in serving):
        return ""
    return f"no version of the model can be read: {live.version}: {faults[live.version]}"


def _everybody(settings: Settings, found: Sequence[WorkerHealth]) -> tuple[list[WorkerHealth], str]:
    """Checks the processes of the embedded stack, or without one every needed role."""
    well = {h.name for h in found if not h.why}
    state = running(settings.data.dir)
    if state is not None and state.get("redis_url") != settings.redis.url:
        state = None  # it works for others
    if state is not None and isinstance(names := state.get("workers"), Mapping):
        wanted = {called(settings, str(name), embedded=True) for name in names}
        missing = sorted(wanted - {h.name for h in found})
    else:
        missing = sorted(set(NEEDED) - {h.role for h in found if h.name in well})
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
