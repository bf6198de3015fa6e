"""Calm new lines from indices: one bucket for each masked line, and then the templates of these."""

import threading
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.opensearch.documents import frame_of, indices
from pipeline.opensearch.patterns import SAMPLES, composite_buckets
from pipeline.records.news import DAY_US, MESSAGE_CHARS, NEWS_SCHEMA, NOT_CALM, NOVEL, NewsQuery
from pipeline.records.verdict import Reason
from pipeline.settings import Settings
from pipeline.units import epoch_us

_SAID: Final = ("record_id", "level", "message", "reasons", "timestamp")
_SOURCES: Final[list[dict[str, Any]]] = [
    {"workload": {"terms": {"field": "workload"}}},
    {"template_id": {"terms": {"field": "template_id", "missing_bucket": True}}},
    {"pattern_id": {"terms": {"field": "pattern_id", "missing_bucket": True}}},
]
_EACH: Final[dict[str, Any]] = {
    "first": {"min": {"field": "timestamp"}},
    "last": {"max": {"field": "timestamp"}},
    "said": {
        "top_hits": {
            "size": 1,
            "_source": list(_SAID),
            "sort": [{"score": "desc"}, {"timestamp": "asc"}, {"record_id": "asc"}],
        }
    },
}


def news_documents(
    client: OpenSearch, settings: Settings, query: NewsQuery, *, stop: threading.Event
) -> pl.DataFrame:
    """NEWS_SCHEMA: the strangest of each workload, then the second of each, and so on.

    `first` and `last` are in milliseconds.

    Raises SourceUnavailable, and AnswerCancelled once `stop` is set."""
    buckets = list(
        composite_buckets(
            client, indices(settings), _SOURCES, _EACH, size=SAMPLES, filters=_filters(query), stop=stop
        )
    )
    hits = [bucket["said"]["hits"]["hits"][0] for bucket in buckets]
    rows = [
        {
            "workload": str(bucket["key"]["workload"]),
            "template_id": int(bucket["key"]["template_id"] or 0),
            "records": bucket["doc_count"],
            "first": int(bucket["first"]["value"]) * 1_000,
            "last": int(bucket["last"]["value"]) * 1_000,
            "score": hit["sort"][0],
        }
        for bucket, hit in zip(buckets, hits, strict=True)
    ]
    counted = ("workload", "template_id", "records", "first", "last", "score")
    patterns = pl.DataFrame(
        rows, schema={name: pl.Int64 if name in ("first", "last") else NEWS_SCHEMA[name] for name in counted}
    )
    said = frame_of([hit["_source"] for hit in hits]).select(
        pl.col("timestamp").alias("at"),
        "record_id",
        "level",
        pl.col("message").str.head(MESSAGE_CHARS),
        "reasons",
    )
    return _strangest(pl.concat([patterns, said], how="horizontal").cast(pl.Schema(NEWS_SCHEMA)), query)


def _strangest(patterns: pl.DataFrame, query: NewsQuery) -> pl.DataFrame:
    of_strangest = ("at", "record_id", "level", "message", "reasons")
    order = ("turn", "score", "first", "workload", "template_id")
    found = (
        patterns.filter(pl.col("first") >= query.since)
        .sort("score", "at", "record_id", descending=[True, False, False])
        .group_by("workload", "template_id", maintain_order=True)
        .agg(
            pl.col("records").sum(),
            pl.col("first").min(),
            pl.col("last", "score").max(),
            pl.col(*of_strangest).first(),
        )
        .with_columns(((epoch_us(query.until) - 1 - pl.col("first").dt.epoch("us")) // DAY_US).alias("day"))
        .sort("score", "first", "template_id", descending=[True, False, False])
        .with_columns(pl.int_range(pl.len()).over("day", "workload").alias("turn"))
        .sort(order, descending=[name == "score" for name in order])
    )
    return found.filter(pl.int_range(pl.len()).over("day") < query.limit).select(list(NEWS_SCHEMA))


def _filters(query: NewsQuery) -> list[dict[str, Any]]:
    """Those of `sinks.answers.news`. A calm new line has some reason, and only those in NOVEL."""
    others = [{"prefix": {"reasons": kind.value}} for kind in Reason if kind not in NOVEL]
    novel = {
        "bool": {
            "filter": [{"exists": {"field": "reasons"}}],
            "must_not": [{"terms": {"level": list(NOT_CALM)}}, *others],
        }
    }
    said = {"prefix": {"reasons": Reason.NEVER_SAID.value}}
    marked = {"prefix": {"reasons": Reason.MARKED.value}}
    span = {"gte": query.past.isoformat(), "lt": query.until.isoformat()}
    found: list[dict[str, Any]] = [
        {"range": {"timestamp": span}},
        {"term": {"anomalous": True}},
        {"bool": {"should": [said, novel], "minimum_should_match": 1}},
        {"bool": {"must_not": [{"range": {"template_id": {"lt": 0}}}, marked]}},
    ]
    if query.workloads is not None:
        found.append({"terms": {"workload": list(query.workloads)}})
    return found
