"""Requests of the protocols of the intake, made of log lines as their usual senders make them.

OTLP comes as an SDK sends it: the message without its header (a blank in front would continue the record
before it), a severity, two attributes, the ids of a trace.
`_bulk` and Loki come as Fluent Bit and Alloy send files of pods. Every physical line is sent alone with its
header, and each request has their User-Agent. rsyslog and winston-loki send none. The intake gives each of
their records an identity. Each record has a time of its own in microseconds, so an equal body is the same
request."""

import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import cramjam
import msgspec
import polars as pl
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bench._log_files import read_file
from bench._shipper import Request
from pipeline.sources import formats
from pipeline.sources.protocols.loki_messages import PushRequest

NAMESPACE: Final = "bench"
JSON: Final = "application/json"
_SEVERITY: Final = {
    "trace": 1, "debug": 5, "info": 9, "notice": 10, "warning": 13, "error": 17, "critical": 21, "fatal": 24,
}  # fmt: skip
_THREADS: Final = 8
_json: Final = msgspec.json.Encoder()


class Record(NamedTuple):
    """A line of a file, or a stack trace of several."""

    raw: str
    message: str
    level: str


class Part(NamedTuple):
    """Records of one application within a request. Their times go on from `at_us`, a microsecond each."""

    app: str
    records: Sequence[Record]
    at_us: int

    @property
    def workload(self) -> str:
        return f"{NAMESPACE}/{self.app}"

    @property
    def entries(self) -> list[tuple[int, str]]:
        """Time and text of each physical line."""
        lines = [line for record in self.records for line in record.raw.split("\n")]
        return list(enumerate(lines, start=self.at_us))


def records_of(path: Path) -> list[Record]:
    """The records of a file with their messages and levels, as the pipeline reads them."""
    found: list[Record] = []
    for chunk in read_file(path):
        rows = formats.parse(chunk.records, chunk.formats, arrived=datetime.now(UTC), zone="UTC")
        columns = pl.DataFrame(
            {
                "raw": chunk.records["raw"],
                "message": rows["message"],
                "level": rows["level"].fill_null("info"),
            }
        )
        found += map(Record._make, columns.iter_rows())
    return found


