"""OTLP logs in JSON: a request of the protocol, and a line of a file that the Collector has exported.

JSON is read by typed structs: protobuf's own reader of JSON is ten times slower, and takes the hexadecimal
ids for base64.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_text import read_body
from pipeline.sources.protocols.otlp_records import Collected, Entry, ResourceFacts

OTLP_REQUEST: Final = "the OTLP request"
T = TypeVar("T")
_MOST_VALUES: Final = 10_000
_DEEPEST: Final = 64  # levels of a value; protobuf's own limit is 100 messages, two per level


def decode_json(body: bytes, hints: Hints) -> Decoded:
    """A body of `application/json`."""
    if body.lstrip()[:1] == b"[":
        raise Undecodable(
            "the OTLP request is a JSON array; send one object with resourceLogs (in Vector: codec otlp)"
        )
    request = read_body(_REQUEST, body, OTLP_REQUEST)
    collected = Collected(hints)
    for resource_logs in request.resource_logs or ():
        resource = resource_logs.resource
        origin = collected.origin(ResourceFacts.of(_json_pairs(resource.attributes if resource else None)))
        for scope_logs in resource_logs.scope_logs or ():
            scope = (scope_logs.scope.name if scope_logs.scope else "") or ""
            collected.expect(len(scope_logs.log_records or ()))
            for record in scope_logs.log_records or ():
                attributes = record.attributes
                collected.add(
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


def bounded_values(values: Sequence[T]) -> Sequence[T]:
    """The values. Raises Undecodable for more than anybody writes; empty ones take two bytes of a body."""
    if len(values) > _MOST_VALUES:
        raise Undecodable(f"{OTLP_REQUEST} has more than {_MOST_VALUES:,} values in one list; send fewer")
    return values


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
    for pair in bounded_values(pairs or ()):
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
        raise Undecodable(f"{OTLP_REQUEST} has a value of more than {_DEEPEST} levels; send fewer levels")
    if value.array_value is not None:
        return [_json_value(item, depth + 1) for item in bounded_values(value.array_value.values or ())]
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
