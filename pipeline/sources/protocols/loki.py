"""Loki's push: JSON of both versions, and protobuf in a raw snappy block.

The raw text of a record is its line. Stage ingest parses it, but its time is that of the entry. Structured
metadata stands around the line, in the JSON that Fluent Bit writes, so that session keys are found in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import cramjam
import msgspec
from google.protobuf.message import DecodeError

from pipeline.records.pushed import LATEST, PushedRecords, column_of
from pipeline.records.written_levels import level_of
from pipeline.sources.protocols import client_times, workloads
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.sources.protocols.json_text import check_count, envelope, read_body, text_form
from pipeline.sources.protocols.labels import parsed_labels
from pipeline.sources.protocols.loki_messages import PushRequest
from pipeline.sources.protocols.nested_fields import check_nested
from pipeline.sources.protocols.origins import STREAM, by_rules

LOKI_MAX_BYTES: Final = 20 << 20  # of a snappy block when it is unpacked
_MOST_PAIRS: Final = 1_000
_ENTRIES: Final = (1, 2)  # streams, entries
_LEVELS: Final = ("detected_level", "level", "severity", "severity_text")
_HOSTS: Final = ("host", "hostname", "node_name", "instance")
_SERVICES: Final = ("service_name", "app", "container", "job")


class _Value(msgspec.Struct, array_like=True, gc=False):
    time: int | str
    line: str
    metadata: dict[str, Any] | None = None


class _Entry(msgspec.Struct, gc=False):
    ts: int | str | None = None
    line: str = ""


class _Stream(msgspec.Struct, gc=False):
    stream: dict[str, Any] | None = None
    values: list[_Value] | None = None
    labels: str | None = None  # of version 0, with the entries
    entries: list[_Entry] | None = None


class _Push(msgspec.Struct, gc=False):
    streams: list[_Stream] | None = None


_PUSH: Final = msgspec.json.Decoder(_Push)


class _Collected:
    """The entries of a request, in its order: one item a record in each list but `labels`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.times: list[int | None] = []
        self.metadata: list[Mapping[str, Any] | None] = []
        self.streams: list[int] = []
        self.labels: list[Mapping[str, str]] = []

    def add(
        self,
        labels: Mapping[str, str],
        lines: Iterable[str],
        times: Iterable[int | None],
        metadata: Iterable[Mapping[str, Any] | None],
    ) -> None:
        """The entries of one stream."""
        before = len(self.lines)
        self.lines += lines
        check_count(len(self.lines))
        self.times += times
        self.metadata += metadata
        self.streams += [len(self.labels)] * (len(self.lines) - before)
        self.labels.append(labels)


def decode_push(body: bytes, hints: Hints) -> Decoded:
    """By the content type: JSON, or protobuf for any other. The body of protobuf is a snappy block."""
    if hints.content_type.partition(";")[0].strip() == "application/json":
        return decode_push_json(body, hints)
    return decode_push_protobuf(body, hints)


def decode_push_json(body: bytes, hints: Hints) -> Decoded:
    """Version 1 (`stream`, `values`) or version 0 (`labels`, `entries`)."""
    found = _Collected()
    for stream in read_body(_PUSH, body, "the Loki push").streams or ():
        if stream.labels is not None:
            labels = _labels(stream.labels)
        else:
            labels = {key: text_form(value) for key, value in (stream.stream or {}).items()}
        if values := stream.values:
            found.add(
                labels,
                [value.line for value in values],
                _nanoseconds([value.time for value in values]),
                [value.metadata or None for value in values],
            )
        if entries := stream.entries:
            times = [client_times.of_iso(e.ts) if isinstance(e.ts, str) else None for e in entries]
            found.add(labels, [entry.line for entry in entries], times, [None] * len(entries))
    return _decoded(found, hints)


