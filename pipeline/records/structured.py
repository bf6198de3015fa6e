"""The fields that stand beside the message of a stored record, read from its raw text.

A JSON document has its keys, a message of RFC 5424 its structured data. No column holds them: the raw text
is stored anyway, and fields are read where a person asks for a few records.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

_DOCUMENT: Final = msgspec.json.Decoder(dict[str, Any])
_FAULTS: Final = (msgspec.DecodeError, ValueError, RecursionError)
# Keys that hold the text of the record, if they hold a text.
_TEXTS: Final = ("log", "message", "msg", "MESSAGE", "body")
_HEADER: Final = re.compile(r"<[0-9]{1,3}>[0-9]{1,2} (?:[^ ]+ ){5}(?=\[)")
_ELEMENT: Final = re.compile(r"\[([^\]= \"]+)((?: [^\]= \"]+=\"(?:[^\"\\\]]|\\.)*\")*)\]")
_PARAMETER: Final = re.compile(r" ([^\]= \"]+)=\"((?:[^\"\\\]]|\\.)*)\"")
_ESCAPE: Final = re.compile(r"\\([\"\\\]])")
_TRACES: Final = ("trace_id", "traceId", "traceid", "TRACE_ID", "trace.id", "dd.trace_id")
_SPANS: Final = ("span_id", "spanId", "spanid", "SPAN_ID", "span.id", "dd.span_id")


class TraceIds(NamedTuple):
    """Of the trace that a record belongs to; None where it names none."""

    trace_id: str | None
    span_id: str | None


def structured_fields(raw: str | None) -> Mapping[str, Any]:
    """The fields of a raw text, empty for a text without any."""
    text = (raw or "").lstrip()
    if text.startswith("{"):
        try:
            document = _DOCUMENT.decode(text)
        except _FAULTS:
            return {}
        return {key: value for key, value in document.items() if not _is_text(key, value)}
    header = _HEADER.match(text)
    if header is None:
        return {}
    found: dict[str, Any] = {}
    at = header.end()
    while (element := _ELEMENT.match(text, at)) is not None:
        found[element[1]] = {
            name: _ESCAPE.sub(r"\1", value) for name, value in _PARAMETER.findall(element[2])
        }
        at = element.end()
    return found


def trace_ids(fields: Mapping[str, Any]) -> TraceIds:
    """By the names that libraries give, at the top of a document or within its objects."""
    flat = dict(fields)
    for key, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
            flat |= {name: inner for name, inner in value.items() if name not in flat}
    return TraceIds(_first(flat, _TRACES), _first(flat, _SPANS))


def _is_text(key: str, value: object) -> bool:
    return key in _TEXTS and isinstance(value, str)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    found = (fields.get(name) for name in names)
    return next((str(value) for value in found if isinstance(value, str | int) and value), None)
