"""What Prometheus reads: the counters that workers pushed, and the state of the deployment at the moment of the scrape.

A scrape asks Redis in two round trips (three where there are GPUs), however many batches wait, and at most once a second,
however often somebody asks. When Redis does not answer, `logweir_redis_up` is 0 and everything that it would have to say
is left out: a stale number is worse than none. Numbers only: no workload, no id, no line of a log.
"""

import itertools
import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from pipeline.errors import LogweirError, RedisUnavailable
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.values import LeaseMode
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_DRAIN, all_queues, both
from pipeline.observe.counters import METERS, OTHER, ROLES, STAGES, Meter, field_name
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import WORKER_TTL_S, Keys
from pipeline.redis.leases import DRAIN
from pipeline.redis.shards import of_shard
from pipeline.settings import Settings
from pipeline.workers.gauges import (
    CLOSED,
    DEAD,
    DEAD_BYTES,
    DEAD_LIMIT,
    DEVICES,
    DISK_FREE,
    DISK_SIZE,
    DURABLE,
    FAULTS,
    GPU_LEASED,
    GPU_LEASES,
    GPU_LEFT,
    GPU_MEMORY,
    GPU_OLDEST,
    GPU_WAITING,
    GROWING,
    INCIDENTS_OPEN,
    LEADER,
    LIMIT_BATCHES,
    LIMIT_BYTES,
    LINES,
    LINES_TOTAL,
    MEMORY,
    MEMORY_MAX,
    MODEL,
    MODEL_AGE,
    MODEL_MAX,
    MODELS,
    NODES,
    OLDEST,
    PASSING,
    PENDING,
    PENDING_BYTES,
    QUEUED,
    REDIS_UP,
    SCRAPE,
    SESSIONS_OPEN,
    SHOWN,
    TRAININGS,
    TROUBLE,
    TROUBLES,
    UNACKED,
    UNSEEN,
    UNWATCHED,
    WARMING,
    WATCH_AGE,
    WORKERS,
    WORKLOADS,
)

FRESH_S: Final = 1.0
# Waiting batches whose age is looked up; above it the age is that of the oldest among those that are due first.
LOOKED_AT: Final = 20_000


Values = dict[tuple[str, tuple[str, ...]], float]


