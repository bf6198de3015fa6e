"""The metrics that Prometheus reads: counters that workers pushed, and the state of the deployment at the
scrape.

A scrape takes two round trips to Redis (three with GPUs), however many batches wait, and happens at most once
a second. When Redis does not answer, `logweir_redis_up` is 0 and its metrics are left out: a stale number is
worse than none. Labels come from closed sets: no workload, no id, no line of a log. Tenants are those of the
settings."""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from pipeline.errors import LogweirError, RedisUnavailable
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.logs import logger
from pipeline.messages.routing import ALL_QUEUES
from pipeline.observe.counters import METERS, ROLES, Meter, MeterKind, field_name
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN
from pipeline.settings import Settings
from pipeline.workers import gauges
from pipeline.workers.gauges import Values, set_value

FRESH_S: Final = 1.0
# Waiting batches whose age is read; beyond it the age is that of the oldest among those that are due first.
AGES_MAX: Final = 20_000
_BATCH_FIELDS: Final = ("accepted_ms", "kind", "dead_ms", "backfill")

_FAMILIES: Final = {
    MeterKind.COUNTER: CounterMetricFamily,
    MeterKind.GAUGE: GaugeMetricFamily,
    MeterKind.HISTOGRAM: HistogramMetricFamily,
}


class Questions:
    """One round trip to Redis whose answers are read by name."""

    def __init__(self, client: "redis.Redis") -> None:
        self._pipe = client.pipeline(transaction=False)
        self._fields: dict[str | tuple[str, object], tuple[str, ...]] = {}

    def ask(self, name: str | tuple[str, object], *command: Any, fields: tuple[str, ...] = ()) -> None:
        """`fields`: of a hash; the answer is a dict of those that it has."""
        self._fields[name] = fields
        self._pipe.execute_command(*command, *fields)  # type: ignore[no-untyped-call]

    def answers(self, required: tuple[str, ...] | None = None) -> dict[str | tuple[str, object], Any]:
        """Without an answer (a missing right) None, unless it is required; by default all are. Raises
        RedisError."""
        with answering():
            replies = self._pipe.execute(raise_on_error=required is None) if self._fields else []
        found: dict[str | tuple[str, object], Any] = {}
        for (name, fields), reply in zip(self._fields.items(), replies, strict=True):
            if isinstance(reply, Exception):
                if name in (required or ()):
                    raise reply
                found[name] = None
            elif fields:
                found[name] = {
                    field: value for field, value in zip(fields, reply, strict=True) if value is not None
                }
            else:
                found[name] = reply
        return found