def lines_in(records: Iterable[Record]) -> int:
    """Physical lines."""
    return sum(record.raw.count("\n") + 1 for record in records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How requests of a protocol are made.

    `several`: whether one may have several workloads. `agent`: the client's name for itself, "" for none.
    `counted`: lines of records as the intake has them."""

    name: str
    dialect: str  # of workers/intake/dialects.py
    path: str
    content_type: str
    encode: Callable[[Sequence[Part]], bytes]
    several: bool = True
    agent: str = ""
    gzip: bool = False
    counted: Callable[[Sequence[Record]], int] = lines_in

    def request(self, parts: Sequence[Part], *, due: float = 0.0) -> Request:
        body, headers = self.encode(parts), {"Content-Type": self.content_type}
        if self.agent:
            headers["User-Agent"] = self.agent
        if self.gzip:
            body = gzip.compress(body, 6)
            headers["Content-Encoding"] = "gzip"
        lines = sum(self.counted(part.records) for part in parts)
        return Request(self.path_of(parts), headers, body, lines, due)

    @property
    def plain(self) -> "Protocol":
        """Without compression."""
        return replace(self, gzip=False)

    def path_of(self, parts: Sequence[Part]) -> str:
        return self.path if self.several else f"{self.path}?service={parts[0].workload}"


def _otlp(parts: Sequence[Part]) -> bytes:
    request = ExportLogsServiceRequest()
    for part in parts:
        found = request.resource_logs.add()
        for key, value in _resource(part.app).items():
            found.resource.attributes.add(key=key).value.string_value = value
        scope = found.scope_logs.add()
        scope.scope.name = "bench.logger"
        for number, record in enumerate(part.records):
            nanos = (part.at_us + number) * 1000
            one = scope.log_records.add(
                time_unix_nano=nanos,
                observed_time_unix_nano=nanos,
                severity_number=_SEVERITY[record.level],  # type: ignore[arg-type]
                severity_text=record.level.upper(),
                trace_id=nanos.to_bytes(16, "big"),
                span_id=nanos.to_bytes(8, "big"),
            )
            one.body.string_value = record.message.lstrip()
            one.attributes.add(key="code.function.name").value.string_value = f"{part.app}.Handler.serve"
            one.attributes.add(key="thread.id").value.int_value = number % _THREADS
    return request.SerializeToString()


def _otlp_json(parts: Sequence[Part]) -> bytes:
    return _json.encode({"resourceLogs": [_json_resource_logs(part) for part in parts]})


def _json_resource_logs(part: Part) -> dict[str, Any]:
    function = f"{part.app}.Handler.serve"
    records = [
        {
            "timeUnixNano": str((part.at_us + number) * 1000),
            "observedTimeUnixNano": str((part.at_us + number) * 1000),
            "severityNumber": _SEVERITY[record.level],
            "severityText": record.level.upper(),
            "body": {"stringValue": record.message.lstrip()},
            "attributes": [
                {"key": "code.function.name", "value": {"stringValue": function}},
                {"key": "thread.id", "value": {"intValue": str(number % _THREADS)}},
            ],
            "traceId": f"{part.at_us + number:032x}",
            "spanId": f"{part.at_us + number:016x}",
        }
        for number, record in enumerate(part.records)
    ]
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in _resource(part.app).items()]
    return {
        "resource": {"attributes": attributes},
        "scopeLogs": [{"scope": {"name": "bench.logger"}, "logRecords": records}],
    }


def _bulk(parts: Sequence[Part]) -> bytes:
    action = b'{"create":{"_index":"logs-bench"}}\n'
    return b"".join(action + document + b"\n" for part in parts for document in _documents(part))


def _ndjson(parts: Sequence[Part]) -> bytes:
    return b"".join(document + b"\n" for part in parts for document in _documents(part))


def _documents(part: Part) -> list[bytes]:
    """As Fluent Bit writes lines of pods."""
    pod = {
        "pod_name": f"{part.app}-6c4b9d7f5-x2x7k",
        "namespace_name": NAMESPACE,
        "container_name": part.app,
        "host": "node-1",
        "labels": {"app": part.app},
    }
    return [
        _json.encode({"@timestamp": _iso(at), "log": line, "stream": "stdout", "kubernetes": pod})
        for at, line in part.entries
    ]


def _loki(parts: Sequence[Part]) -> bytes:
    streams = [
        {"stream": _labels(part.app), "values": [[str(at * 1000), line] for at, line in part.entries]}
        for part in parts
    ]
    return _json.encode({"streams": streams})


def _loki_protobuf(parts: Sequence[Part]) -> bytes:
    request = PushRequest()
    for part in parts:
        labels = ", ".join(f'{key}="{value}"' for key, value in _labels(part.app).items())
        stream = request.streams.add(labels=f"{{{labels}}}".encode())
        for at, line in part.entries:
            entry = stream.entries.add(line=line.encode())
            entry.timestamp.seconds, entry.timestamp.nanos = at // 1_000_000, at % 1_000_000 * 1000
    return bytes(cramjam.snappy.compress_raw(request.SerializeToString()))


def _hec(parts: Sequence[Part]) -> bytes:
    return b"".join(
        _json.encode(
            {"time": at / 1e6, "host": "node-1", "index": NAMESPACE, "sourcetype": part.app, "event": line}
        )
        for part in parts
        for at, line in part.entries
    )


def _text(parts: Sequence[Part]) -> bytes:
    return b"".join(line.encode() + b"\n" for part in parts for _, line in part.entries)


def _resource(app: str) -> dict[str, str]:
    return {
        "service.name": app,
        "service.namespace": NAMESPACE,
        "host.name": "node-1",
        "telemetry.sdk.language": "java",
        "telemetry.sdk.version": "1.45.0",
    }


def _labels(app: str) -> dict[str, str]:
    return {"namespace": NAMESPACE, "app": app, "container": app, "pod": f"{app}-6c4b9d7f5-x2x7k"}


def _iso(micros: int) -> str:
    return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + (
        f"{micros % 1_000_000:06}Z"
    )


_OTLP: Final = Protocol(
    name="otlp",
    dialect="otlp",
    path="/v1/logs",
    content_type="application/x-protobuf",
    encode=_otlp,
    counted=len,  # the raw text of a record is JSON, a line
)
_BULK: Final = Protocol(
    name="bulk",
    dialect="bulk",
    path="/_bulk",
    content_type="application/x-ndjson",
    encode=_bulk,
    agent="Fluent-Bit",
)
_LOKI: Final = Protocol(
    name="loki",
    dialect="loki",
    path="/loki/api/v1/push",
    content_type=JSON,
    encode=_loki,
    agent="Alloy/v1.11.0 (linux)",
)
_LINES: Final = Protocol(
    name="ndjson", dialect="lines", path="/api/v1/lines", content_type="application/x-ndjson", encode=_ndjson
)
PROTOCOLS: Final = {
    one.name: one
    for one in (
        _OTLP,
        _BULK,
        _LOKI,
        replace(_OTLP, name="otlp_gzip", gzip=True),
        replace(_BULK, name="bulk_gzip", gzip=True),
        replace(_BULK, name="bulk_rsyslog", agent=""),
        replace(_OTLP, name="otlp_json", content_type=JSON, encode=_otlp_json),
        replace(_LOKI, name="loki_winston", agent=""),
        replace(_LOKI, name="loki_protobuf", content_type="application/x-protobuf", encode=_loki_protobuf),
        _LINES,
        replace(_LINES, name="text", content_type="text/plain", encode=_text, several=False),
        Protocol(name="hec", dialect="hec", path="/services/collector/event", content_type=JSON, encode=_hec),
    )
}
