"""The newest stored results, for the CLI."""

from datetime import datetime
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.errors import BadInput, SourceUnavailable
from pipeline.opensearch.client import translate_errors
from pipeline.opensearch.documents import frame_of, indices
from pipeline.settings import Settings

MAX_RESULTS: Final = 10_000  # of one search (index.max_result_window)


def newest(
    client: OpenSearch,
    settings: Settings,
    *,
    limit: int,
    since: datetime | None = None,
    workload: str | None = None,
    anomalous: bool = False,
) -> pl.DataFrame:
    """RESULT_SCHEMA, oldest first. Raises BadInput for more than MAX_RESULTS, SourceUnavailable."""
    if limit > MAX_RESULTS:
        raise BadInput(
            f"--limit {limit:,} is more than OpenSearch gives at once; ask for at most {MAX_RESULTS:,}"
        )
    index = indices(settings)
    wanted: list[dict[str, Any]] = []
    if since is not None:
        wanted.append({"range": {"timestamp": {"gte": since.isoformat()}}})
    if workload is not None:
        wanted.append({"term": {"workload": workload}})
    if anomalous:
        wanted.append({"term": {"anomalous": True}})
    order = [
        {name: {"order": "desc", "unmapped_type": kind}}
        for name, kind in (("timestamp", "date"), ("record_id", "keyword"))
    ]
    body = {"size": limit, "query": {"bool": {"filter": wanted}}, "sort": order, "track_total_hits": False}
    with translate_errors(f"results cannot be read from {index}", SourceUnavailable):
        hits = client.search(index=index, body=body, params={"allow_partial_search_results": "false"})
    return frame_of(reversed([hit["_source"] for hit in hits["hits"]["hits"]]))


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
