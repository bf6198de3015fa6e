"""All settings, in one place, with one precedence: defaults < config file < environment < flags.

This module is the only reader of the environment. An entry point builds one `Settings` and passes it
down; child processes get the same values through `to_environ()`. Users know a setting by its flat name
(`gpu_yield_s`); code reads it in its group (`settings.gpu.yield_s`). msgspec checks types and bounds.
"""

import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from zoneinfo import ZoneInfo

import msgspec

from pipeline.errors import BadSetting
from pipeline.settings import listeners, proxies
from pipeline.settings.kafka import kafka_sources, masked_sources
from pipeline.settings.nats import masked_source, nats_source
from pipeline.settings.toml import read_toml
from pipeline.settings.train_source import TrainSource
from pipeline.settings.values import (
    check_opensearch_url,
    check_url,
    kept_results,
    masked_url,
    nearest,
    store_place,
)

PREFIX: Final = "LOGWEIR_"
# The only variables that reach `Internal`. Tests and benches set them for a stack.
PREFIX_INTERNAL: Final = "LOGWEIR_INTERNAL_"
# All changed settings of a parent process as one JSON object, so that no separator can split a value.
HANDED_DOWN: Final = "LOGWEIR_HANDED_DOWN"
CONFIG: Final = "LOGWEIR_CONFIG"
# Kubernetes adds these for every Service of the namespace, and Docker for a link. A Service can be called
# logweir-metrics, so LOGWEIR_METRICS_PORT is only recognised as such by its value.
_LINK: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_ADDRESS: Final = ("tcp://", "udp://", "sctp://")
# Names that users know from elsewhere.
ALIASES: Final = {
    "redis_url": "REDIS_URL",
    "flower_auth": "FLOWER_BASIC_AUTH",
    "opensearch_url": "OPENSEARCH_URL",
}
# Never shown, not even in a message about their own type.
SECRETS: Final = frozenset(
    {
        "redis_url",
        "flower_auth",
        "opensearch_url",
        "opensearch_password",
        "opensearch_read_password",
        "kafka_source",
        "nats_source",
    }
)
SINKS: Final = ("parquet", "opensearch")
# All processes of one GPU pool need these alike: each of them plans.
POLICY: Final = (
    "gpu_tenants", "gpu_half_life_s", "gpu_backfill", "gpu_yield_s", "gpu_infer_mib", "gpu_context_mib",
    "gpu_node_ttl_ms", "gpu_beat_s", "lease_ttl_ms",
)  # fmt: skip
# All senders into one pipeline need these alike: each sender judges by its own settings what is full.
LIMITS: Final = ("max_pending_mib", "max_pending_batches", "max_dead_mib")
ALIKE: Final = (*POLICY, *LIMITS)
Words = tuple[str, ...]

# In a group, and yet no setting: `logweir run` hands it to its processes.
PRIVATE: Final = frozenset({"results_dir"})

# How a secret is shown that is not all of a value.
_SHOWN: Final = {
    "redis_url": masked_url,
    "opensearch_url": masked_url,
    "kafka_source": masked_sources,
    "nats_source": masked_source,
}

DAY_S: Final = 86_400
_TRUTH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
CENTURY_S: Final = 3_153_600_000  # bound of a span: a longer one is a slip
TIB_MIB: Final = 1_048_576


def says(text: str, low: float | None = None, high: float | None = None) -> msgspec.Meta:
    """The description of a setting for the manual, and its inclusive bounds."""
    return msgspec.Meta(description=text, ge=low, le=high)


