"""Topics of Kafka to read, such as `kafka://broker1:9092,broker2/app-logs,web-*?start=latest`.

`kafkas://` is the same over TLS. A user and a password make it SASL. `KafkaSource` explains the options.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pipeline.settings.values import masked_url

PLAIN, TLS = "kafka", "kafkas"
PORT: Final = 9092
EXAMPLE: Final = "kafka://broker1:9092,broker2:9092/app-logs?start=latest"
FORMATS: Final = ("record", "lines", "otlp", "otlp-json")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
FILES: Final = ("ca", "cert", "key")
OPTIONS: Final = ("start", "format", "workload", "group", "mechanism", *FILES)
# A topic of Kafka, with * and ? as in `logweir watch`.
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._*?-]{1,249}")
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._-]+)(?::(\d{1,5}))?")
_FIELD: Final = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSource:
    """Topics of one cluster, and how they are read."""

    servers: str  # host:port,host:port
    topics: tuple[str, ...]  # names, and patterns with * and ?
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    mechanism: str = "PLAIN"
    # Where a partition begins that was never read: "earliest", "latest", or the first record of a time.
    start: str | datetime = "earliest"
    # A value is one record, several lines, or a request of OTLP in protobuf or JSON.
    format: str = "record"
    workload: str = ""  # with {topic}, {key} and {header.NAME} in it; "" lets the records tell
    group: str = "logweir"  # the consumer group that gets the offsets, for the tools of Kafka
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError in one sentence, without the password."""
        scheme, mark, address = text.partition("://")
        shown = masked_url(text) if mark else text.rpartition("@")[2]
        if not mark or scheme not in (PLAIN, TLS):
            raise ValueError(f"kafka_source {shown!r} is not usable; write it like {EXAMPLE}")
        place, _, query = address.partition("?")
        login, at, place = place.rpartition("@")
        hosts, _, path = place.partition("/")
        try:
            options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        except ValueError:
            raise ValueError(f"kafka_source {shown!r} has options that are not NAME=VALUE") from None
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise ValueError(
                f"kafka_source has the unknown option {unknown[0]!r}; known are {', '.join(OPTIONS)}"
            )
        user, colon, password = login.partition(":")
        if at and not (user and colon and password):
            raise ValueError(
                f"kafka_source {shown!r} needs both a user and a password, as user:password@host"
            )
        named = {name: options[name] for name in OPTIONS if options.get(name)}
        source = cls(
            servers=",".join(_server(host, shown) for host in hosts.split(",")),
            topics=_topics(unquote(path), shown),
            tls=scheme == TLS,
            user=unquote(user),
            password=unquote(password),
            mechanism=named.get("mechanism", "PLAIN"),
            start=_start(named.get("start", "earliest")),
            format=named.get("format", "record"),
            workload=named.get("workload", ""),
            group=named.get("group", "logweir"),
            ca=_file(named.get("ca")),
            cert=_file(named.get("cert")),
            key=_file(named.get("key")),
        )
        source._check("mechanism" in options)
        return source

    def _check(self, has_mechanism: bool) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"kafka_source format={self.format} is unknown; use {', '.join(FORMATS)}")
        if self.mechanism not in MECHANISMS:
            raise ValueError(
                f"kafka_source mechanism={self.mechanism} is unknown; use {', '.join(MECHANISMS)}"
            )
        if has_mechanism and not self.user:
            raise ValueError("kafka_source has a mechanism, and no user:password@ in front of its hosts")
        if any(getattr(self, name) for name in FILES) and not self.tls:
            raise ValueError("kafka_source has files for TLS, which only kafkas:// has; write kafkas://")
        if (self.cert is None) != (self.key is None):
            raise ValueError("kafka_source needs both cert=FILE and key=FILE, or neither")
        for name in _FIELD.findall(self.workload):
            if name not in ("topic", "key") and not name.startswith("header."):
                raise ValueError(
                    f"kafka_source workload={self.workload} has the unknown field {{{name}}}; "
                    "use {topic}, {key} or {header.NAME}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in `workload`."""
        return tuple(_FIELD.findall(self.workload))

    def workload_of(self, values: dict[str, str]) -> str:
        """`workload` with these values of its fields."""
        return _FIELD.sub(lambda found: values.get(found[1], ""), self.workload)

    def __str__(self) -> str:
        """Servers and topics, for people; no login."""
        return f"{TLS if self.tls else PLAIN}://{self.servers}/{','.join(self.topics)}"


def kafka_sources(text: str | None) -> tuple[KafkaSource, ...]:
    """The addresses of a setting, which blanks separate. Raises ValueError."""
    return tuple(KafkaSource.parse(part) for part in (text or "").split())


def kafka_packages(text: str | None) -> tuple[str, ...]:
    """The packages of extras that the reading of these addresses imports."""
    formats = {source.format for source in kafka_sources(text)}
    client = ("confluent_kafka",) if formats else ()
    return client if formats <= {"record", "lines"} else (*client, "opentelemetry.proto")


def masked_sources(text: str) -> str:
    """The addresses without their passwords."""
    return " ".join(masked_url(part) for part in text.split())


def with_absolute_files(text: str) -> str:
    """The addresses with files that a process in another directory finds."""
    return " ".join(map(_absolute, text.split()))


def _absolute(address: str) -> str:
    begin, mark, query = address.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    options |= {name: str(Path(options[name]).absolute()) for name in FILES if options.get(name)}
    return f"{begin}{mark}{urlencode(options, safe='/{}:*', quote_via=quote)}"


def _server(text: str, shown: str) -> str:
    found = _HOST.fullmatch(text)
    port = int(found[2] or PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise ValueError(
            f"kafka_source {shown!r} has a broker that is not HOST or HOST:PORT; write it like {EXAMPLE}"
        )
    return f"{found[1]}:{port}"


def _topics(path: str, shown: str) -> tuple[str, ...]:
    topics = tuple(path.strip("/").split(","))
    if wrong := [topic for topic in topics if not _TOPIC.fullmatch(topic)]:
        raise ValueError(f"kafka_source {shown!r} has no usable topic {wrong[0]!r}; write it like {EXAMPLE}")
    return topics


def _file(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _start(text: str) -> str | datetime:
    if text in ("earliest", "latest"):
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise ValueError(
            f"kafka_source start={text} is not usable; use earliest, latest or a time such as "
            "2026-11-20T00:00:00Z"
        )
    return moment
