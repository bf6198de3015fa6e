"""Log documents of other programs as pages that a training reads, without a second copy of them.

index --point in time--> pages --fields, headers, levels--> LEARN_SCHEMA --> sampler, which masks

The messages are those that the pipeline would judge. A page is decoded to columns; where a document holds
another type than text, its page is read document by document. Several pages are parsed together, because a
query costs as much for one.

Invariant: the records do not depend on how many pages are parsed together.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import polars as pl

from pipeline.controller.watchlist import covers
from pipeline.errors import BadInput, SourceUnavailable, TrainingFailed
from pipeline.opensearch import scan
from pipeline.opensearch.client import translate_errors
from pipeline.records.columns import stacked
from pipeline.records.query import Documents, Query
from pipeline.records.schema import LEARN_SCHEMA, raw_frame
from pipeline.records.written_levels import level_of
from pipeline.sources import formats
from pipeline.sources.documents import document_workload_name, text_of, value_at
from pipeline.sources.framing import MAX_RECORD_BYTES, split_text
from pipeline.sources.times import read_times

SAMPLE: Final = 2_000  # messages whose formats are looked for
TOGETHER: Final = 50_000  # documents; six pages or less, which are fewer than a sampler groups at once
TOGETHER_BYTES: Final = 16 << 20  # of their texts; documents of 4 KB are parsed by fewer at once
_READ: Final = frozenset(("timestamp", "level"))  # of the headers
MANY: Final = 100_000  # documents without a message, after which there is none to expect


@dataclass(slots=True)
class _Waiting:
    """Pages that are not parsed yet: a column of text for each path, and the index of each document."""

    texts: list[pl.DataFrame] = field(default_factory=list)
    indices: list[pl.Series] = field(default_factory=list)
    documents: int = 0
    bytes: int = 0

    def add(self, texts: pl.DataFrame, index: pl.Series) -> None:
        self.texts.append(texts)
        self.indices.append(index)
        self.documents += texts.height
        self.bytes += int(texts.estimated_size())


@dataclass(slots=True)
class DocumentReader:
    """Reads the documents of one query. `documents` and `without_message` count those of the frames given.

    `together`: documents that are parsed together; the first page alone tells the formats."""

    client: scan.Client
    query: Query
    arrived: datetime = field(default_factory=lambda: datetime.now(UTC))
    zone: str = "UTC"
    size: int = scan.MAX_SIZE
    together: int = TOGETHER
    documents: int = field(default=0, init=False)
    without_message: int = field(default=0, init=False)
    _formats: tuple[str, ...] = field(default=(), init=False)

    def pages(self) -> Iterator[pl.DataFrame]:
        """Frames (LEARN_SCHEMA) of the records that the query selects; a frame may be empty.

        Raises SourceUnavailable, and TrainingFailed where no document has the field of the message."""
        documents = self._documents
        paths = list(dict.fromkeys((*documents.fields, *documents.workload_fields)))
        waiting = _Waiting()
        for page in scan.pages(
            self.client,
            documents.index,
            query=documents_clause(self.query),
            fields=paths,
            size=self.size,
            ahead=max(1, self.together // self.size),
        ):
            waiting.add(_texts(page, paths), page["_index"])
            if not self.documents or waiting.documents >= self.together or waiting.bytes >= TOGETHER_BYTES:
                yield self._block(waiting)
                waiting = _Waiting()
        if waiting.documents:
            yield self._block(waiting)

    @property
    def _documents(self) -> Documents:
        if self.query.documents is None:
            raise BadInput("the query names no documents; give it an index")
        return self.query.documents

    def _block(self, pages: _Waiting) -> pl.DataFrame:
        """The records of these pages."""
        texts = stacked(pages.texts)
        time, message, level = self._documents.fields
        with_message = texts[message].is_not_null()
        if self._documents.headers and not self.documents:
            self._formats = formats.detect(texts[message].drop_nulls().head(SAMPLE).to_list())
        self.documents += texts.height
        self.without_message += texts.height - int(with_message.sum())
        if self.without_message == self.documents and self.documents >= MANY:
            raise TrainingFailed(self.explain_missing())
        index = pl.concat(pages.indices, rechunk=True)
        heights = [page.height for page in pages.texts]
        frame = pl.DataFrame(
            {
                "message": texts[message].str.strip_chars_end(),
                "level": _levels(texts[level]),
                "workload": _workloads(texts, self._documents.workload_fields, index),
                "timestamp": read_times(texts[time], arrived=self.arrived, zone=self.zone),
                "page": np.repeat(np.arange(len(heights)), heights),
            }
        ).filter(with_message)
        frame = self._parsed(_cut(frame), self._formats)
        return _selected(frame, self.query)

    def _parsed(self, frame: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
        """The messages without their headers, which fill what a document does not say."""
        if not names or frame.is_empty():
            return frame.with_columns(pl.col("message").alias("raw"))
        raw = raw_frame(frame["message"]).with_columns(frame["level"], frame["timestamp"])
        if frame["timestamp"].null_count():
            # A line without a time takes that of the line before it, within its page.
            raw = raw.with_columns(frame["page"].cast(pl.String).alias("source"))
        parsed = formats.parse(raw, names, arrived=self.arrived, zone=self.zone, headers=_READ)
        return parsed.select(
            "message", "level", pl.when(pl.col("timed").fill_null(value=True)).then("timestamp"), "raw"
        ).with_columns(frame["workload"])

    def explain_missing(self) -> str:
        """A sentence for people."""
        names = self._documents
        return (
            f"no document of {names.index} has the field {names.fields[1]!r} of the message; name the fields "
            "of time, message and level in opensearch_fields"
        )


def count_documents(client: scan.Client, query: Query) -> int:
    """How many documents the server's part of a query selects. Raises BadInput for a query that the server
    refuses, SourceUnavailable."""
    documents = query.documents
    if documents is None:
        return 0
    try:
        with translate_errors(f"{documents.index} cannot be read", SourceUnavailable):
            answer = client.count(index=documents.index, body={"query": documents_clause(query)})
    except SourceUnavailable as exc:
        if getattr(exc.__cause__, "status_code", None) == 400:
            raise BadInput(f"OpenSearch refuses the query ({exc}); correct --query or train_source") from exc
        raise
    return int(answer["count"])


def documents_clause(query: Query) -> dict[str, Any]:
    """The server's part of a query: its clause and its span."""
    documents = query.documents
    wanted: list[dict[str, Any]] = []
    if documents is not None and documents.query:
        wanted.append(json.loads(documents.query))
    span = {
        name: _ms(moment)
        for name, moment in (
            ("gte", query.since),
            ("lt", query.until and query.until + timedelta(microseconds=999)),
        )
        if moment is not None
    }
    if span and documents is not None:
        wanted.append({"range": {documents.fields[0]: span | {"format": "epoch_millis"}}})
    return {"bool": {"filter": wanted}}


