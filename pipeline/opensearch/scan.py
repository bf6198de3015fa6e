"""Reads every document of a query in pages: point in time, search_after, prefetch of the next page.

A page is sorted by the caller's keys and then by `_seq_no`, the number that a shard gives each write.
`_seq_no` exists in every index, is cheap to sort by (doc values; `_id` has none) and outlives a point in
time.

The order is not total: two shards may give the same number. So a page starts *at* the keys of the last
document of the page before, and documents that were yielded already are dropped. Their number is at most the
number of shards."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch
from opensearchpy.exceptions import NotFoundError, OpenSearchException, RequestError

from pipeline.errors import SourceUnavailable
from pipeline.opensearch.client import reason_of, translate_errors

PAGE_SIZE: Final = 5_000
MAX_SIZE: Final = 10_000  # the default of index.max_result_window
AHEAD_BYTES: Final = 32 << 20  # of answers that wait; about 100,000 short documents
KEEP_ALIVE: Final = "2m"  # renewed by every page; longer than the work on a page
_REOPEN: Final = 3  # times in a row
_FEW: Final = 32  # documents with the same number: at most one a shard
SEQ: Final = "_seq_no"
_SORT_MARK: Final = '"sort":['  # inside a text its quotes would be escaped

# An alias for other rooms, so that this room alone imports opensearch-py.
Client = OpenSearch
# One page of an answer as text -> a frame with `_index`, `_id`, `sort` (list of int64) and `_source`.
Decode = Callable[[str], pl.DataFrame]


def loose(text: str) -> pl.DataFrame:
    """`_source` as Python objects, for documents of other programs."""
    hits = json.loads(text)["hits"]["hits"]
    return pl.DataFrame(
        [
            pl.Series("_index", [h["_index"] for h in hits], dtype=pl.String),
            pl.Series("_id", [h["_id"] for h in hits], dtype=pl.String),
            pl.Series("sort", [h["sort"] for h in hits], dtype=pl.List(pl.Int64)),
            pl.Series("_source", [h.get("_source") or {} for h in hits], dtype=pl.Object),
        ]
    )


def typed(fields: Mapping[str, Any]) -> Decode:
    """`_source` as a struct of these fields, without Python objects. Raises ComputeError for other types."""
    hit = pl.Struct(
        {
            "_index": pl.String,
            "_id": pl.String,
            "sort": pl.List(pl.Int64),
            "_source": pl.Struct(dict(fields)),
        }
    )
    answer = pl.Struct({"hits": pl.Struct({"hits": pl.List(hit)})})

    def decode(text: str) -> pl.DataFrame:
        hits = pl.Series([text]).str.json_decode(answer).struct.field("hits").struct.field("hits")
        return hits.explode(empty_as_null=False).struct.unnest()

    return decode


def pages(
    client: OpenSearch,
    index: str,
    *,
    query: Mapping[str, Any],
    fields: Sequence[str],
    sort: Sequence[Mapping[str, Any]] = (),
    size: int = PAGE_SIZE,
    after: Sequence[int] | None = None,
    decode: Decode = loose,
    preference: str = "",
    ahead: int = 1,
) -> Iterator[pl.DataFrame]:
    """Pages of the documents that match `query`, decoded by `decode`, with `fields` of their source.

    `sort` are clauses before `_seq_no`, with integer values (dates are milliseconds). `after` are sort values
    to continue from, exclusive (see `at`). `preference` picks shards. A thread prefetches up to `ahead`
    pages, of AHEAD_BYTES together or else one, so by default about two pages are in memory. A pattern without
    an index has no pages.

    A document that exists at the begin of the scan comes exactly once, also if the point in time expires and
    is opened again. A document that is rewritten meanwhile has a new number and may come twice. Raises
    SourceUnavailable, also for a page with missing shards."""
    scan = _Scan(client, index, query=query, fields=fields, sort=sort, preference=preference)
    fetcher = _Fetcher(scan, after, size, ahead)
    try:
        yielded: set[tuple[str, str]] = set()  # at the keys where the next page begins
        while True:
            text = fetcher.next_page()
            last = _last_sort(text)
            if last is None:
                return
            page = decode(text)
            full = page.height == size
            page = without_head(page, yielded)
            newly = at_end(page, last)
            if not page.is_empty():
                one_key = newly and page.height == len(newly)
                yielded = yielded | newly if one_key else newly
                yield page
            if not full:
                return
            if page.is_empty():
                size = _wider(size, index)
                fetcher.begin(at(last), size)
    finally:
        # The thread first: it may be opening the point in time to close.
        fetcher.end()
        scan.close()


class _Fetcher:
    """Fetches pages in a thread, some ahead of their reader. Each request needs the page before it alone."""

    def __init__(self, scan: "_Scan", after: Sequence[int] | None, size: int, ahead: int) -> None:
        self.scan, self.ahead = scan, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="opensearch-page")
        self._coming: deque[Future[str]] = deque()
        self._after: list[int] | None = None
        self._size, self._ended = size, False
        self.begin(None if after is None else list(after), size)

    def begin(self, after: list[int] | None, size: int) -> None:
        """Goes on behind these sort values, without the pages fetched ahead."""
        for page in self._coming:
            page.cancel()
        self._coming.clear()
        self._coming.append(self._thread.submit(self._first, after, size))

    def next_page(self) -> str:
        """The next answer as text, and those behind it are on their way; "" behind the last one."""
        text = self._coming.popleft().result()
        many = min(self.ahead, AHEAD_BYTES // max(1, len(text)))
        while len(self._coming) < max(1, many):
            self._coming.append(self._thread.submit(self._following))
        return text

    def end(self) -> None:
        """Returns when the thread has ended."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # The thread alone runs these, one behind another, so the second begins where the first ended.

    def _first(self, after: list[int] | None, size: int) -> str:
        self._after, self._size, self._ended = after, size, False
        return self._following()

    def _following(self) -> str:
        if self._ended:
            return ""
        text = self.scan.fetch(self._after, self._size)
        last = _last_sort(text)
        # A source may hold the mark too, so many marks do not tell that the page is full.
        self._ended = last is None or text.count(_SORT_MARK) < self._size
        self._after = None if last is None else at(last)
        return text


