"""All settings, in one place, with one precedence: defaults < config file < environment < flags.

This module is the only reader of the environment. An entry point builds one `Settings` and passes it
down; child processes get the same values through `to_environ()`.
"""

import math
import operator
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

from pipeline.errors import BadSetting

PREFIX: Final = "LOGWEIR_"
# Names that users know from elsewhere.
ALIASES: Final = {"redis_url": "REDIS_URL", "flower_auth": "FLOWER_BASIC_AUTH"}
# Never shown, not even in a message about their own type.
SECRETS: Final = frozenset({"redis_url", "flower_auth"})


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

    batch_records: int = _about("records in one batch at most", 5_000, least=1, most=100_000)
    batch_kib: int = _about("size of one batch at most, before compression", 1_024, least=64, most=65_536)
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
    torch_threads: int = _about(
        "threads of a scoring process; more than one pays only on idle cores", 1, least=1, most=1_024
    )
    train_seconds: float = _about("time the fit of a model may take", 20.0, least=1, most=86_400)
    train_max_patterns: int = _about(
        "distinct masked lines a training takes at most", 100_000, least=100, most=10_000_000
    )
    seed: int = _about("seed of a training", 0, least=0, most=2**31 - 1)

    redis_max_mib: int = _about("memory of the embedded Redis", 768, least=32, most=1_048_576)
    flower_auth: str | None = _about("user:password of Flower; it is required off loopback", None)
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
                if limit is not None and wrong(value, limit):
                    raise BadSetting(f"{item.name} = {value} is out of range; it must be {word} {limit:.15g}")
        if self.time_zone not in available_timezones():
            raise BadSetting(
                f"time_zone {self.time_zone!r} is not known; use an IANA name such as Europe/Berlin"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise BadSetting(f"log_level {self.log_level!r} is not known; use debug, info, warning or error")
        if not self.key_prefix or any(c in self.key_prefix for c in "{}* \n"):
            raise BadSetting(
                f"key_prefix {self.key_prefix!r} is empty or has one of the characters {{ }} * or space"
            )
        if self.redis_url is not None:
            _check_url(self.redis_url)

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
        if self.redis_url is not None:
            shown["redis_url"] = masked_url(self.redis_url)
        if self.flower_auth is not None:
            shown["flower_auth"] = "***"
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def to_environ(self) -> dict[str, str]:
        """What a child process needs in its environment to build the same Settings."""
        values: dict[str, str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default:
                continue
            name = ALIASES.get(item.name, PREFIX + item.name.upper())
            if isinstance(value, tuple):
                values[name] = os.pathsep.join(str(v) for v in value)
            else:
                values[name] = str(value)
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
        return cls(**{name: _as_type(name, value, hints[name]) for name, value in values.items()})


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


def _check_url(url: str) -> None:
    """Raises BadSetting without the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only when it is asked for
    except ValueError:
        raise BadSetting("REDIS_URL is not a URL; write it like redis://host:6379/0") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise BadSetting("REDIS_URL must begin with redis://, rediss:// or unix://")


def _as_type(name: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, types.UnionType):
        if value is None or value == "":
            return None
        wanted = next(arg for arg in typing.get_args(wanted) if arg is not type(None))
    shown = "***" if name in SECRETS else repr(value)
    word = "a list of paths" if typing.get_origin(wanted) is tuple else wanted.__name__
    wrong = BadSetting(f"{name} = {shown} has the wrong type; it must be {word}")
    try:
        if typing.get_origin(wanted) is tuple:
            items = value.split(os.pathsep) if isinstance(value, str) else value
            return tuple(Path(item) for item in items if str(item))
        if isinstance(value, bool) or (isinstance(value, float) and wanted is int):
            raise wrong
        if wanted is str and not isinstance(value, str):
            raise wrong
        return wanted(value)
    except (TypeError, ValueError) as exc:
        raise wrong from exc


def masked_url(url: str) -> str:
    """The URL with its password hidden, for messages and logs, also where the password makes it no valid URL."""
    scheme, mark, rest = url.partition("://")
    userinfo, at, place = rest.rpartition("@")
    if ":" in userinfo:
        rest = f"{userinfo.partition(':')[0]}:***{at}{place}"
    return re.sub(r"(?i)([?&]password=)[^&#]*", r"\1***", scheme + mark + rest)


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
            "| setting | environment | default | what it is |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
