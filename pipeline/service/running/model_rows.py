"""Models on leased devices as facts for `gpu models`: those of users, then Logweir's own. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pipeline.gpu.homes import Pending, ServeState, serve_state
from pipeline.gpu.own_models import SCORING, TRAINING
from pipeline.gpu.placing import Loaded, LoadState
from pipeline.gpu.policy.explain import device_views, why_it_waits
from pipeline.gpu.policy.policy import open_to_shared
from pipeline.gpu.served import ServeNode
from pipeline.gpu.values import TENANT, LeaseKind, PoolRequest, Snapshot, scoring_need
from pipeline.settings import Settings

NO_MODEL = "no model has been trained yet"


def model_rows(view: Pending) -> list[dict[str, Any]]:
    """Every version of every served model, and where its copies are; times in seconds."""
    found = []
    for model in sorted(view.models, key=lambda one: (one.tenant, one.name, -one.version)):
        state, why = serve_state(view, model)
        placed = view.copies_of(model)
        found.append(
            {
                "tenant": model.tenant,
                "model": model.name,
                "version": model.version,
                "newest": view.newest(model),
                "state": state.value,
                "why": why,
                "ready": len(view.answering(model)),
                "replicas": model.replicas,
                "format": model.format.value,
                "memory_mib": model.memory_mib,
                "size": model.size,
                "by": model.by,
                "age_s": (view.now_ms - model.put_ms) / 1000,
                "copies": [_copy(view, entry) for entry in placed],
            }
        )
    return found


def _copy(view: Pending, entry: Loaded) -> dict[str, Any]:
    node = view.holder(entry)
    return {
        "device": entry.uuid,
        "node": node.node if node is not None else "",
        "holder": entry.holder,
        "lease": entry.lease_id,
        "state": entry.state.value,
        "used_s_ago": (view.now_ms - entry.used_ms) / 1000,
    }


def own_rows(view: Pending, snapshot: Snapshot, live: str, settings: Settings) -> list[dict[str, Any]]:
    """Logweir's own models: versions that score, and trainings. `live`: the version that scores now, or "".

    `replicas` of the live version are the processes that score; a process without a copy says why.
    """
    copies: dict[str, list[Loaded]] = defaultdict(list)
    for entry in view.loaded:
        if entry.model.tenant == TENANT and entry.model.name.startswith((SCORING, TRAINING)):
            copies[entry.model.name].append(entry)
    scoring = [node for node in view.scoring if not view.silent(node)]
    name = f"{SCORING}{live}".strip()
    if scoring:
        copies.setdefault(name, [])
    waiting = [request for request in snapshot.waiting if request.need.kind is LeaseKind.TRAIN]
    found = []
    for model, placed in sorted(copies.items()):
        with_copy = {entry.lease_id for entry in placed}
        reasons = [
            f"{node.node}: {_why_unplaced(node, snapshot, live, settings)}"
            for node in scoring
            if model == name and node.lease_id not in with_copy
        ]
        found.append(_own_row(view, model, placed, replicas=len(placed) + len(reasons), why=reasons))
    for request in waiting:
        why = why_it_waits(snapshot, request, device_views(snapshot))
        found.append(_own_row(view, TRAINING.strip(), [], replicas=1, why=[why]))
    return found


def _own_row(
    view: Pending, model: str, placed: Sequence[Loaded], *, replicas: int, why: Sequence[str]
) -> dict[str, Any]:
    ready = sum(entry.state is LoadState.READY for entry in placed)
    state = ServeState.READY if ready else ServeState.LOADING if placed else ServeState.PENDING
    return {
        "tenant": TENANT,
        "model": model,
        "version": None,
        "newest": True,
        "state": state.value,
        "why": "; ".join(dict.fromkeys(why)),
        "ready": ready,
        "replicas": replicas,
        "format": "logweir",
        "memory_mib": max((entry.model.memory_mib for entry in placed), default=None),
        "size": None,
        "by": TENANT,
        "age_s": None,
        "copies": [_copy(view, entry) for entry in placed],
    }


def _why_unplaced(node: ServeNode, snapshot: Snapshot, live: str, settings: Settings) -> str:
    """Why a process that scores has no copy: its own words, else the pool's."""
    if node.why:
        return node.why
    if not live:
        return NO_MODEL
    need = scoring_need(settings, node=node.node)
    if node.lease_id or open_to_shared(snapshot, need):
        return "it loads the model with the next lines"
    request = PoolRequest(request_id=node.name, holder=node.name, need=need, ttl_ms=1)
    return why_it_waits(snapshot, request, device_views(snapshot))
