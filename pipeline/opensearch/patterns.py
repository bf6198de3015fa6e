"""How often patterns occur: sums over all of them, then trend and samples of those that are shown.

Composite aggregations answer in pages, so that no answer has more buckets than a server allows."""

import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.errors import AnswerCancelled, SourceUnavailable
from pipeline.opensearch.client import translate_errors
from pipeline.opensearch.documents import indices
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.pattern_query import (
    PATTERN_ORDERS,
    PATTERN_SCHEMA,
    RATE_SCHEMA,
    SAMPLE_CHARS,
    PatternQuery,
)
from pipeline.settings import Settings
from pipeline.units import epoch_us

# Of one page: with its filters a pattern has three buckets, and a server allows 65,535 (search.max_buckets).
PAGE: Final = 5_000
SAMPLES: Final = 500  # of one page: each sample is a document
SHOWN: Final = 1_000  # more patterns than these are not named in a query

_KEY: Final = ["workload", "template_id"]
_SOURCES: Final[list[dict[str, Any]]] = [
    {"workload": {"terms": {"field": "workload"}}},
    {"template_id": {"terms": {"field": "template_id", "missing_bucket": True}}},
]
_SUMS: Final[dict[str, Any]] = {
    "anomalous": {"filter": {"term": {"anomalous": True}}},
    "severe": {"filter": {"terms": {"level": sorted(ERROR_LEVELS)}}},
    "score": {"max": {"field": "score"}},
    "first": {"min": {"field": "timestamp"}},
    "last": {"max": {"field": "timestamp"}},
}
_SUM_SCHEMA: Final = {name: PATTERN_SCHEMA[name] for name in (*_KEY, "records", *_SUMS)}


def pattern_counts(
    client: OpenSearch, settings: Settings, query: PatternQuery, *, stop: threading.Event
) -> pl.DataFrame:
    """PATTERN_SCHEMA in the order that was asked for. `first` and `last` are in milliseconds.

    Raises SourceUnavailable, and AnswerCancelled once `stop` is set."""
    requests = _Requests(client, indices(settings), query, stop)
    span = (query.since, query.until)
    now = requests.sums(span)
    then = requests.sums(query.against) if query.against else now.clear()
    found = _ordered(_beside(now, then), query)
    spans = [span] if query.against is None else [span, query.against]
    trend = requests.trend(found) if found.height else {}
    samples = requests.samples(found, spans) if found.height else {}
    keys = list(found.select(_KEY).iter_rows())
    none = [0] * query.buckets
    return found.with_columns(
        pl.Series("sample", [samples.get(key) for key in keys], dtype=pl.String),
        pl.Series("trend", [trend.get(key, none) for key in keys], dtype=PATTERN_SCHEMA["trend"]),
    ).select(list(PATTERN_SCHEMA))


def rate_counts(
    client: OpenSearch, settings: Settings, query: PatternQuery, *, stop: threading.Event
) -> pl.DataFrame:
    """RATE_SCHEMA by workload, in slots of whole milliseconds. Raises as `pattern_counts` does."""
    found = _Requests(client, indices(settings), query, stop).rates()
    rows = [(name, *sums, trend) for name, (sums, trend) in sorted(found.items())]
    return pl.DataFrame(rows, schema=RATE_SCHEMA, orient="row")


def _beside(now: pl.DataFrame, then: pl.DataFrame) -> pl.DataFrame:
    """The sums of a span with `before` and `change`; patterns of the other span alone have 0 records."""
    before = then.select(*_KEY, pl.col("records").alias("before"))
    absent = then.join(now, on=_KEY, how="anti").with_columns(
        pl.lit(0, pl.Int64).alias(name) for name in ("records", "anomalous", "severe")
    )
    found = pl.concat([now, absent]).join(before, on=_KEY, how="left")
    found = found.with_columns(pl.col("before").fill_null(0))
    return found.with_columns(((pl.col("records") + 1) / (pl.col("before") + 1)).alias("change"))


def _ordered(found: pl.DataFrame, query: PatternQuery) -> pl.DataFrame:
    """The patterns that are shown, in their order."""
    if query.anomalous:
        found = found.filter(pl.col("anomalous") > 0)
    by = [*PATTERN_ORDERS[query.order], ("workload", False), ("template_id", False)]
    found = found.sort([name for name, _ in by], descending=[down for _, down in by])
    return found if query.limit is None else found.head(query.limit)