def _ms(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _selected(frame: pl.DataFrame, query: Query) -> pl.DataFrame:
    blank = (name for name in LEARN_SCHEMA if name not in frame.columns)
    frame = frame.with_columns(pl.lit(None).alias(name) for name in blank)
    keep = query.selects()
    documents = query.documents
    if documents is not None and documents.level_not:
        keep &= ~pl.col("level").is_in(list(documents.level_not)).fill_null(value=False)
    if documents is not None and documents.workloads:
        names = [name for name in frame["workload"].unique() if covers(documents.workloads, name)]
        keep &= pl.col("workload").is_in(names)
    return frame.filter(keep).select([pl.col(name).cast(kind) for name, kind in LEARN_SCHEMA.items()])


def _levels(words: pl.Series) -> pl.Series:
    found = words.unique().drop_nulls().to_list()
    return words.replace_strict(
        found, [level_of(word) for word in found], default=None, return_dtype=pl.String
    )


def _workloads(texts: pl.DataFrame, paths: Sequence[str], index: pl.Series) -> pl.Series:
    parts = [pl.when(pl.col(path) != "").then(pl.col(path)) for path in paths]
    joined = pl.concat_str(parts, separator="/", ignore_nulls=True) if parts else pl.lit("")
    names = texts.select(pl.when(joined != "").then(joined).otherwise(index)).to_series()
    found = names.unique().to_list()
    return names.replace_strict(
        found, [document_workload_name(name) for name in found], return_dtype=pl.String
    )


def _cut(frame: pl.DataFrame) -> pl.DataFrame:
    """A message longer than a record is several records."""
    if not (frame["message"].str.len_bytes() > MAX_RECORD_BYTES).any():
        return frame
    pieces = pl.Series("message", [list(split_text(text)) for text in frame["message"]])
    return frame.with_columns(pieces).explode("message", empty_as_null=True)


def _texts(page: pl.DataFrame, paths: Sequence[str]) -> pl.DataFrame:
    """A column of text for each path."""
    sources = page["_source"].to_list()
    columns = {path: [text_of(value_at(one, path)) for one in sources] for path in paths}
    return pl.DataFrame({path: pl.Series(texts, dtype=pl.String) for path, texts in columns.items()})
