"""The NATS server of Opni's services, such as `nats://nats:4222/raw_logs?serve=controller`.

`tls://` is the same over TLS. `NatsSource` explains the options.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pipeline.settings.values import masked_url

PLAIN, TLS = "nats", "tls"
PORT: Final = 4222
EXAMPLE: Final = "nats://nats1:4222,nats2:4222/raw_logs?serve=controller"
# The subjects of logs that Opni's services send.
LOG_SUBJECTS: Final = (
    "raw_logs",
    "preprocessed_logs_workload",
    "preprocessed_logs_pretrained_model",
    "opnilog_workload_logs",
    "opnilog_cp_logs",
    "opnilog_rancher_logs",
    "opnilog_longhorn_logs",
    "gpu_service_inference_internal",
)
GPU_LOGS: Final = "gpu_service_inference_internal"  # from the training controller to the GPU service
MODES: Final = ("jetstream", "core")
SERVES: Final = ("nothing", "gpu", "controller")
STARTS: Final = ("earliest", "latest")
FILES: Final = ("ca", "cert", "key", "creds")
OPTIONS: Final = (
    "mode", "serve", "start", "stream", "out", "keep_hours", "size_gib", "replicas", *FILES,
)  # fmt: skip
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._-]+)(?::(\d{1,5}))?")
_STREAM: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSource:
    """Subjects of one server or cluster, how they are read, and which services the gateway stands for."""

    servers: tuple[str, ...]  # host:port
    subjects: tuple[str, ...]  # of LOG_SUBJECTS
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    mode: str = "jetstream"  # core: without a stream, at most once
    serve: str = "nothing"  # gpu: the GPU service; controller: the training controller too
    start: str = "earliest"  # where a stream begins that was never read
    stream: str = "logweir-in"
    out: str = "logweir-out"
    keep_hours: int = 24  # of a stream that the gateway makes
    size_gib: int = 8
    replicas: int = 1
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    creds: Path | None = None  # a file of `nsc`: JWT and seed

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError in one sentence, without password and token."""
        scheme, mark, address = text.partition("://")
        shown = _shown(text)
        if not mark or scheme not in (PLAIN, TLS) or " " in text:
            raise ValueError(f"nats_source {shown!r} is not usable; write it like {EXAMPLE}")
        place, _, query = address.partition("?")
        login, at, place = place.rpartition("@")
        hosts, _, path = place.partition("/")
        try:
            options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        except ValueError:
            raise ValueError(f"nats_source {shown!r} has options that are not NAME=VALUE") from None
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise ValueError(
                f"nats_source has the unknown option {unknown[0]!r}; known are {', '.join(OPTIONS)}"
            )
        user, colon, password = login.partition(":")
        if at and (not user or (colon and not password)):
            raise ValueError(
                f"nats_source {shown!r} needs user:password@host, or token@host, in front of its hosts"
            )
        named = {name: options[name] for name in OPTIONS if options.get(name)}
        numbers = (("keep_hours", 8_760), ("size_gib", 65_536), ("replicas", 5))
        values: dict[str, Any] = {
            **{name: named[name] for name in ("mode", "serve", "start", "stream", "out") if name in named},
            **{name: _number(name, named[name], most) for name, most in numbers if name in named},
            **{name: Path(named[name]) for name in FILES if name in named},
        }
        source = cls(
            servers=tuple(_server(host, shown) for host in hosts.split(",")),
            subjects=_subjects(unquote(path), shown, named.get("serve", "nothing")),
            tls=scheme == TLS,
            user=unquote(user) if colon else "",
            password=unquote(password),
            token="" if colon else unquote(user),
            **values,
        )
        source._check()
        return source

    def _check(self) -> None:
        for name, known in (("mode", MODES), ("serve", SERVES), ("start", STARTS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"nats_source {name}={value} is unknown; use {', '.join(known)}")
        for name in ("stream", "out"):
            if not _STREAM.fullmatch(value := getattr(self, name)):
                raise ValueError(
                    f"nats_source {name}={value} is no name of a stream; use letters, digits, - and _"
                )
        if self.stream == self.out:
            raise ValueError(
                f"nats_source has stream={self.stream} and out={self.out}; use two streams, one each way"
            )
        if (self.ca or self.cert or self.key) and not self.tls:
            raise ValueError("nats_source has files for TLS, which only tls:// has; write tls://")
        if (self.cert is None) != (self.key is None):
            raise ValueError("nats_source needs both cert=FILE and key=FILE, or neither")
        if self.creds is not None and (self.user or self.token):
            raise ValueError(
                "nats_source has both creds=FILE and a login in front of its hosts; leave one out"
            )

    @property
    def is_durable(self) -> bool:
        """Whether messages are read from a stream; without one, a message is taken at most once."""
        return self.mode == "jetstream"

    @property
    def is_gpu_service(self) -> bool:
        return self.serve != "nothing"

    @property
    def is_controller(self) -> bool:
        return self.serve == "controller"

    def __str__(self) -> str:
        """Servers and subjects, for people; no login."""
        return f"{TLS if self.tls else PLAIN}://{','.join(self.servers)}/{','.join(self.subjects)}"


def nats_source(text: str | None) -> NatsSource | None:
    """The address of a setting. Raises ValueError."""
    return NatsSource.parse(text) if text else None


def nats_packages(text: str | None) -> tuple[str, ...]:
    """The packages of the extra that the gateway imports."""
    source = nats_source(text)
    if source is None:
        return ()
    return ("nats", "google.protobuf", *(("nkeys",) if source.creds is not None else ()))


def masked_source(text: str) -> str:
    """The address without its password or token."""
    return _shown(text)


def with_absolute_paths(text: str) -> str:
    """The address with files that a process in another directory finds."""
    begin, mark, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    options |= {name: str(Path(options[name]).absolute()) for name in FILES if options.get(name)}
    return f"{begin}{mark}{urlencode(options, safe='/', quote_via=quote)}"


def _shown(text: str) -> str:
    scheme, mark, address = text.partition("://")
    if not mark:
        return text.rpartition("@")[2]
    place, question, query = address.partition("?")
    login, at, rest = place.rpartition("@")
    if at and ":" not in login:
        return f"{scheme}{mark}***@{rest}{question}{query}"
    return masked_url(text)


def _server(text: str, shown: str) -> str:
    found = _HOST.fullmatch(text)
    port = int(found[2] or PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise ValueError(
            f"nats_source {shown!r} has a server that is not HOST or HOST:PORT; write it like {EXAMPLE}"
        )
    return f"{found[1]}:{port}"


def _subjects(path: str, shown: str, serve: str) -> tuple[str, ...]:
    subjects = tuple(path.strip("/").split(","))
    if wrong := [subject for subject in subjects if subject not in LOG_SUBJECTS]:
        raise ValueError(
            f"nats_source {shown!r} has no usable subject {wrong[0]!r}; use {', '.join(LOG_SUBJECTS)}"
        )
    # Opni's training controller sends logs there as soon as a GPU service answers.
    own = (GPU_LOGS,) if serve != "nothing" else ()
    return tuple(dict.fromkeys((*subjects, *own)))


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ValueError(f"nats_source {name}={text} is not usable; use a number from 1 to {most:,}")
    return int(text)
