"""The records of an OTLP request by column, whichever encoding they came in.

The raw text of a record is its body, or compact JSON of all that it says where it says more: severity,
attributes, trace and span. Session keys are found in that text. A record without a severity is a line that a
collector has read from a file; stage ingest parses it.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from pipeline.records.pushed import PushedRecords, column_of
from pipeline.records.written_levels import level_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.json_text import check_count, envelope, json_of, text_form
from pipeline.sources.protocols.line_streams import streams_of
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
    """The records of a request by column, in its order."""

    hints: Hints
    messages: list[str | None] = field(default_factory=list)
    raws: list[str | None] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    services: list[str | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    lines: list[str | None] = field(default_factory=list)  # of records that are a line
    streams: list[Hashable] = field(default_factory=list)  # of each record up to the last line
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

    def add(self, entry: Entry) -> None:
        """One more record."""
        origin, scope, nanos, number, severity, body, attributes, trace, span, event = entry
        stated = severity or number
        fields: dict[str, Any] = {}
        if stated or event or not isinstance(body, str) or _STACK in attributes:
            if body is not None:
                fields["body"] = body
            if stated:
                fields["severity"] = stated
            if event:
                fields["event_name"] = event
            is_line = False
        else:  # nobody has parsed it, so a collector read the line from a file
            is_line = True
        if attributes:
            if not RESERVED.isdisjoint(attributes):
                attributes = {f"attributes.{k}" if k in RESERVED else k: v for k, v in attributes.items()}
            fields.update(attributes)
        if trace:
            fields["trace_id"] = trace
        if span:
            fields["span_id"] = span
        time = client_times.of_nanoseconds(nanos)
        self.times.append(time)
        self.origins.append(origin)
        self.services.append(origin.service or scope or None)
        self.levels.append(level_stated(number, severity) if stated else None)
        if is_line:
            line = body.rstrip("\r\n")
            self.streams += [None] * (len(self.lines) - len(self.streams))
            self.streams.append((origin.identity, scope, *map(attributes.get, _PLACES)))
            self.lines.append(body)
            self.messages.append(None)
            self.raws.append(envelope(line, fields, time) if fields else line)
            return
        self.lines.append(None)
        message, raw = _message_and_raw(body, event, fields)
        self.messages.append(message)
        self.raws.append(raw)

    def decoded(self) -> Decoded:
        """All records."""
        streams = None
        if self.streams:
            keys = [*self.streams, *[None] * (len(self.lines) - len(self.streams))]
            streams = streams_of(self.lines, lambda: keys)
        return Decoded(
            records=PushedRecords(
                self.messages,
                timestamps=column_of(self.times),
                levels=column_of(self.levels),
                hosts=column_of([origin.host for origin in self.origins]),
                processes=column_of([origin.process for origin in self.origins]),
                services=column_of(self.services),
                raws=column_of(self.raws),
                workloads=[origin.workload for origin in self.origins],
                streams=streams,
                lines_inside=None if streams is None or self.lines == self.raws else self.lines,
            ),
            distinct=client_times.are_fine(self.times),
        )


def level_stated(number: int, severity: str) -> str | None:
    """The level of a severity, by its number first."""
    by_number = _OF_NUMBER[number] if 0 < number < _NUMBERS else None
    return by_number or (level_of(severity) if severity else None)


def _message_and_raw(body: Any, event: str, fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message, and JSON of all that the record says; None where it says nothing else."""
    text = body if isinstance(body, str) else _text_of_body(body) or event
    message = text.rstrip("\r\n")
    stack = fields.get(_STACK)
    if isinstance(stack, str) and stack and stack not in message:
        message = f"{message}\n{stack.rstrip()}" if message else stack.rstrip()
    if fields.keys() <= {"body"}:
        raw = json_of(body) if fields else ""
        return message, None if raw == message else raw
    raw = json_of(fields)
    return message or (raw if body is None else ""), raw


def _text_of_body(body: Any) -> str:
    if isinstance(body, dict):
        for key in _MESSAGE_KEYS:
            if isinstance(value := body.get(key), str) and value:
                return value
    return text_form(body)