class Scrape:
    """A collector of prometheus_client; safe for the threads of a server."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.pool = PoolLedger(client, settings)
        self._one = threading.Lock()
        self._read_at = float("-inf")
        self._families: list[Metric] = []
        self._ages: dict[bytes, tuple[int, bool]] = {}  # batch -> since when it waits, whether it is backfill
        self._highest: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Everything, read at most FRESH_S ago."""
        with self._one:
            if time.monotonic() - self._read_at > FRESH_S:
                self._families = list(self._read())
                self._read_at = time.monotonic()
            families = self._families
        yield from families

    def _read(self) -> Iterator[Metric]:
        began = time.monotonic()
        values: Values = {}
        counted: defaultdict[str, float] | None = None
        self._local(values)
        try:
            counted = self._state(values)
            _set(values, REDIS_UP, 1)
        except (RedisUnavailable, redis.RedisError) as exc:
            logger().warning("redis.away", why=str(exc))
            values = {}
            self._local(values)
            _set(values, REDIS_UP, 0)
        _set(values, SCRAPE, time.monotonic() - began)
        yield from _gauges(values)
        if counted is not None:
            yield from _counters(counted)

    def _local(self, values: Values) -> None:
        """What is known without Redis."""
        settings = self.settings
        _set(values, LIMIT_BATCHES, settings.internal.max_pending_batches)
        _set(values, LIMIT_BYTES, settings.intake.max_pending_mib * 2**20)
        _set(values, DEAD_LIMIT, settings.intake.max_dead_mib * 2**20)
        _set(values, MODEL_MAX, settings.train.retrain_age_s)
        for place, path in (("data", settings.data.dir), ("results", settings.data.results)):
            with suppress(OSError):
                usage = shutil.disk_usage(_existing(path))
                _set(values, DISK_FREE, usage.free, place)
                _set(values, DISK_SIZE, usage.total, place)

    def _state(self, values: Values) -> defaultdict[str, float]:
        """Sets what stands in Redis; returns what workers have counted. Raises RedisUnavailable, redis.RedisError."""
        found = self._ask_first()
        now = int(found["time"][0]) * 1000 + int(found["time"][1]) // 1000
        self._ask_second(values, found, now)
        _in_flight(values, found)
        _people(values, found, now)
        _redis(values, found)
        _watching(values, found, now)
        counted: defaultdict[str, float] = defaultdict(float)
        for role in ROLES:
            for name, amount in text_map(found[f"metrics:{role}"]).items():
                with suppress(ValueError):
                    counted[name] += float(amount)
        self._held_up(counted)
        with suppress(LogweirError):  # of a newer build: the rest is still worth showing
            _gpus(values, self.pool if found["nodes"] else None)
        return counted

    def _ask_first(self) -> dict[str, Any]:
        """By name; a question that Redis does not answer (a right is missing) is answered with nothing."""
        k = self.keys
        pipe = self.client.pipeline(transaction=False)
        names: list[str] = []

        def ask(name: str, *command: Any) -> None:
            names.append(name)
            pipe.execute_command(*command)  # type: ignore[no-untyped-call]

        ask("time", "TIME")
        ask("counts", "HGETALL", k.counts)
        ask("due", "ZRANGE", k.due, 0, LOOKED_AT - 1)
        ask("workloads", "SMEMBERS", k.workloads)
        ask("workers", "HVALS", k.workers)
        ask("dead", "ZCARD", k.dead)
        ask("warming", "ZCARD", k.warming)
        ask("closed", "EXISTS", k.closed)
        ask("trouble", "GET", k.trouble)
        for shard in range(self.settings.drain.shards):
            ask(f"leader:{shard}", "HMGET", k.lease(of_shard(DRAIN, shard)), "holder", "deadline")
        ask("model", "HMGET", k.model(), "version", "published_ms")
        ask("models", "SCARD", k.model_names)
        ask("faults", "HLEN", k.model_faults)
        ask("training_queue", "ZCARD", k.training_queue)
        ask("training_now", "EXISTS", k.training_now)
        ask("watching", "HGETALL", k.watching())
        ask("unseen", "LLEN", k.watching("observations"))
        ask("open_sessions", "HLEN", k.watching("sessions"))
        ask("nodes", "HLEN", k.gpu("nodes"))
        ask("unacked", "HLEN", k.kombu("unacked"))
        for queue in all_queues(self.settings.drain.shards):
            ask(f"queue:{queue}", "LLEN", k.kombu(queue))
        for role in ROLES:
            ask(f"metrics:{role}", "HGETALL", k.metrics(role))
        for section in ("memory", "persistence"):
            ask(section, "INFO", section)
        with answering():
            answers = pipe.execute(raise_on_error=False)
        found = dict(zip(names, answers, strict=True))
        for name in ("time", "counts", "due", "workloads"):
            if isinstance(found[name], Exception):
                raise found[name]
        return {name: None if isinstance(x, Exception) else x for name, x in found.items()}

    def _ask_second(self, values: Values, found: dict[str, Any], now: int) -> None:
        """What the first answers name: line counters of workloads, and when batches began to wait that are new to us."""
        workloads = [str(name, "utf-8", "replace") for name in found["workloads"]]
        due = cast("list[bytes]", found["due"])
        new = [batch_id for batch_id in due if batch_id not in self._ages]
        pipe = self.client.pipeline(transaction=False)
        for name in workloads:
            pipe.hmget(self.keys.totals(name), *GROWING, *PASSING)
        for batch_id in new:
            pipe.hmget(
                self.keys.batch(str(batch_id, "utf-8", "replace")),
                "accepted_ms",
                "kind",
                "dead_ms",
                "backfill",
            )
        with answering():
            answers = pipe.execute() if len(pipe) else []
        _lines(values, answers[: len(workloads)])
        ages = {batch_id: self._ages[batch_id] for batch_id in due if batch_id in self._ages}
        for batch_id, (accepted, kind, died, backfill) in zip(new, answers[len(workloads) :], strict=True):
            if accepted is not None:
                # What is scored again, or was dead, waits since we saw it: it was accepted long before.
                since = now if kind == b"rescore" or died is not None else int(accepted)
                ages[batch_id] = (since, backfill == b"1")
        self._ages = ages
        for word, wanted in (("fresh", False), ("backfill", True)):
            oldest = min((since for since, late in ages.values() if late is wanted), default=now)
            _set(values, OLDEST, max(0, now - oldest) / 1000, word)
        _set(values, WORKLOADS, len(workloads))
        growing = {key: value for key, value in values.items() if key[0] == LINES_TOTAL.name}
        for key in growing:
            values[key] = self._not_back(f"{key}", values[key])

    def _held_up(self, counted: defaultdict[str, float]) -> None:
        for name in counted:
            counted[name] = self._not_back(name, counted[name])

    def _not_back(self, name: str, value: float) -> float:
        """A Redis that lost its last second must not look like a counter that began anew, which counts all of it again."""
        before = self._highest.get(name, 0.0)
        shown = before if before / 2 < value < before else value
        self._highest[name] = shown
        return shown


