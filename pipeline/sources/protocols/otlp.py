"""OTLP logs (`POST /v1/logs` and gRPC) in protobuf and in JSON.

Both encodings are walked once into entries of otlp_records.py. JSON is read by typed structs: protobuf's own
reader of JSON is ten times slower, and takes the hexadecimal ids for base64.
"""

import base64
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2

from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_text import read_body
from pipeline.sources.protocols.nested_fields import check_nested
from pipeline.sources.protocols.otlp_records import (
    RESERVED,
    Collected,
    Entry,
    ResourceFacts,
    StatedRecords,
    add_attributes,
    stated_fields,
)

_NOUN: Final = "the OTLP request"
_RECORDS: Final = (1, 2, 2)  # resource_logs, scope_logs, log_records
T = TypeVar("T")
_MOST_VALUES: Final = 10_000
# Senders repeat their resource in each request. So many are remembered, of at most so many bytes.
_RESOURCES: Final = 2_048
_RESOURCE_BYTES: Final = 2 << 10
_DEEPEST: Final = 64  # levels of a value; protobuf's own limit is 100 messages, two per level


def decode_protobuf(body: bytes, hints: Hints) -> Decoded:
    """A body of `application/x-protobuf`."""
    check_nested(body, _RECORDS)
    try:
        message = ExportLogsServiceRequest.FromString(body)
    except DecodeError as exc:
        message = _without_bad_text(body, exc)
    return decode_message(message, hints)


def decode_message(message: ExportLogsServiceRequest, hints: Hints) -> Decoded:
    """A request that is parsed already."""
    return (_ends_are_stated(message) and _of_stated(message, hints)) or _of_any(message, hints)


def _ends_are_stated(message: ExportLogsServiceRequest) -> bool:
    """Whether the last record of each scope has a severity.

    Where some record has none, `_of_stated` works for nothing. Most of these come from files, in a scope of
    their own."""
    for resource_logs in message.resource_logs:
        for scope_logs in resource_logs.scope_logs:
            if records := scope_logs.log_records:
                last = records[-1]
                if not last.severity_number and not last.severity_text:
                    return False
    return True


def _of_stated(message: ExportLogsServiceRequest, hints: Hints) -> Decoded | None:
    """None unless every record has a severity, as those of an SDK have. Values are read while they are in the
    caches of the processor."""
    collected, stated = Collected(hints), StatedRecords()
    add, add_time = stated.add, stated.nanos.append
    for resource_logs in message.resource_logs:
        origin = collected.origin(_facts(resource_logs.resource))
        for scope_logs in resource_logs.scope_logs:
            records = scope_logs.log_records
            collected.expect(len(records))
            if records:
                stated.origins.append((origin, scope_logs.scope.name, len(records)))
            for record in records:
                number, severity = record.severity_number, record.severity_text
                if not number and not severity:
                    return None
                body, event = record.body, record.event_name
                value = body.string_value or _value(body)
                fields = stated_fields(value, severity or number, event)
                attributes = record.attributes
                for pair in _bounded(attributes):
                    key, any_value = pair.key, pair.value
                    if key in RESERVED:
                        # Two keys may get one name, so a later value is not always the one that stands.
                        fields = stated_fields(value, severity or number, event)
                        add_attributes(fields, _pairs(attributes))
                        break
                    fields[key] = any_value.string_value or _value(any_value)
                if trace := record.trace_id:
                    fields["trace_id"] = trace.hex()
                if span := record.span_id:
                    fields["span_id"] = span.hex()
                add(value, severity, number, event, fields)
                add_time(record.time_unix_nano or record.observed_time_unix_nano)
    return stated.decoded()


