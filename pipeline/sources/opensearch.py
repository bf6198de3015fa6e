"""Polls log indices of an OpenSearch that other programs write: every document becomes a record, once.

The poll follows the order of writing: each shard numbers its writes (`_seq_no`). Times of documents need no
order. The cursor (`dedup_window`) moves in the step that accepts the batch, so a document is accepted once,
also after kill -9.

A late write becomes visible after a later write of its shard. The poll finds late writes of at most 60 s and
200 writes (`dedup_window.OVERLAP_S`, `ALWAYS`). With OpenSearch's default refresh a write is late by a second
and a few writes.

A rewritten document (same `_id`) among the last 10,000 documents is skipped. An older one becomes a new
record with the same record id: OpenSearch replaces the record, Parquet stores both. An index that is created
anew, restored from a snapshot or reindexed is a new index and is read."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.errors import BadSetting, CursorMoved, SourceUnavailable
from pipeline.opensearch import scan
from pipeline.opensearch.client import opensearch_client, translate_errors
from pipeline.opensearch.dedup_window import AcceptedDocument, DedupWindow
from pipeline.records.batch import Batch, Purpose, digest, utc_now
from pipeline.records.delivery import Accepted, Full
from pipeline.settings import Settings
from pipeline.sources.documents import (
    Layout,
    SourceDocument,
    document_number,
    document_records,
    document_workload,
    message_of,
    text_of,
)

POLL_S: Final = 5.0  # between two polls once all was read: OpenSearch shows new documents after 1 s at best
_CLAUSES: Final = 500  # shards asked for at once; a query may have 1,024 clauses
_TEXTS_AT_ONCE: Final = 200  # documents without a message that one request fetches

# Puts a batch in and moves the cursor with it: Producer.accept has this shape.
Accept = Callable[..., Accepted | Full]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolledBatch:
    """Documents of one workload that one accept takes together with `cursor`.

    The batch id derives from the documents, so the ledger recognises a repeated batch as a duplicate.
    """

    records: pl.DataFrame  # RAW_SCHEMA; `line` is the 63-bit digest of index and `_id`
    workload: str
    batch_id: str
    source: str
    source_key: str
    cursor: str
    documents: int
    without_message: int
    without_time: int

    def batch(self, *, arrived: datetime, zone: str) -> Batch:
        """The batch for the ledger."""
        return Batch(
            batch_id=self.batch_id,
            workload=self.workload,
            source=self.source,
            source_key=self.source_key,
            purpose=Purpose.SCORE,
            arrived=arrived,
            formats=(),
            zone=zone,
            records=self.records,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    index: str
    number: int
    key: str  # "<index uuid>/<number>": an index created anew under the same name has another uuid


class Poller:
    """Reads what is new in `settings.opensearch.source`. Not thread-safe."""

    def __init__(
        self,
        client: scan.Client,
        settings: Settings,
        *,
        clock: Callable[[], datetime] = utc_now,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        """`pulse` is called with every answer: pages without new documents are progress too."""
        if settings.opensearch.source is None:
            raise BadSetting("no index is named to read from; set opensearch_source, such as app-logs-*")
        self.client = client
        self.settings = settings
        self.clock = clock
        self.pulse = pulse
        self.pattern = settings.opensearch.source
        self.layout = Layout.of(settings)
        self.source = f"opensearch:{self.pattern}"
        self.source_key = digest(self.source)
        self.cursor_key = digest("cursor", self.source)
        # Cursor and window after the last whole poll. The window forgets old entries that the cursor still
        # has.
        self._settled: tuple[str, DedupWindow] | None = None

    def poll(self, cursor: str | None) -> Iterator[PolledBatch]:
        """Batches of all documents that are new since `cursor`.

        The caller accepts each batch before it asks for the next. A caller that cannot drops the iterator and
        polls again from the cursor of the last accepted batch. Raises SourceUnavailable (also when no index
        matches the pattern) and BadPayload for a cursor of another source."""
        window = (
            self._settled[1] if self._settled and self._settled[0] == cursor else DedupWindow.unpack(cursor)
        )
        self._settled = None
        shards = self._shards()
        window.keep({shard.key for shard in shards})
        last = cursor
        for shard in self._moved(shards, window):
            for piece in self._read(shard, window):
                last = piece.cursor
                yield piece
        if last is not None:
            self._settled = (last, window)

    def _now(self) -> int:
        return int(self.clock().timestamp())

    def _shards(self) -> list[_Shard]:
        wanted = {"filter_path": "*.settings.index.uuid,*.settings.index.number_of_shards"}
        with translate_errors(f"{self.pattern} cannot be read", SourceUnavailable):
            found = self.client.indices.get(index=self.pattern, params=wanted)
        if not found:
            raise SourceUnavailable(
                f"no index is called {self.pattern} yet; it is read as soon as there is one, or correct "
                "opensearch_source"
            )
        shards = []
        for name, entry in sorted(found.items()):
            facts = entry["settings"]["index"]
            shards += [
                _Shard(index=name, number=n, key=f"{facts['uuid']}/{n}")
                for n in range(int(facts["number_of_shards"]))
            ]
        return shards

    def _moved(self, shards: Sequence[_Shard], window: DedupWindow) -> list[_Shard]:
        """Shards with documents past their place; most indices of a long-lived pattern have none."""
        moved: list[_Shard] = []
        for number in sorted({shard.number for shard in shards}):
            group = [shard for shard in shards if shard.number == number]
            for at in range(0, len(group), _CLAUSES):
                some = group[at : at + _CLAUSES]
                named = self._with_news(number, some, window)
                moved += [shard for shard in some if shard.index in named]
        return sorted(moved, key=lambda shard: (shard.index, shard.number))

    def _with_news(self, number: int, shards: Sequence[_Shard], window: DedupWindow) -> set[str]:
        clauses = [
            {"bool": {"filter": [{"term": {"_index": s.index}}, _past(window.place(s.key))]}} for s in shards
        ]
        body = {
            "size": 0,
            "track_total_hits": False,
            "query": {"bool": {"should": clauses, "minimum_should_match": 1}},
            "aggs": {"index": {"terms": {"field": "_index", "size": len(shards)}}},
        }
        params = {"preference": f"_shards:{number}", "allow_partial_search_results": "false"}
        with translate_errors(f"{self.pattern} cannot be read", SourceUnavailable):
            answer = self.client.search(index=self.pattern, body=body, params=params)
        self.pulse()
        return {bucket["key"] for bucket in answer["aggregations"]["index"]["buckets"]}

    def _read(self, shard: _Shard, window: DedupWindow) -> Iterator[PolledBatch]:
        """Batches of the shard's new documents. Places move with the last batch of a page."""
        view, upto = self._now(), -1
        for page in scan.pages(
            self.client,
            shard.index,
            query=_past(window.place(shard.key)),
            fields=self.layout.fields,
            preference=f"_shards:{shard.number}",
        ):
            self.pulse()
            upto = page["sort"][-1][0]
            fresh: dict[int, SourceDocument] = {}
            for index, doc_id, sort, source in page.iter_rows():
                number = document_number(index, doc_id)
                if not window.recognises(number, AcceptedDocument(shard.key, sort[0], view)):
                    fresh[number] = SourceDocument(
                        index=index, id=doc_id, number=number, seq=sort[0], source=source
                    )
            parts = list(self._parts(list(fresh.values())))
            for n, (workload, documents, messages, missing) in enumerate(parts, start=1):
                window.add({d.number: AcceptedDocument(shard.key, d.seq, view) for d in documents})
                if n == len(parts):
                    window.settle(shard.key, upto, view)
                yield self._piece(workload, documents, messages, missing, window.pack())
        window.settle(shard.key, upto, view)

    def _parts(
        self, documents: Sequence[SourceDocument]
    ) -> Iterator[tuple[str, list[SourceDocument], list[str], int]]:
        """(workload, documents, their messages, number of documents without a message) of each batch."""
        messages = {d.number: message_of(d.source, self.layout) for d in documents}
        bare = [d for d in documents if messages[d.number] is None]
        messages |= self._source_texts(bare)
        without = {d.number for d in bare}
        groups: dict[str, list[SourceDocument]] = {}
        for document in documents:
            groups.setdefault(document_workload(document, self.layout), []).append(document)
        for workload, group in groups.items():
            for part in self._cut(group, messages):
                texts = [messages[d.number] or "" for d in part]
                yield workload, part, texts, sum(d.number in without for d in part)

    def _cut(
        self, group: Sequence[SourceDocument], messages: Mapping[int, str | None]
    ) -> Iterator[list[SourceDocument]]:
        """At most `batch_records` and `batch_kib` in each, but at least one document."""
        part: list[SourceDocument] = []
        size = 0
        for document in group:
            length = len(messages[document.number] or "")
            full = (
                len(part) >= self.settings.internal.batch_records
                or size + length > self.settings.internal.batch_kib * 1024
            )
            if part and full:
                yield part
                part, size = [], 0
            part.append(document)
            size += length
        if part:
            yield part

    def _source_texts(self, documents: Sequence[SourceDocument]) -> dict[int, str]:
        """Whole sources as JSON. For a document deleted meanwhile: the fields that were read before."""
        found: dict[int, str] = {}
        for at in range(0, len(documents), _TEXTS_AT_ONCE):
            some = documents[at : at + _TEXTS_AT_ONCE]
            with translate_errors(f"{self.pattern} cannot be read", SourceUnavailable):
                answer = self.client.search(
                    index=some[0].index,
                    body={"size": len(some), "query": {"ids": {"values": [d.id for d in some]}}},
                    params={"allow_partial_search_results": "false"},
                )
            sources = {hit["_id"]: hit.get("_source") for hit in answer["hits"]["hits"]}
            for document in some:
                found[document.number] = text_of(sources.get(document.id) or dict(document.source)) or ""
        return found

    def _piece(
        self,
        workload: str,
        documents: Sequence[SourceDocument],
        messages: Sequence[str],
        missing: int,
        cursor: str,
    ) -> PolledBatch:
        layout = self.layout
        # The layout is part of the content: another layout gives other records of the same documents.
        content = (repr(layout), workload, *(f"{d.number}:{d.seq}" for d in documents))
        records = document_records(
            documents, messages, layout, arrived=self.clock(), zone=self.settings.intake.time_zone
        )
        heads = records.filter(pl.col("lines") > 0)
        return PolledBatch(
            records=records,
            workload=workload,
            batch_id=f"{self.source_key}-{digest(*content)}",
            source=self.source,
            source_key=self.source_key,
            cursor=cursor,
            documents=len(documents),
            without_message=missing,
            without_time=heads["timestamp"].null_count(),
        )


