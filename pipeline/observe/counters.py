"""Counters of worker processes: steps, lookups, scoring, waits. The exporter (workers/metrics.py) serves
them.

A process counts in memory and adds its increments to a hash in Redis every two seconds, and once more at its
end. So a counter outlives its process, and one endpoint serves the whole deployment. A killed process loses
its last two seconds; a push whose answer is lost may count twice. Exact sums are in the ledger.

Labels come from the closed sets below, never from workloads, ids or texts. So the hash of a role has a
bounded size."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.upkeep import FaultSeries, UpkeepThread

PUSH_S: Final = 2.0
OTHER: Final = "other"

STAGES: Final = ("ingest", "infer", "drain", "store")
# The end of a step. done: handed on or stored. failed: tried again, counted. waits: tried again, not counted.
# hung: over its time limit. lost: its claim expired. away: Redis did not answer. skipped: finished or held by
# another worker.
OUTCOMES: Final = ("done", "failed", "waits", "lost", "away", "skipped", "hung", "split", "dead")
# The reason of a wait.
REASONS: Final = ("sink", "redis", "model", "device", "lease", OTHER)
RESULTS: Final = ("hit", "miss")
DEVICES: Final = ("cpu", "cuda", OTHER)
LEASES: Final = ("drain", "training", "share", OTHER)
# Of a training; kept: the new model was judged worse than the live one.
TRAININGS: Final = ("published", "kept", "failed", "cancelled")
# Of what is found in no single line: rules of sessions, rates of templates, their numbers.
FOUND: Final = (
    "session-event", "session-counts", "session-order", "session-missing",
    "rate-burst", "rate-silence", "rate-mix", "number-shift", "number-outlier", OTHER,
)  # fmt: skip
# What programs send lines in.
PROTOCOLS: Final = ("otlp", "bulk", "loki", "hec", "lines", "journal", "syslog", "relp", "forward", OTHER)
# The end of a request. away: Redis did not answer. conflict: its key was used for another body. refused: it
# cannot be decoded, is too large or too slow, or has no key.
REQUESTS: Final = ("accepted", "duplicate", "full", "away", "conflict", "refused", "failed")
# Of a request to a served model. relayed: another node answered. refused: a fault of the client. unready: no
# copy of it now, or no room for the request. late: its deadline came first.
SERVED_OUTCOMES: Final = ("answered", "relayed", "refused", "unready", "late", "failed")
# Of a record of Kafka. tombstone: it has no value. unreadable: a dead letter.
KAFKA_OUTCOMES: Final = ("read", "tombstone", "unreadable", OTHER)
# Of a payload of NATS. empty: it has no text. unreadable: a dead letter. dropped: there was no room for it,
# without JetStream.
NATS_OUTCOMES: Final = ("read", "empty", "unreadable", "dropped", OTHER)
# Of a message to NATS. known: the server had it already.
PUBLISHED: Final = ("new", "known", OTHER)
ROLES: Final = (
    "ingest", "infer-cpu", "infer-gpu", "drain", "store", "train", "train-gpu",
    "reader", "beat", "source", "kafka", "nats", "agent", "gpu-jobs", "serve", "metrics", "intake", OTHER,
)  # fmt: skip


class MeterKind(Enum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """One metric. `labels` names the closed set of each label; `buckets` are those of a histogram.

    Redis has counted in the buckets: other buckets need another name.
    """

    name: str
    about: str
    kind: MeterKind = MeterKind.COUNTER
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


STEPS: Final = Meter(
    name="logweir_steps_total",
    about="Steps of batches by how they ended.",
    labels={"stage": STAGES, "outcome": OUTCOMES},
)
STEP_SECONDS: Final = Meter(
    name="logweir_step_seconds",
    kind=MeterKind.HISTOGRAM,
    about="How long a step took from its claim on.",
    labels={"stage": STAGES},
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
WAITS: Final = Meter(
    name="logweir_waits_total",
    about="Steps that gave their batch back because something around it failed.",
    labels={"stage": STAGES, "reason": REASONS},
)
LOOKUPS: Final = Meter(
    name="logweir_verdict_lookups_total",
    about="Distinct masked lines looked up in the verdict cache.",
    labels={"result": RESULTS},
)
SCORED: Final = Meter(
    name="logweir_scored_lines_total",
    about="Distinct masked lines scored by a model.",
    labels={"device": DEVICES},
)
SCORE_SECONDS: Final = Meter(
    name="logweir_score_seconds",
    kind=MeterKind.HISTOGRAM,
    about="How long the model took for one pass: the lines of a batch, or of several.",
    labels={"device": DEVICES},
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
LEASE_SECONDS: Final = Meter(
    name="logweir_lease_wait_seconds",
    kind=MeterKind.HISTOGRAM,
    about="How long was waited for leases that were granted.",
    labels={"kind": LEASES},
    buckets=(0.01, 0.05, 0.25, 1, 5, 15, 60, 150, 300),
)
REFUSED: Final = Meter(
    name="logweir_lease_refusals_total",
    about="Leases that were asked for and not granted.",
    labels={"kind": LEASES},
)
SWEEPS: Final = Meter(name="logweir_sweeps_total", about="Rounds of the sweeper.")
SWEPT: Final = Meter(
    name="logweir_sweeper_sent_total", about="Wake-ups that the sweeper sent because none was there."
)
DROPPED: Final = Meter(
    name="logweir_messages_dropped_total",
    about="Messages that were none of ours, or damaged, and were dropped.",
)
RELOADS: Final = Meter(
    name="logweir_reloads_total", about="Times a process began to answer under another version."
)
TRAINED: Final = Meter(
    name="logweir_trainings_total",
    about="Trainings that ended, by what came of them.",
    labels={"result": TRAININGS},
)
OBSERVED: Final = Meter(
    name="logweir_observations_total", about="Stored batches that the watcher has looked at."
)
SESSIONS: Final = Meter(name="logweir_sessions_total", about="Sessions that were over and judged.")
FINDINGS: Final = Meter(
    name="logweir_watch_findings_total",
    about="Sessions and rates that went wrong, by the first reason.",
    labels={"kind": FOUND},
)
STARTS: Final = Meter(
    name="logweir_worker_starts_total", about="Worker processes that began to work.", labels={"role": ROLES}
)
REQUESTS_TOTAL: Final = Meter(
    name="logweir_intake_requests_total",
    about="Requests to the intake by how they ended.",
    labels={"protocol": PROTOCOLS, "outcome": REQUESTS},
)
REQUEST_LINES: Final = Meter(
    name="logweir_intake_lines_total",
    about="Lines of requests that were answered as stored, duplicates too.",
    labels={"protocol": PROTOCOLS},
)
REQUEST_BYTES: Final = Meter(
    name="logweir_intake_bytes_total",
    about="Bytes of text in requests that were decoded.",
    labels={"protocol": PROTOCOLS},
)
REQUEST_DUPLICATES: Final = Meter(
    name="logweir_intake_duplicates_total",
    about="Lines of requests that were in already; many of them: a sender repeats what was answered.",
    labels={"protocol": PROTOCOLS},
)
REQUEST_SECONDS: Final = Meter(
    name="logweir_intake_wait_seconds",
    kind=MeterKind.HISTOGRAM,
    about="How long a decoded request waited for its answer.",
    labels={"protocol": PROTOCOLS},
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
INFERENCES: Final = Meter(
    name="logweir_serve_requests_total",
    about="Requests to served models by how they ended, on the node that its client asked or that was sent them.",
    labels={"outcome": SERVED_OUTCOMES},
)
INFERENCE_SECONDS: Final = Meter(
    name="logweir_serve_seconds",
    kind=MeterKind.HISTOGRAM,
    about="How long a request to a served model took, by how it ended.",
    labels={"outcome": SERVED_OUTCOMES},
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
MESSAGES_DROPPED: Final = Meter(
    name="logweir_intake_dropped_total",
    about="Datagrams for which there was no room, in the intake or in the kernel's buffer before it.",
    labels={"protocol": PROTOCOLS},
)
MESSAGES_SHORTENED: Final = Meter(
    name="logweir_intake_shortened_total",
    about="Messages longer than 64 KiB, stored without their end.",
    labels={"protocol": PROTOCOLS},
)
KAFKA_RECORDS: Final = Meter(
    name="logweir_kafka_records_total",
    about="Records of Kafka by what became of them.",
    labels={"outcome": KAFKA_OUTCOMES},
)
NATS_PAYLOADS: Final = Meter(
    name="logweir_nats_payloads_total",
    about="Payloads of NATS by what became of them.",
    labels={"outcome": NATS_OUTCOMES},
)
NATS_PUBLISHED: Final = Meter(
    name="logweir_nats_published_total",
    about="Messages with results to NATS, by whether the server had them already.",
    labels={"outcome": PUBLISHED},
)
METERS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Meter))


# ---- counting ------------------------------------------------------------------------------------


def step_ended(stage: str, outcome: str) -> None:
    """A step ended, in one of OUTCOMES."""
    _count(STEPS, 1, stage, outcome)


def took(stage: str, seconds: float) -> None:
    """How long a step worked."""
    _observe(STEP_SECONDS, seconds, stage)


def waited(stage: str, reason: str) -> None:
    """A batch was given back because of something in REASONS."""
    _count(WAITS, 1, stage, reason)


def lookups(hits: int, misses: int) -> None:
    """Answers of the verdict cache."""
    _count(LOOKUPS, hits, "hit")
    _count(LOOKUPS, misses, "miss")


def scored(lines: int, seconds: float, device: str) -> None:
    """A model scored so many lines on a device, `cpu` or as torch names it (`cuda:0`)."""
    kind = device.partition(":")[0]
    _count(SCORED, lines, kind)
    _observe(SCORE_SECONDS, seconds, kind)


def lease_waited(kind: str, seconds: float) -> None:
    """A lease was granted after so long."""
    _observe(LEASE_SECONDS, seconds, kind)


def lease_refused(kind: str) -> None:
    """A lease was not granted."""
    _count(REFUSED, 1, kind)


def swept(sent: int) -> None:
    """The sweeper made a round and sent so many wake-ups."""
    _count(SWEEPS, 1)
    _count(SWEPT, sent)


def dropped() -> None:
    """A message was dropped that was none of ours."""
    _count(DROPPED, 1)


def reloaded() -> None:
    """This process answers under another version from now on."""
    _count(RELOADS, 1)


def trained(result: str) -> None:
    """A training ended, in one of TRAININGS."""
    _count(TRAINED, 1, result)


def watched(observations: int, sessions: int, kinds: Sequence[str]) -> None:
    """The watcher made a round: batches it looked at, sessions it judged, and what kinds of things it
    found."""
    _count(OBSERVED, observations)
    _count(SESSIONS, sessions)
    for kind in kinds:
        _count(FINDINGS, 1, kind)


def request_ended(protocol: str, outcome: str, lines: int, size: int, seconds: float) -> None:
    """A decoded request was answered, in one of REQUESTS."""
    _count(REQUESTS_TOTAL, 1, protocol, outcome)
    _count(REQUEST_LINES, lines, protocol)
    _count(REQUEST_BYTES, size, protocol)
    if outcome == "duplicate":
        _count(REQUEST_DUPLICATES, lines, protocol)
    _observe(REQUEST_SECONDS, seconds, protocol)


def inference_ended(outcome: str, seconds: float) -> None:
    """A request to a served model was answered, in one of SERVED_OUTCOMES."""
    _count(INFERENCES, 1, outcome)
    _observe(INFERENCE_SECONDS, seconds, outcome)


def request_refused(protocol: str) -> None:
    """A request was refused before its records were known."""
    _count(REQUESTS_TOTAL, 1, protocol, "refused")


def messages_dropped(protocol: str, count: int) -> None:
    """So many messages were lost because there was no room for them."""
    _count(MESSAGES_DROPPED, count, protocol)


def messages_shortened(protocol: str, count: int) -> None:
    """So many messages lost their end."""
    _count(MESSAGES_SHORTENED, count, protocol)


def kafka_read(records: int, *, tombstones: int, unreadable: int) -> None:
    """So many records of Kafka are in."""
    _count(KAFKA_RECORDS, records, "read")
    _count(KAFKA_RECORDS, tombstones, "tombstone")
    _count(KAFKA_RECORDS, unreadable, "unreadable")


def nats_read(payloads: int, *, empty: int, unreadable: int) -> None:
    """So many payloads of NATS are in."""
    _count(NATS_PAYLOADS, payloads, "read")
    _count(NATS_PAYLOADS, empty, "empty")
    _count(NATS_PAYLOADS, unreadable, "unreadable")


def nats_dropped(payloads: int) -> None:
    """There was no room for so many payloads."""
    _count(NATS_PAYLOADS, payloads, "dropped")


def nats_published(messages: int, *, known: int) -> None:
    """So many messages with results were new to the server, and so many were not."""
    _count(NATS_PUBLISHED, messages, "new")
    _count(NATS_PUBLISHED, known, "known")


def started(role: str) -> None:
    """A worker process of a role begins."""
    _count(STARTS, 1, role)


@cache
def _registry() -> tuple[Any, dict[str, Any], dict[tuple[str, tuple[str, ...]], Any]]:
    """prometheus_client's registry of this process, and its contents by name, and by name and labels.

    Importing it costs 0.1 s, and senders do not. It takes ten times as long as the last of these to find a
    counter by its labels."""
    from prometheus_client import CollectorRegistry, Counter, Histogram

    registry = CollectorRegistry()
    collectors: dict[str, Any] = {}
    for meter in METERS:
        kind: Any = Counter
        more: dict[str, Any] = {"registry": registry}
        if meter.kind is MeterKind.HISTOGRAM:
            kind, more = Histogram, {**more, "buckets": meter.buckets}
        collectors[meter.name] = kind(meter.name, meter.about, tuple(meter.labels), **more)
    return registry, collectors, {}


def _count(meter: Meter, amount: float, *labels: str) -> None:
    if amount > 0:
        _of(meter, labels).inc(amount)


def _observe(meter: Meter, seconds: float, *labels: str) -> None:
    _of(meter, labels).observe(seconds)


def _of(meter: Meter, labels: tuple[str, ...]) -> Any:
    _, collectors, labelled = _registry()
    found = labelled.get((meter.name, labels))
    if found is None:
        found = collectors[meter.name]
        if labels:
            closed = list(zip(labels, meter.labels.values(), strict=True))
            found = found.labels(*(label if label in registered else OTHER for label, registered in closed))
            if not all(label in registered for label, registered in closed):
                return found
        labelled[meter.name, labels] = found
    return found


# ---- pushing -------------------------------------------------------------------------------------


def field_name(name: str, labels: Mapping[str, str]) -> str:
    """A sample's field in Redis: `logweir_steps_total|stage=ingest|outcome=done`."""
    return "|".join((name, *(f"{label}={value}" for label, value in labels.items())))


