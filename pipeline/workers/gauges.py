"""The gauges that the exporter shows, computed at each scrape."""

from typing import Final

from pipeline.messages.routing import all_queues
from pipeline.observe.counters import OTHER, ROLES, STAGES, Meter
from pipeline.settings import MAX_SHARDS

# Counters of workloads that only grow, and those that do not (a rescored or retried batch leaves them again).
GROWING: Final = ("accepted", "stored", "skipped", "discarded", "anomalous", "normal", "unclassified")
PASSING: Final = ("dead", "warming")
CLASSES: Final = ("fresh", "backfill")
TROUBLES: Final = (*STAGES, "source", "templates", "model", OTHER)


def _gauge(name: str, about: str, **labels: tuple[str, ...]) -> Meter:
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
QUEUED: Final = _gauge(
    "queue_messages", "Wake-ups that no worker has taken yet.", queue=all_queues(MAX_SHARDS)
)
UNACKED: Final = _gauge("unacked_messages", "Wake-ups that a worker has taken and not acknowledged.")
LINES_TOTAL: Final = _gauge("lines_total", "Physical lines by what became of them.", outcome=GROWING)
LINES: Final = _gauge("lines", "Physical lines that are so now.", state=("in_flight", *PASSING))
WARMING: Final = _gauge("warming_batches", "Batches stored without a verdict, which wait for a model.")
WORKLOADS: Final = _gauge("workloads", "Workloads seen.")
DEAD: Final = _gauge("dead_batches", "Dead letters.")
DEAD_BYTES: Final = _gauge("dead_bytes", "Payloads of dead letters.")
DEAD_LIMIT: Final = _gauge("dead_limit_bytes", "Payloads of dead letters at which accept says full.")
CLOSED: Final = _gauge("door_closed", "1 while an operator lets nothing in (`logweir drain`).")
WORKERS: Final = _gauge("workers", "Worker processes that live.", role=ROLES)
LEADER: Final = _gauge(
    "drain_leader", "1 while every drain shard with work has a writer that holds its lease."
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
UNWATCHED: Final = _gauge(
    "observations_dropped_total", "Stored batches that the watcher was never told of: their list was full."
)
SESSIONS_OPEN: Final = _gauge("open_sessions", "Sessions that are open.")
INCIDENTS_OPEN: Final = _gauge("open_incidents", "Incidents that go on.")
NODES: Final = _gauge("gpu_nodes", "Machines whose agent was heard of.", state=("alive", "silent"))
DEVICES: Final = _gauge("gpu_devices", "GPUs and MIG slices.", state=("usable", "unusable"))
GPU_MEMORY: Final = _gauge("gpu_memory_bytes", "Memory of usable devices that may be leased.")
GPU_LEASED: Final = _gauge("gpu_leased_bytes", "Memory that is leased.")
GPU_LEASES: Final = _gauge("gpu_leases", "Leases that live.", mode=("shared", "exclusive"))
GPU_WAITING: Final = _gauge("gpu_waiting", "Needs that wait for a GPU.")
GPU_OLDEST: Final = _gauge("gpu_oldest_waiting_seconds", "How long the oldest of them has waited.")
GPU_LEFT: Final = _gauge("gpu_left_parts", "Parts of ended leases whose processes may still be there.")
SCRAPE: Final = _gauge("scrape_seconds", "How long reading all this took.")
SHOWN: Final = (
    REDIS_UP, DISK_FREE, DISK_SIZE, PENDING, PENDING_BYTES, LIMIT_BATCHES, LIMIT_BYTES, OLDEST, QUEUED, UNACKED,
    LINES_TOTAL, LINES, WARMING, WORKLOADS, DEAD, DEAD_BYTES, DEAD_LIMIT, CLOSED, WORKERS, LEADER, TROUBLE, MODEL, MODEL_AGE,
    MODEL_MAX, MODELS, FAULTS, TRAININGS, MEMORY, MEMORY_MAX, DURABLE, WATCH_AGE, UNSEEN, UNWATCHED,
    SESSIONS_OPEN, INCIDENTS_OPEN, NODES, DEVICES, GPU_MEMORY, GPU_LEASED, GPU_LEASES,
    GPU_WAITING, GPU_OLDEST, GPU_LEFT, SCRAPE,
)  # fmt: skip
