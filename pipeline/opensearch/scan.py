"""Reads every document of a query, a page at a time: point in time, search_after, the next page while one works.

Order. A page is sorted by the caller's keys and then by `_seq_no`: the number a shard gives each write. It is there in
every index, cheap to sort by (doc values; `_id` has none), and outlives a point in time, unlike a position inside it.
It is not total: two shards may give the same number. So no page starts *after* the last document of the page before
it but *at* its keys, and documents of those keys that were already handed over are dropped. There are at most as
many of them as shards are read.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch
from opensearchpy.exceptions import NotFoundError, OpenSearchException, RequestError

from pipeline.errors import SourceUnavailable
from pipeline.opensearch.client import reason_of, translate_errors

PAGE_SIZE: Final = 5_000
MAX_SIZE: Final = 10_000  # index.max_result_window of an index that nobody changed
KEEP_ALIVE: Final = "2m"  # renewed by every page; longer than any page takes to be worked on
_REOPEN: Final = 3  # times in a row; a point in time that never lives until it is used will not
SEQ: Final = "_seq_no"
_SORT_MARK: Final = '"sort":['  # inside a text its quotes would be escaped

# What others call the client, so that this package stays the only one that knows where it comes from.
Client = OpenSearch
# One page of an answer as text -> a frame with `_index`, `_id`, `sort` (list of int64) and `_source`.
Decode = Callable[[str], pl.DataFrame]


def loose(text: str) -> pl.DataFrame:
    """`_source` as Python objects, whatever it is: for documents that others wrote."""
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
    """`_source` as a struct of these fields, decoded without Python objects. Raises ComputeError on other types."""
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
) -> Iterator[pl.DataFrame]:
    """Pages of the documents that answer `query`, as `decode` makes them; only `fields` of their source.

    `sort` are clauses in front of `_seq_no`; their values must be integers (dates are, as milliseconds). `after` are
    sort values to go on from, exclusive (see `at`). While the caller works on a page one thread fetches the next, so
    about two pages are in memory. A pattern that no index answers to has no pages. `preference` picks shards.

    What was there when the scan began comes exactly once, also when the point in time expires on the way and a new
    one takes over; a document that is *written again* in between has a new number and then may come twice.
    Raises SourceUnavailable; a page with missing shards is never taken for a whole one.
    """
    scan = _Scan(client, index, query=query, fields=fields, sort=sort, preference=preference)
    fetcher = ThreadPoolExecutor(1, thread_name_prefix="opensearch-page")
    try:
        place = None if after is None else list(after)
        text = scan.fetch(place, size)
        seen: set[tuple[str, str]] = set()  # handed over, at the keys where the next page begins
        while True:
            last = _last_sort(text)
            if last is None:
                return
            place = at(last)
            following = fetcher.submit(scan.fetch, place, size)
            page = decode(text)
            full = page.height == size
            if seen:
                ids = zip(page["_index"], page["_id"], strict=True)
                page = page.filter(pl.Series([pair not in seen for pair in ids], dtype=pl.Boolean))
            ends = page.filter(page["sort"] == pl.Series([last], dtype=pl.List(pl.Int64)))
            newly = set(zip(ends["_index"], ends["_id"], strict=True))
            if page.is_empty():
                if not full:
                    return
                size = _wider(size, index)
                following.result()
                following = fetcher.submit(scan.fetch, place, size)
            else:
                one_key = newly and page.height == ends.height
                seen = seen | newly if one_key else newly
                yield page
            if not full:
                following.cancel()
                return
            text = following.result()
    finally:
        # The thread first: it may be opening the point in time that has to be closed.
        fetcher.shutdown(wait=True, cancel_futures=True)
        scan.close()


class _Scan:
    """One query on a point in time that is opened again when it is gone."""

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
        """The answer as text: decoding it is the caller's, outside of this thread."""
        with translate_errors(f"{self.index} cannot be read", SourceUnavailable):
            for _ in range(_REOPEN):
                try:
                    return self._ask(after, size)
                except NotFoundError:
                    if self.pit is None:
                        raise  # no such index
                    self.pit = None  # it expired, or the server was started again
            return self._ask(after, size)

    def _ask(self, after: list[int] | None, size: int) -> str:
        if self.pit is None and not self._open():
            return ""
        body = self.body | {"size": size, "pit": {"id": self.pit, "keep_alive": KEEP_ALIVE}}
        if after is not None:
            body["search_after"] = after
        # Below the client, which would make Python objects of the answer.
        connection = self.client.transport.get_connection()
        _, _, text = connection.perform_request(
            "POST",
            "/_search",
            params={"allow_partial_search_results": "false"},
            body=json.dumps(body).encode(),
        )
        return str(text)

    def _open(self) -> bool:
        """False when no index answers to the pattern."""
        params = {"keep_alive": KEEP_ALIVE, "allow_partial_pit_creation": "false"}
        if self.preference:
            params["preference"] = self.preference
        try:
            self.pit = self.client.create_pit(index=self.index, params=params)["pit_id"]
        except RequestError as exc:
            # What OpenSearch says of a pattern without indices: the point in time that it made has no id.
            if "*" in self.index and "invalid id: [null]" in reason_of(exc)[1]:
                return False
            raise
        return True

    def close(self) -> None:
        if self.pit is not None:
            # It expires by itself; whatever ends the scan matters more.
            with suppress(OpenSearchException):
                self.client.delete_pit(body={"pit_id": [self.pit]})
            self.pit = None


def at(last: Sequence[int]) -> list[int]:
    """`after` that hands the documents *at* these sort values over again: search_after is exclusive."""
    return [*last[:-1], last[-1] - 1]


def _last_sort(text: str) -> list[int] | None:
    """Sort values of the last document, found without decoding the page; None for an empty page.

    They stand behind the source of their document, so the last mark of the text is theirs.
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
    """A JSON value as text that can be stored: what is no text is shown as JSON, so that nothing of it is lost."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return text.encode("utf-8", "backslashreplace").decode()
    return text
