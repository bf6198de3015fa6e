"""Requests of shippers for the fuzzer and for tests: each decoder with its hints and what honest senders
write."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import cramjam
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bench import _fuzz_streams as streams
from pipeline.records.batch import Batch, Purpose
from pipeline.records.payload import pack, unpack
from pipeline.sources.protocols import bulk, hec, journal, lines, loki, otlp, otlp_json
from pipeline.sources.protocols.contract import Decoded, Decoder, Hints
from pipeline.sources.protocols.loki_messages import PushRequest

JSON_HINTS = Hints(content_type="application/json")
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NANOS = 1763539200123456789
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """A decoder and honest bodies for it."""

    decode: Decoder
    seeds: Sequence[bytes]
    hints: Hints = field(default_factory=Hints)


def checked(decoded: Decoded) -> Decoded:
    """Raises AssertionError unless the records can be accepted, and read again as they were."""
    records = decoded.records
    if any(column is not None and len(column) != records.height for column in records.columns):
        raise AssertionError("columns have different lengths")
    if records.workloads is None or not all(
        0 < len(name) <= 200 and name.isprintable() for name in records.workloads
    ):
        raise AssertionError("a record has no usable workload")
    batch = Batch(
        batch_id="b", workload="w", source="push", source_key="k", purpose=Purpose.SCORE, arrived=NOW, formats=(),
        zone="UTC", records=records,
    )  # fmt: skip
    # The intake makes no batch of a request without records.
    if records.height and unpack(pack(batch).blob, max_bytes=MAX_BYTES) != records:
        raise AssertionError("the records are not what was packed")
    return decoded


def run(data: bytes) -> None:
    """The first byte says which decoder."""
    requests = tuple(REQUESTS.values())[(data[0] if data else 0) % len(REQUESTS)]
    checked(requests.decode(data[1:], requests.hints))


def seeds() -> list[bytes]:
    return [
        bytes([number]) + body for number, requests in enumerate(REQUESTS.values()) for body in requests.seeds
    ]


def otlp_request() -> ExportLogsServiceRequest:
    """Two records: a text with everything beside it, and a map."""
    request = ExportLogsServiceRequest()
    resource_logs = request.resource_logs.add()
    for key, value in (("service.name", "cart"), ("service.namespace", "shop"), ("host.name", "h1")):
        resource_logs.resource.attributes.add(key=key).value.string_value = value
    scope_logs = resource_logs.scope_logs.add()
    scope_logs.scope.name = "shop.cart"
    first = scope_logs.log_records.add(
        time_unix_nano=NANOS, severity_number=17, severity_text="ERROR", trace_id=bytes(range(1, 17)), span_id=bytes(range(1, 9)),
    )  # fmt: skip
    first.body.string_value = "disk full"
    first.attributes.add(key="n").value.int_value = -7
    first.attributes.add(key="ratio").value.double_value = float("nan")
    first.attributes.add(key="list").value.array_value.values.add().bool_value = True
    first.attributes.add(key="data").value.bytes_value = b"\xff\x00"
    first.attributes.add(
        key="exception.stacktrace"
    ).value.string_value = "Traceback (most recent call last):\n  x\nE: 7"
    second = scope_logs.log_records.add(observed_time_unix_nano=NANOS + 1_000_000)
    pair = second.body.kvlist_value.values.add(key="msg")
    pair.value.string_value = "a message"
    return request


def _dumped(*values: Any, between: str = "\n") -> bytes:
    return between.join(json.dumps(value) for value in values).encode()


def _otlp_json() -> bytes:
    def text(value: str) -> dict[str, str]:
        return {"stringValue": value}

    record = {
        "timeUnixNano": str(NANOS), "observedTimeUnixNano": NANOS, "severityNumber": 9, "severityText": "Info", "body": text("up"),
        "attributes": [{"key": "k", "value": {"intValue": "7"}}, {"key": "d", "value": {"doubleValue": "NaN"}},
                       {"key": "a", "value": {"arrayValue": {"values": [text("x"), {"kvlistValue": {"values": []}}]}}}],
        "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174", "flags": 1,
    }  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": text("cart")}]}
    scope_logs = [{"scope": {"name": "s"}, "logRecords": [record, {"body": {"boolValue": True}}]}]
    return _dumped({"resourceLogs": [{"resource": resource, "scopeLogs": scope_logs}]})


def _loki_protobuf() -> bytes:
    request = PushRequest()
    stream = request.streams.add(labels=rb'{app="cart", path="C:\\x\"y", raw=`a\b`, host="h\u00e9"}')
    for number in range(3):
        entry = stream.entries.add(line=b"\tat a.b(C.java:1)" if number else b"java.lang.E: x")
        entry.timestamp.seconds, entry.timestamp.nanos = 1763539200, number
    entry.metadata.add(name=b"trace_id", value=b"ab" * 16)
    return bytes(cramjam.snappy.compress_raw(request.SerializeToString()))


_LOKI = {
    "streams": [
        {"stream": {"app": "cart", "level": "warn"}, "values": [[str(NANOS), "a line"], [str(NANOS + 1), "b", {"trace_id": "ab" * 16}]]},
        {"labels": '{app="x", b="c\\"d"}', "entries": [{"ts": "2026-11-20T10:00:00.5Z", "line": "old"}]},
    ]
}  # fmt: skip
_DOCUMENTS = (
    {"@timestamp": "2026-11-20T10:00:00.123Z", "log": "java.lang.E: x", "stream": "stderr",
     "kubernetes": {"namespace_name": "shop", "pod_name": "cart-1", "container_name": "cart", "labels": {"app": "cart"}}},
    {"@timestamp": "2026-11-20T10:00:00.124Z", "log": "\tat a.b(C.java:1)", "stream": "stderr",
     "kubernetes": {"namespace_name": "shop", "pod_name": "cart-1", "container_name": "cart", "labels": {"app": "cart"}}},
    {"time": 1763539200.5, "level": "info", "message": "up", "service": {"name": "cart", "namespace": 7}, "host": {"name": "h"}},
    {"date": [1], "message": {"a": [{}]}, "kubernetes": 7, "service": None, "data_stream": {"dataset": "nginx"}},
)  # fmt: skip
_EVENTS = (
    {"time": 1763539200.123, "host": "h", "source": "s", "sourcetype": "cart", "index": "main", "event": "a }{ b"},
    {"time": "1763539201.5", "event": {"line": "x", "source": "stderr", "tag": "t"}, "fields": {"trace_id": "ab" * 16}},
    {"event": {"msg": "m", "level": "warn"}, "fields": {"k": 7}},
    {"event": 7},
)  # fmt: skip
_JOURNAL = (
    b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=1763539200123456\nPRIORITY=3\n_HOSTNAME=h\n_PID=7\nSYSLOG_IDENTIFIER=cart\nMESSAGE=disk full\n\n"
    b"__REALTIME_TIMESTAMP=1763539200123457\nMESSAGE\n" + struct.pack("<Q", 9) + b"two\n\nlines"[:9] + b"\nTRACE=x\n\n"
)  # fmt: skip

REQUESTS = {
    "otlp protobuf": Requests(decode=otlp.decode_protobuf, seeds=(otlp_request().SerializeToString(),)),
    "otlp json": Requests(decode=otlp_json.decode_json, seeds=(_otlp_json(),)),
    "bulk": Requests(
        decode=bulk.decode_bulk,
        seeds=(b"".join(_dumped({"create": {"_index": "logs-2026.11.20"}}, d) + b"\n" for d in _DOCUMENTS),),
        hints=Hints(path="/logs/_bulk"),
    ),
    "loki json": Requests(decode=loki.decode_push_json, seeds=(_dumped(_LOKI),)),
    "loki protobuf": Requests(decode=loki.decode_push_protobuf, seeds=(_loki_protobuf(),)),
    "ndjson": Requests(decode=lines.decode_posted, seeds=(_dumped(*_DOCUMENTS),), hints=JSON_HINTS),
    "array": Requests(decode=lines.decode_array, seeds=(_dumped(_DOCUMENTS),)),
    "text": Requests(decode=lines.decode_posted, seeds=(b"2026-11-20 10:00:00 ERROR x\n\tat a.b(C.java:1)\n",)),
    "hec": Requests(decode=hec.decode_events, seeds=(_dumped(*_EVENTS, between=""),)),
    "hec raw": Requests(decode=hec.decode_raw, seeds=(b"a line\nanother\n",)),
    "journal": Requests(decode=journal.decode_journal, seeds=(_JOURNAL,)),
    "syslog": Requests(decode=streams.decode_syslog, seeds=streams.SYSLOG_SEEDS),
    "datagram": Requests(decode=streams.decode_datagram, seeds=streams.SYSLOG_SEEDS),
    "relp": Requests(decode=streams.decode_relp, seeds=streams.RELP_SEEDS),
    "forward": Requests(decode=streams.decode_forward, seeds=streams.FORWARD_SEEDS),
}  # fmt: skip
