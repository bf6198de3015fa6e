"""OTLP logs (`POST /v1/logs` and gRPC) in protobuf, walked once into the columns of otlp_records.py."""

import base64
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2

from pipeline.records.remembered import remembered
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.nested_fields import check_nested
from pipeline.sources.protocols.otlp_json import OTLP_REQUEST, bounded_values
from pipeline.sources.protocols.otlp_records import Collected, Entry, ResourceFacts

_RECORDS: Final = (1, 2, 2)  # resource_logs, scope_logs, log_records
# Senders repeat their resource in each request. So many are remembered, of at most so many bytes.
_RESOURCES: Final = 2_048
_RESOURCE_BYTES: Final = 2 << 10


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
    collected = Collected(hints)
    for resource_logs in message.resource_logs:
        origin = collected.origin(_facts(resource_logs.resource))
        for scope_logs in resource_logs.scope_logs:
            scope = scope_logs.scope.name
            collected.expect(len(scope_logs.log_records))
            for record in scope_logs.log_records:
                body = record.body
                attributes = record.attributes
                collected.add(
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


# Values of protobuf


def _pairs(attributes: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    found = {}
    for pair in bounded_values(attributes):
        value = pair.value
        found[pair.key] = value.string_value or _value(value)
    return found


def _facts(resource: resource_pb2.Resource) -> ResourceFacts:
    return _facts_of(resource.SerializeToString())


@remembered(_RESOURCES, _RESOURCE_BYTES)
def _facts_of(packed: bytes) -> ResourceFacts:
    return ResourceFacts.of(_pairs(resource_pb2.Resource.FromString(packed).attributes))


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in bounded_values(value.array_value.values)]
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
        raise Undecodable(f"{OTLP_REQUEST} is not protobuf of ExportLogsServiceRequest: {exc}") from exc
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
