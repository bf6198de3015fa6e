"""The records of an OTLP request by column, whichever encoding they came in.

The raw text of a record is its body, or compact JSON of all that it says where it says more: severity,
attributes, trace and span. Session keys are found in that text. A record without a severity is a line that a
collector has read from a file; stage ingest parses it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from pipeline.records.levels import level_of
from pipeline.records.pushed import PushedRecords, column_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.joining import continuations, heads, joined_text
from pipeline.sources.protocols.json_text import check_count, envelope, json_of, text_form
from pipeline.sources.protocols.origins import RESOURCE, by_rules

# Four numbers per level, from 1; numbers outside stand for no severity.
_OF_NUMBER: Final = (
    None,
    *(level for level in ("trace", "debug", "info", "warning", "error", "fatal") for _ in range(4)),
)
_NUMBERS: Final = len(_OF_NUMBER)
_MESSAGE_KEYS: Final = ("message", "msg", "log", "event")
_STACK: Final = "exception.stacktrace"
# Names that the raw text gives to fields of the record itself.
RESERVED: Final = frozenset({"body", "severity", "event_name", "trace_id", "span_id"})
_Column = list[str | None] | None
_PLACES: Final = ("log.file.path", "log.iostream", "container.id")  # attributes that part streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The columns that a resource fills for all its records."""

    identity: str  # all its attributes
    workload: str
    host: str | None
    process: str | None
    service: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFacts:
    """A resource by its attributes alone, whoever sends it."""

    texts: Mapping[str, str]  # of all attributes
    origin: Origin  # where nobody chooses another workload

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "ResourceFacts":
        texts = {key: text_form(value) for key, value in attributes.items()}
        hosts = (texts.get(key) for key in ("host.name", "k8s.node.name", "k8s.pod.name"))
        origin = Origin(
            identity=json_of(texts),
            workload=workloads.of_resource(texts),
            host=next(filter(None, hosts), None),
            process=texts.get("process.pid") or None,
            service=texts.get("service.name") or texts.get("k8s.container.name") or None,
        )
        return cls(texts=texts, origin=origin)


class Entry(NamedTuple):
    """One record, its values as Python has them. `trace` and `span` are in hex, "" for none."""

    origin: Origin
    scope: str
    nanos: int | str | None
    number: int
    severity: str
    body: Any
    attributes: Mapping[str, Any]
    trace: str
    span: str
    event: str


@dataclass(slots=True)
class Collected:
    """The records of a request, in its order."""

    hints: Hints
    entries: list[Entry] = field(default_factory=list)
    _origins: int = 0
    _expected: int = 0

    def origin(self, facts: ResourceFacts) -> Origin:
        """Of one more resource. Raises Undecodable for too many."""
        self._origins += 1
        check_count(self._origins)
        origin = facts.origin
        if self.hints.workload:
            return replace(origin, workload=workloads.joined_name(self.hints.workload))
        if self.hints.rules:
            named = by_rules(self.hints, RESOURCE, facts.texts, origin.workload)
            return replace(origin, workload=named)
        return origin

    def expect(self, records: int) -> None:
        """Raises Undecodable where so many records more would be too many."""
        self._expected += records
        check_count(self._expected)

    def decoded(self) -> Decoded:
        """All records, stack traces joined."""
        entries = self.entries
        times = [client_times.of_nanoseconds(entry.nanos) for entry in entries]
        distinct = client_times.are_fine(times)
        # A record with a severity was made as one.
        stated = all(entry.number or entry.severity for entry in entries)
        texts = [None if stated or not _is_line(entry) else entry.body for entry in entries]
        found = {} if stated else continuations(texts, lambda i: _stream(entries[i]))
        for head, others in found.items():
            entries[head] = entries[head]._replace(body=joined_text(texts, head, others))
        if found:
            rows = heads(len(entries), found)
            entries, times = [entries[i] for i in rows], [times[i] for i in rows]
            texts = [texts[i] for i in rows]
        messages: list[str | None] = []
        raws: list[str | None] = []
        levels: list[str | None] = []
        for entry, time, line in zip(entries, times, texts, strict=True):
            message, raw = _line_and_raw(entry, time) if line is not None else _message_and_raw(entry)
            messages.append(message)
            raws.append(raw)
            number = entry.number
            levels.append(level_stated(number, entry.severity))
        hosts, processes, services, names = self._of_origins(entries)
        return Decoded(
            records=PushedRecords(
                messages,
                timestamps=column_of(times),
                levels=column_of(levels),
                hosts=hosts,
                processes=processes,
                services=services,
                raws=column_of(raws),
                workloads=names,
            ),
            distinct=distinct,
        )

    def _of_origins(self, entries: Sequence[Entry]) -> tuple[_Column, _Column, _Column, list[str]]:
        """Hosts, processes, services and workloads."""
        count = len(entries)
        if count and self._origins == 1 and (service := entries[0].origin.service):
            # One resource and its own service: most requests.
            origin = entries[0].origin
            return (
                [origin.host] * count if origin.host is not None else None,
                [origin.process] * count if origin.process is not None else None,
                [service] * count,
                [origin.workload] * count,
            )
        return (
            column_of([entry.origin.host for entry in entries]),
            column_of([entry.origin.process for entry in entries]),
            column_of([entry.origin.service or entry.scope or None for entry in entries]),
            [entry.origin.workload for entry in entries],
        )


