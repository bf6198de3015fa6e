"""All settings, in one place, with one precedence: defaults < config file < environment < flags.

This module is the only reader of the environment. An entry point builds one `Settings` and passes it down; child
processes get the same values through `to_environ()`. Users know a setting by its flat name (`gpu_yield_s`); code
reads it in its group (`settings.gpu.yield_s`). msgspec checks types and bounds.
"""

import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from zoneinfo import ZoneInfo

import msgspec

from pipeline.errors import BadSetting
from pipeline.values import check_opensearch_url, check_url, masked_url

PREFIX: Final = "LOGWEIR_"
# The only variables that reach `Internal`: the embedded stack sets them for its workers, tests and benches for stacks.
PREFIX_INTERNAL: Final = "LOGWEIR_INTERNAL_"
# Names that users know from elsewhere.
ALIASES: Final = {
    "redis_url": "REDIS_URL",
    "flower_auth": "FLOWER_BASIC_AUTH",
    "opensearch_url": "OPENSEARCH_URL",
}
# Never shown, not even in a message about their own type.
SECRETS: Final = frozenset(
    {"redis_url", "flower_auth", "opensearch_url", "opensearch_password", "opensearch_read_password"}
)
SINKS: Final = ("parquet", "opensearch")
# All processes of one GPU pool need these alike: each of them plans.
POLICY: Final = (
    "gpu_tenants", "gpu_half_life_s", "gpu_backfill", "gpu_yield_s", "gpu_infer_mib", "gpu_context_mib",
    "gpu_node_ttl_ms", "gpu_beat_s", "lease_ttl_ms",
)  # fmt: skip
# All senders into one pipeline need these alike: each sender judges by its own settings what is full.
LIMITS: Final = ("max_pending_mib", "max_pending_batches", "max_dead_mib")
# All workers of one pipeline need these alike: they say which queues there are.
QUEUED: Final = ("drain_shards",)
ALIKE: Final = (*POLICY, *LIMITS, *QUEUED)
MAX_SHARDS: Final = 64
# Settings of earlier builds, each with its remedy.
REMOVED: Final = {
    "opensearch_time_field": "name the time field first in opensearch_fields",
    "opensearch_message_field": "name the message field second in opensearch_fields",
    "opensearch_level_field": "name the level field third in opensearch_fields",
    "polars_threads": "set POLARS_MAX_THREADS instead",
    **dict.fromkeys(
        ("backfill_after_s", "drain_depth", "drift_lines", "drift_novelty", "drift_score", "drift_unknown",
         "gpu_headroom_mib", "gpu_infer_percent", "keep_done_s", "keep_models", "loaded_models", "max_open_sessions",
         "opensearch_poll_s", "reload_poll_ms", "templates_per_workload", "torch_threads",
         "train_max_patterns", "verdict_cache_entries"),
        "its value is fixed now; leave it out",
    ),
}  # fmt: skip

DAY_S: Final = 86_400
CENTURY_S: Final = 3_153_600_000  # bound of a span: a longer one is a slip
TIB_MIB: Final = 1_048_576


