"""Calm lines unlike all that training has seen: which records they are, and a question about them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import UTC_US
from pipeline.records.verdict import Reason

# Reasons that say no more than that training has not seen the like. A calm line that has no other ones makes
# no incident, anomalous or not.
NOVEL: Final = frozenset({Reason.NEW_TEMPLATE, Reason.NEVER_SAID, Reason.UNLIKELY_TOKENS, Reason.RARE})
NOT_CALM: Final = (*sorted(ERROR_LEVELS), "warning")
DAY_US: Final = 86_400_000_000
MESSAGE_CHARS: Final = 2_000  # of the message that stands for a template

NEWS_SCHEMA: Final[dict[str, Any]] = {
    "workload": pl.String,
    "template_id": pl.Int64,  # 0: unclassified lines
    "records": pl.Int64,  # of the span
    "first": UTC_US,
    "last": UTC_US,
    "score": pl.Float64,  # the greatest
    # Of the strangest record, the earliest one where several are as strange:
    "at": UTC_US,
    "record_id": pl.String,
    "level": pl.String,
    "message": pl.String,  # cut at MESSAGE_CHARS
    "reasons": pl.List(pl.String),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsQuery:
    """The templates of calm new lines of [since, until), of each 24 hours before `until` the strangest of
    each workload, then the second of each, and so on.

    A masked line that was news in [past, since) already is none any more. A template belongs to the 24 hours
    of its first record."""

    past: datetime
    since: datetime
    until: datetime
    limit: int  # templates of each 24 hours
    workloads: tuple[str, ...] | None = None  # their exact names


def is_news() -> pl.Expr:
    """Selects calm records that are anomalous only because training has never seen their sentence."""
    said, marked = (
        pl.col("reasons").list.eval(pl.element().str.starts_with(name)).list.any()
        for name in (Reason.NEVER_SAID, Reason.MARKED)
    )
    return (said & ~marked).fill_null(value=False)