class Pusher(UpkeepThread):
    """Adds what this process has counted to the hash of its role. Redis being away only delays it: what was
    not pushed stays counted here, in as many numbers as there are labels."""

    def __init__(self, client: "redis.Redis", keys: Keys, role: str) -> None:
        super().__init__("metrics")
        self.client = client
        self.key = keys.metrics(role)
        self._registry = _registry()[0]
        self._pushed: dict[str, float] = {}
        self._one = threading.Lock()
        self._stopping = threading.Event()

    def work(self) -> None:
        faults = FaultSeries("metrics.not_pushed", RedisUnavailable, redis.RedisError)
        while not self._stopping.wait(PUSH_S):
            with faults.outlived():  # such as OSError without a free file; the next push has all of it
                self.push()

    def push(self) -> None:
        """Add what is new, all of it or nothing. Raises RedisUnavailable."""
        with self._one:
            now = {
                field_name(sample.name, sample.labels): sample.value
                for metric in self._registry.collect()
                for sample in metric.samples
                if not sample.name.endswith("_created")
            }
            new = {name: value - self._pushed.get(name, 0.0) for name, value in now.items()}
            pipe = self.client.pipeline(transaction=True)
            for name, amount in new.items():
                if amount > 0:
                    pipe.hincrbyfloat(self.key, name, amount)
            if len(pipe):
                with answering():
                    pipe.execute()
                self._pushed = now

    def stop(self) -> None:
        """Push what is left and end; Redis being away loses it."""
        self._stopping.set()
        with contextlib.suppress(RedisUnavailable, redis.RedisError):
            self.push()


_pushers: list[Pusher] = []


def push(client: "redis.Redis", keys: Keys, role: str) -> Pusher:
    """Begin to count in this process and to push it. A forked child calls it for itself: what its parent had
    counted, and a lock that its parent may have held, are not taken over."""
    _registry.cache_clear()
    pusher = Pusher(client, keys, role)
    _pushers[:] = [pusher]
    pusher.start()
    return pusher


def flush() -> None:
    """The last push of a process that is about to end, if it pushes at all."""
    for pusher in _pushers:
        pusher.stop()
