"""Log documents of other programs as pages that a training reads, without a second copy of them.

index --point in time--> pages --fields, headers, levels--> LEARN_SCHEMA --> sampler, which masks

The messages are those that the pipeline would judge. A page is decoded to columns; where a document holds
another type than text, its page is read document by document. Several pages are parsed together, because a
query costs as much for one. A place names the last document that was read, so a reader that died is followed
by one that goes on behind it.

Invariant: the records do not depend on how many pages are parsed together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
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
from pipeline.records.levels import level_of
from pipeline.records.query import Documents, Query
from pipeline.records.schema import LEARN_SCHEMA, raw_frame
from pipeline.sources import formats
from pipeline.sources.documents import document_workload_name, text_of, value_at
from pipeline.sources.framing import MAX_RECORD_BYTES, split_text
from pipeline.sources.times import read_times
from pipeline.training.checkpoints import Place

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
    """Reads the documents of one query. `place` is behind the last frame that was given.

    `together`: documents that are parsed together; the first page alone tells the formats."""

    client: scan.Client
    query: Query
    place: Place | None = None
    arrived: datetime = field(default_factory=lambda: datetime.now(UTC))
    zone: str = "UTC"
    size: int = scan.MAX_SIZE
    together: int = TOGETHER

    def pages(self) -> Iterator[pl.DataFrame]:
        """Frames (LEARN_SCHEMA) of the records that the query selects; a frame may be empty.

        Raises SourceUnavailable, and TrainingFailed where no document has the field of the message."""
        documents, place = self._documents, self.place
        paths = list(dict.fromkeys((*documents.fields, *documents.workload_fields)))
        decode = _decoder(paths)
        resumed = known = set(place.there) if place else set()
        last = place.after if place else []
        waiting = _Waiting()
        for read in scan.pages(
            self.client,
            documents.index,
            query=documents_clause(self.query),
            fields=paths,
            size=self.size,
            after=None if place is None else scan.at(place.after),
            decode=decode,
            ahead=max(1, self.together // self.size),
        ):
            sort = read["sort"].tail(1).to_list()[0]
            page = scan.without_head(read, resumed)
            if sort != last:
                resumed = set()  # later pages have none of them
            if page.is_empty():
                continue
            known = (known if sort == last else set()) | scan.at_end(page, sort)
            last = sort
            waiting.add(_texts(page, paths), page["_index"])
            first = self.place is None
            if first or waiting.documents >= self.together or waiting.bytes >= TOGETHER_BYTES:
                yield self._block(waiting, last, known)
                waiting = _Waiting()
        if waiting.documents:
            yield self._block(waiting, last, known)

    @property
    def _documents(self) -> Documents:
        if self.query.documents is None:
            raise BadInput("the query names no documents; give it an index")
        return self.query.documents

    def _block(self, pages: _Waiting, sort: list[int], there: Set[tuple[str, str]]) -> pl.DataFrame:
        """The records of these pages; moves the place."""
        before = self.place or Place(after=[], there=[])
        texts = stacked(pages.texts)
        time, message, level = self._documents.fields
        with_message = texts[message].is_not_null()
        missing = before.without_message + texts.height - int(with_message.sum())
        names = tuple(before.formats)
        if self._documents.headers and not before.documents:
            names = formats.detect(texts[message].drop_nulls().head(SAMPLE).to_list())
        self.place = Place(
            after=sort,
            there=sorted(there),
            formats=list(names),
            documents=before.documents + texts.height,
            without_message=missing,
        )
        if missing == self.place.documents and missing >= MANY:
            raise TrainingFailed(self.without_message())
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
        frame = self._parsed(_cut(frame), names)
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

    def without_message(self) -> str:
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
    blank = {"pattern_id": pl.UInt64, "template_id": pl.Int64, "anomalous": pl.Boolean}
    frame = frame.with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in blank.items())
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


# ---- fields of documents --------------------------------------------------------------------------


def _decoder(paths: Sequence[str]) -> scan.Decode:
    try:
        decode = scan.typed(_schema(paths))
    except ValueError:  # a field is also the folder of another one
        return scan.loose

    def decoded(text: str) -> pl.DataFrame:
        try:
            return decode(text)
        except pl.exceptions.ComputeError:
            return scan.loose(text)

    return decoded


def _shapes(path: str) -> Iterator[tuple[str, ...]]:
    """The ways in which a source may hold a dotted path, in the order of `value_at`."""
    yield (path,)
    for cut in (i for i, c in enumerate(path) if c == "."):
        for inner in _shapes(path[cut + 1 :]):
            yield (path[:cut], *inner)


def _schema(paths: Sequence[str]) -> Mapping[str, Any]:
    tree: dict[str, Any] = {}
    for path in paths:
        for *folders, leaf in _shapes(path):
            node = tree
            for name in folders:
                node = node.setdefault(name, {})
                if not isinstance(node, dict):
                    raise ValueError(path)
            if isinstance(node.get(leaf), dict):
                raise ValueError(path)
            node[leaf] = None
    return _types(tree)


def _types(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: pl.String if inner is None else pl.Struct(_types(inner)) for name, inner in tree.items()}


def _texts(page: pl.DataFrame, paths: Sequence[str]) -> pl.DataFrame:
    """A column of text for each path."""
    source = page["_source"]
    if source.dtype == pl.Object:
        rows = {path: [text_of(value_at(one, path)) for one in source] for path in paths}
        return pl.DataFrame({path: pl.Series(texts, dtype=pl.String) for path, texts in rows.items()})
    frame = source.struct.unnest()
    columns = []
    for path in paths:
        ways = []
        for first, *inner in _shapes(path):
            way = pl.col(first)
            for name in inner:
                way = way.struct.field(name)
            ways.append(way)
        columns.append(pl.coalesce(ways).str.replace_all("\0", "\\x00", literal=True).alias(path))
    return frame.select(columns)