def says(text: str, least: float | None = None, most: float | None = None) -> msgspec.Meta:
    """What a setting is, for the manual, and its bounds, both included."""
    return msgspec.Meta(description=text, ge=least, le=most)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group of settings. `rename` of a subclass gives the flat names. `__post_init__` raises ValueError."""


class Data(Group, frozen=True, rename={"dir": "data_dir"}):
    """Where files are."""

    dir: Annotated[Path, says("where the embedded stack keeps its Redis, models and results")] = Path(
        "logweir-data"
    )
    results_dir: Annotated[Path | None, says("where the Parquet results go; default <data_dir>/results")] = (
        None
    )
    sinks: Annotated[tuple[str, ...], says("where results are stored: parquet, opensearch or both")] = (
        "parquet",
    )

    def __post_init__(self) -> None:
        if not self.sinks or not set(self.sinks) <= set(SINKS):
            raise ValueError(
                f"sinks {','.join(self.sinks)!r} is not usable; name {' or '.join(SINKS)}, or both"
            )

    @property
    def results(self) -> Path:
        """Where the Parquet sink writes."""
        return self.results_dir if self.results_dir is not None else self.dir / "results"

    @property
    def baseline(self) -> Path:
        """Where lines are stored that only trainings read, apart from the results."""
        return self.dir / "baseline"

    @property
    def models(self) -> Path:
        """Where model versions are."""
        return self.dir / "models"


class Redis(
    Group, frozen=True, rename={"url": "redis_url", "max_mib": "redis_max_mib", "fsync": "redis_fsync"}
):
    """The Redis of a pipeline."""

    url: Annotated[str | None, says("a Redis to use; without it the embedded stack starts its own")] = None
    key_prefix: Annotated[
        str, says("first part of every Redis key, so that several pipelines share one Redis")
    ] = "logweir"
    max_mib: Annotated[int, says("memory of the embedded Redis", 32, TIB_MIB)] = 768
    fsync: Annotated[
        Literal["everysec", "always"],
        says(
            "appendfsync of the embedded Redis; with always, pushes survive a power cut, at the price of speed"
        ),
    ] = "everysec"

    def __post_init__(self) -> None:
        if not self.key_prefix or any(c in self.key_prefix for c in "{}* \n"):
            raise ValueError(
                f"key_prefix {self.key_prefix!r} is empty or has one of the characters {{ }} * or space"
            )
        if self.url is not None:
            check_url(self.url)


class Intake(Group, frozen=True):
    """How lines come in, and how many may wait."""

    time_zone: Annotated[str, says("IANA zone of header times that carry no offset")] = "UTC"
    masks: Annotated[tuple[Path, ...], says("more mask files, applied before the shipped ones")] = ()
    max_pending_mib: Annotated[
        int, says("payloads that may wait in Redis; past it a pipeline is full and takes none", 1, TIB_MIB)
    ] = 256
    max_dead_mib: Annotated[
        int,
        says(
            "payloads of dead letters; past it a pipeline is full until some are retried or discarded",
            1,
            TIB_MIB,
        ),
    ] = 256

    def __post_init__(self) -> None:
        try:
            ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            raise ValueError(
                f"time_zone {self.time_zone!r} is not known; use an IANA name such as Europe/Berlin"
            ) from None

    @property
    def zone(self) -> ZoneInfo:
        """`time_zone` as an object."""
        return ZoneInfo(self.time_zone)


class Drain(Group, frozen=True, rename=lambda name: f"drain_{name}"):
    """Mining of templates."""

    similarity: Annotated[
        float, says("Drain3 sim_th: share of equal tokens that makes two lines one template", 0.05, 1)
    ] = 0.7
    shards: Annotated[
        int,
        says("writers of templates that work in parallel, each for its part of the workloads", 1, MAX_SHARDS),
    ] = 1
    processes: Annotated[
        int, says("drain workers of the embedded stack for each shard: one works, the others stand by", 1, 64)
    ] = 1


class Stack(Group, frozen=True):
    """The processes of the embedded stack."""

    ingest_processes: Annotated[int, says("ingest workers of the embedded stack", 1, 64)] = 1
    infer_processes: Annotated[int, says("CPU scoring workers of the embedded stack", 1, 64)] = 1
    store_processes: Annotated[int, says("store workers of the embedded stack", 1, 64)] = 1
    step_s: Annotated[
        float,
        says("limit of one step of a batch; past it the process ends and the batch is tried again", 1, 3_600),
    ] = 120.0
    metrics: Annotated[bool, says("serve Prometheus metrics with `logweir up`")] = True
    metrics_address: Annotated[str, says("where the metrics are served")] = "127.0.0.1"
    metrics_port: Annotated[int, says("port of the metrics; if it is taken, one of the next", 1, 65_535)] = (
        9464
    )
    flower: Annotated[bool, says("start Flower with `logweir up`")] = True
    flower_address: Annotated[str, says("where Flower listens; off loopback it needs flower_auth")] = (
        "127.0.0.1"
    )
    flower_port: Annotated[int, says("port of Flower; if it is taken, one of the next", 1, 65_535)] = 5555
    flower_auth: Annotated[str | None, says("user:password of Flower; it is required off loopback")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], says("what is logged")] = "info"

    def __post_init__(self) -> None:
        for name in ("metrics_address", "flower_address"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; give a host or an address such as 127.0.0.1")


_TRAIN: Final = {
    name: f"train_{name}" for name in ("seconds", "source", "span_s", "exclude_words", "exclude_anomalous")
}


class Train(Group, frozen=True, rename=_TRAIN):
    """What models learn from, and when."""

    seconds: Annotated[float, says("time that the fit of a model may take", 1, DAY_S)] = 20.0
    source: Annotated[
        Literal["results", "parquet", "opensearch"],
        says("where training data comes from; results is the first of the sinks"),
    ] = "results"
    span_s: (
        Annotated[
            float,
            says("how far back training data reaches, by record time; without it everything", 1, CENTURY_S),
        ]
        | None
    ) = None
    exclude_words: Annotated[tuple[str, ...], says("trainings skip lines with one of these words")] = ()
    exclude_anomalous: Annotated[
        bool,
        says("trainings skip lines that were judged anomalous; models then never learn new normal lines"),
    ] = False
    alerts_per_day: Annotated[
        float,
        says(
            "false alarms a day that a workload may raise over new calm lines, by its training data",
            0.01,
            10_000,
        ),
    ] = 10.0
    seed: Annotated[int, says("seed of a training", 0, 2**31 - 1)] = 0
    own_models: Annotated[
        tuple[str, ...],
        says("watchlist patterns of workloads that get a model of their own; all others share one"),
    ] = ()
    retrain_age_s: Annotated[float, says("a model older than this is trained again", 1, CENTURY_S)] = 86_400.0
    retrain_at: Annotated[tuple[str, ...], says("times of day for a training, HH:MM in time_zone")] = ()
    retrain_min_lines: Annotated[
        int, says("lines of watched workloads that the controller needs for a training", 20, 10**12)
    ] = 1_000
    keep_models_mib: Annotated[int, says("size of all stored model versions", 16, TIB_MIB)] = 2_048

    def __post_init__(self) -> None:
        for text in self.retrain_at:
            if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
                raise ValueError(f"retrain_at {text!r} is not a time of day; write it like 02:30")


class Watch(Group, frozen=True):
    """The watchlist and sessions."""

    unwatched: Annotated[
        Literal["score", "skip"],
        says("workloads off the watchlist: score them by the shared model, or skip (only count) them"),
    ] = "score"
    session_timeout_s: Annotated[
        float, says("a session is judged after so long without an event", 1, DAY_S)
    ] = 60.0
    session_keys: Annotated[
        tuple[str, ...],
        says(
            "regular expressions (Rust) with one group each, the key of a session; they come before block, trace and "
            "request ids"
        ),
    ] = ()


class Gpu(Group, frozen=True, rename=lambda name: f"gpu_{name}"):
    """The pool of GPUs."""

    agent: Annotated[bool, says("`logweir up` watches and uses the GPUs of this machine")] = True
    infer_mib: Annotated[int, says("memory that a scoring process leases", 1, TIB_MIB)] = 2_048
    idle_s: Annotated[
        float, says("a scoring process returns its GPU after so long without work", 0.1, DAY_S)
    ] = 60.0
    yield_s: Annotated[
        float,
        says("time that a holder has to return a lease when asked; then the lease is revoked", 0.1, DAY_S),
    ] = 150.0
    tenants: Annotated[
        tuple[str, ...],
        says("who may use the GPUs: name, name=WEIGHT or name=WEIGHT:MEMORY, as in research=2:40GiB"),
    ] = ("logweir",)
    half_life_s: Annotated[float, says("past GPU use counts half after so long", 1, 315_360_000)] = 86_400.0
    backfill: Annotated[
        Literal["easy", "strict", "free"],
        says(
            "what may overtake a need that waits for room: easy (what does not delay it), strict (nothing) or free"
        ),
    ] = "easy"


class OpenSearch(Group, frozen=True, rename=lambda name: f"opensearch_{name}"):
    """The OpenSearch of sink and source."""

    url: Annotated[str | None, says("the OpenSearch of sink and source, https://host:9200")] = None
    user: Annotated[str | None, says("the user who writes results")] = None
    password: Annotated[str | None, says("the password of that user")] = None
    read_user: Annotated[
        str | None, says("the user who reads log indices; without it the writing user reads too")
    ] = None
    read_password: Annotated[str | None, says("the password of that user")] = None
    ca: Annotated[Path | None, says("certificate authority of the server, PEM")] = None
    prefix: Annotated[str, says("first part of the names of our indices")] = "logweir"
    source: Annotated[str | None, says("index pattern of logs that the stack polls, app-logs-*")] = None
    fields: Annotated[
        tuple[str, str, str],
        says("fields of a polled document with its time, message and level, in this order"),
    ] = ("@timestamp", "message", "level")
    workload_fields: Annotated[
        tuple[str, ...], says("fields whose values, joined by /, are the workload of a polled document")
    ] = ("cluster_id", "namespace_name", "deployment")

    def __post_init__(self) -> None:
        if self.url is not None:
            check_opensearch_url(self.url)


class Internal(Group, frozen=True):
    """No settings: constants that tests and benches shorten, or that one process hands to another.

    Files, flags and `LOGWEIR_*` do not reach them; `LOGWEIR_INTERNAL_*` does. They may change in any build.
    """

    # 10,000 lines or 2 MiB: smaller batches cost throughput, larger ones latency (docs/performance.md).
    batch_records: Annotated[int, says("records in one batch at most", 1, 100_000)] = 10_000
    prefetch: Annotated[
        int, says("messages a worker reserves; past one, fresh lines wait behind backfill", 1, 64)
    ] = 1
    batch_kib: Annotated[int, says("size of one batch at most, before compression", 64, 65_536)] = 2_048
    # Bounds the ledger's own keys where batches are small; max_pending_mib is the bound that users meet.
    max_pending_batches: Annotated[int, says("batches that may wait", 1, 10_000_000)] = 10_000
    # A third try tells a bad line from a worker that died for another reason.
    max_attempts: Annotated[
        int, says("attempts at a batch before bisection, and at a record before it is a dead letter", 1, 100)
    ] = 3
    # A claim is renewed three times in its life: a pause of 3 s costs nothing.
    claim_ttl_ms: Annotated[
        int, says("a worker that is silent for so long loses its batch", 1_000, 3_600_000)
    ] = 10_000
    overdue_ms: Annotated[
        int, says("a batch that no worker took for so long is sent again", 500, 3_600_000)
    ] = 5_000
    sweep_s: Annotated[float, says("period of the sweeper, which looks for overdue batches", 0.2, 3_600)] = (
        2.0
    )
    # Longer than any pause of a healthy worker, and short enough that backlog does not reach its limit meanwhile.
    stall_s: Annotated[
        float, says("a worker that takes nothing for so long although its queue has work restarts", 2, 3_600)
    ] = 30.0
    # Three renewals and a hiccup of Redis fit in; a drain worker that stands by waits as long.
    lease_ttl_ms: Annotated[
        int, says("a lease that is not renewed for so long is lost", 2_000, 3_600_000)
    ] = 15_000
    tick_s: Annotated[float, says("period of the controller, which decides about trainings", 0.2, 3_600)] = (
        10.0
    )
    watch_s: Annotated[float, says("period of the watcher of sessions, rates and incidents", 0.2, 60)] = 2.0
    # `logweir run` sets a day: a session's lines may stand in two files that are read one after the other.
    session_open_s: (
        Annotated[float, says("how long a session stays open; without it session_timeout_s", 0.1, 31_536_000)]
        | None
    ) = None
    # A day's age is what usually triggers; this is for pipelines that see new lines much faster.
    retrain_lines: Annotated[
        int, says("stored lines since a training that trigger the next", 100, 10**15)
    ] = 5_000_000
    retrain_backoff_s: Annotated[
        float,
        says("wait after a failed training; doubled with every further failure, an hour at most", 0.1, 3_600),
    ] = 30.0
    # Ten looks fit into a node's life: one that is missed costs nothing.
    gpu_beat_s: Annotated[float, says("period of a node agent, which looks at its GPUs", 0.05, 60)] = 1.0
    gpu_node_ttl_ms: Annotated[
        int, says("a node whose agent is silent for so long gets no new leases", 200, 3_600_000)
    ] = 10_000
    # A CUDA context takes 300 to 500 MiB on the data centre GPUs of the last generations.
    gpu_context_mib: Annotated[
        int,
        says(
            "memory that CUDA itself takes in a process: part of a lease, out of reach of tensors", 0, TIB_MIB
        ),
    ] = 512
    supervisor_pid: Annotated[
        int, says("process of the embedded stack: its workers end when this process ends", 0, 2**22)
    ] = 0

    def __post_init__(self) -> None:
        if self.gpu_beat_s * 2_000 > self.gpu_node_ttl_ms:
            raise ValueError(
                f"gpu_beat_s = {self.gpu_beat_s:g} is more than half of gpu_node_ttl_ms = {self.gpu_node_ttl_ms}, "
                "so every node would look silent now and then; look at the GPUs more often or raise gpu_node_ttl_ms"
            )


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Settings:
    """All settings, in groups. Units stand in the names.

    `Settings(seed=7, gpu_yield_s=60)` takes flat names and raises BadSetting for an unknown name, a wrong type or a
    value out of range.
    """

    data: Data
    redis: Redis
    intake: Intake
    drain: Drain
    stack: Stack
    train: Train
    watch: Watch
    gpu: Gpu
    opensearch: OpenSearch
    internal: Internal

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
        """What two groups say together."""
        if self.gpu.infer_mib <= self.internal.gpu_context_mib:
            raise ValueError(
                f"gpu_infer_mib = {self.gpu.infer_mib} leaves a scoring process nothing beside what CUDA takes, "
                f"gpu_context_mib = {self.internal.gpu_context_mib}; raise gpu_infer_mib above it"
            )
        uses_opensearch = "opensearch" in (*self.data.sinks, self.train.source) or self.opensearch.source
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
                shown[name] = masked_url(shown[name]) if name.endswith("_url") else "***"
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def policy(self) -> dict[str, Any]:
        """The settings of ALIKE, for processes that join later."""
        flat = self.flat()
        return {name: flat[name] for name in ALIKE}

    def under(self, policy: Mapping[str, Any]) -> Self:
        """A copy with another process's settings of ALIKE; other names are ignored. Raises BadSetting."""
        return self.replace(**{name: policy[name] for name in ALIKE if name in policy})

    def to_environ(self) -> dict[str, str]:
        """What a child process needs in its environment to build the same Settings."""
        return {ITEMS[name].variable: _joined(value) for name, value in self._changed().items()}

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> Self:
        """Build from all four levels. Flags whose value is None count as not given.

        Raises BadSetting for an unknown key, a wrong type or a value out of range.
        """
        env = os.environ if environ is None else environ
        path = config or (Path(env["LOGWEIR_CONFIG"]) if env.get("LOGWEIR_CONFIG") else None)
        values = {} if path is None else _from_file(path)
        values |= _from_environ(env)
        values |= {k: v for k, v in (flags or {}).items() if v is not None}
        for name in values:
            _item(name, public=True)
        return cls(**values, **_internal(env))


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


