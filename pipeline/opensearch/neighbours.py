"""The records before and after hits in their sources, by line number."""

import threading
from datetime import timedelta
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.errors import AnswerCancelled, SourceUnavailable
from pipeline.opensearch.client import error_cause, remedy, translate_errors
from pipeline.opensearch.documents import NAME_LENGTH, frame_of, indices
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.settings import Settings

HITS: Final = 50  # whose neighbours one request asks for


def neighbours(
    client: OpenSearch,
    settings: Settings,
    hits: pl.DataFrame,
    records: int,
    *,
    within: timedelta,
    stop: threading.Event,
) -> pl.DataFrame:
    """The hits (RESULT_SCHEMA), and up to so many records before and after each in its reading of a source.

    They are at most `within` from it in time. Each record stands once, in no order.

    Raises SourceUnavailable, and AnswerCancelled once `stop` is set."""
    index = indices(settings)
    task = f"results cannot be read from {index}"
    searches = [(hit, order) for hit in hits.iter_rows(named=True) for order in ("asc", "desc")]
    found: list[dict[str, Any]] = []
    for start in range(0, len(searches), 2 * HITS):
        if stop.is_set():
            raise AnswerCancelled("the question was cancelled")
        some = searches[start : start + 2 * HITS]
        body: list[dict[str, Any]] = []
        for hit, order in some:
            body += [{"allow_partial_search_results": False}, _beside(hit, order, records, within)]
        with translate_errors(task, SourceUnavailable):
            answers = client.msearch(body=body, index=index)["responses"]
        for (hit, _), answer in zip(some, answers, strict=True):
            if problem := answer.get("error"):
                why = remedy(answer.get("status", 500), *error_cause(problem))
                raise SourceUnavailable(f"{task}: {why}")
            sources = [one["_source"] for one in answer["hits"]["hits"]]
            found += [one for one in sources if _key(one["record_id"]) == _key(hit["record_id"])]
    stored = pl.concat([hits.select(list(RESULT_SCHEMA)), frame_of(found)])
    return stored.unique("record_id", keep="first")


def _beside(hit: dict[str, Any], order: str, records: int, within: timedelta) -> dict[str, Any]:
    """The search for the records behind (`asc`) or before (`desc`) a hit."""
    at = hit["timestamp"]
    filters: list[dict[str, Any]] = [
        {"prefix": {"record_id": f"{_key(hit['record_id'])}-"}},
        {"range": {"timestamp": {"gte": (at - within).isoformat(), "lte": (at + within).isoformat()}}},
    ]
    if len(hit["source"] or "") <= NAME_LENGTH:  # a longer name is not indexed
        filters.append({"term": {"source": hit["source"]}})
    return {
        "size": records,
        "query": {"bool": {"filter": filters}},
        "sort": [{"line": {"order": order}}, {"record_id": {"order": order}}],
        "search_after": [hit["line"], hit["record_id"]],
        "track_total_hits": False,
    }


def _key(record_id: str) -> str:
    """The part of an id that all records of one reading of one source share."""
    return record_id.rpartition("-")[0] or record_id