def _past(place: int) -> dict[str, Any]:
    return {"range": {scan.SEQ: {"gt": place}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """Counts of a poll. `duplicates`: batches that had been accepted before."""

    documents: int = 0
    batches: int = 0
    duplicates: int = 0
    without_message: int = 0
    without_time: int = 0

    def __add__(self, other: "Polled") -> "Polled":
        return Polled(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


def deliver(
    poller: Poller,
    cursor: str | None,
    accept: Accept,
    *,
    go_on: Callable[[], bool] = lambda: True,
    wait: Callable[[float], object] = time.sleep,
) -> Polled:
    """Polls once to the end; waits while the ledger is full (back-pressure).

    `accept` is Producer.accept. The poll ends early when `go_on` answers False before a try. If the ledger's
    cursor differs (Redis lost its last writes), the poll starts over from that cursor. Raises
    SourceUnavailable and the errors of `accept`."""
    total = Polled()
    while True:
        try:
            for polled in _pieces(poller, cursor, accept, go_on, wait):
                total = total + polled
            return total
        except CursorMoved as moved:
            cursor = moved.cursor or None


def _pieces(
    poller: Poller,
    cursor: str | None,
    accept: Accept,
    go_on: Callable[[], bool],
    wait: Callable[[float], object],
) -> Iterator[Polled]:
    """The counts of each accepted batch. Raises CursorMoved."""
    pieces = poller.poll(cursor)
    try:
        for piece in pieces:
            batch = piece.batch(arrived=poller.clock(), zone=poller.settings.intake.time_zone)
            while True:
                if not go_on():
                    return
                answer = accept(batch, cursor_key=poller.cursor_key, cursor=piece.cursor, after=cursor or "")
                if isinstance(answer, Accepted):
                    break
                wait(answer.retry_after_s)
            cursor = piece.cursor
            yield Polled(
                documents=piece.documents,
                batches=1,
                duplicates=int(answer.duplicate),
                without_message=piece.without_message,
                without_time=piece.without_time,
            )
    finally:
        pieces.close()  # type: ignore[attr-defined] # a generator: gives its point in time back now


def poll_once(
    settings: Settings,
    accept: Accept,
    cursor_of: Callable[[str], str | None],
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> Polled:
    """Polls `settings.opensearch.source` once: `poll_once(s, p.accept, p.ledger.intake.cursor)`.

    Raises SourceUnavailable, BadSetting without a server, and the errors of `accept`.
    """
    poller = Poller(opensearch_client(settings, reading=True), settings)
    return deliver(poller, cursor_of(poller.cursor_key), accept, go_on=go_on)