def _of_any(message: ExportLogsServiceRequest, hints: Hints) -> Decoded:
    collected = Collected(hints)
    add = collected.entries.append
    for resource_logs in message.resource_logs:
        origin = collected.origin(_facts(resource_logs.resource))
        for scope_logs in resource_logs.scope_logs:
            scope = scope_logs.scope.name
            collected.expect(len(scope_logs.log_records))
            for record in scope_logs.log_records:
                body = record.body
                attributes = record.attributes
                add(
                    Entry(
                        origin,
                        scope,
                        record.time_unix_nano or record.observed_time_unix_nano,
                        record.severity_number,
                        record.severity_text,
                        body.string_value or _value(body),
                        _pairs(attributes) if attributes else {},
                        record.trace_id.hex(),
                        record.span_id.hex(),
                        record.event_name,
                    )
                )
    return collected.decoded()


def decode_json(body: bytes, hints: Hints) -> Decoded:
    """A body of `application/json`."""
    if body.lstrip()[:1] == b"[":
        raise Undecodable(
            "the OTLP request is a JSON array; send one object with resourceLogs (in Vector: codec otlp)"
        )
    request = read_body(_REQUEST, body, _NOUN)
    collected = Collected(hints)
    add = collected.entries.append
    for resource_logs in request.resource_logs or ():
        resource = resource_logs.resource
        origin = collected.origin(ResourceFacts.of(_json_pairs(resource.attributes if resource else None)))
        for scope_logs in resource_logs.scope_logs or ():
            scope = (scope_logs.scope.name if scope_logs.scope else "") or ""
            collected.expect(len(scope_logs.log_records or ()))
            for record in scope_logs.log_records or ():
                attributes = record.attributes
                add(
                    Entry(
                        origin,
                        scope,
                        _time(record.time_unix_nano) or record.observed_time_unix_nano,
                        record.severity_number or 0,
                        record.severity_text or "",
                        _json_value(record.body),
                        _json_pairs(attributes) if attributes else {},
                        (record.trace_id or "").lower(),
                        (record.span_id or "").lower(),
                        record.event_name or "",
                    )
                )
    return collected.decoded()


# Values of protobuf


def _bounded(values: Sequence[T]) -> Sequence[T]:
    """The values. Raises Undecodable for more than anybody writes; empty ones take two bytes of a body."""
    if len(values) > _MOST_VALUES:
        raise Undecodable(f"{_NOUN} has more than {_MOST_VALUES:,} values in one list; send fewer")
    return values


def _pairs(attributes: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    found = {}
    for pair in _bounded(attributes):
        value = pair.value
        found[pair.key] = value.string_value or _value(value)
    return found


def _facts(resource: resource_pb2.Resource) -> ResourceFacts:
    packed = resource.SerializeToString()
    return (_facts_of if len(packed) <= _RESOURCE_BYTES else _facts_of.__wrapped__)(packed)


@lru_cache(_RESOURCES)
def _facts_of(packed: bytes) -> ResourceFacts:
    return ResourceFacts.of(_pairs(resource_pb2.Resource.FromString(packed).attributes))


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in _bounded(value.array_value.values)]
    if kind == "kvlist_value":
        return _pairs(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def _without_bad_text(body: bytes, exc: DecodeError) -> ExportLogsServiceRequest:
    """The request with U+FFFD for what is not UTF-8. Collectors pass on such bytes of log files unchecked."""
    kind, texts = _request_of_bytes()
    try:
        message = kind.FromString(body)
    except DecodeError:
        raise Undecodable(f"{_NOUN} is not protobuf of ExportLogsServiceRequest: {exc}") from exc
    _mend_texts(message, texts)
    mended: ExportLogsServiceRequest = ExportLogsServiceRequest.FromString(message.SerializeToString())
    return mended


def _mend_texts(message: Message, texts: frozenset[str]) -> None:
    for field, value in message.ListFields():
        if field.full_name in texts:
            if isinstance(value, bytes):
                setattr(message, field.name, value.decode("utf-8", "replace").encode())
            else:
                value[:] = [item.decode("utf-8", "replace").encode() for item in value]
        elif isinstance(value, Message):
            _mend_texts(value, texts)
        elif field.message_type is not None:
            for item in value:
                _mend_texts(item, texts)


@cache
def _request_of_bytes() -> tuple[type[Message], frozenset[str]]:
    """The class of requests with bytes in place of texts, and the names of those fields."""
    pool = descriptor_pool.DescriptorPool()
    texts = set()
    for module in (common_pb2, resource_pb2, logs_pb2, logs_service_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for kind in file.message_type:
            for field in kind.field:
                if field.type == field.TYPE_STRING:
                    field.type = field.TYPE_BYTES
                    texts.add(f"{file.package}.{kind.name}.{field.name}")
        pool.Add(file)
    name = ExportLogsServiceRequest.DESCRIPTOR.full_name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name)), frozenset(texts)