def decode_push_protobuf(body: bytes, hints: Hints) -> Decoded:
    """A `logproto.PushRequest` in a raw snappy block."""
    unpacked = _unpacked(body)
    check_nested(unpacked, _ENTRIES)
    try:
        request = PushRequest.FromString(unpacked)
    except DecodeError as exc:
        raise Undecodable(f"the Loki push is not protobuf of PushRequest: {exc}") from exc
    check_count(len(request.streams))
    check_count(sum(len(stream.entries) for stream in request.streams))
    found = _Collected()
    for stream in request.streams:
        entries = stream.entries
        stamps = [entry.timestamp for entry in entries]
        found.add(
            _labels(stream.labels.decode("utf-8", "replace")),
            [entry.line.decode("utf-8", "replace") for entry in entries],
            _nanoseconds([stamp.seconds * 1_000_000_000 + stamp.nanos for stamp in stamps]),
            [_pairs(entry.metadata) for entry in entries],
        )
    return _decoded(found, hints)


def _unpacked(body: bytes) -> bytes:
    """Raises Undecodable; the announced length is checked before any memory is taken."""
    if not body:
        return b""
    try:
        length = cramjam.snappy.decompress_raw_len(body)
        if length > LOKI_MAX_BYTES:
            raise Undecodable(
                f"the Loki push unpacks to {length:,} bytes; send at most {LOKI_MAX_BYTES:,} at once"
            )
        return bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as exc:
        raise Undecodable(f"the Loki push is no snappy block: {exc}") from exc


def _decoded(found: _Collected, hints: Hints) -> Decoded:
    lines, streams = found.lines, found.streams
    if hints.workload:
        names = [workloads.joined_name(hints.workload)] * len(found.labels)
    else:
        names = [by_rules(hints, STREAM, labels, workloads.of_labels(labels)) for labels in found.labels]
    hosts = [_first(labels, _HOSTS) for labels in found.labels]
    services = [_first(labels, _SERVICES) for labels in found.labels]
    levels = [level_of(_first(labels, _LEVELS)) for labels in found.labels]
    metadata = found.metadata if any(found.metadata) else None
    records = PushedRecords(
        [None] * len(lines),
        timestamps=column_of(found.times),
        levels=_levels(metadata, [levels[stream] for stream in streams]),
        hosts=column_of([hosts[stream] for stream in streams]),
        services=column_of([services[stream] for stream in streams]),
        raws=list(lines) if metadata is None else list(map(_raw, lines, metadata, found.times)),
        workloads=[names[stream] for stream in streams],
        streams=list(streams),
        lines_inside=list(lines) if metadata is not None else None,
    )
    distinct = client_times.are_fine(found.times)
    apart: Sequence[bytes] = ()
    if hints.one_by_one and distinct:
        streams_of = [repr(sorted(labels.items())) for labels in found.labels]
        apart = [
            f"{streams_of[stream]}\0{time}\0{line}".encode("utf-8", "replace")
            for stream, time, line in zip(streams, found.times, lines, strict=True)
        ]
    return Decoded(records=records, distinct=distinct, apart=apart)


def _labels(text: str) -> Mapping[str, str]:
    labels = parsed_labels(text)
    if labels is None:
        raise Undecodable(
            f'the labels {text[:80]!r} of a stream are not readable; send {{name="value", ...}}'
        )
    return labels


def _nanoseconds(values: Sequence[int | str]) -> list[int | None]:
    try:
        times = [int(value) // 1000 for value in values]
    except ValueError:
        return [client_times.of_nanoseconds(value) for value in values]
    # The times of most requests are all in range, and none is 0.
    if times and min(times) > 0 and max(times) < LATEST:
        return list(times)
    return [client_times.of_nanoseconds(value) for value in values]


def _pairs(pairs: Any) -> Mapping[str, str] | None:
    if not pairs:
        return None
    if len(pairs) > _MOST_PAIRS:
        raise Undecodable(
            f"an entry of the Loki push has more than {_MOST_PAIRS:,} pairs of metadata; send fewer"
        )
    return {p.name.decode("utf-8", "replace"): p.value.decode("utf-8", "replace") for p in pairs}


def _first(labels: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _levels(
    metadata: Sequence[Mapping[str, Any] | None] | None, of_streams: list[str | None]
) -> list[str | None] | None:
    if metadata is None:
        return column_of(of_streams)
    own = (level_of(_first(one, _LEVELS)) if one else None for one in metadata)
    return column_of([level or other for level, other in zip(own, of_streams, strict=True)])


def _raw(line: str, metadata: Mapping[str, Any] | None, time: int | None) -> str:
    return envelope(line, metadata, time) if metadata else line