@dataclass(slots=True)
class StatedRecords:
    """The columns of a request whose records all have a severity: none is a line or a part of a stack trace.

    Equal to those of `Collected`, which keeps each record until all are there."""

    messages: list[str | None] = field(default_factory=list)
    raws: list[str | None] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    nanos: list[int | str | None] = field(default_factory=list)
    origins: list[tuple[Origin, str, int]] = field(default_factory=list)  # resource, scope, number of records

    def add(self, body: Any, severity: str, number: int, event: str, fields: dict[str, Any]) -> None:
        """`fields`: as of `stated_fields`, with attributes, trace and span."""
        message, raw = _message_and_json(body, event, fields)
        self.messages.append(message)
        self.raws.append(raw)
        self.levels.append(level_stated(number, severity))

    def decoded(self) -> Decoded:
        times = [client_times.of_nanoseconds(nanos) for nanos in self.nanos]

        def spread(values: Sequence[str | None]) -> _Column:
            """The value of each run of records, for each record."""
            if not any(values):
                return None
            return [value for value, (*_, n) in zip(values, self.origins, strict=True) for _ in range(n)]

        return Decoded(
            records=PushedRecords(
                self.messages,
                timestamps=column_of(times),
                levels=column_of(self.levels),
                hosts=spread([origin.host for origin, *_ in self.origins]),
                processes=spread([origin.process for origin, *_ in self.origins]),
                services=spread([origin.service or scope or None for origin, scope, _ in self.origins]),
                raws=column_of(self.raws),
                workloads=[origin.workload for origin, _, n in self.origins for _ in range(n)],
            ),
            distinct=client_times.are_fine(times),
        )


def level_stated(number: int, severity: str) -> str | None:
    """The level of a severity, by its number first."""
    by_number = _OF_NUMBER[number] if 0 < number < _NUMBERS else None
    return by_number or (level_of(severity) if severity else None)


def _stream(entry: Entry) -> Hashable:
    places = (text_form(entry.attributes.get(key)) for key in _PLACES)
    return (entry.origin.identity, entry.scope, *places)


def _is_line(entry: Entry) -> bool:
    """True for a line as a collector read it: without a severity, nobody has parsed it."""
    stated = entry.number or entry.severity or entry.event or _STACK in entry.attributes
    return isinstance(entry.body, str) and bool(entry.body) and not stated


def _line_and_raw(entry: Entry, time: int | None) -> tuple[None, str]:
    """Stage ingest parses the line, so that its message is not known here."""
    line = entry.body.rstrip("\r\n")
    beside = _with_fields({}, entry.attributes, entry.trace, entry.span)
    return None, envelope(line, beside, time) if beside else line


def _message_and_raw(entry: Entry) -> tuple[str, str | None]:
    """The raw text is None where it is the message."""
    _, _, _, number, severity, body, attributes, trace, span, event = entry
    stated = severity or number
    if not (attributes or trace or span or stated or event):
        text = body if isinstance(body, str) else _text_of_body(body)
        message = text.rstrip("\r\n")
        raw = text if isinstance(body, str) or body is None else json_of(body)
        return message, None if raw == message else raw
    return _message_and_json(
        body, event, _with_fields(stated_fields(body, stated, event), attributes, trace, span)
    )


def stated_fields(body: Any, stated: str | int, event: str) -> dict[str, Any]:
    """The first members of a record's raw text."""
    fields: dict[str, Any] = {} if body is None else {"body": body}
    if stated:
        fields["severity"] = stated
    if event:
        fields["event_name"] = event
    return fields


def _message_and_json(body: Any, event: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """`fields`: all that the record says."""
    text = body if isinstance(body, str) else _text_of_body(body) or event
    message = text.rstrip("\r\n")
    if _STACK in fields:
        stack = fields[_STACK]
        if isinstance(stack, str) and stack and stack not in message:
            message = f"{message}\n{stack.rstrip()}" if message else stack.rstrip()
    raw = json_of(fields)
    return message or (raw if body is None else ""), raw


def _with_fields(
    fields: dict[str, Any], attributes: Mapping[str, Any], trace: str, span: str
) -> dict[str, Any]:
    """And attributes, trace and span."""
    add_attributes(fields, attributes)
    if trace:
        fields["trace_id"] = trace
    if span:
        fields["span_id"] = span
    return fields


def add_attributes(fields: dict[str, Any], attributes: Mapping[str, Any]) -> None:
    """Adds the attributes of a record to the fields of its raw text."""
    if RESERVED.isdisjoint(attributes):
        fields.update(attributes)
    else:
        fields |= {f"attributes.{k}" if k in RESERVED else k: value for k, value in attributes.items()}


def _text_of_body(body: Any) -> str:
    if isinstance(body, dict):
        for key in _MESSAGE_KEYS:
            if isinstance(value := body.get(key), str) and value:
                return value
    return text_form(body)
