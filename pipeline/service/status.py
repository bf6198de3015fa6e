"""The facts of a running pipeline at one moment."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, cast

import redis

from pipeline.controller.tick import decisions
from pipeline.controller.trainings import Trainings
from pipeline.controller.watchlist import Watchlist
from pipeline.errors import RedisUnavailable, StoreUnavailable
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.ledger.ledger import Ledger
from pipeline.messages.routing import all_queues, both, stage_queues
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence, Trouble, WorkerView
from pipeline.records.delivery import Stage
from pipeline.redis.attach import running
from pipeline.redis.connection import answering, connect
from pipeline.redis.keys import SHARED, Keys
from pipeline.service.values import (
    DiskRoom,
    DrainShard,
    PoolCounts,
    QueueLength,
    ServingWorker,
    StackStatus,
    WorkloadLines,
)
from pipeline.settings import Settings
from pipeline.settings.values import kept_results
from pipeline.sinks.manifest import KEY, manifest
from pipeline.store.choose import open_store

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
        trouble=presence.trouble() or _refused_writes(client),
        watching=ledger.backlog.watching(),
        drain_shards=_drain_shards(client, settings, workers),
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
        results=_stored(settings),
        results_keep=kept_results(settings.data.results_keep),
    )


def journal_trouble(facts: Mapping[str, Any]) -> Trouble | None:
    """That Redis cannot write, by its INFO of persistence. No process can record this trouble: Redis refuses
    that, too."""
    if not facts.get("aof_enabled") or facts.get("aof_last_write_status", "ok") == "ok":
        return None
    return Trouble(
        stage="redis",
        reason="Redis cannot write its journal, as on a full disk, and takes nothing more in; free some disk space",
    )


def _refused_writes(client: "redis.Redis") -> Trouble | None:
    try:
        return journal_trouble(cast("Mapping[str, Any]", client.info("persistence")))
    except redis.ResponseError:  # this user may not ask
        return None


def read_queues(client: "redis.Redis", settings: Settings) -> list[QueueLength]:
    """Every queue with its messages, those of later batches apart. Raises RedisUnavailable."""
    keys, names = Keys(settings.redis.key_prefix), all_queues(settings.drain.shards)
    served = {queue for worker in Presence(client, settings).live() for queue in worker.queues}
    with answering():
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.llen(keys.kombu(name))
        lengths = pipe.execute()
    return [
        QueueLength(queue=name, messages=int(length), served=name in served)
        for name, length in zip(names, lengths, strict=True)
    ]


def read_disk(settings: Settings) -> DiskRoom | None:
    """The room of the disk that holds the data directory, None where it cannot be asked."""
    try:
        room = shutil.disk_usage(settings.data.dir)
    except OSError:
        return None
    return DiskRoom(folder=str(settings.data.dir), total=room.total, free=room.free)


def _stored(settings: Settings) -> dict[str, int] | None:
    if "parquet" not in settings.data.sinks:
        return None
    try:  # without Polars: an installation that only sends has none
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


def _drain_shards(
    client: "redis.Redis", settings: Settings, workers: Sequence[WorkerView]
) -> list[DrainShard]:
    keys = Keys(settings.redis.key_prefix)
    served = {queue for worker in workers for queue in worker.queues}
    return [
        DrainShard(
            queue=queue,
            messages=sum(int(client.llen(keys.kombu(name))) for name in both(queue)),
            served=queue in served,
        )
        for queue in stage_queues(Stage.DRAIN, settings.drain.shards)
    ]


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
