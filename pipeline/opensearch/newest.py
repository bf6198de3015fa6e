"""The newest stored results, for the CLI."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.errors import BadInput, SourceUnavailable
from pipeline.opensearch import scan
from pipeline.opensearch.client import translate_errors
from pipeline.opensearch.documents import frame_of, indices
from pipeline.opensearch.patterns import of_templates
from pipeline.records.result_query import ResultQuery
from pipeline.settings import Settings
from pipeline.units import epoch_us

MAX_RESULTS: Final = 10_000  # of one search (index.max_result_window)


def newest(client: OpenSearch, settings: Settings, query: ResultQuery) -> pl.DataFrame:
    """RESULT_SCHEMA, oldest first. Its text is looked for as a phrase of whole words.

    Raises BadInput for more than MAX_RESULTS, SourceUnavailable."""
    if query.limit > MAX_RESULTS:
        raise BadInput(
            f"--limit {query.limit:,} is more than OpenSearch gives at once; ask for at most {MAX_RESULTS:,}"
        )
    index = indices(settings)
    wanted = _filters(query)
    order = [
        {name: {"order": "desc", "unmapped_type": kind}}
        for name, kind in (("timestamp", "date"), ("record_id", "keyword"))
    ]
    body: dict[str, Any] = {
        "size": query.limit,
        "query": {"bool": {"filter": wanted}},
        "sort": order,
        "track_total_hits": False,
    }
    if query.before is not None:
        at, record_id = query.before
        body["search_after"] = [epoch_us(at) // 1000, record_id]
    with translate_errors(f"results cannot be read from {index}", SourceUnavailable):
        hits = client.search(index=index, body=body, params={"allow_partial_search_results": "false"})
    return frame_of(reversed([hit["_source"] for hit in hits["hits"]["hits"]]))


def matching_pages(
    client: OpenSearch, settings: Settings, query: ResultQuery, names: Sequence[str]
) -> Iterator[pl.DataFrame]:
    """All results that match, in these columns and in no order. Raises SourceUnavailable."""
    wanted = {"bool": {"filter": _filters(query)}}
    for page in scan.pages(client, indices(settings), query=wanted, fields=list(names), size=scan.MAX_SIZE):
        yield frame_of(page["_source"].to_list()).select(names)


def _filters(query: ResultQuery) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    bounds = {"gte": query.since, "lt": query.until}
    times = {name: moment.isoformat() for name, moment in bounds.items() if moment is not None}
    if times:
        found.append({"range": {"timestamp": times}})
    if query.workloads is not None:
        found.append({"terms": {"workload": list(query.workloads)}})
    if query.level is not None:
        found.append({"terms": {"level": list(query.levels)}})
    if query.template_id is not None:
        found.append(of_templates([query.template_id]))
    for text in (query.text, query.key):
        if text is not None:
            found.append({"match_phrase": {"message": text}})
    if query.anomalous:
        found.append({"term": {"anomalous": True}})
    if query.record_id is not None:
        found.append({"term": {"record_id": query.record_id}})
    return found


def workloads(client: OpenSearch, settings: Settings) -> list[str]:
    """The names of all workloads with results, at most MAX_RESULTS. Raises SourceUnavailable."""
    index = indices(settings)
    names = {"names": {"terms": {"field": "workload", "size": MAX_RESULTS}}}
    body = {"size": 0, "aggs": names}
    with translate_errors(f"results cannot be read from {index}", SourceUnavailable):
        answer = client.search(index=index, body=body, params={"allow_partial_search_results": "false"})
    found = answer.get("aggregations", {}).get("names", {}).get("buckets", [])
    return sorted(str(bucket["key"]) for bucket in found)


def with_number(
    client: OpenSearch, settings: Settings, column: str, number: int
) -> tuple[int, dict[str, Any] | None]:
    """The count and the newest of the records of a pattern_id or template_id. Raises SourceUnavailable."""
    index = indices(settings)
    body = {
        "size": 1,
        "query": {"term": {column: str(number)}},
        "sort": [{"timestamp": {"order": "desc", "unmapped_type": "date"}}],
        "track_total_hits": True,
    }
    with translate_errors(f"results cannot be read from {index}", SourceUnavailable):
        hits = client.search(index=index, body=body, params={"allow_partial_search_results": "false"})["hits"]
    found = [hit["_source"] for hit in hits["hits"]]
    return int(hits["total"]["value"]), found[0] if found else None
