"""All settings, in one place, with one precedence: defaults < config file < environment < flags.

This module is the only reader of the environment. An entry point builds one `Settings` and passes it
down; child processes get the same values through `to_environ()`.
"""

import math
import operator
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self
from zoneinfo import ZoneInfo, available_timezones

from pipeline.errors import BadSetting
from pipeline.values import as_type, check_opensearch_url, check_url, joined, masked_url

PREFIX: Final = "LOGWEIR_"
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
# Settings that are one of a few words, and how a message names them.
CHOICES: Final = {
    "log_level": (("debug", "info", "warning", "error"), "debug, info, warning or error"),
    "unwatched": (("score", "skip"), "score or skip"),
    "train_source": (("results", *SINKS), "results, parquet or opensearch"),
    "redis_fsync": (("everysec", "always"), "everysec or always"),
    "gpu_backfill": (("easy", "strict", "free"), "easy, strict or free"),
}
# What every process of one GPU pool has to have alike: whoever plans by other rules grants what the others would not.
POLICY: Final = (
    "gpu_tenants", "gpu_half_life_s", "gpu_backfill", "gpu_yield_s", "gpu_node_ttl_ms", "gpu_beat_s", "gpu_context_mib",
    "gpu_infer_mib", "lease_ttl_ms",
)  # fmt: skip
# What everybody who sends into one pipeline has to have alike: the sender's own settings say what is full, and what is late.
LIMITS: Final = ("max_pending_mib", "max_pending_batches", "max_dead_mib", "backfill_after_s")
# What everybody who works in one pipeline has to have alike: which queues there are, and whose batch lies in which.
QUEUED: Final = ("drain_shards",)
MAX_SHARDS: Final = 64
ALIKE: Final = (*POLICY, *LIMITS, *QUEUED)


