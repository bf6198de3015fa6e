"""Splunk's HTTP Event Collector: events as JSON objects one behind another, and raw lines.

The raw text of a record is its event, as it was sent. Indexed fields stand beside the event, so that session
keys are found in them: within an event that is an object, around an event that is a line.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any, Final

import msgspec

from pipeline.records.pushed import PushedRecords, column_of
from pipeline.records.written_levels import level_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_text import (
    FAULTS,
    check_count,
    envelope,
    json_of,
    mend,
    read_body,
    text_form,
)
from pipeline.sources.protocols.line_streams import streams_of
from pipeline.sources.protocols.lines import line_records, posted_lines
from pipeline.sources.protocols.origins import PLAIN, by_event, by_rules

# Where one object may end and the next begin. Within a text such a place gives no two whole objects.
_BORDER: Final = re.compile(r"(?<=\})\s*(?=\{)")
_BLANK: Final = re.compile(r"\s*")
_ORIGIN: Final = ("index", "sourcetype", "source", "host")
NO_DATA, INVALID, NO_EVENT, BLANK_EVENT = 5, 6, 12, 13


class HecRefused(Undecodable):
    """A request that Splunk refuses too. `code`: its number of the error; `event`: which event, from 0."""

    def __init__(self, code: int, message: str, event: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.event = event


class _Event(msgspec.Struct, gc=False):
    event: msgspec.Raw = msgspec.Raw(b"")
    time: Any = None
    host: Any = None
    source: Any = None
    sourcetype: Any = None
    index: Any = None
    fields: dict[str, Any] | None = None


class _DockerLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The event that Docker's driver makes of a line."""

    line: str
    source: str = "stdout"
    tag: str = ""
    attrs: dict[str, str] | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)
_TEXT: Final = msgspec.json.Decoder(str)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_DOCKER: Final = msgspec.json.Decoder(_DockerLine)


def decode_events(body: bytes, hints: Hints) -> Decoded:
    """Events of `/services/collector/event`. The query of a request holds what its events do not say."""
    events = _events(body)
    moments = [event.time for event in events]
    times = [client_times.of_value(moment) for moment in moments]
    distinct = client_times.are_fine(times) and all(map(client_times.has_fraction, moments))
    origins = _origins(events, hints)
    by_origin = {origin: _workload(origin, hints) for origin in set(origins)}
    names = [by_origin[origin] for origin in origins]
    if hints.rules and not hints.workload:
        names = [
            by_event(hints, _facts(origin, event.fields), bytes(event.event), name)
            for origin, event, name in zip(origins, events, names, strict=True)
        ]
    lines: list[str | None] = []
    besides: list[Mapping[str, Any] | None] = []
    raws: list[str | None] = []
    for number, (event, time) in enumerate(zip(events, times, strict=True)):
        line, beside = _line_and_fields(event, number)
        lines.append(line)
        besides.append(beside)
        raws.append(_raw_of_object(event, time, number) if line is None else _raw(line, beside, time))
    streams = streams_of(lines, lambda: origins)
    records = PushedRecords(
        [None] * len(events),
        timestamps=column_of(times),
        levels=column_of([_level(event.fields) for event in events]),
        hosts=column_of([origin[3] or None for origin in origins]),
        services=column_of([origin[1] or origin[2] or None for origin in origins]),
        raws=raws,
        workloads=names,
        streams=streams,
        lines_inside=lines if streams is not None and any(besides) else None,
    )
    return Decoded(records=records, distinct=distinct)


def _origins(events: Sequence[_Event], hints: Hints) -> list[tuple[str, ...]]:
    """The values of _ORIGIN of each event. Few combinations occur in one request."""
    values_of_events = [(event.index, event.sourcetype, event.source, event.host) for event in events]
    # Others may not be keys of a dict, or be equal as 1 and true are.
    if set(map(type, chain.from_iterable(values_of_events))) <= {str, NoneType}:
        origins = {values: _origin(values, hints) for values in set(values_of_events)}
        return [origins[values] for values in values_of_events]
    return [_origin(values, hints) for values in values_of_events]