class _Requests:
    """The requests of one question."""

    def __init__(self, client: OpenSearch, index: str, query: PatternQuery, stop: threading.Event) -> None:
        self._client = client
        self._index = index
        self._query = query
        self._stop = stop

    def sums(self, span: tuple[datetime, datetime]) -> pl.DataFrame:
        """The sums of each pattern in a span."""
        rows = [
            (
                *_pattern(bucket),
                bucket["doc_count"],
                bucket["anomalous"]["doc_count"],
                bucket["severe"]["doc_count"],
                bucket["score"]["value"],
                _moment(bucket["first"]["value"]),
                _moment(bucket["last"]["value"]),
            )
            for bucket in self._buckets(_SOURCES, _SUMS, PAGE, [self._of([span])])
        ]
        found = pl.DataFrame(rows, schema=_SUM_SCHEMA, orient="row")
        # Lines with the template 0 and lines without one are one pattern.
        return found.group_by(_KEY).agg(
            pl.col("records", "anomalous", "severe").sum(),
            pl.col("score", "last").max(),
            pl.col("first").min(),
        )

    def trend(self, shown: pl.DataFrame) -> dict[tuple[str, int], list[int]]:
        """The records of patterns in equal spans."""
        query = self._query
        sources = [*_SOURCES, {"slot": self._slot()}]
        found: dict[tuple[str, int], list[int]] = {}
        filters = [self._of([(query.since, query.until)]), _these(shown)]
        for bucket in self._buckets(sources, {}, PAGE, filters):
            counts = found.setdefault(_pattern(bucket), [0] * query.buckets)
            counts[self._place(bucket)] += bucket["doc_count"]
        return found

    def rates(self) -> dict[str, tuple[list[int], list[int]]]:
        """(records, anomalous, severe) and the trend of each workload."""
        sums = {name: _SUMS[name] for name in ("anomalous", "severe")}
        sources = [_SOURCES[0], {"slot": self._slot()}]
        found: dict[str, tuple[list[int], list[int]]] = {}
        filters = [self._of([(self._query.since, self._query.until)])]
        for bucket in self._buckets(sources, sums, PAGE, filters):
            counts = (bucket["doc_count"], *(bucket[name]["doc_count"] for name in sums))
            known, trend = found.setdefault(bucket["key"]["workload"], ([0] * 3, [0] * self._query.buckets))
            known[:] = (one + other for one, other in zip(known, counts, strict=True))
            trend[self._place(bucket)] += counts[0]
        return found

    @property
    def _slots_ms(self) -> tuple[int, int]:
        """Where the first slot begins, and the length of each."""
        begin = epoch_us(self._query.since) // 1000
        return begin, max(1, (epoch_us(self._query.until) // 1000 - begin) // self._query.buckets)

    def _slot(self) -> dict[str, Any]:
        begin_ms, width_ms = self._slots_ms
        return {
            "date_histogram": {
                "field": "timestamp",
                "fixed_interval": f"{width_ms}ms",
                "offset": f"{begin_ms % width_ms}ms",
            }
        }

    def _place(self, bucket: dict[str, Any]) -> int:
        begin_ms, width_ms = self._slots_ms
        at = (bucket["key"]["slot"] - begin_ms) // width_ms
        return int(min(max(at, 0), self._query.buckets - 1))

    def samples(
        self, shown: pl.DataFrame, spans: Sequence[tuple[datetime, datetime]]
    ) -> dict[tuple[str, int], str]:
        """A message of each pattern."""
        sample = {"sample": {"top_hits": {"size": 1, "_source": ["message"]}}}
        return {
            _pattern(bucket): str(bucket["sample"]["hits"]["hits"][0]["_source"].get("message", ""))[
                :SAMPLE_CHARS
            ]
            for bucket in self._buckets(_SOURCES, sample, SAMPLES, [self._of(spans), _these(shown)])
        }

    def _of(self, spans: Sequence[tuple[datetime, datetime]]) -> dict[str, Any]:
        """The lines of these spans that the question is about."""
        within = [
            {"range": {"timestamp": {"gte": begin.isoformat(), "lt": end.isoformat()}}}
            for begin, end in spans
        ]
        wanted: list[dict[str, Any]] = [{"bool": {"should": within, "minimum_should_match": 1}}]
        if self._query.workloads is not None:
            wanted.append({"terms": {"workload": list(self._query.workloads)}})
        if self._query.template_ids is not None:
            wanted.append(of_templates(self._query.template_ids))
        # Findings in sessions and rates have negative ids.
        return {"bool": {"filter": wanted, "must_not": [{"range": {"template_id": {"lt": 0}}}]}}

    def _buckets(
        self,
        sources: Sequence[dict[str, Any]],
        each: dict[str, Any],
        size: int,
        filters: Sequence[dict[str, Any]],
    ) -> Iterator[dict[str, Any]]:
        return composite_buckets(
            self._client, self._index, sources, each, size=size, filters=filters, stop=self._stop
        )


def composite_buckets(
    client: OpenSearch,
    index: str,
    sources: Sequence[dict[str, Any]],
    each: dict[str, Any],
    *,
    size: int,
    filters: Sequence[dict[str, Any]],
    stop: threading.Event,
) -> Iterator[dict[str, Any]]:
    """The buckets of a composite aggregation, page by page. Raises SourceUnavailable, AnswerCancelled."""
    composite: dict[str, Any] = {"size": size, "sources": list(sources)}
    while True:
        if stop.is_set():
            raise AnswerCancelled("the question was cancelled")
        body = {
            "size": 0,
            "query": {"bool": {"filter": list(filters)}},
            "aggs": {"patterns": {"composite": composite, **({"aggs": each} if each else {})}},
        }
        with translate_errors(f"results cannot be read from {index}", SourceUnavailable):
            answer = client.search(index=index, body=body, params={"allow_partial_search_results": "false"})
        page = answer.get("aggregations", {}).get("patterns", {})
        yield from page.get("buckets", [])
        if "after_key" not in page:
            return
        composite = {**composite, "after": page["after_key"]}


def of_templates(template_ids: Sequence[int]) -> dict[str, Any]:
    """The lines of these templates; 0 stands for unclassified lines, which may have none."""
    wanted: list[dict[str, Any]] = [{"terms": {"template_id": list(template_ids)}}]
    if 0 in template_ids:
        wanted.append({"bool": {"must_not": [{"exists": {"field": "template_id"}}]}})
    return {"bool": {"should": wanted, "minimum_should_match": 1}}


def _these(shown: pl.DataFrame) -> dict[str, Any]:
    """About the lines of these patterns: those of another workload that has one of the templates too."""
    if shown.height > SHOWN:
        return {"match_all": {}}
    workloads = shown["workload"].unique().to_list()
    templates = of_templates(shown["template_id"].unique().to_list())
    return {"bool": {"filter": [{"terms": {"workload": workloads}}, templates]}}


def _pattern(bucket: dict[str, Any]) -> tuple[str, int]:
    return str(bucket["key"]["workload"]), int(bucket["key"]["template_id"] or 0)


def _moment(ms: float) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