class _Scan:
    """One query on a point in time, opened again after it expired."""

    def __init__(
        self,
        client: OpenSearch,
        index: str,
        *,
        query: Mapping[str, Any],
        fields: Sequence[str],
        sort: Sequence[Mapping[str, Any]],
        preference: str,
    ) -> None:
        self.client, self.index, self.preference = client, index, preference
        self.body: dict[str, Any] = {
            "query": dict(query),
            "_source": list(fields) if fields else False,
            "sort": [*sort, {SEQ: "asc"}],
            "track_total_hits": False,
        }
        self.pit: str | None = None

    def fetch(self, after: list[int] | None, size: int) -> str:
        """The answer as text; the caller decodes it outside of this thread."""
        with translate_errors(f"{self.index} cannot be read", SourceUnavailable):
            for _ in range(_REOPEN):
                try:
                    return self._ask(after, size)
                except NotFoundError:
                    if self.pit is None:
                        raise  # no such index
                    self.pit = None  # it expired, or the server restarted
            return self._ask(after, size)

    def _ask(self, after: list[int] | None, size: int) -> str:
        if self.pit is None and not self._open():
            return ""
        body = self.body | {"size": size, "pit": {"id": self.pit, "keep_alive": KEEP_ALIVE}}
        if after is not None:
            body["search_after"] = after
        # Below the client, which would decode the answer to Python objects.
        connection = self.client.transport.get_connection()
        _, _, text = connection.perform_request(
            "POST",
            "/_search",
            params={"allow_partial_search_results": "false"},
            body=json.dumps(body).encode(),
        )
        return str(text)

    def _open(self) -> bool:
        """False if no index matches the pattern."""
        params = {"keep_alive": KEEP_ALIVE, "allow_partial_pit_creation": "false"}
        if self.preference:
            params["preference"] = self.preference
        try:
            self.pit = self.client.create_pit(index=self.index, params=params)["pit_id"]
        except RequestError as exc:
            # The error for a pattern without indices: a point in time without an id.
            if "*" in self.index and "invalid id: [null]" in reason_of(exc)[1]:
                return False
            raise
        return True

    def close(self) -> None:
        if self.pit is not None:
            # It expires by itself; an error here must not replace the one that ends the scan.
            with suppress(OpenSearchException):
                self.client.delete_pit(body={"pit_id": [self.pit]})
            self.pit = None


def without_head(page: pl.DataFrame, known: Set[tuple[str, str]]) -> pl.DataFrame:
    """`page` without the documents `known` (`_index`, `_id`), all of which stand at its head.

    A page begins at their sort values. So only a few rows become Python objects, unless one of them is
    missing.
    """
    if not known:
        return page
    rows = _FEW
    while True:
        there = [pair in known for pair in _pairs(page.head(rows))]
        count = sum(there)
        if count >= len(known) and all(there[:count]):
            return page.slice(count)  # copies nothing
        if count >= len(known) or rows >= page.height:
            kept = ~pl.Series(there, dtype=pl.Boolean)
            return page.filter(kept.extend_constant(True, page.height - len(there)))
        rows *= _FEW


def at_end(page: pl.DataFrame, last: Sequence[int]) -> set[tuple[str, str]]:
    """The documents (`_index`, `_id`) at the sort values `last`, which are the highest of `page`."""
    rows = _FEW
    while True:
        tail = page.tail(rows)
        of_last = [sort == last for sort in tail["sort"].to_list()]
        if not all(of_last) or rows >= page.height:
            return {pair for pair, ends in zip(_pairs(tail), of_last, strict=True) if ends}
        rows *= _FEW


def _pairs(page: pl.DataFrame) -> list[tuple[str, str]]:
    return list(zip(page["_index"].to_list(), page["_id"].to_list(), strict=True))


def at(last: Sequence[int]) -> list[int]:
    """The `after` that includes documents *at* these sort values: search_after is exclusive."""
    return [*last[:-1], last[-1] - 1]


def _last_sort(text: str) -> list[int] | None:
    """Sort values of the last document, without decoding the page; None for an empty page.

    Sort values follow the source of their document, so the last mark in the text is the right one.
    """
    start = text.rfind(_SORT_MARK)
    if start < 0:
        return None
    start += len(_SORT_MARK)
    return [int(part) for part in text[start : text.index("]", start)].split(",")]


def _wider(size: int, index: str) -> int:
    if size >= MAX_SIZE:
        raise SourceUnavailable(
            f"{index} has {size:,} documents with the same time and number, from as many shards; read fewer "
            "indices at once, by a narrower pattern"
        )
    return min(size * 2, MAX_SIZE)


def as_text(value: Any) -> str | None:
    """A JSON value as text that can be stored; other values than text become JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return text.encode("utf-8", "backslashreplace").decode()
    return text