def _origin(values: Sequence[Any], hints: Hints) -> tuple[str, ...]:
    return tuple(
        text_form(value) or hints.query.get(name, "") for name, value in zip(_ORIGIN, values, strict=True)
    )


def decode_raw(body: bytes, hints: Hints) -> Decoded:
    """Lines of `/services/collector/raw`, with host, source and index in the query."""
    lines = posted_lines(body)
    if not lines:
        raise HecRefused(NO_DATA, "the request has no data; send lines")
    origin = tuple(hints.query.get(name, "") for name in _ORIGIN)
    name = by_rules(hints, PLAIN, _facts(origin), _workload(origin, hints))
    return line_records(lines, name, host=origin[3])


def _facts(origin: Sequence[str], fields: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Origin and indexed fields of an event, by name."""
    return {**(fields or {}), **{name: value for name, value in zip(_ORIGIN, origin, strict=True) if value}}


def _workload(origin: Sequence[str], hints: Hints) -> str:
    if hints.workload:
        return workloads.joined_name(hints.workload)
    index, sourcetype, source, host = origin
    return workloads.of_event(index=index, sourcetype=sourcetype, source=source, host=host)


def _events(body: bytes) -> list[_Event]:
    text = body.decode("utf-8", "replace").strip("\ufeff \t\r\n")
    if not text:
        raise HecRefused(NO_DATA, "the request has no data; send events")
    check_count(text.count("}") // 16)  # a bound on the pieces below
    pieces = _BORDER.split(text)
    check_count(len(pieces))
    try:
        return [_EVENT.decode(piece) for piece in pieces]
    except FAULTS:
        return _odd_events(text)


def _odd_events(text: str) -> list[_Event]:
    """Events with a border inside a text, with half surrogate pairs, or with a fault."""
    text = mend(text) or text
    scanner = json.JSONDecoder()
    events: list[_Event] = []
    at = 0
    while at < len(text):
        check_count(len(events) + 1)
        try:
            _, end = scanner.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            raise HecRefused(
                INVALID, f"event {len(events)} of the request is not JSON: {exc}", len(events)
            ) from exc
        try:
            events.append(read_body(_EVENT, text[at:end], f"event {len(events)} of the request"))
        except Undecodable as exc:
            raise HecRefused(INVALID, str(exc), len(events)) from exc
        at = _BLANK.match(text, end).end()  # type: ignore[union-attr] # it matches everywhere
    return events


def _line_and_fields(event: _Event, number: int) -> tuple[str | None, Mapping[str, Any] | None]:
    """The line of an event and what stands beside it. The line is None where the event is no text."""
    data = bytes(event.event)
    start = data[:1]
    if start == b'"':
        line = read_body(_TEXT, data, f"event {number} of the request")
        if not line:
            raise HecRefused(BLANK_EVENT, f"the event field of event {number} is blank; send text", number)
        return line, event.fields
    if start == b"{" and b'"line"' in data:
        try:
            docker = _DOCKER.decode(data)
        except FAULTS:
            return None, event.fields
        tag = {"tag": docker.tag} if docker.tag else {}
        return docker.line, {"stream": docker.source, **tag, **(docker.attrs or {}), **(event.fields or {})}
    if not start or data == b"null":
        raise HecRefused(NO_EVENT, f"event {number} has no event field; send one", number)
    return None, event.fields


def _raw_of_object(event: _Event, time: int | None, number: int) -> str:
    data = bytes(event.event)
    raw = data.decode("utf-8", "replace")
    if not event.fields:
        return raw
    if data[:1] != b"{":
        return envelope(raw, event.fields, time)
    document: dict[str, Any] = read_body(_OBJECT, data, f"event {number} of the request")
    return json_of({**event.fields, **document})


def _raw(line: str, fields: Mapping[str, Any] | None, time: int | None) -> str:
    return envelope(line, fields, time) if fields else line


def _level(fields: Mapping[str, Any] | None) -> str | None:
    return level_of(fields.get("level") or fields.get("severity")) if fields else None