def _items(group: str, kind: type[Group]) -> dict[str, Item]:
    prefix = PREFIX_INTERNAL if kind is Internal else PREFIX
    items = {}
    for info in msgspec.structs.fields(kind):
        name, parts = info.encode_name, _parts(info.type)
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
_INTERNAL: Final = frozenset(name for name, item in ITEMS.items() if item.group == "internal")
PUBLIC: Final = tuple(name for name in ITEMS if name not in _INTERNAL)


def _item(name: str, *, public: bool = False) -> Item:
    """Raises BadSetting for an unknown name, and with `public` for one of `Internal`."""
    if name in ITEMS and not (public and name in _INTERNAL):
        return ITEMS[name]
    remedy = "its value is fixed now; leave it out" if name in _INTERNAL else REMOVED.get(name)
    raise BadSetting(
        f"{name!r} is not a setting; the settings are: {', '.join(sorted(PUBLIC))}"
        if remedy is None
        else f"{name!r} is not a setting any more: {remedy}"
    )


def _converted(item: Item, value: Any) -> Any:
    """The value as its setting wants it; text is parsed. Raises BadSetting."""
    if value == "" and item.optional:
        return None
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
    """Text of an environment or a flag. Paths are separated as in PATH, words by commas. Raises ValueError."""
    if kind is bool:
        return _WORDS.get(text.strip().lower(), text)
    if kind in (int, float):
        return kind(text)
    if typing.get_origin(kind) is tuple:
        separator = os.pathsep if Path in typing.get_args(kind) else ","
        return [item.strip() for item in text.split(separator) if item.strip()]
    return text


