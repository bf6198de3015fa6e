"""The metrics that the exporter computes at each scrape from answers of Redis."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.gpu.values import TENANT, LeaseKind, LeaseMode, Snapshot
from pipeline.ledger.intake import MAX_IDENTITIES
from pipeline.messages.routing import ALL_QUEUES
from pipeline.observe.counters import OTHER, ROLES, STAGES, Meter, MeterKind
from pipeline.records.left_out import KEPT_BACK, LEFT_OUT
from pipeline.redis.connection import text_map
from pipeline.redis.keys import WORKER_TTL_S
from pipeline.service.senders import silent_senders
from pipeline.settings import Settings
from pipeline.workers.kafka.progress import read_partitions
from pipeline.workers.nats.progress import read_streams

# (name of the metric, values of its labels) -> value
Values = dict[tuple[str, tuple[str, ...]], float]
# Answers of Redis by the name of the question; None where Redis refused to answer (a missing right).
Answers = Mapping[str | tuple[str, object], Any]

# Counters of workloads that only grow, and those that do not (a rescored or retried batch leaves them again).
GROWING: Final = ("accepted", "stored", "skipped", "discarded", "anomalous", "normal", "unclassified")
PASSING: Final = ("dead", "warming")
CLASSES: Final = ("fresh", "backfill")
LAG_SHOWN: Final = 200
LISTED: Final = 256  # devices with series of their own, four each
LAG_KNOWN_MS: Final = 60_000  # a reader reports every other second
TROUBLES: Final = (*STAGES, "source", "templates", "model", OTHER)


def _gauge(name: str, about: str, **labels: tuple[str, ...]) -> Meter:
    return Meter(name=f"logweir_{name}", about=about, labels=labels, kind=MeterKind.GAUGE)


def _counter(name: str, about: str, **labels: tuple[str, ...]) -> Meter:
    return Meter(name=f"logweir_{name}", about=about, labels=labels)


REDIS_UP: Final = _gauge("redis_up", "1 when Redis answers.")
DISK_FREE: Final = _gauge(
    "disk_free_bytes", "Free space where data and results of this machine lie.", place=("data", "results")
)
DISK_SIZE: Final = _gauge("disk_size_bytes", "Size of the file system there.", place=("data", "results"))
PENDING: Final = _gauge("pending_batches", "Batches in flight by the stage they wait for.", stage=STAGES)
PENDING_BYTES: Final = _gauge("pending_bytes", "Payloads of batches in flight.")
LIMIT_BATCHES: Final = _gauge("pending_limit_batches", "Batches in flight at which accept says full.")
LIMIT_BYTES: Final = _gauge("pending_limit_bytes", "Payloads in flight at which accept says full.")
OLDEST: Final = _gauge("oldest_pending_seconds", "Age of the oldest batch in flight.", priority=CLASSES)
QUEUED: Final = _gauge("queue_messages", "Wake-ups that no worker has taken yet.", queue=ALL_QUEUES)
UNACKED: Final = _gauge("unacked_messages", "Wake-ups that a worker has taken and not acknowledged.")
LINES_TOTAL: Final = _counter("lines_total", "Physical lines by what became of them.", outcome=GROWING)
LINES: Final = _gauge("lines", "Physical lines that are so now.", state=("in_flight", *PASSING))
WARMING: Final = _gauge("warming_batches", "Batches stored without a verdict, which wait for a model.")
WORKLOADS: Final = _gauge("workloads", "Workloads seen.")
DEAD: Final = _gauge("dead_batches", "Dead letters.")
DEAD_BYTES: Final = _gauge("dead_bytes", "Payloads of dead letters.")
DEAD_LIMIT: Final = _gauge("dead_limit_bytes", "Payloads of dead letters at which accept says full.")
CLOSED: Final = _gauge("door_closed", "1 while an operator lets nothing in (`logweir drain`).")
IDENTITIES: Final = _gauge(
    "intake_identities", "Requests to the intake, or their records, that a retry would be compared with."
)
IDENTITIES_MAX: Final = _gauge(
    "intake_identities_max", "The most that there may be; then the oldest go early."
)
IDENTITIES_EARLY: Final = _counter(
    "intake_identities_early_total", "Times when the older half was forgotten before ten minutes were over."
)
SILENT_SENDERS: Final = _gauge(
    "intake_silent_senders", "Senders to the intake that sent for an hour and fell silent today."
)
KAFKA_LAG: Final = _gauge(
    "kafka_lag_records",
    "Records of a partition that wait in Kafka; of the 200 that lag most.",
    topic=(),
    partition=(),
)
NATS_LAG: Final = _gauge("nats_lag_messages", "Messages that wait in a stream of NATS.", stream=())
SOURCE_LOST: Final = _counter(
    "source_lost_total",
    "Records of Kafka and messages of NATS that were removed before they were read, and rests of followed files "
    "that were not found, each counted as one.",
)
WORKERS: Final = _gauge("workers", "Worker processes that live.", role=ROLES)
LEADER: Final = _gauge(
    "drain_leader", "1 while the writer of templates holds its lease; it needs none while no line waits."
)
TROUBLE: Final = _gauge("trouble", "1 where something keeps batches waiting.", stage=TROUBLES)
MODEL: Final = _gauge("model_info", "The live version of the shared model.", version=())
MODEL_AGE: Final = _gauge("model_age_seconds", "Age of the live version of the shared model.")
MODEL_MAX: Final = _gauge("model_max_age_seconds", "Age at which the controller trains again.")
MODELS: Final = _gauge("models", "Models that were ever published: the shared one and workloads' own.")
FAULTS: Final = _gauge("model_faults", "Versions whose files cannot be read.")
TRAININGS: Final = _gauge("trainings", "Trainings by state.", state=("queued", "running"))
MEMORY: Final = _gauge("redis_memory_bytes", "Memory that Redis uses.")
MEMORY_MAX: Final = _gauge("redis_memory_max_bytes", "Memory that Redis may use; 0: unlimited.")
DURABLE: Final = _gauge("redis_durable", "1 while Redis writes its append-only file.")
WATCH_AGE: Final = _gauge("watch_age_seconds", "Time since the watcher last looked at what was stored.")
UNSEEN: Final = _gauge("observations", "Stored batches that the watcher has not looked at.")
UNWATCHED: Final = _counter(
    "observations_dropped_total", "Stored batches that the watcher was never told of: their list was full."
)
LEFT_OUT_TOTAL: Final = _counter(
    "left_out_total", "Lines and values that rates and numbers could not use as they are.", kind=LEFT_OUT
)
KEPT_BACK_TOTAL: Final = _counter(
    "findings_kept_back_total", "Findings that opened no incident, because the alarm budget was too small."
)
WORKLOADS_FORGOTTEN: Final = _counter(
    "workloads_forgotten_total", "Workloads whose rates were forgotten for want of room."
)
SESSIONS_OPEN: Final = _gauge("open_sessions", "Sessions that are open.")
INCIDENTS_OPEN: Final = _gauge("open_incidents", "Incidents that go on.")
NODES: Final = _gauge("gpu_nodes", "Machines whose agent was heard of.", state=("alive", "silent"))
DEVICES: Final = _gauge("gpu_devices", "GPUs and MIG slices.", state=("usable", "unusable"))
GPU_MEMORY: Final = _gauge("gpu_memory_bytes", "Memory of usable devices that may be leased.")
GPU_LEASED: Final = _gauge("gpu_leased_bytes", "Memory that is leased.")
DEVICE_LEASED: Final = _gauge("gpu_device_leased_bytes", "Memory leased of a device.", node=(), device=())
DEVICE_USED: Final = _gauge("gpu_device_used_bytes", "Memory used on a device.", node=(), device=())
DEVICE_BUSY: Final = _gauge(
    "gpu_device_busy_ratio", "Share of time in which a kernel ran on a device.", node=(), device=()
)
DEVICE_HEAT: Final = _gauge("gpu_device_temperature_celsius", "Temperature of a device.", node=(), device=())
GPU_LEASES: Final = _gauge("gpu_leases", "Leases that live.", mode=("shared", "exclusive"))
GPU_WAITING: Final = _gauge("gpu_waiting", "Needs that wait for a GPU.")
GPU_OLDEST: Final = _gauge("gpu_oldest_waiting_seconds", "How long the oldest of them has waited.")
GPU_LEFT: Final = _gauge("gpu_left_parts", "Parts of ended leases whose processes may still be there.")
GPU_SECONDS: Final = Meter(
    name="logweir_gpu_seconds_total",
    about="Device time of ended leases, by their share of the device; tenants are those of gpu_tenants.",
    labels={"tenant": (TENANT, OTHER), "kind": tuple(LeaseKind)},
)
GPU_LOST: Final = _counter("gpu_usage_lost_total", "Usage records that no process stored in time.")
SCRAPE: Final = _gauge("scrape_seconds", "How long reading all this took.")
SHOWN: Final = tuple(value for value in list(globals().values()) if isinstance(value, Meter))


# ---- from answers of Redis -----------------------------------------------------------------------


def set_value(values: Values, meter: Meter, value: float, *labels: str) -> None:
    values[meter.name, labels] = float(value)


def set_local(values: Values, settings: Settings) -> None:
    """Gauges that need no Redis."""
    set_value(values, LIMIT_BATCHES, settings.internal.max_pending_batches)
    set_value(values, LIMIT_BYTES, settings.intake.max_pending_mib * 2**20)
    set_value(values, DEAD_LIMIT, settings.intake.max_dead_mib * 2**20)
    set_value(values, IDENTITIES_MAX, 2 * MAX_IDENTITIES)
    set_value(values, MODEL_MAX, settings.train.retrain_age_s)
    for place, path in (("data", settings.data.dir), ("results", settings.data.results)):
        with suppress(OSError):
            usage = shutil.disk_usage(_existing(path))
            set_value(values, DISK_FREE, usage.free, place)
            set_value(values, DISK_SIZE, usage.total, place)


def set_lines(values: Values, totals: Sequence[Mapping[str, bytes]]) -> None:
    """Lines by outcome, over the totals of all workloads."""
    sums = {name: sum(int(of.get(name, 0)) for of in totals) for name in (*GROWING, *PASSING)}
    for name in GROWING:
        set_value(values, LINES_TOTAL, sums[name], name)
    for name in PASSING:
        set_value(values, LINES, sums[name], name)
    ended = sum(sums[name] for name in ("stored", "dead", "discarded", "skipped"))
    set_value(values, LINES, max(0, sums["accepted"] - ended), "in_flight")


def set_state(values: Values, found: Answers, now: int) -> None:
    """Gauges of the first round trip of a scrape. `now` in ms."""
    _set_in_flight(values, found)
    set_value(values, SILENT_SENDERS, silent_senders(found["senders"] or (), now))
    _set_lag(values, found, now)
    _set_processes(values, found, now)
    _set_redis(values, found)
    _set_watching(values, found, now)


def _set_in_flight(values: Values, found: Answers) -> None:
    counts = text_map(found["counts"])
    for stage in STAGES:
        set_value(values, PENDING, int(counts.get(f"stage:{stage}", 0)), stage)
    set_value(values, PENDING_BYTES, int(counts.get("bytes", 0)))
    kinds = ("identities", "record_identities")
    set_value(values, IDENTITIES, sum(found[kind, slot] or 0 for kind in kinds for slot in ("young", "old")))
    set_value(values, IDENTITIES_EARLY, int(counts.get("identities_early", 0)))
    set_value(values, SOURCE_LOST, int(counts.get("source_lost", 0)))
    set_value(values, DEAD_BYTES, int(counts.get("dead_bytes", 0)))
    set_value(values, DEAD, found["dead"] or 0)
    set_value(values, WARMING, found["warming"] or 0)
    set_value(values, CLOSED, found["closed"] or 0)
    set_value(values, UNACKED, found["unacked"] or 0)
    for queue in ALL_QUEUES:
        set_value(values, QUEUED, found["queue", queue] or 0, queue)


def _set_lag(values: Values, found: Answers, now: int) -> None:
    """Topics are no closed set, but few: an operator names them."""
    live = [one for one in read_partitions(found["kafka"] or ()) if now - one.at_ms < LAG_KNOWN_MS]
    for one in live[:LAG_SHOWN]:
        labels = (one.topic, str(one.partition))
        also = values.get((KAFKA_LAG.name, labels), 0)  # of the same name in another cluster
        set_value(values, KAFKA_LAG, one.lag + also, *labels)
    for stream in read_streams(found["nats"] or ())[:LAG_SHOWN]:
        if stream.stream and now - stream.at_ms < LAG_KNOWN_MS:
            set_value(values, NATS_LAG, stream.lag, stream.stream)


def _set_processes(values: Values, found: Answers, now: int) -> None:
    """Workers, the writer of templates, the reported problem, and the live model."""
    roles = dict.fromkeys(ROLES, 0)
    for text in found["workers"] or []:
        with suppress(ValueError, KeyError, TypeError):
            worker = json.loads(text)
            if now - int(worker["beat_ms"]) < WORKER_TTL_S * 1000:
                roles[worker["role"] if worker["role"] in roles else OTHER] += 1
    for role, count in roles.items():
        set_value(values, WORKERS, count, role)
    set_value(values, LEADER, _drain_leads(found, now))
    trouble = ""
    with suppress(ValueError, KeyError, TypeError):
        trouble = str(json.loads(found["trouble"])["stage"])
    for word in TROUBLES:
        label = trouble if trouble in TROUBLES or not trouble else OTHER
        set_value(values, TROUBLE, word == label, word)
    model = found["model"] or {}
    if "version" in model:
        set_value(values, MODEL, 1, str(model["version"], "utf-8", "replace"))
        if model.get("published_ms"):
            set_value(values, MODEL_AGE, max(0, now - int(model["published_ms"])) / 1000)
    set_value(values, MODELS, found["models"] or 0)
    set_value(values, FAULTS, found["faults"] or 0)
    set_value(values, TRAININGS, found["training_queue"] or 0, "queued")
    set_value(values, TRAININGS, found["training_now"] or 0, "running")


def _drain_leads(found: Answers, now: int) -> bool:
    lease = found["leader"] or {}
    return bool(lease.get("holder")) and int(lease.get("deadline") or 0) > now


def _set_redis(values: Values, found: Answers) -> None:
    memory, persistence = found["memory"] or {}, found["persistence"] or {}
    if "used_memory" in memory:
        set_value(values, MEMORY, memory["used_memory"])
        set_value(values, MEMORY_MAX, memory.get("maxmemory", 0))
    if "aof_enabled" in persistence:
        written = persistence.get("aof_last_write_status", "ok") == "ok"
        set_value(values, DURABLE, bool(persistence["aof_enabled"]) and written)


def _set_watching(values: Values, found: Answers, now: int) -> None:
    numbers = text_map(found["watching"] or {})
    round_ms = int(numbers.get("round_ms", now))
    set_value(values, WATCH_AGE, max(0, now - round_ms) / 1000)
    set_value(values, UNSEEN, found["unseen"] or 0)
    set_value(values, UNWATCHED, int(numbers.get("dropped", 0)))
    for kind in LEFT_OUT:
        set_value(values, LEFT_OUT_TOTAL, int(numbers.get(kind, 0)), kind)
    set_value(values, KEPT_BACK_TOTAL, int(numbers.get(KEPT_BACK, 0)))
    set_value(values, WORKLOADS_FORGOTTEN, int(numbers.get("workloads", 0)))
    set_value(values, SESSIONS_OPEN, found["open_sessions"] or 0)
    set_value(values, INCIDENTS_OPEN, int(numbers.get("incidents", 0)))


def set_gpus(values: Values, pool: PoolLedger | None) -> None:
    """`pool` None: there is no node, and Redis is not asked again. Raises LogweirError."""
    view = None if pool is None else pool.snapshot()
    nodes, devices, leases = (view.nodes, view.devices, view.leases) if view else ((), (), ())
    waiting, orphans = (view.waiting, view.orphans) if view else ((), ())
    silent = sum(node.silent for node in nodes)
    usable = [device for device in devices if device.usable]
    set_value(values, NODES, len(nodes) - silent, "alive")
    set_value(values, NODES, silent, "silent")
    set_value(values, DEVICES, len(usable), "usable")
    set_value(values, DEVICES, len(devices) - len(usable), "unusable")
    set_value(values, GPU_MEMORY, sum(device.schedulable_mib for device in usable) * 2**20)
    set_value(values, GPU_LEASED, sum(part.memory_mib for lease in leases for part in lease.parts) * 2**20)
    for mode in LeaseMode:
        set_value(values, GPU_LEASES, sum(lease.need.mode is mode for lease in leases), mode.value)
    set_value(values, GPU_WAITING, len(waiting))
    oldest = max((view.now_ms - request.since_ms for request in waiting), default=0) if view else 0
    set_value(values, GPU_OLDEST, oldest / 1000)
    set_value(values, GPU_LEFT, len(orphans))
    if view is not None:
        _set_devices(values, view)


def _set_devices(values: Values, view: Snapshot) -> None:
    """The first LISTED devices by node and index; without what their driver or a silent node does not say."""
    leased: defaultdict[str, int] = defaultdict(int)
    for lease in view.leases:
        for part in lease.parts:
            leased[part.uuid] += part.memory_mib
    silent = {node.name for node in view.nodes if node.silent}
    for device in view.devices[:LISTED]:
        labels = (device.node, device.uuid)
        set_value(values, DEVICE_LEASED, leased[device.uuid] * 2**20, *labels)
        if device.node in silent:
            continue
        set_value(values, DEVICE_USED, device.used_mib * 2**20, *labels)
        if device.utilisation_percent is not None:
            set_value(values, DEVICE_BUSY, device.utilisation_percent / 100, *labels)
        if device.temperature_c is not None:
            set_value(values, DEVICE_HEAT, device.temperature_c, *labels)


def set_gpu_seconds(values: Values, metered: Mapping[bytes, bytes] | None, tenants: Iterable[str]) -> None:
    """Counters of ended leases; tenants that the settings do not name count as `other`."""
    names = (*parse_tenants(tuple(tenants)), OTHER)
    sums = {(tenant, kind.value): 0 for tenant in names for kind in LeaseKind}
    for name, amount in text_map(metered or {}).items():
        kind, _, tenant = name.removeprefix("ms:").partition(":")
        place = (tenant if tenant in names else OTHER, kind)
        if place in sums:
            sums[place] += int(amount)
    for labels, ms in sums.items():
        set_value(values, GPU_SECONDS, ms / 1000, *labels)
    set_value(values, GPU_LOST, int((metered or {}).get(b"lost", 0)))


def _existing(path: Path) -> Path:
    """The nearest directory that exists: results may not have been written yet."""
    return next((place for place in (path, *path.parents) if place.exists()), path)