# ---- one part each -------------------------------------------------------------------------------


def _set(values: Values, meter: Meter, value: float, *labels: str) -> None:
    values[meter.name, labels] = float(value)


def _lines(values: Values, totals: Sequence[Sequence[bytes | None]]) -> None:
    names = (*GROWING, *PASSING)
    columns = zip(*totals, strict=True) if totals else [()] * len(names)
    sums = {name: sum(int(x or 0) for x in column) for name, column in zip(names, columns, strict=True)}
    for name in GROWING:
        _set(values, LINES_TOTAL, sums[name], name)
    for name in PASSING:
        _set(values, LINES, sums[name], name)
    gone = sum(sums[name] for name in ("stored", "dead", "discarded", "skipped"))
    _set(values, LINES, max(0, sums["accepted"] - gone), "in_flight")


def _in_flight(values: Values, found: dict[str, Any]) -> None:
    counts = text_map(found["counts"])
    for stage in STAGES:
        _set(values, PENDING, int(counts.get(f"stage:{stage}", 0)), stage)
    _set(values, PENDING_BYTES, int(counts.get("bytes", 0)))
    _set(values, DEAD_BYTES, int(counts.get("dead_bytes", 0)))
    _set(values, DEAD, found["dead"] or 0)
    _set(values, WARMING, found["warming"] or 0)
    _set(values, CLOSED, found["closed"] or 0)
    _set(values, UNACKED, found["unacked"] or 0)
    for name, length in found.items():
        kind, _, queue = name.partition(":")
        if kind == "queue":
            _set(values, QUEUED, length or 0, queue)


def _people(values: Values, found: dict[str, Any], now: int) -> None:
    """Who works, who leads, what they complain about, and the model that they answer under."""
    roles = dict.fromkeys(ROLES, 0)
    for text in found["workers"] or []:
        with suppress(ValueError, KeyError, TypeError):
            worker = json.loads(text)
            if now - int(worker["beat_ms"]) < WORKER_TTL_S * 1000:
                roles[worker["role"] if worker["role"] in roles else OTHER] += 1
    for role, count in roles.items():
        _set(values, WORKERS, count, role)
    _set(values, LEADER, _led(found, now))
    trouble = ""
    with suppress(ValueError, KeyError, TypeError):
        trouble = str(json.loads(found["trouble"])["stage"])
    for word in TROUBLES:
        _set(values, TROUBLE, word == (trouble if trouble in TROUBLES or not trouble else OTHER), word)
    version, published = found["model"] or (None, None)
    if version is not None:
        _set(values, MODEL, 1, str(version, "utf-8", "replace"))
        if published:
            _set(values, MODEL_AGE, max(0, now - int(published)) / 1000)
    _set(values, MODELS, found["models"] or 0)
    _set(values, FAULTS, found["faults"] or 0)
    _set(values, TRAININGS, found["training_queue"] or 0, "queued")
    _set(values, TRAININGS, found["training_now"] or 0, "running")


def _led(found: dict[str, Any], now: int) -> bool:
    """Whether batches of stage drain get on. A writer keeps its lease only while it has work, and of several shards some
    may have none."""
    led, waits = [], []
    for name, answer in found.items():
        kind, _, number = name.partition(":")
        if kind == "leader":
            holder, deadline = answer or (None, None)
            led.append(bool(holder) and int(deadline or 0) > now)
            queues = both(of_shard(QUEUE_DRAIN, int(number)))
            waits.append(any(found[f"queue:{queue}"] for queue in queues))
    of_those_with_work = [one for one, work in zip(led, waits, strict=True) if work]
    return all(of_those_with_work) if of_those_with_work else any(led)


