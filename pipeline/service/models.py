"""Model versions: their states, and which of them is live."""

from dataclasses import asdict
from typing import Any

import redis

from pipeline.errors import BadBundle, BadInput, NotFound
from pipeline.messages.app import app_of
from pipeline.messages.reload import announce
from pipeline.models.registry import Registry
from pipeline.records.batch import utc_now
from pipeline.records.versions import Live
from pipeline.redis.keys import SHARED
from pipeline.service.access.audit import record_change
from pipeline.service.values import ModelView, Moved
from pipeline.settings import Settings


def read_models(registry: Registry) -> list[ModelView]:
    """Every version in the store, in its order. Raises RedisUnavailable, StoreUnavailable."""
    live = {one.version: one for one in registry.live()}
    faults: dict[str, str] = {}
    for fault in registry.faults():
        described = f"on {fault.machine}: {fault.reason}"
        faults[fault.version] = (
            f"{faults[fault.version]}; {described}" if fault.version in faults else described
        )
    sizes = registry.stored.artifacts.sizes()
    return [_view(registry, version, live, faults, sizes) for version in registry.versions()]


def chosen_version(registry: Registry, version: str | None) -> str:
    """This version, without one the live one. Raises BadInput."""
    live = registry.current()
    version = version or (live.version if live else None)
    if version is None:
        raise BadInput("there is no model yet; train one with `logweir train`")
    if version not in registry.versions():
        raise NotFound(f"there is no model {version[:80]!r}; `logweir models list` shows what there is")
    return version


def read_model(registry: Registry, version: str | None) -> dict[str, Any]:
    """The manifest of a version and its state. Raises BadInput, BadBundle."""
    version = chosen_version(registry, version)
    note = registry.note(version)
    return asdict(registry.stored.manifest(version)) | {"state": asdict(note) if note else None}


def promote_model(
    client: "redis.Redis", settings: Settings, version: str, *, by: str, reason: str = ""
) -> Moved:
    """Makes a version the live one. Raises BadInput, LiveChanged, BadBundle."""
    now = Registry(client, settings).promote(version, at=utc_now(), reason=reason)
    return _moved(client, settings, now.previous, now, by=by, reason=reason)


def roll_back_model(
    client: "redis.Redis", settings: Settings, *, model: str = SHARED, by: str, reason: str = ""
) -> Moved:
    """Makes the version before the live one live again. Raises BadInput, LiveChanged, BadBundle."""
    before, now = Registry(client, settings).roll_back(model=model, at=utc_now(), reason=reason)
    return _moved(client, settings, before, now, by=by, reason=reason)


def _moved(
    client: "redis.Redis", settings: Settings, before: str, now: Live, *, by: str, reason: str
) -> Moved:
    announce(app_of(settings))
    record_change(
        client, settings, by=by, action=f"model.{now.how}", target=now.version, model=now.model, reason=reason
    )
    return Moved(**asdict(now), before=before)


def _view(
    registry: Registry, version: str, live: dict[str, Live], faults: dict[str, str], sizes: dict[str, int]
) -> ModelView:
    note = registry.note(version)
    try:
        manifest = registry.stored.complete(version, sizes)
        model, created, lines = manifest.model, manifest.created, manifest.stats.lines
        state, reason = (note.state, note.reason) if note else ("candidate", "")
    except BadBundle as exc:
        model, created, lines = (live[version].model if version in live else "?"), None, None
        state, reason = "unreadable", str(exc)
    if version in live:
        state = "live" if version not in faults and state != "unreadable" else "live, unreadable"
        reason = faults.get(version, reason)
    return ModelView(
        version=version,
        live=version in live,
        model=model,
        created=created,
        lines=lines,
        state=state,
        reason=reason,
        judgement=dict(note.judgement) if note else {},
    )
