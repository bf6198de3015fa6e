"""Training data from OpenSearch: stored results that match a query, as frames.

The server filters by exact terms and times, in milliseconds. The frames are filtered again, in microseconds,
so a query selects the same records as from Parquet files. Excluded words are filtered in the frames alone.
The server's filters would exclude other lines: match_phrase compares analysed words (`time` would not exclude
`timeout`), and wildcard walks through every distinct message and ignores long ones."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch

from pipeline.errors import SourceUnavailable
from pipeline.opensearch import scan
from pipeline.opensearch.client import translate_errors
from pipeline.opensearch.documents import indices
from pipeline.records.query import Query
from pipeline.records.schema import LEARN_SCHEMA, UTC_US, of_lines
from pipeline.settings import Settings

# As text: documents of other programs may hold numbers as strings and the reverse.
_FIELDS: Final = dict.fromkeys(LEARN_SCHEMA, pl.String) | {"anomalous": pl.Boolean, "timed": pl.Boolean}
_EPOCH_MS: Final = r"^(-?\d{1,15})$"


def learn_pages(
    client: OpenSearch,
    settings: Settings,
    query: Query,
    *,
    index: str | None = None,
    size: int = scan.MAX_SIZE,
) -> Iterator[pl.DataFrame]:
    """Frames (LEARN_SCHEMA) of the records that match `query`, in the order of writing; no frame is empty.

    `index`: indices with the fields of our results, by default our own. A pattern or query without a match
    gives no frames. About two pages are in memory. A record that is rescored during the scan may come twice.
    Raises SourceUnavailable, which names the missing index, the user without the right, or the server."""
    decode = scan.typed(_FIELDS)
    keep = query.selects() & of_lines()
    for page in scan.pages(
        client,
        index or indices(settings),
        query=_question(query),
        fields=list(_FIELDS),
        size=size,
        decode=lambda text: _decoded(text, decode),
    ):
        frame = _learn(page["_source"].struct.unnest()).filter(keep).select(list(LEARN_SCHEMA))
        if not frame.is_empty():
            yield frame


def count(client: OpenSearch, settings: Settings, query: Query, *, index: str | None = None) -> int:
    """The number of records that match `query`, excluded words ignored: an upper bound. Raises
    SourceUnavailable."""
    name = index or indices(settings)
    with translate_errors(f"{name} cannot be read", SourceUnavailable):
        answer = client.count(index=name, body={"query": _question(query)})
    if answer["_shards"]["failed"]:
        raise SourceUnavailable(
            f"{name} cannot be counted: {answer['_shards']['failed']} of its shards do not answer; "
            "look at the health of the cluster"
        )
    return int(answer["count"])


def _question(query: Query) -> dict[str, Any]:
    """The server's part of `query`: exact, except for times, which are up to a millisecond too wide."""
    wanted: list[dict[str, Any]] = []
    if query.workloads:
        wanted.append({"terms": {"workload": list(query.workloads)}})
    span: dict[str, Any] = {}
    if query.since is not None:
        span["gte"] = _ms(query.since)
    if query.until is not None:
        span["lt"] = _ms(query.until + timedelta(microseconds=999))
    if span:
        wanted.append({"range": {"timestamp": span | {"format": "epoch_millis"}}})
    refused = [{"term": {"anomalous": True}}] if query.exclude_anomalous else []
    return {"bool": {"filter": wanted, "must_not": refused}}


def _ms(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _decoded(text: str, decode: scan.Decode) -> pl.DataFrame:
    """A page; decoded document by document if one has a list or an object in place of a text."""
    try:
        return decode(text)
    except pl.exceptions.ComputeError:
        page = scan.loose(text)
        rows = [_plain(source) for source in page["_source"].to_list()]
        return page.with_columns(pl.Series("_source", rows, dtype=pl.Struct(_FIELDS)))


def _plain(source: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: scan.as_text(source.get(name)) for name in _FIELDS}
    return row | {"anomalous": source.get("anomalous") is True, "timed": source.get("timed") is not False}


def _learn(rows: pl.DataFrame) -> pl.DataFrame:
    """Texts to the types of LEARN_SCHEMA; unreadable values become null."""
    return rows.with_columns(
        _times(rows["timestamp"]),
        rows["pattern_id"].cast(pl.UInt64, strict=False),
        rows["template_id"].cast(pl.Int64, strict=False),
    )


def _times(text: pl.Series) -> pl.Series:
    moments = text.str.to_datetime("%+", time_unit="us", time_zone="UTC", strict=False)
    if moments.null_count() > text.null_count():  # or milliseconds since 1970
        ms = text.str.extract(_EPOCH_MS).cast(pl.Int64, strict=False)
        moments = moments.fill_null((ms * 1000).cast(UTC_US))
    return moments.rename("timestamp")