def _about(text: str, default: Any, *, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"about": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every value a deployment may want to change. Units stand in the names."""

    data_dir: Path = _about(
        "where the embedded stack keeps its Redis, models and results", Path("logweir-data")
    )
    results_dir: Path | None = _about("where the Parquet results go; default <data_dir>/results", None)
    redis_url: str | None = _about("a Redis to use; without it the embedded stack starts its own", None)
    key_prefix: str = _about(
        "first part of every Redis key, so that several pipelines share one Redis", "logweir"
    )
    time_zone: str = _about("IANA zone of header times that carry no offset", "UTC")
    masks: tuple[Path, ...] = _about("more mask files, applied before the shipped ones", ())

    batch_records: int = _about("records in one batch at most", 10_000, least=1, most=100_000)
    batch_kib: int = _about("size of one batch at most, before compression", 2_048, least=64, most=65_536)
    prefetch: int = _about(
        "messages a worker holds, the one it works on among them; with more than one, fresh lines wait behind backfill",
        1,
        least=1,
        most=64,
    )
    max_pending_mib: int = _about(
        "payloads waiting in Redis before accept says full", 256, least=1, most=1_048_576
    )
    max_pending_batches: int = _about(
        "batches waiting before accept says full", 10_000, least=1, most=10_000_000
    )
    max_attempts: int = _about(
        "attempts at a batch before it is split, and at a record before it is dead", 3, least=1, most=100
    )
    claim_ttl_ms: int = _about(
        "a worker that is silent for so long has lost its batch", 10_000, least=1_000, most=3_600_000
    )
    overdue_ms: int = _about(
        "a batch nobody took for so long is sent again", 5_000, least=500, most=3_600_000
    )
    sweep_s: float = _about("how often the sweeper looks for overdue batches", 2.0, least=0.2, most=3_600)
    step_s: float = _about(
        "a step that has not ended after so long is given up: its process ends and the batch is tried again",
        120.0,
        least=1,
        most=3_600,
    )
    stall_s: float = _about(
        "a worker that takes nothing for so long although its queue has work ends, and is started again",
        30.0,
        least=2,
        most=3_600,
    )
    backfill_after_s: float = _about(
        "a batch whose newest line is older than this waits behind fresh ones",
        3_600.0,
        least=1,
        most=3_153_600_000,
    )
    max_dead_mib: int = _about(
        "payloads of dead letters; above it accept says full until some are retried or discarded",
        256,
        least=1,
        most=1_048_576,
    )
    keep_done_s: int = _about(
        "how long a finished batch id is remembered, so that it is not accepted twice",
        604_800,
        least=60,
        most=315_360_000,
    )

    verdict_cache_entries: int = _about(
        "cached verdicts per model version in Redis", 500_000, least=1_000, most=100_000_000
    )
    templates_per_workload: int = _about(
        "templates one workload may create; lines past it are unclassified", 5_000, least=1, most=1_000_000
    )
    drain_similarity: float = _about(
        "Drain3 sim_th: share of equal tokens that makes two lines one template", 0.7, least=0.05, most=1.0
    )
    drain_depth: int = _about("Drain3 tree depth", 4, least=3, most=16)

    lease_ttl_ms: int = _about(
        "a lease that is not renewed for so long is lost", 15_000, least=2_000, most=3_600_000
    )
    ingest_processes: int = _about("ingest workers of the embedded stack", 1, least=1, most=64)
    infer_processes: int = _about("CPU scoring workers of the embedded stack", 1, least=1, most=64)
    drain_shards: int = _about(
        "writers of templates that work side by side, each for its part of the workloads",
        1,
        least=1,
        most=MAX_SHARDS,
    )
    drain_processes: int = _about(
        "drain workers of the embedded stack for each shard; one works, the others take over when it dies",
        1,
        least=1,
        most=64,
    )
    store_processes: int = _about("store workers of the embedded stack", 1, least=1, most=64)
    torch_threads: int = _about(
        "torch threads of a scoring process; infer_processes is what uses more cores", 1, least=1, most=1_024
    )
    polars_threads: int = _about(
        "Polars threads of `send` and of each ingest, scoring, drain and store worker; ingest_processes is what uses more cores, 0 leaves Polars' own number",
        1,
        least=0,
        most=1_024,
    )
    train_seconds: float = _about("time the fit of a model may take", 20.0, least=1, most=86_400)
    train_max_patterns: int = _about(
        "distinct masked lines a training takes at most", 100_000, least=100, most=10_000_000
    )
    train_source: str = _about(
        "where training data comes from: results (whatever the first sink is), parquet or opensearch",
        "results",
    )
    train_span_s: float | None = _about(
        "how far back training data reaches, by record time; without it everything",
        None,
        least=1,
        most=3_153_600_000,
    )
    train_exclude_words: tuple[str, ...] = _about("lines with one of these words are not learnt from", ())
    train_exclude_anomalous: bool = _about(
        "do not learn from lines that were judged anomalous; new normal shapes are then never learnt", False
    )
    alerts_per_day: float = _about(
        "false alarms over new calm lines that a workload may raise in a day, as far as its training data can tell",
        10.0,
        least=0.01,
        most=10_000,
    )
    seed: int = _about("seed of a training", 0, least=0, most=2**31 - 1)

    unwatched: str = _about(
        "what happens to workloads off the watchlist: score (by the shared model) or skip (counted only)",
        "score",
    )
    own_models: tuple[str, ...] = _about(
        "watchlist patterns of workloads that get a model of their own; all others share one", ()
    )
    tick_s: float = _about("how often the controller decides about trainings", 10.0, least=0.2, most=3_600)
    watch_s: float = _about("how often sessions, rates and incidents are looked at", 2.0, least=0.2, most=60)
    session_timeout_s: float = _about(
        "a session in which nothing happens for so long is judged", 60.0, least=1, most=86_400
    )
    session_open_s: float | None = _about(
        "a session is held open for so long, to be judged at all its silences at once; without it session_timeout_s",
        None,
        least=1,
        most=86_400,
    )
    session_keys: tuple[str, ...] = _about(
        "regular expressions (Rust) of what names a session, the key in their one group; looked for before block, trace "
        "and request ids",
        (),
    )
    max_open_sessions: int = _about(
        "sessions that are open at once; past that the longest idle one is closed first; as many pasts of silent ones "
        "are kept",
        100_000,
        least=100,
        most=10_000_000,
    )
    retrain_age_s: float = _about(
        "a model older than this is trained again", 86_400.0, least=1, most=3_153_600_000
    )
    retrain_lines: int = _about(
        "lines stored since the last training that are worth another one", 5_000_000, least=100, most=10**15
    )
    retrain_at: tuple[str, ...] = _about("times of day for a training, HH:MM in time_zone", ())
    retrain_min_lines: int = _about(
        "lines of watched workloads needed before the controller trains", 1_000, least=20, most=10**12
    )
    retrain_backoff_s: float = _about(
        "wait after a failed training; doubled with every further failure, an hour at most",
        30.0,
        least=0.1,
        most=3_600,
    )
    drift_lines: int = _about("lines in one window of drift measurement", 20_000, least=100, most=10**12)
    drift_novelty: float = _about(
        "drift: rise of the share of lines with a new template", 0.05, least=0.0, most=1.0
    )
    drift_unknown: float = _about("drift: rise of the share of unknown words", 0.10, least=0.0, most=1.0)
    drift_score: float = _about(
        "drift: population stability index of the scores; 0.25 is the usual mark of a major shift",
        0.25,
        least=0.0,
        most=1_000,
    )
    keep_models: int = _about("model versions kept on disk besides those in use", 10, least=1, most=100_000)
    keep_models_mib: int = _about("size of all kept model versions", 2_048, least=16, most=1_048_576)
    loaded_models: int = _about(
        "model versions that a process keeps in memory, some MiB each; more than `own_models` has workloads saves loading",
        8,
        least=2,
        most=10_000,
    )
    reload_poll_ms: int = _about(
        "how often a process at work compares the live model version, should the hint not reach it; an idle one does so once a second",
        200,
        least=20,
        most=60_000,
    )

    redis_max_mib: int = _about("memory of the embedded Redis", 768, least=32, most=1_048_576)
    redis_fsync: str = _about(
        "appendfsync of the embedded Redis: everysec, or always (pushes survive a power cut, at the price of speed)",
        "everysec",
    )
    metrics: bool = _about("serve Prometheus metrics with `logweir up`", True)
    metrics_address: str = _about("where the metrics are served", "127.0.0.1")
    metrics_port: int = _about(
        "port of the metrics; when it is taken, one of the next", 9464, least=1, most=65_535
    )
    flower: bool = _about("start Flower with `logweir up`", True)
    flower_address: str = _about("where Flower listens; off loopback it needs flower_auth", "127.0.0.1")
    flower_port: int = _about("port of Flower; when it is taken, one of the next", 5555, least=1, most=65_535)
    flower_auth: str | None = _about("user:password of Flower; it is required off loopback", None)

    gpu_agent: bool = _about("`logweir up` watches and uses the GPUs of this machine", True)
    gpu_beat_s: float = _about("how often a node agent looks at its GPUs", 1.0, least=0.05, most=60)
    gpu_node_ttl_ms: int = _about(
        "a node whose agent is silent for so long gets no new leases", 10_000, least=200, most=3_600_000
    )
    gpu_headroom_mib: int = _about("memory of a GPU that is never leased", 256, least=0, most=1_048_576)
    gpu_context_mib: int = _about(
        "what CUDA itself takes in a process; part of its lease, out of reach of its tensors",
        512,
        least=0,
        most=1_048_576,
    )
    gpu_infer_mib: int = _about("memory that a scoring process leases", 2_048, least=1, most=1_048_576)
    gpu_infer_percent: int = _about("share of a GPU that a scoring process leases", 10, least=0, most=100)
    gpu_idle_s: float = _about(
        "a scoring process without work for so long gives its GPU back", 60.0, least=0.1, most=86_400
    )
    gpu_yield_s: float = _about(
        "how long a holder may take to give back what it was asked for; then the lease is revoked",
        150.0,
        least=0.1,
        most=86_400,
    )
    gpu_tenants: tuple[str, ...] = _about(
        "who may use the GPUs: name, name=WEIGHT or name=WEIGHT:MEMORY, as in research=2:40GiB", ("logweir",)
    )
    gpu_half_life_s: float = _about(
        "past GPU use counts half after so long", 86_400.0, least=1, most=315_360_000
    )
    gpu_backfill: str = _about(
        "what may overtake a need that waits for room: easy (what does not delay it), strict (nothing) or free",
        "easy",
    )

    sinks: tuple[str, ...] = _about("where results are stored: parquet, opensearch or both", ("parquet",))
    opensearch_url: str | None = _about("the OpenSearch of sink and source, https://host:9200", None)
    opensearch_user: str | None = _about("the user who writes results", None)
    opensearch_password: str | None = _about("the password of that user", None)
    opensearch_read_user: str | None = _about(
        "the user who reads log indices; without it the writing user reads too", None
    )
    opensearch_read_password: str | None = _about("the password of that user", None)
    opensearch_ca: Path | None = _about("certificate authority of the server, PEM", None)
    opensearch_prefix: str = _about("first part of the names of our indices", "logweir")
    opensearch_source: str | None = _about("index pattern of logs that the stack polls, app-logs-*", None)
    opensearch_time_field: str = _about("where polled documents have their time", "@timestamp")
    opensearch_message_field: str = _about("where polled documents have their message", "message")
    opensearch_level_field: str = _about("where polled documents have their level", "level")
    opensearch_workload_fields: tuple[str, ...] = _about(
        "fields whose values, joined by /, are the workload of a polled document",
        ("cluster_id", "namespace_name", "deployment"),
    )
    opensearch_poll_s: float = _about(
        "how often a source is polled once it has been read", 5.0, least=0.1, most=86_400
    )
    supervisor_pid: int = _about(
        "set by the embedded stack for its workers: they end when this process has gone",
        0,
        least=0,
        most=2**22,
    )
    log_level: str = _about("debug, info, warning or error", "info")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, meta = getattr(self, item.name), item.metadata
            if isinstance(value, float) and not math.isfinite(value):
                raise BadSetting(
                    f"{item.name} = {value} is not a number one can count with; give a finite one"
                )
            for bound, wrong, word in (
                ("least", operator.lt, "at least"),
                ("most", operator.gt, "at most"),
            ):
                limit = meta.get(bound)
                if value is not None and limit is not None and wrong(value, limit):
                    raise BadSetting(f"{item.name} = {value} is out of range; it must be {word} {limit:.15g}")
        if self.time_zone not in available_timezones():
            raise BadSetting(
                f"time_zone {self.time_zone!r} is not known; use an IANA name such as Europe/Berlin"
            )
        if not self.key_prefix or any(c in self.key_prefix for c in "{}* \n"):
            raise BadSetting(
                f"key_prefix {self.key_prefix!r} is empty or has one of the characters {{ }} * or space"
            )
        for name, (choices, shown) in CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadSetting(f"{name} {getattr(self, name)!r} is not known; use {shown}")
        self._check_gpu()
        if not self.sinks or not set(self.sinks) <= set(SINKS):
            raise BadSetting(
                f"sinks {','.join(self.sinks)!r} is not usable; name {' or '.join(SINKS)}, or both"
            )
        if self.opensearch_url is None and (
            "opensearch" in (*self.sinks, self.train_source) or self.opensearch_source
        ):
            raise BadSetting(
                "OPENSEARCH_URL is not set; name the server, such as https://search.example:9200"
            )
        for text in self.retrain_at:
            if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
                raise BadSetting(f"retrain_at {text!r} is not a time of day; write it like 02:30")
        self._check_addresses()

    def _check_addresses(self) -> None:
        if self.redis_url is not None:
            check_url(self.redis_url)
        if self.opensearch_url is not None:
            check_opensearch_url(self.opensearch_url)
        for name in ("metrics_address", "flower_address"):
            if not getattr(self, name).strip():
                raise BadSetting(f"{name} is empty; give a host or an address such as 127.0.0.1")

    def _check_gpu(self) -> None:
        if self.gpu_beat_s * 2_000 > self.gpu_node_ttl_ms:
            raise BadSetting(
                f"gpu_beat_s = {self.gpu_beat_s:g} is more than half of gpu_node_ttl_ms = {self.gpu_node_ttl_ms}, "
                "so every node would look silent now and then; look at the GPUs more often or raise gpu_node_ttl_ms"
            )
        if self.gpu_infer_mib <= self.gpu_context_mib:
            raise BadSetting(
                f"gpu_infer_mib = {self.gpu_infer_mib} leaves a scoring process nothing beside what CUDA takes, "
                f"gpu_context_mib = {self.gpu_context_mib}; raise gpu_infer_mib above it"
            )

    @property
    def zone(self) -> ZoneInfo:
        """`time_zone` as an object."""
        return ZoneInfo(self.time_zone)

    @property
    def results(self) -> Path:
        """Where the Parquet sink writes."""
        return self.results_dir if self.results_dir is not None else self.data_dir / "results"

    @property
    def baseline(self) -> Path:
        """Where lines that are only learnt from are kept, apart from the results."""
        return self.data_dir / "baseline"

    @property
    def models(self) -> Path:
        """Where model versions live."""
        return self.data_dir / "models"

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in SECRETS:
            value = shown[name]
            if value is not None:
                shown[name] = masked_url(value) if name.endswith("_url") else "***"
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def policy(self) -> dict[str, Any]:
        """The settings of ALIKE, for whoever joins later."""
        return {name: getattr(self, name) for name in ALIKE}

    def under(self, policy: Mapping[str, Any]) -> Self:
        """With the settings of ALIKE as another process has them; what else stands there is passed over.

        Raises BadSetting for a wrong type or a value out of range.
        """
        hints = typing.get_type_hints(type(self))
        return replace(
            self,
            **{name: as_type(name, policy[name], hints[name]) for name in ALIKE if name in policy},
        )

    def to_environ(self) -> dict[str, str]:
        """What a child process needs in its environment to build the same Settings."""
        values: dict[str, str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default:
                continue
            name = ALIASES.get(item.name, PREFIX + item.name.upper())
            values[name] = joined(value)
        return values

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
        values: dict[str, Any] = {}
        path = config or (Path(env["LOGWEIR_CONFIG"]) if env.get("LOGWEIR_CONFIG") else None)
        if path is not None:
            values.update(_from_file(path))
        values.update(_from_environ(env))
        values.update({k: v for k, v in (flags or {}).items() if v is not None})
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise BadSetting(f"{name!r} is not a setting; the settings are: {', '.join(sorted(known))}")
        hints = typing.get_type_hints(cls)
        return cls(
            **{
                name: as_type(name, value, hints[name], secret=name in SECRETS)
                for name, value in values.items()
            }
        )


def visible_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES: not ours to set, but it tells which GPU a process works on."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def inherited(*names: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of other programs, as far as they are set: not ours, but what we start gets them too."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in names if name in env}


def limit_polars(threads: int) -> None:
    """Polars takes so many threads in this process and its children, 0: as many as it likes. What the environment says
    goes first. Without effect once Polars is imported.

    Handing a batch of some thousand lines to a second thread costs more than that thread does (docs/performance.md).
    """
    if threads and not os.environ.get("POLARS_MAX_THREADS"):
        os.environ["POLARS_MAX_THREADS"] = str(threads)


def see_only(device: str) -> None:
    """CUDA in this process and its children sees this device alone; of several MIG slices it sees no other way the
    right one. Without effect once CUDA has started."""
    os.environ["CUDA_VISIBLE_DEVICES"] = device


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise BadSetting(f"the configuration file {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise BadSetting(f"the configuration file {path} is not valid TOML: {exc}") from exc


def _from_environ(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, alias in ALIASES.items():
        if env.get(alias):
            values[name] = env[alias]
    for key, value in env.items():
        if key.startswith(PREFIX) and key != "LOGWEIR_CONFIG":
            values[key.removeprefix(PREFIX).lower()] = value
    return values


def describe() -> list[tuple[str, str, str]]:
    """(name, default, what it is) of every setting, for help texts and the manual."""
    return [(f.name, str(f.default), str(f.metadata["about"])) for f in fields(Settings)]


def page() -> str:
    """docs/settings.md: every setting, from the settings themselves (a test compares)."""
    rows = [
        f"| `{name}` | `{ALIASES.get(name, PREFIX + name.upper())}` | {default or '-'} | {about} |"
        for name, default, about in describe()
    ]
    return "\n".join(
        [
            "# Settings",
            "",
            "Precedence: defaults < configuration file (`--config FILE` or `LOGWEIR_CONFIG`, TOML with the names of the",
            "first column) < environment < flags. An unknown name, a wrong type or a value out of range is refused.",
            "",
            "All processes of one GPU pool need the same rules, whoever sends into one pipeline the same limits, and whoever works",
            "in it the same queues. A command that joins a running stack takes these settings from it, whatever it was given; where",
            "`REDIS_URL` names a Redis instead, set them alike everywhere:",
            f"{', '.join(f'`{name}`' for name in ALIKE)}.",
            "",
            "| setting | environment | default | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
