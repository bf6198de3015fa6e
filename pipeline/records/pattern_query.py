"""A question about patterns, the templates of workloads, in terms that every store understands."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import polars as pl

from pipeline.records.schema import UTC_US

SAMPLE_CHARS: Final = 160  # of a message that stands for a pattern

PatternOrder = Literal["count", "change", "new", "less"]

PATTERN_SCHEMA: Final[dict[str, Any]] = {
    "workload": pl.String,
    "template_id": pl.Int64,  # 0: unclassified lines
    "records": pl.Int64,  # in the span
    "before": pl.Int64,  # in the other span
    "change": pl.Float64,  # how many times as frequent as before: (records + 1) / (before + 1)
    "anomalous": pl.Int64,
    "severe": pl.Int64,  # at an error-like level
    "score": pl.Float64,  # the greatest
    "first": UTC_US,  # of the span; of the other one where it alone has the pattern
    "last": UTC_US,
    "sample": pl.String,  # the message of a record, cut at SAMPLE_CHARS
    "trend": pl.List(pl.Int64),  # records in equal spans
}


# Of a workload as a whole, in the same terms.
RATE_SCHEMA: Final[dict[str, Any]] = {
    name: PATTERN_SCHEMA[name] for name in ("workload", "records", "anomalous", "severe", "trend")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternQuery:
    """The patterns of the lines of [since, until), and how many lines each had in another span.

    Findings in sessions and rates are no lines. A pattern of the other span alone has 0 records."""

    since: datetime
    until: datetime
    against: tuple[datetime, datetime] | None = None  # [begin, end)
    workloads: tuple[str, ...] | None = None  # their exact names
    template_ids: tuple[int, ...] | None = None
    anomalous: bool = False  # only patterns with anomalous lines
    order: PatternOrder = "count"
    limit: int | None = None
    buckets: int = 24  # of the trend


# The columns of each order, and whether it descends; then the workload and the template.
PATTERN_ORDERS: Final[dict[PatternOrder, tuple[tuple[str, bool], ...]]] = {
    "count": (("records", True),),
    "change": (("change", True), ("records", True)),
    "new": (("first", True),),
    "less": (("change", False), ("before", True)),
}
