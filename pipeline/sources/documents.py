"""Documents of other programs as records. Every document becomes a record, whatever its fields hold.

A message that is no text becomes JSON. A document without a message becomes its own message. An unreadable
time is null, and ingest replaces null by the time of arrival."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import polars as pl

from pipeline.opensearch.scan import as_text
from pipeline.records.batch import MAX_NAME, as_workload_name, digest
from pipeline.records.schema import RAW_SCHEMA, with_missing_columns
from pipeline.records.written_levels import level_of
from pipeline.settings import Settings
from pipeline.sources.framing import split_text
from pipeline.sources.protocols.json_text import at_path
from pipeline.sources.times import read_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fields of time, message, level and workload. `a.b` is the key "a.b" or the `b` of `a`."""

    time: str
    message: str
    level: str
    workload: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """From the settings."""
        time, message, level = settings.opensearch.fields
        return cls(time=time, message=message, level=level, workload=settings.opensearch.workload_fields)

    @property
    def fields(self) -> list[str]:
        """The fields that a poll fetches."""
        return list(dict.fromkeys((self.time, self.message, self.level, *self.workload)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """A hit of a search. `number` is the 63-bit digest of index and `_id`."""

    index: str
    id: str
    number: int
    seq: int
    source: Mapping[str, Any]


def document_number(index: str, doc_id: str) -> int:
    """63 bits, because stores hold a signed `line`. 10 million documents collide with a chance of 1 in
    200,000."""
    return int(digest(index, doc_id), 16) >> 1


def value_at(source: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted path, None when there is none; a list of one is its element."""
    found = at_path(source, path)
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def text_of(value: Any) -> str | None:
    """A value as text that can be stored, None when there is none."""
    text = as_text(value)
    return None if text is None else text.replace("\0", "\\x00")


def message_of(source: Mapping[str, Any], layout: Layout) -> str | None:
    """The message as text, None when the document has none."""
    return text_of(value_at(source, layout.message))


def document_workload(document: SourceDocument, layout: Layout) -> str:
    """The values of the workload fields joined by /; the index if all are missing."""
    parts = [text_of(value_at(document.source, name)) for name in layout.workload]
    return document_workload_name("/".join(part for part in parts if part) or document.index)


def document_workload_name(name: str) -> str:
    """A name from elsewhere as that of a workload: printable and bounded."""
    name = as_workload_name(name)
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 17]}~{digest(name)}"


def document_records(
    documents: Sequence[SourceDocument],
    messages: Sequence[str],
    layout: Layout,
    *,
    arrived: datetime,
    zone: str,
) -> pl.DataFrame:
    """RAW_SCHEMA, in the order of the documents; a message longer than a record becomes several records."""
    times = read_times(
        pl.Series([text_of(value_at(d.source, layout.time)) for d in documents], dtype=pl.String),
        arrived=arrived,
        zone=zone,
    ).to_list()
    rows: list[tuple[str, int, int, datetime | None, str | None]] = []
    for document, text, moment in zip(documents, messages, times, strict=True):
        level = level_of(value_at(document.source, layout.level))
        message = text.rstrip()  # trailing blanks would make a second pattern
        lines = message.count("\n") + 1
        for piece in split_text(message):
            rows.append((piece, document.number, lines, moment, level))
            lines = 0
    raw, line, lines_, timestamp, levels = zip(*rows, strict=True)
    frame = pl.DataFrame(
        {"raw": raw, "line": line, "lines": lines_, "timestamp": timestamp, "level": levels, "message": raw},
        schema={n: RAW_SCHEMA[n] for n in ("raw", "line", "lines", "timestamp", "level", "message")},
    )
    return with_missing_columns(frame)