def _redis(values: Values, found: dict[str, Any]) -> None:
    memory, persistence = found["memory"] or {}, found["persistence"] or {}
    if "used_memory" in memory:
        _set(values, MEMORY, memory["used_memory"])
        _set(values, MEMORY_MAX, memory.get("maxmemory", 0))
    if "aof_enabled" in persistence:
        written = persistence.get("aof_last_write_status", "ok") == "ok"
        _set(values, DURABLE, bool(persistence["aof_enabled"]) and written)


def _watching(values: Values, found: dict[str, Any], now: int) -> None:
    numbers = text_map(found["watching"] or {})
    round_ms = int(numbers.get("round_ms", now))
    _set(values, WATCH_AGE, max(0, now - round_ms) / 1000)
    _set(values, UNSEEN, found["unseen"] or 0)
    _set(values, UNWATCHED, int(numbers.get("dropped", 0)))
    _set(values, SESSIONS_OPEN, found["open_sessions"] or 0)
    _set(values, INCIDENTS_OPEN, int(numbers.get("incidents", 0)))


def _gpus(values: Values, pool: PoolLedger | None) -> None:
    """Raises LogweirError. Without a node there are none, and Redis is not asked again."""
    seen = None if pool is None else pool.snapshot()
    nodes, devices, leases = (seen.nodes, seen.devices, seen.leases) if seen else ((), (), ())
    waiting, left = (seen.waiting, seen.orphans) if seen else ((), ())
    silent = sum(node.silent for node in nodes)
    usable = [device for device in devices if device.usable]
    _set(values, NODES, len(nodes) - silent, "alive")
    _set(values, NODES, silent, "silent")
    _set(values, DEVICES, len(usable), "usable")
    _set(values, DEVICES, len(devices) - len(usable), "unusable")
    _set(values, GPU_MEMORY, sum(device.schedulable_mib for device in usable) * 2**20)
    _set(values, GPU_LEASED, sum(part.memory_mib for lease in leases for part in lease.parts) * 2**20)
    for mode in LeaseMode:
        _set(values, GPU_LEASES, sum(lease.need.mode is mode for lease in leases), mode.value)
    _set(values, GPU_WAITING, len(waiting))
    oldest = max((seen.now_ms - request.since_ms for request in waiting), default=0) if seen else 0
    _set(values, GPU_OLDEST, oldest / 1000)
    _set(values, GPU_LEFT, len(left))


# ---- as Prometheus wants it ----------------------------------------------------------------------


def _gauges(values: Values) -> Iterator[Metric]:
    for meter in SHOWN:
        kind = CounterMetricFamily if meter in (LINES_TOTAL, UNWATCHED) else GaugeMetricFamily
        family = kind(meter.name, meter.about, labels=tuple(meter.labels))
        for (name, labels), value in values.items():
            if name == meter.name:
                family.add_metric(labels, value)
        if family.samples:
            yield family


def _counters(counted: defaultdict[str, float]) -> Iterator[Metric]:
    """With a zero where nothing was counted yet, so that the first event is seen as a rise."""
    for meter in METERS:
        kind = HistogramMetricFamily if meter.buckets else CounterMetricFamily
        family = kind(meter.name, meter.about, labels=tuple(meter.labels))
        for labels in itertools.product(*meter.labels.values()):
            named = dict(zip(meter.labels, labels, strict=True))
            if isinstance(family, HistogramMetricFamily):
                edges = [*map(floatToGoString, meter.buckets), "+Inf"]
                buckets = [
                    (le, counted[field_name(f"{meter.name}_bucket", named | {"le": le})]) for le in edges
                ]
                family.add_metric(labels, buckets, counted[field_name(f"{meter.name}_sum", named)])
            else:
                family.add_metric(labels, counted[field_name(meter.name, named)])
        yield family


def _existing(path: Path) -> Path:
    """The nearest directory that is there: results may not have been written yet."""
    return next((place for place in (path, *path.parents) if place.exists()), path)
