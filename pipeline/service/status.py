"""The facts of a running pipeline at one moment."""

import shutil
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, cast

import redis

from pipeline.controller.tick import decisions
from pipeline.controller.trainings import Trainings
from pipeline.controller.watchlist import Watchlist
from pipeline.errors import RedisUnavailable, StoreUnavailable
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.ledger.backlog import has_results
from pipeline.ledger.ledger import Ledger
from pipeline.messages.routing import ALL_QUEUES
from pipeline.models.registry import Registry
from pipeline.observe.losses import recent_loss
from pipeline.observe.presence import Presence, Trouble
from pipeline.records.left_out import unpack_left_out
from pipeline.redis.attach import running
from pipeline.redis.connection import answering, connect, now_ms
from pipeline.redis.keys import SHARED, Keys
from pipeline.service.running.dropped import read_dropped
from pipeline.service.values import (
    DiskRoom,
    LeftOutLines,
    PoolCounts,
    QueueLength,
    ServingWorker,
    StackStatus,
    WorkloadLines,
)
from pipeline.settings import Settings
from pipeline.settings.values import kept_results
from pipeline.sinks.manifest import KEY, gone, manifest
from pipeline.store.choose import open_store

LEFT_OUT_MS: Final = 86_400_000  # what was left out is shown for a day after it last grew
_COUNTED: Final = [f.name for f in fields(WorkloadLines)][:-2]  # the counters of Backlog.totals


def read_status(settings: Settings, client: "redis.Redis | None" = None) -> StackStatus:
    """Raises RedisUnavailable."""
    try:
        return _read(connect(settings) if client is None else client, settings)
    except redis.RedisError as exc:
        raise RedisUnavailable(f"Redis does not answer ({exc}); start the stack with `logweir up`") from exc


def _read(client: "redis.Redis", settings: Settings) -> StackStatus:
    stack = running(settings.data.dir) or {}
    urls: Mapping[str, Any] = stack if stack.get("redis_url") == settings.redis.url else {}
    ledger, registry = Ledger(client, settings), Registry(client, settings)
    counts, refusal = ledger.backlog.counts(), ledger.intake.full()
    models, faults = registry.live(), registry.faults()
    watched = Watchlist(client, settings).look()
    decided = decisions(client, ledger.keys)
    retrained = decisions(client, ledger.keys, "retrain")
    presence = Presence(client, settings)
    workers = _live_workers(presence)
    live_versions = {model.version for model in models}
    return StackStatus(
        model=next((model for model in models if model.model == SHARED), None),
        models=list(models),
        model_faults={
            version: {f.machine: f.reason for f in faults if f.version == version}
            for version in dict.fromkeys(f.version for f in faults)
            if version in live_versions
        },
        training=Trainings(client, settings).now(),
        trainings_waiting=int(client.zcard(ledger.keys.training_queue)),
        decisions=decided,
        retrained={model: entry for model, entry in retrained.items() if model in decided},
        versions_stored=_versions_stored(registry),
        watchlist={"version": watched.version, "patterns": list(watched.patterns)},
        batches=counts.get("batches", 0),
        bytes=counts.get("bytes", 0),
        stages={name.removeprefix("stage:"): n for name, n in counts.items() if name.startswith("stage:")},
        dead={"batches": int(client.zcard(ledger.keys.dead)), "bytes": counts.get("dead_bytes", 0)},
        closed=ledger.intake.paused_because(),
        full=None if refusal is None else str(refusal),
        warming_batches=ledger.backlog.warming(),
        trouble=presence.trouble() or _refused_writes(client) or _results_gone(client, settings),
        redis_loss=recent_loss(client, settings),
        watching=ledger.backlog.watching(),
        dropped=read_dropped(client, settings),
        left_out=read_left_out(client, settings),
        gpus=_pool_counts(client, settings),
        flower=urls.get("flower"),
        metrics=urls.get("metrics"),
        intake=urls.get("intake") or [],
        api=urls.get("api"),
        workers=workers,
        workloads={
            name: _workload_lines(total, watched=watched.covers(name))
            for name, total in ledger.backlog.totals().items()
        },
        unwatched=settings.watch.unwatched,
        results=stored_totals(settings),
        results_keep=kept_results(settings.data.results_keep),
    )


def read_left_out(client: "redis.Redis", settings: Settings) -> dict[str, LeftOutLines]:
    """What rates and numbers left out, by workload, where something was left out in the last day. Those with
    most lines come first."""
    blobs = cast("dict[bytes, bytes]", client.hgetall(Keys(settings.redis.key_prefix).watching("left_out")))
    since_ms = now_ms(client) - LEFT_OUT_MS
    recent = [(name, one) for name, one in unpack_left_out(blobs).items() if one.at_ms >= since_ms]
    recent.sort(key=lambda named: named[1].lines, reverse=True)
    return {
        name: LeftOutLines(
            ahead=one.ahead,
            lead_minutes=one.lead,
            late=one.late,
            out_of_range=one.out_of_range,
            values=one.values,
            session_events=one.session_events,
            failed=one.failed,
            at_ms=one.at_ms,
            sentences=one.sentences(),
        )
        for name, one in recent
    }


