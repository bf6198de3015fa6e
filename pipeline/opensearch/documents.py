"""Stored records in OpenSearch: index templates, and conversion in both directions.

A document has the columns of RESULT_SCHEMA that are not null, plus `batch_id` and `position` (its row in the
batch). `timestamp` is ISO 8601 text with microseconds, `pattern_id` is text. `_source` holds both exactly.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
from opensearchpy import OpenSearch
from opensearchpy.exceptions import NotFoundError

from pipeline.records.schema import RESULT_SCHEMA
from pipeline.settings import Settings

# Increases with every change of a mapping: a process replaces an older template by its own.
TEMPLATE_VERSION: Final = 3
# Above the templates of most log shippers, which have broad patterns too.
PRIORITY: Final = 200

# Lucene takes terms of 32,766 bytes, and UTF-8 has up to 4 bytes a character.
NAME_LENGTH: Final = 8_191
_NAME: Final = {"type": "keyword", "ignore_above": NAME_LENGTH}

RESULT_PROPERTIES: Final[dict[str, Any]] = {
    "record_id": _NAME,
    "source": _NAME,
    "line": {"type": "long"},
    "lines": {"type": "long"},
    # Not date_nanos: its range is 1970 to 2262, and lines may have any date. Searches and aggregations
    # compare milliseconds; _source holds the microseconds.
    "timestamp": {"type": "date", "format": "strict_date_optional_time"},
    "timed": {"type": "boolean"},  # since version 3
    "workload": _NAME,
    "level": _NAME,
    "message": {
        "type": "text",
        "norms": False,
        "fields": {"keyword": {"type": "keyword", "ignore_above": 1_024}},
    },
    # A name of 64 bits, not a quantity: as unsigned_long it would lose digits in every browser.
    "pattern_id": {"type": "keyword"},
    "template_id": {"type": "long"},
    "score": {"type": "double"},
    "anomalous": {"type": "boolean"},
    "p_value": {"type": "double"},  # since version 2 of the template
    "reasons": _NAME,
    "model_version": _NAME,
    "host": _NAME,
    "process": _NAME,
    "service": _NAME,
    "raw": {"type": "text", "index": False},  # people search the message and read the raw text
    "batch_id": _NAME,
    "position": {"type": "integer"},
}

TEMPLATE_PROPERTIES: Final[dict[str, Any]] = {
    "template_id": {"type": "long"},
    "text": {"type": "text", "norms": False, "fields": {"keyword": _NAME}},
    "severe": {"type": "boolean"},
    "workload": _NAME,
}


def indices(settings: Settings, kind: str = "results") -> str:
    """The pattern of all our daily indices of one kind: "results" or "baseline"."""
    return f"{settings.opensearch.prefix}-{kind}-*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document on its way to an index."""

    index: str
    id: str
    body: bytes  # JSON without line breaks


def index_template(pattern: str, properties: dict[str, Any]) -> dict[str, Any]:
    """The index template of one kind of index.

    Unknown fields are stored but not indexed (`dynamic` false). So an older index accepts a newer document,
    and no log can blow up a mapping."""
    return {
        "index_patterns": [pattern],
        "priority": PRIORITY,
        "version": TEMPLATE_VERSION,
        "template": {
            "settings": {
                "index": {
                    "number_of_shards": 1,
                    "auto_expand_replicas": "0-1",  # one copy with a second node, green without
                    # the default of 1 s costs bulk throughput; our own reads refresh
                    "refresh_interval": "5s",
                    "translog": {"durability": "request"},  # acknowledged is on disk, also after kill -9
                }
            },
            "mappings": {"dynamic": False, "properties": properties},
        },
    }


def ensure_template(client: OpenSearch, name: str, body: dict[str, Any]) -> None:
    """Installs the index template unless its version or a newer one exists. Raises errors of
    opensearch-py."""
    try:
        found = client.indices.get_index_template(
            name=name, params={"filter_path": "index_templates.index_template.version"}
        )
        versions = [t["index_template"].get("version", 0) for t in (found or {}).get("index_templates", [])]
    except NotFoundError:
        versions = []
    if not versions or versions[0] < body["version"]:
        client.indices.put_index_template(name=name, body=body)


def documents(frame: pl.DataFrame, batch_id: str, prefix: str) -> Iterator[Document]:
    """RESULT_SCHEMA rows as documents of daily indices `<prefix>-YYYY.MM.DD`, by the record's UTC day."""
    columns = frame.select(list(RESULT_SCHEMA)).with_columns(
        pl.col("timestamp").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"), pl.col("pattern_id").cast(pl.String)
    )
    days = frame["timestamp"].dt.strftime("%Y.%m.%d")
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
    for position, (day, row) in enumerate(zip(days, columns.iter_rows(named=True), strict=True)):
        fields = {name: value for name, value in row.items() if value is not None}
        fields["batch_id"] = batch_id
        fields["position"] = position
        yield Document(index=f"{prefix}-{day}", id=row["record_id"], body=encode(fields).encode())


def frame_of(sources: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """`_source` of documents of ours as RESULT_SCHEMA, in the given order."""
    rows = list(sources)
    text = {"timestamp": pl.String, "pattern_id": pl.String}
    columns = [
        pl.Series(name, [row.get(name) for row in rows], dtype=text.get(name, dtype))
        for name, dtype in RESULT_SCHEMA.items()
    ]
    return pl.DataFrame(columns).with_columns(
        pl.col("timestamp").str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us", time_zone="UTC"),
        pl.col("pattern_id").cast(pl.UInt64),
    )