class Scrape:
    """A collector of prometheus_client; safe for the threads of a server."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.pool = PoolLedger(client, settings)
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._families: list[Metric] = []
        self._ages: dict[bytes, tuple[int, bool]] = {}  # batch -> (waits since, in ms; is backfill)
        self._highest: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """All metrics, read at most FRESH_S ago."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                self._families = list(self._read())
                self._read_at = time.monotonic()
            families = self._families
        yield from families

    def _read(self) -> Iterator[Metric]:
        start = time.monotonic()
        values: Values = {}
        counted: defaultdict[str, float] | None = None
        try:
            counted = self._state(values)
            set_value(values, gauges.REDIS_UP, 1)
        except (RedisUnavailable, redis.RedisError) as exc:
            logger().warning("redis.away", why=str(exc))
            values = {}
            set_value(values, gauges.REDIS_UP, 0)
        gauges.set_local(values, self.settings)
        set_value(values, gauges.SCRAPE, time.monotonic() - start)
        yield from _computed(values)
        if counted is not None:
            yield from _pushed(counted)

    def _state(self, values: Values) -> defaultdict[str, float]:
        """Fill `values` from Redis; the counters that workers pushed. Raises RedisUnavailable,
        redis.RedisError."""
        found = self._ask_state()
        seconds, micros = found["time"]
        now = int(seconds) * 1000 + int(micros) // 1000
        workloads = [str(name, "utf-8", "replace") for name in found["workloads"]]
        self._ask_named(values, workloads, found["due"], now)
        gauges.set_state(values, found, now)
        counted: defaultdict[str, float] = defaultdict(float)
        for role in ROLES:
            for name, amount in text_map(found["metrics", role] or {}).items():
                with suppress(ValueError):
                    counted[name] += float(amount)
        for name in counted:
            counted[name] = self._monotonic(name, counted[name])
        gauges.set_gpu_seconds(values, found["metered"], self.settings.gpu.tenants)
        with suppress(LogweirError):  # a newer build wrote it; the other metrics still hold
            gauges.set_gpus(values, self.pool if found["nodes"] else None)
        return counted

    def _ask_state(self) -> dict[str | tuple[str, object], Any]:
        k = self.keys
        questions = Questions(self.client)
        ask = questions.ask
        ask("time", "TIME")
        ask("counts", "HGETALL", k.counts)
        ask("due", "ZRANGE", k.due, 0, AGES_MAX - 1)
        ask("workloads", "SMEMBERS", k.workloads)
        ask("workers", "HVALS", k.workers)
        ask("dead", "ZCARD", k.dead)
        ask("warming", "ZCARD", k.warming)
        ask("closed", "EXISTS", k.closed)
        for slot in ("young", "old"):
            ask(("identities", slot), "HLEN", k.intake(slot))
            ask(("record_identities", slot), "SCARD", k.intake_records(slot))
        ask("senders", "HVALS", k.senders)
        ask("kafka", "HVALS", k.kafka)
        ask("nats", "HVALS", k.nats)
        ask("trouble", "GET", k.trouble)
        ask("leader", "HMGET", k.lease(DRAIN), fields=("holder", "deadline"))
        ask("model", "HMGET", k.model(), fields=("version", "published_ms"))
        ask("models", "SCARD", k.model_names)
        ask("faults", "HLEN", k.model_faults)
        ask("training_queue", "ZCARD", k.training_queue)
        ask("training_now", "EXISTS", k.training_now)
        ask("watching", "HGETALL", k.watching())
        ask("unseen", "LLEN", k.watching("observations"))
        ask("open_sessions", "HLEN", k.watching("sessions"))
        ask("nodes", "HLEN", k.gpu("nodes"))
        ask("metered", "HGETALL", k.gpu("sums"))
        ask("unacked", "HLEN", k.kombu("unacked"))
        for queue in ALL_QUEUES:
            ask(("queue", queue), "LLEN", k.kombu(queue))
        for role in ROLES:
            ask(("metrics", role), "HGETALL", k.metrics(role))
        for section in ("memory", "persistence"):
            ask(section, "INFO", section)
        return questions.answers(required=("time", "counts", "due", "workloads"))

    def _ask_named(self, values: Values, workloads: list[str], due: list[bytes], now: int) -> None:
        """The line counters of workloads, and the age of waiting batches that this process has not read
        yet."""
        questions = Questions(self.client)
        for name in workloads:
            totals = self.keys.totals(name)
            questions.ask(("totals", name), "HMGET", totals, fields=(*gauges.GROWING, *gauges.PASSING))
        ages = {batch_id: self._ages[batch_id] for batch_id in due if batch_id in self._ages}
        unread = [batch_id for batch_id in due if batch_id not in ages]
        for batch_id in unread:
            key = self.keys.batch(str(batch_id, "utf-8", "replace"))
            questions.ask(("batch", batch_id), "HMGET", key, fields=_BATCH_FIELDS)
        found = questions.answers()
        for batch_id in unread:
            batch = found["batch", batch_id]
            if "accepted_ms" in batch:
                # A rescored or revived batch was accepted long before, so its wait begins at its first
                # scrape.
                waits_anew = batch.get("kind") == b"rescore" or "dead_ms" in batch
                since = now if waits_anew else int(batch["accepted_ms"])
                ages[batch_id] = (since, batch.get("backfill") == b"1")
        self._ages = ages
        for word, wanted in (("fresh", False), ("backfill", True)):
            oldest = min((since for since, backfill in ages.values() if backfill is wanted), default=now)
            set_value(values, gauges.OLDEST, max(0, now - oldest) / 1000, word)
        set_value(values, gauges.WORKLOADS, len(workloads))
        gauges.set_lines(values, [found["totals", name] for name in workloads])
        for meter, value in values.items():
            if meter[0] == gauges.LINES_TOTAL.name:
                values[meter] = self._monotonic(str(meter), value)

    def _monotonic(self, name: str, value: float) -> float:
        """The value of a counter. After a crash Redis may lose its last second: a slightly lower value is not
        a reset, after which Prometheus would count everything again."""
        before = self._highest.get(name, 0.0)
        shown = before if before / 2 < value < before else value
        self._highest[name] = shown
        return shown


# ---- as Prometheus wants it ----------------------------------------------------------------------


def _family(meter: Meter) -> Any:
    return _FAMILIES[meter.kind](meter.name, meter.about, labels=tuple(meter.labels))


def _computed(values: Values) -> Iterator[Metric]:
    for meter in gauges.SHOWN:
        family = _family(meter)
        for (name, labels), value in values.items():
            if name == meter.name:
                family.add_metric(labels, value)
        if family.samples:
            yield family


def _pushed(counted: defaultdict[str, float]) -> Iterator[Metric]:
    """Zero where nothing was counted yet, so that the first event shows as a rise."""
    for meter in METERS:
        family = _family(meter)
        for labels in itertools.product(*meter.labels.values()):
            named = dict(zip(meter.labels, labels, strict=True))
            if meter.kind is MeterKind.HISTOGRAM:
                edges = [*map(floatToGoString, meter.buckets), "+Inf"]
                buckets = [
                    (le, counted[field_name(f"{meter.name}_bucket", named | {"le": le})]) for le in edges
                ]
                family.add_metric(labels, buckets, counted[field_name(f"{meter.name}_sum", named)])
            else:
                family.add_metric(labels, counted[field_name(meter.name, named)])
        yield family