_WORDS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def _path(kind: Any, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"{value!r} is no {kind}")


def _joined(value: Any) -> str:
    """A value as text that `_parsed` reads back."""
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
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise BadSetting(f"the configuration file {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise BadSetting(f"the configuration file {path} is not valid TOML: {exc}") from exc


def _from_environ(env: Mapping[str, str]) -> dict[str, Any]:
    values = {name: env[alias] for name, alias in ALIASES.items() if env.get(alias)}
    for key, value in env.items():
        if key.startswith(PREFIX) and key != "LOGWEIR_CONFIG" and not key.startswith(PREFIX_INTERNAL):
            values[key.removeprefix(PREFIX).lower()] = value
    return values


def _internal(env: Mapping[str, str]) -> dict[str, str]:
    values = {
        key.removeprefix(PREFIX_INTERNAL).lower(): value
        for key, value in env.items()
        if key.startswith(PREFIX_INTERNAL)
    }
    if unknown := sorted(set(values) - _INTERNAL):
        raise BadSetting(f"{PREFIX_INTERNAL}{unknown[0].upper()} is not known; leave it out")
    return values


def visible_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES: CUDA's own variable, which tells the GPU of a process."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def inherited(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those variables of other programs that are set, for the processes that we start."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in names if name in env}


def limit_polars() -> None:
    """Gives Polars one thread in this process and its children, unless POLARS_MAX_THREADS says otherwise.

    More of ingest_processes is the way to use more cores: a second thread for a batch of some thousand lines costs
    more than it saves (docs/performance.md). Without effect once Polars is imported.
    """
    if not os.environ.get("POLARS_MAX_THREADS"):
        os.environ["POLARS_MAX_THREADS"] = "1"


def see_only(device: str) -> None:
    """Restricts CUDA in this process and its children to one device. Without effect once CUDA has started.

    A process that sees several MIG slices cannot choose among them: CUDA takes the first.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = device


def describe() -> list[tuple[str, str, str]]:
    """(name, default, what it is) of every setting, for help texts and the manual."""
    return [(name, str(ITEMS[name].default), str(ITEMS[name].meta.description)) for name in PUBLIC]


def page() -> str:
    """docs/settings.md, from the settings themselves (a test compares)."""
    lines = [
        "# Settings",
        "",
        "Precedence: defaults < configuration file (`--config FILE` or `LOGWEIR_CONFIG`, TOML with the names of the",
        "first column) < environment < flags. An unknown name, a wrong type or a value out of range is refused.",
        "",
        "All processes of one GPU pool need the same rules, all senders into one pipeline the same limits, and all its workers",
        "the same queues. A command that joins a running stack takes these settings from the stack. Where `REDIS_URL` names a",
        "Redis instead, set them alike everywhere:",
        f"{', '.join(f'`{name}`' for name in ALIKE if name in PUBLIC)}.",
    ]
    for group, kind in _GROUPS.items():
        rows = [
            f"| `{name}` | `{item.variable}` | {_joined(item.default) or '-'} | {_choices(item)}{item.meta.description} |"
            for name, item in ITEMS.items()
            if item.group == group
        ]
        if kind is not Internal:
            lines += ["", f"## {kind.__doc__}".rstrip("."), ""]
            lines += ["| setting | environment | default | what it is |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def _choices(item: Item) -> str:
    return f"{', '.join(typing.get_args(item.kind))}: " if typing.get_origin(item.kind) is Literal else ""