def within(low: float, high: float) -> msgspec.Meta:
    """Bounds, both included, of a constant."""
    return msgspec.Meta(ge=low, le=high)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings. `rename` gives the flat names, `__post_init__` raises ValueError."""


class DataSettings(Group, frozen=True, rename={"dir": "data_dir"}):
    """Where files are."""

    dir: Annotated[Path, says("place of the embedded stack's files")] = Path("logweir-data")
    store_url: Annotated[
        str | None,
        says(
            "what all machines of a pipeline share: file:///folder or s3://bucket/prefix; default <data_dir>"
        ),
    ] = None
    results_dir: Annotated[Path | None, says("where results lie; default results/ in store_url")] = None
    results_keep: Annotated[
        Words,
        says("how long Parquet results stay and how large they get: lines=30d, findings=395d, size=200GiB"),
    ] = ("lines=30d",)
    sinks: Annotated[Words, says("where results are stored: parquet, opensearch or both")] = ("parquet",)

    def __post_init__(self) -> None:
        if not self.sinks or not set(self.sinks) <= set(SINKS):
            raise ValueError(
                f"sinks {','.join(self.sinks)!r} is not usable; name {' or '.join(SINKS)}, or both"
            )
        kept_results(self.results_keep)

    @property
    def store(self) -> str:
        """The address of the store: `store_url`, else the data directory."""
        return self.store_url if self.store_url is not None else self.dir.absolute().as_uri()

    @property
    def results_url(self) -> str:
        """The address of the results: `results_dir`, else results/ in the store."""
        if self.results_dir is not None:
            return self.results_dir.absolute().as_uri()
        return f"{self.store.rstrip('/')}/results"

    @property
    def baseline_url(self) -> str:
        """The address of lines that only trainings read, apart from the results."""
        return f"{self.store.rstrip('/')}/baseline"

    @property
    def results(self) -> Path:
        """The folder of results, where they lie in one."""
        return self.results_dir if self.results_dir is not None else self._folder / "results"

    @property
    def baseline(self) -> Path:
        """The folder of a baseline's lines, where they lie in one."""
        return self._folder / "baseline"

    @property
    def _folder(self) -> Path:
        scheme, _, path = store_place(self.store)
        return self.dir if self.store_url is None or scheme != "file" else Path(path)

    @property
    def models(self) -> Path:
        """Where this machine keeps its copies of model versions."""
        return self.dir / "models"


class RedisSettings(
    Group,
    frozen=True,
    rename={
        "url": "redis_url",
        "max_mib": "redis_max_mib",
        "fsync": "redis_fsync",
        "replicas_ack": "redis_replicas_ack",
    },
):
    """The Redis of a pipeline."""

    url: Annotated[str | None, says("a Redis to use; without it the embedded stack starts its own")] = None
    key_prefix: Annotated[str, says("first part of every key; pipelines may share a Redis")] = "logweir"
    max_mib: Annotated[int, says("memory of the embedded Redis", 32, TIB_MIB)] = 768
    fsync: Annotated[
        Literal["everysec", "always"], says("appendfsync; always survives a power cut and is slower")
    ] = "everysec"
    replicas_ack: Annotated[
        int, says("replicas that acknowledge a push or a new live model before its answer", 0, 8)
    ] = 0

    def __post_init__(self) -> None:
        # Patterns of SCAN and of an ACL begin with it, so it has none of their characters.
        if not self.key_prefix or any(c in self.key_prefix for c in "{}*?[]\\ \n"):
            raise ValueError(
                f"key_prefix {self.key_prefix!r} is empty or has one of the characters "
                "{ } * ? [ ] \\ or space; use letters, digits, - and _"
            )
        if self.url is not None:
            check_url(self.url)


class IntakeSettings(Group, frozen=True, rename={"listeners": "intake", "rules": "workload_rules"}):
    """How lines come in, and how many may wait."""

    listeners: Annotated[
        Words, says("where the intake listens, such as http://127.0.0.1:4318; empty: nowhere")
    ] = (listeners.DEFAULT,)
    rules: Annotated[
        Path | None, says("file of rules that name the workload of what shippers send; docs/intake.md")
    ] = None
    time_zone: Annotated[str, says("IANA zone of header times that carry no offset")] = "UTC"
    masks: Annotated[tuple[Path, ...], says("more mask files, applied before the shipped ones")] = ()
    max_pending_mib: Annotated[
        int,
        says(
            "packed payloads that wait before a pipeline is full; work of later stages is extra", 1, TIB_MIB
        ),
    ] = 256
    max_dead_mib: Annotated[int, says("payloads of dead letters before a pipeline is full", 1, TIB_MIB)] = 256
    follow_quiet_s: Annotated[
        float,
        says("how long nothing was written to a rotated file before `send --follow` lets it go", 1, DAY_S),
    ] = 60.0

    def __post_init__(self) -> None:
        try:
            ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            raise ValueError(
                f"time_zone {self.time_zone!r} is not known; use an IANA name such as Europe/Berlin"
            ) from None
        for text in self.listeners:
            listeners.Listener.parse(text)

    @property
    def zone(self) -> ZoneInfo:
        """`time_zone` as an object."""
        return ZoneInfo(self.time_zone)