def journal_trouble(facts: Mapping[str, Any]) -> Trouble | None:
    """That Redis cannot write, by its INFO of persistence. No process can record this trouble: Redis refuses
    that, too."""
    if facts.get("aof_enabled") and facts.get("aof_last_write_status", "ok") != "ok":
        what = "cannot write its journal"
    elif facts.get("rdb_last_bgsave_status", "ok") != "ok":
        what = "could not save its last snapshot"
    else:
        return None
    reason = f"Redis {what}, as on a full disk, and takes nothing more in; free some disk space"
    return Trouble(stage="redis", reason=reason)


def _refused_writes(client: "redis.Redis") -> Trouble | None:
    try:
        return journal_trouble(cast("Mapping[str, Any]", client.info("persistence")))
    except redis.ResponseError:  # this user may not ask
        return None


def read_queues(client: "redis.Redis", settings: Settings) -> list[QueueLength]:
    """Every queue with its messages, those of later batches apart. Raises RedisUnavailable."""
    keys = Keys(settings.redis.key_prefix)
    served = {queue for worker in Presence(client, settings).live() for queue in worker.queues}
    with answering():
        pipe = client.pipeline(transaction=False)
        for name in ALL_QUEUES:
            pipe.llen(keys.kombu(name))
        lengths = pipe.execute()
    return [
        QueueLength(queue=name, messages=int(length), served=name in served)
        for name, length in zip(ALL_QUEUES, lengths, strict=True)
    ]


def read_disk(settings: Settings) -> DiskRoom | None:
    """The room of the disk that holds the data directory, None where it cannot be asked."""
    try:
        room = shutil.disk_usage(settings.data.dir)
    except OSError:
        return None
    return DiskRoom(folder=str(settings.data.dir), total=room.total, free=room.free)


def check_results(client: "redis.Redis", settings: Settings) -> None:
    """Raises StoreUnavailable where files should hold results and no manifest is there, RedisUnavailable."""
    if "parquet" not in settings.data.sinks:
        return
    objects = open_store(settings.data.results_url)
    if objects.look(KEY) is None and has_results(Ledger(client, settings).backlog.totals()):
        raise gone(objects.url)


def _results_gone(client: "redis.Redis", settings: Settings) -> Trouble | None:
    try:
        check_results(client, settings)
    except StoreUnavailable as exc:
        return Trouble(stage="store", reason=str(exc))
    return None


def stored_totals(settings: Settings) -> dict[str, int] | None:
    """Sums of the Parquet results; None where there are none by setting, or while the store is away."""
    if "parquet" not in settings.data.sinks:
        return None
    try:
        objects = open_store(settings.data.results_url)
        return manifest(objects.get(KEY), objects.url).totals()
    except StoreUnavailable:
        return None


def _live_workers(presence: Presence) -> list[ServingWorker]:
    serving = presence.serving()
    return [
        ServingWorker(
            name=worker.name,
            role=worker.role,
            pid=worker.pid,
            queues=worker.queues,
            beat_ms=worker.beat_ms,
            progress=worker.progress,
            engine=worker.engine,
            serves=serving[worker.name].versions if worker.name in serving else {},
        )
        for worker in presence.live()
    ]


def _versions_stored(registry: Registry) -> int | None:
    try:
        return len(registry.versions())
    except StoreUnavailable:
        return None


def _pool_counts(client: "redis.Redis", settings: Settings) -> PoolCounts:
    pool = PoolLedger(client, settings).snapshot()
    return PoolCounts(
        devices=len(pool.devices),
        usable=sum(device.usable for device in pool.devices),
        leases=len(pool.leases),
        waiting=len(pool.waiting),
        trouble=[f"{device.name} of {device.node}: {device.why}" for device in pool.devices if device.why],
    )


def in_flight(total: Mapping[str, int]) -> int:
    """Accepted lines of a workload that are neither stored nor given up."""
    settled = sum(total.get(name, 0) for name in ("stored", "dead", "discarded", "skipped"))
    return total.get("accepted", 0) - settled


def _workload_lines(total: Mapping[str, int], *, watched: bool) -> WorkloadLines:
    return WorkloadLines(
        **{name: total.get(name, 0) for name in _COUNTED},
        in_flight=in_flight(total),
        watched=watched,
    )