# JSON: names in lower camel case, 64-bit integers as numbers or texts. It has no cycles, so that Python need
# not search it for garbage.


class _JsonValue(msgspec.Struct, rename="camel", gc=False):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | str | None = None
    double_value: float | str | None = None
    array_value: "_JsonArray | None" = None
    kvlist_value: "_JsonPairs | None" = None
    bytes_value: str | None = None


class _JsonArray(msgspec.Struct, gc=False):
    values: list[_JsonValue | None] | None = None


class _JsonPair(msgspec.Struct, gc=False):
    key: str = ""
    value: _JsonValue | None = None


class _JsonPairs(msgspec.Struct, gc=False):
    values: list[_JsonPair] | None = None


class _JsonRecord(msgspec.Struct, rename="camel", gc=False):
    time_unix_nano: int | str | None = None
    observed_time_unix_nano: int | str | None = None
    severity_number: int | None = None
    severity_text: str | None = None
    body: _JsonValue | None = None
    attributes: list[_JsonPair] | None = None
    trace_id: str | None = None
    span_id: str | None = None
    event_name: str | None = None


class _JsonNamed(msgspec.Struct, gc=False):
    name: str | None = None
    attributes: list[_JsonPair] | None = None


class _JsonScopeLogs(msgspec.Struct, rename="camel", gc=False):
    scope: _JsonNamed | None = None
    log_records: list[_JsonRecord] | None = None


class _JsonResourceLogs(msgspec.Struct, rename="camel", gc=False):
    resource: _JsonNamed | None = None
    scope_logs: list[_JsonScopeLogs] | None = None


class _JsonRequest(msgspec.Struct, rename="camel", gc=False):
    resource_logs: list[_JsonResourceLogs] | None = None


_REQUEST: Final = msgspec.json.Decoder(_JsonRequest)


def _time(nanos: int | str | None) -> int | str | None:
    """None for 0, which stands for no time."""
    return None if nanos in (0, "0", "") else nanos


def _json_pairs(pairs: Sequence[_JsonPair] | None, depth: int = 0) -> dict[str, Any]:
    found = {}
    for pair in _bounded(pairs or ()):
        value = pair.value
        text = value.string_value if value is not None else None
        found[pair.key] = text if text is not None else _json_value(value, depth)
    return found


def _json_value(value: _JsonValue | None, depth: int = 0) -> Any:
    if value is None:
        return None
    if value.string_value is not None:
        return value.string_value
    if depth > _DEEPEST:
        raise Undecodable(f"{_NOUN} has a value of more than {_DEEPEST} levels; send fewer levels")
    if value.array_value is not None:
        return [_json_value(item, depth + 1) for item in _bounded(value.array_value.values or ())]
    if value.kvlist_value is not None:
        return _json_pairs(value.kvlist_value.values, depth + 1)
    if value.int_value is not None:
        return _integer(value.int_value)
    for plain in (value.bool_value, value.double_value, value.bytes_value):
        if plain is not None:
            return plain
    return None


def _integer(value: int | str) -> int | str:
    """An integer, or the text that should have been one."""
    try:
        return int(value)
    except ValueError:
        return value