class DrainSettings(Group, frozen=True, rename=lambda name: f"drain_{name}"):
    """Mining of templates."""

    similarity: Annotated[float, says("Drain3 sim_th: equal tokens in one template", 0.05, 1)] = 0.7
    processes: Annotated[int, says("drain workers; one works, the others stand by", 1, 64)] = 1


class StackSettings(Group, frozen=True):
    """The processes of the embedded stack."""

    ingest_processes: Annotated[
        int,
        says(
            "ingest workers of the embedded stack; 0: one, and more while batches wait and a core is idle",
            0,
            64,
        ),
    ] = 0
    infer_processes: Annotated[int, says("CPU scoring workers of the embedded stack", 1, 64)] = 1
    store_processes: Annotated[int, says("store workers of the embedded stack", 1, 64)] = 1
    reader_processes: Annotated[
        int, says("readers of archives (`logweir backfill`) of the embedded stack", 0, 64)
    ] = 1
    step_s: Annotated[float, says("a longer step ends its process and is retried", 1, 3_600)] = 120.0
    api: Annotated[str, says("where `logweir up` is asked over HTTP; empty: nowhere")] = listeners.API_DEFAULT
    api_proxies: Annotated[
        str,
        says(
            "networks of proxies that name who signed in, the headers that they set, and GROUP=SCOPE of each group"
        ),
    ] = ""
    metrics: Annotated[bool, says("serve Prometheus metrics with `logweir up`")] = True
    metrics_address: Annotated[str, says("where the metrics are served")] = "127.0.0.1"
    metrics_port: Annotated[int, says("port of the metrics; if taken, one of the next", 1, 65535)] = 9464
    flower: Annotated[bool, says("start Flower with `logweir up`")] = True
    flower_address: Annotated[str, says("where Flower listens")] = "127.0.0.1"
    flower_port: Annotated[int, says("port of Flower; if taken, one of the next", 1, 65_535)] = 5555
    flower_auth: Annotated[str | None, says("user:password of Flower; it is required off loopback")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], says("what is logged")] = "info"

    def __post_init__(self) -> None:
        for name in ("metrics_address", "flower_address"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; give a host or an address such as 127.0.0.1")
        if self.api:
            listeners.Listener.parse(self.api, setting="api")
        proxies.parse_proxies(self.api_proxies)


_TRAIN: Final = {
    name: f"train_{name}" for name in ("source", "span_s", "exclude_words", "exclude_anomalous")
} | {"edition": "model_edition"}


class TrainSettings(Group, frozen=True, rename=_TRAIN):
    """The sources and times of trainings."""

    source: Annotated[
        str,
        says(
            "source of lines: results (first sink), parquet, opensearch, or opensearch:logs-* for documents"
        ),
    ] = "results"
    span_s: Annotated[float, says("greatest age of a line to learn from", 1, CENTURY_S)] | None = None
    exclude_words: Annotated[Words, says("trainings skip lines with one of these words")] = ()
    exclude_anomalous: Annotated[bool, says("do not learn from lines that were judged anomalous")] = False
    news_per_day: Annotated[
        float, says("calm new lines a day to list; they open no incident", 0.01, 10_000)
    ] = 10.0
    seed: Annotated[int, says("seed of a training", 0, 2**31 - 1)] = 0
    edition: Annotated[
        Literal["causal", "transformer"],
        says("line model of the next training; transformer: by Hugging Face"),
    ] = "causal"
    encoder: Annotated[
        Path | None, says("directory of a pretrained encoder that the transformer edition fine-tunes")
    ] = None
    own_models: Annotated[Words, says("watchlist patterns of workloads with a model of their own")] = ()
    retrain_age_s: Annotated[float, says("a model older than this is trained again", 1, CENTURY_S)] = 86_400.0
    retrain_at: Annotated[Words, says("times of day for a training, HH:MM in time_zone")] = ()
    retrain_min_lines: Annotated[int, says("lines needed for a training", 20, 10**12)] = 1_000
    keep_models_mib: Annotated[int, says("size of all stored model versions", 16, TIB_MIB)] = 2_048

    def __post_init__(self) -> None:
        TrainSource.parse(self.source)
        for text in self.retrain_at:
            if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
                raise ValueError(f"retrain_at {text!r} is not a time of day; write it like 02:30")
        if self.encoder is not None and self.edition != "transformer":
            raise ValueError(
                f"encoder = {self.encoder} belongs to the transformer edition; set model_edition to transformer"
            )


class WatchSettings(Group, frozen=True):
    """The watchlist, sessions and alarms."""

    unwatched: Annotated[
        Literal["score", "skip"], says("what to do with workloads off the watchlist: skip only counts")
    ] = "score"
    alerts_per_day: Annotated[float, says("false alarms a day of the whole deployment", 0.01, 10_000)] = 2.0
    session_timeout_s: Annotated[float, says("gap after which a session is judged", 1, DAY_S)] = 60.0
    session_keys: Annotated[
        Words, says("regular expressions (Rust), each with one group: the key of a session")
    ] = ()


class GpuSettings(Group, frozen=True, rename=lambda name: f"gpu_{name}"):
    """The pool of GPUs."""

    agent: Annotated[bool, says("`logweir up` watches and uses the GPUs of this machine")] = True
    jobs: Annotated[
        bool, says("this machine runs commands that other machines submit, as the user of this process")
    ] = False
    serve: Annotated[
        str, says("where this machine serves models of the pool over HTTP, http://HOST:4390; empty: nowhere")
    ] = ""
    serve_mib: Annotated[int, says("memory that the process which serves models leases", 1, TIB_MIB)] = 4_096
    infer_mib: Annotated[int, says("memory that a scoring process leases", 1, TIB_MIB)] = 2_048
    infer_processes: Annotated[
        int, says("scoring processes of `logweir up`, at most one per GPU or MIG slice", 1, 64)
    ] = 4
    idle_s: Annotated[float, says("idle time before a scoring process returns its GPU", 0.1, DAY_S)] = 60.0
    yield_s: Annotated[float, says("time to return a lease before it is revoked", 0.1, DAY_S)] = 150.0
    tenants: Annotated[
        Words, says("users of the GPUs as name[=WEIGHT[:MEMORY]], such as research=2:40GiB")
    ] = ("logweir",)
    half_life_s: Annotated[float, says("past GPU use counts half after so long", 1, 315_360_000)] = 86_400.0
    backfill: Annotated[
        Literal["easy", "strict", "free"],
        says("what may overtake a waiting need: whatever does not delay it, nothing, all"),
    ] = "easy"

    def __post_init__(self) -> None:
        if self.serve:
            listeners.Listener.parse(self.serve, setting="gpu_serve")


class OpenSearchSettings(Group, frozen=True, rename=lambda name: f"opensearch_{name}"):
    """The OpenSearch of sink and source."""

    url: Annotated[str | None, says("the OpenSearch of sink and source, https://host:9200")] = None
    user: Annotated[str | None, says("the user who writes results")] = None
    password: Annotated[str | None, says("the password of that user")] = None
    read_user: Annotated[str | None, says("the user who reads log indices; default opensearch_user")] = None
    read_password: Annotated[str | None, says("the password of that user")] = None
    ca: Annotated[Path | None, says("certificate authority of the server, PEM")] = None
    prefix: Annotated[str, says("first part of the names of our indices")] = "logweir"
    source: Annotated[str | None, says("index pattern of logs that the stack polls, app-logs-*")] = None
    fields: Annotated[tuple[str, str, str], says("time, message and level of polled documents")] = (
        "@timestamp",
        "message",
        "level",
    )
    workload_fields: Annotated[Words, says("fields that make its workload, joined by /")] = (
        "cluster_id",
        "namespace_name",
        "deployment",
    )

    def __post_init__(self) -> None:
        if self.url is not None:
            check_opensearch_url(self.url)


class KafkaSettings(Group, frozen=True, rename=lambda name: f"kafka_{name}"):
    """Topics of Kafka to read."""

    source: Annotated[
        str | None, says("topics that the stack reads, kafka://broker:9092/app-logs?start=latest")
    ] = None

    def __post_init__(self) -> None:
        kafka_sources(self.source)


class NatsSettings(Group, frozen=True, rename=lambda name: f"nats_{name}"):
    """The NATS of Opni's services."""

    source: Annotated[
        str | None,
        says("logs of Opni's services, which get answers, nats://nats:4222/raw_logs?serve=controller"),
    ] = None

    def __post_init__(self) -> None:
        nats_source(self.source)


class InternalSettings(Group, frozen=True):
    """No settings: constants that tests and benches shorten, or that one process hands to another.

    Files, flags and `LOGWEIR_*` do not reach them; `LOGWEIR_INTERNAL_*` does. They may change in any build.
    """

    # Of one batch, before compression: small ones cost throughput, large ones latency (docs/performance.md).
    batch_records: Annotated[int, within(1, 100_000)] = 10_000
    batch_kib: Annotated[int, within(64, 65_536)] = 2_048
    prefetch: Annotated[int, within(1, 64)] = 1  # messages of a worker; past 1, fresh lines wait
    # Bounds the ledger's own keys where batches are small; users meet max_pending_mib.
    max_pending_batches: Annotated[int, within(1, 10_000_000)] = 10_000
    # Before a batch is bisected, or a record is a dead letter. One worker may die of something else.
    max_attempts: Annotated[int, within(1, 100)] = 3
    # A worker renews its claim three times in this time, so a pause of 3 s loses no batch.
    claim_ttl_ms: Annotated[int, within(1_000, 3_600_000)] = 10_000
    overdue_ms: Annotated[int, within(500, 3_600_000)] = 5_000  # a batch that no worker took is sent again
    sweep_s: Annotated[float, within(0.2, 3_600)] = 2.0  # period of the search for overdue batches
    # A worker that takes nothing for so long although its queue has work ends. No healthy one pauses as long.
    stall_s: Annotated[float, within(2, 3_600)] = 30.0
    # A lease is lost without a renewal. Several renewals fit in; a drain worker that stands by waits as long.
    lease_ttl_ms: Annotated[int, within(2_000, 3_600_000)] = 15_000
    tick_s: Annotated[float, within(0.2, 3_600)] = 10.0  # period of the controller
    watch_s: Annotated[float, within(0.2, 60)] = 2.0  # period of the watcher
    # How long a session stays open. `logweir run` sets a day: lines of a session may stand in two files.
    session_open_s: Annotated[float, within(0.1, 31_536_000)] | None = None
    # New lines that trigger a training; retrain_age_s is the usual trigger.
    retrain_lines: Annotated[int, within(100, 10**15)] = 5_000_000
    retrain_backoff_s: Annotated[float, within(0.1, 3_600)] = 30.0  # after a failure, doubled up to an hour
    gpu_beat_s: Annotated[float, within(0.05, 60)] = 1.0  # period of a node agent
    # A node whose agent is silent gets no new leases. Ten beats fit in, so one that is missed costs nothing.
    gpu_node_ttl_ms: Annotated[int, within(200, 3_600_000)] = 10_000
    # CUDA's own memory in a process: a part of its lease that tensors cannot have.
    gpu_context_mib: Annotated[int, within(0, TIB_MIB)] = 512
    # `logweir run` works in one process up to this size of its files, unpacked by rule of thumb.
    one_process_kib: Annotated[int, within(0, 1_048_576)] = 8_192
    supervisor_pid: Annotated[int, within(0, 2**22)] = 0

    def __post_init__(self) -> None:
        if self.gpu_beat_s * 2_000 > self.gpu_node_ttl_ms:
            raise ValueError(
                f"gpu_beat_s = {self.gpu_beat_s:g} is more than half of gpu_node_ttl_ms = "
                f"{self.gpu_node_ttl_ms}, "
                "so every node would look silent now and then; look at the GPUs more often or raise "
                "gpu_node_ttl_ms"
            )


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Settings:
    """All settings, in groups. Units stand in the names.

    `Settings(seed=7, gpu_yield_s=60)` takes flat names. Raises BadSetting for an unknown name, a wrong type
    or a value out of range."""

    data: DataSettings
    redis: RedisSettings
    intake: IntakeSettings
    drain: DrainSettings
    stack: StackSettings
    train: TrainSettings
    watch: WatchSettings
    gpu: GpuSettings
    opensearch: OpenSearchSettings
    kafka: KafkaSettings
    nats: NatsSettings
    internal: InternalSettings

    def __init__(self, **values: Any) -> None:
        grouped: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for name, value in values.items():
            item = _item(name)
            grouped[item.group][item.field] = _converted(item, value)
        try:
            for group, kind in _GROUPS.items():
                object.__setattr__(self, group, kind(**grouped[group]))
            self._check()
        except ValueError as exc:
            raise BadSetting(str(exc)) from None

    def _check(self) -> None:
        """Checks across groups."""
        if self.gpu.infer_mib <= self.internal.gpu_context_mib:
            raise ValueError(
                f"gpu_infer_mib = {self.gpu.infer_mib} leaves a scoring process nothing beside what CUDA "
                "takes, "
                f"gpu_context_mib = {self.internal.gpu_context_mib}; raise gpu_infer_mib above it"
            )
        sources = (*self.data.sinks, TrainSource.parse(self.train.source).store)
        uses_opensearch = "opensearch" in sources or self.opensearch.source
        if self.opensearch.url is None and uses_opensearch:
            raise ValueError(
                "OPENSEARCH_URL is not set; name the server, such as https://search.example:9200"
            )

    def flat(self) -> dict[str, Any]:
        """Every value by its flat name."""
        return {name: getattr(getattr(self, item.group), item.field) for name, item in ITEMS.items()}

    def replace(self, **values: Any) -> Self:
        """A copy with these values, by flat names. Raises BadSetting as the constructor does."""
        return type(self)(**{**self._changed(), **values})

    def _changed(self) -> dict[str, Any]:
        return {name: value for name, value in self.flat().items() if value != ITEMS[name].default}

    def __repr__(self) -> str:
        shown = self.flat()
        for name in SECRETS:
            if shown[name] is not None:
                shown[name] = _SHOWN.get(name, _hidden)(shown[name])
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def policy(self) -> dict[str, Any]:
        """The settings of ALIKE, for processes that join later."""
        flat = self.flat()
        return {name: flat[name] for name in ALIKE}

    def under(self, policy: Mapping[str, Any]) -> Self:
        """A copy with another process's settings of ALIKE; other names are ignored. Raises BadSetting."""
        return self.replace(**{name: policy[name] for name in ALIKE if name in policy})

    def to_environ(self) -> dict[str, str]:
        """What makes a child process build the same Settings; the rest is `without_settings()`."""
        return {HANDED_DOWN: json.dumps(self._changed(), default=str)}

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> Self:
        """Build from all four levels. Flags whose value is None count as not given.

        An unknown variable is ignored, and `unknown_variables` reports it: the environment is shared with
        programs that use the same prefix. Raises BadSetting for an unknown key of a file or flag, a wrong
        type or a value out of range.
        """
        env = os.environ if environ is None else environ
        path = config or (Path(env[CONFIG]) if env.get(CONFIG) else None)
        values = {} if path is None else _named(_from_file(path))
        # As they are: only a variable or a flag unsets a setting by an empty text.
        values |= json.loads(env.get(HANDED_DOWN, "{}"))
        values |= _named(_from_environ(env), internal=True)
        values |= _named({k: v for k, v in (flags or {}).items() if v is not None})
        return cls(**values)


def _hidden(_value: str) -> str:
    return "***"


class Item(NamedTuple):
    """One setting: its flat name, its place, and what it may be."""

    name: str
    group: str
    field: str
    type: Any  # with bounds, for msgspec
    kind: Any  # without bounds and None
    optional: bool
    default: Any
    meta: msgspec.Meta
    variable: str


def _is_internal(group: str, name: str) -> bool:
    return group == "internal" or name in PRIVATE


def _items(group: str, kind: type[Group]) -> dict[str, Item]:
    items = {}
    for info in msgspec.structs.fields(kind):
        name, parts = info.encode_name, _parts(info.type)
        prefix = PREFIX_INTERNAL if _is_internal(group, name) else PREFIX
        items[name] = Item(
            name=name,
            group=group,
            field=info.name,
            type=info.type,
            kind=parts[0],
            optional=type(None) in parts,
            default=info.default,
            meta=next(part for part in parts if isinstance(part, msgspec.Meta)),
            variable=ALIASES.get(name, prefix + name.upper()),
        )
    return items


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of unions and of Annotated, nested ones too; the first one is the type of a value."""
    if typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        return tuple(part for arg in typing.get_args(kind) for part in _parts(arg))
    return (kind,)


_GROUPS: Final[dict[str, type[Group]]] = typing.get_type_hints(Settings)
ITEMS: Final = {name: item for group, kind in _GROUPS.items() for name, item in _items(group, kind).items()}
_INTERNAL: Final = frozenset(name for name, item in ITEMS.items() if _is_internal(item.group, name))
PUBLIC: Final = tuple(name for name in ITEMS if name not in _INTERNAL)


def _item(name: str) -> Item:
    """Raises BadSetting for an unknown name."""
    if name not in ITEMS:
        raise BadSetting(_unknown(name))
    return ITEMS[name]


def _named(values: Mapping[str, Any], *, internal: bool = False) -> dict[str, Any]:
    """The values of one level, checked for unknown names; an empty text unsets a setting that may be absent.

    `internal`: constants are taken as well. Raises BadSetting."""
    for name in values:
        if name not in PUBLIC and not (internal and name in _INTERNAL):
            raise BadSetting(_unknown(name))
    return {name: None if value == "" and ITEMS[name].optional else value for name, value in values.items()}


def _unknown(name: str) -> str:
    if name in _INTERNAL:
        return f"{name!r} is not a setting: its value is fixed; leave it out"
    meant = ", ".join(f"{guess} ({ITEMS[guess].variable})" for guess in nearest(name, PUBLIC))
    return f"{name!r} is not a setting; " + (
        f"did you mean {meant}?" if meant else "docs/settings.md lists them all"
    )


def _converted(item: Item, value: Any) -> Any:
    """The value as its setting wants it; text is parsed. Raises BadSetting."""
    shown = "***" if item.name in SECRETS else repr(value)
    try:
        parsed = _parsed(item.kind, value) if isinstance(value, str) else value
        return msgspec.convert(parsed, item.type, dec_hook=_path)
    except (msgspec.ValidationError, ValueError) as exc:
        if choices := typing.get_args(item.kind) if typing.get_origin(item.kind) is Literal else ():
            words = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise BadSetting(f"{item.name} {shown} is not known; use {words}") from exc
        if bound := re.search(r" (<=|>=) (\S+)$", str(exc)):
            word = "at least" if bound[1] == ">=" else "at most"
            limit = f"{float(bound[2]):.15g}"
            raise BadSetting(f"{item.name} = {value} is out of range; it must be {word} {limit}") from exc
        wanted = _word(item.kind)
        raise BadSetting(f"{item.name} = {shown} has the wrong type; it must be {wanted}") from exc


def _parsed(kind: Any, text: str) -> Any:
    """Text of an environment. Paths are separated as in PATH, words by commas. Raises ValueError."""
    if kind is bool:
        return _TRUTH.get(text.strip().lower(), text)
    if kind in (int, float):
        return kind(text)
    if typing.get_origin(kind) is tuple:
        separator = os.pathsep if Path in typing.get_args(kind) else ","
        return [item.strip() for item in text.split(separator) if item.strip()]
    return text


def _path(kind: Any, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"{value!r} is no {kind}")


def _joined(value: Any) -> str:
    """A default as the page of settings shows it, which is how a variable spells it."""
    if isinstance(value, tuple):
        paths = any(isinstance(item, Path) for item in value)
        return (os.pathsep if paths else ",").join(str(item) for item in value)
    return str(value)


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        return (
            "a list of paths"
            if Path in items
            else "a list of words"
            if ... in items
            else f"a list of {len(items)} words"
        )
    return "true or false" if kind is bool else str(kind.__name__)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as exc:
        raise BadSetting(f"the configuration file {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise BadSetting(f"the configuration file {path} is not valid TOML: {exc}") from exc


def _from_environ(env: Mapping[str, str]) -> dict[str, str]:
    values = {name: env[alias] for name, alias in ALIASES.items() if env.get(alias)}
    return values | {name: env[key] for key, name in _ours(env) if name is not None}


def _ours(env: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Each variable of ours and the setting that it names, None for an unknown one."""
    for key, value in env.items():
        if not key.startswith(PREFIX) or key in (HANDED_DOWN, CONFIG):
            continue
        if _LINK.fullmatch(key) or (key.endswith("_PORT") and value.startswith(_LINK_ADDRESS)):
            continue
        internal = key.startswith(PREFIX_INTERNAL)
        name = key.removeprefix(PREFIX_INTERNAL if internal else PREFIX).lower()
        yield key, name if name in (_INTERNAL if internal else PUBLIC) else None


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence on each variable that begins like one of ours and names no setting."""
    return [
        f"{key} is ignored: {_unknown(key.removeprefix(PREFIX).lower())}"
        for key, name in _ours(os.environ if environ is None else environ)
        if name is None
    ]


def without_settings() -> dict[str, str]:
    """The environment of this process without the variables that name settings, for a child that gets
    all of them from `to_environ`."""
    aliases = ALIASES.values()
    return {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in aliases}


def visible_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES: CUDA's own variable, which tells the GPU of a process."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def inherited(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of other programs that are set, for child processes."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in names if name in env}


@contextmanager
def reduced_environment(names: Sequence[str], more: Mapping[str, str]) -> Iterator[None]:
    """Reduces the environment of this process and its children to these names and `more`, meanwhile.

    The program of another person then gets no address and no password of ours.
    """
    before = dict(os.environ)
    for name in before.keys() - set(names):
        del os.environ[name]
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def limit_polars() -> None:
    """Gives Polars one thread in this process and its children, unless POLARS_MAX_THREADS says otherwise.

    A second thread for a batch of some thousand lines costs more than it saves (docs/performance.md);
    ingest_processes use more cores. Without effect once Polars is imported.
    """
    if not os.environ.get("POLARS_MAX_THREADS"):
        os.environ["POLARS_MAX_THREADS"] = "1"


def see_only(device: str) -> None:
    """Restricts CUDA in this process and its children to one device. Without effect once CUDA has started.

    A process that sees several MIG slices cannot choose among them: CUDA takes the first.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = device


def set_for_cuda(variables: Mapping[str, str]) -> None:
    """Sets variables that CUDA reads when it starts in this process, as those of MPS."""
    os.environ.update(variables)


def page() -> str:
    """docs/settings.md, from the settings themselves (a test compares)."""
    lines = [
        "# Settings",
        "",
        "Precedence: defaults < configuration file < environment < flags. The file (`--config FILE` or",
        "`LOGWEIR_CONFIG`) is TOML with the names of the first column. A wrong type or a value out of range "
        "is refused,",
        "and so is an unknown name in the file. An unknown variable `LOGWEIR_*` is ignored; `logweir doctor` "
        "and `logweir up`",
        "warn of it, except for those that Kubernetes sets for its Services.",
        "",
        "All processes of one GPU pool need the same rules, all senders into one pipeline the same limits, "
        "and all",
        "its workers the same queues. A command that joins a running stack takes these settings from the "
        "stack.",
        "Where `REDIS_URL` names a Redis instead, set them alike everywhere:",
        f"{', '.join(f'`{name}`' for name in ALIKE if name in PUBLIC)}.",
    ]
    for group, kind in _GROUPS.items():
        rows = [
            f"| `{name}` | `{item.variable}` | {_joined(item.default) or '-'} | "
            f"{_choices(item)}{item.meta.description} |"
            for name, item in ITEMS.items()
            if item.group == group and name not in _INTERNAL
        ]
        if kind is not InternalSettings and rows:
            lines += ["", f"## {kind.__doc__}".rstrip("."), ""]
            lines += ["| setting | environment | default | what it is |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def _choices(item: Item) -> str:
    return f"{', '.join(typing.get_args(item.kind))}: " if typing.get_origin(item.kind) is Literal else ""
