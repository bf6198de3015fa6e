"""The query of a training: it can be stored, merged with an equal one, and repeated."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipeline.records.batch import digest

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Log documents of other programs in OpenSearch, which a training reads in place of stored results.

    `query` is a clause of OpenSearch as JSON, "" for all. `level_not` are spellings of LEVELS. `workloads`
    are patterns; empty means all. `fields` are those of time, message and level. `headers`: the header of a
    message is parsed, as the pipeline does with lines that do not come from OpenSearch.
    """

    index: str
    query: str = ""
    level_not: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    fields: tuple[str, str, str] = ("@timestamp", "message", "level")
    workload_fields: tuple[str, ...] = ()
    headers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Records of these workloads in this span, without what is excluded.

    `workloads` are exact names, never patterns, so that no name selects another one's logs; empty means all.
    Times are aware UTC and compared with the records' own; None leaves that end open. `until` is exclusive.
    `store` is where to look: "parquet" or "opensearch". `documents` names log documents in place of results.
    """

    store: str = "parquet"
    workloads: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    exclude_words: tuple[str, ...] = ()  # whole records whose message holds one of them, upper or lower case
    exclude_anomalous: bool = False
    documents: Documents | None = None

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @property
    def key(self) -> str:
        """Equal queries have equal keys."""
        return digest(json.dumps(self.to_json(), sort_keys=True))

    def selects(self) -> "pl.Expr":
        """The selection on the columns workload, timestamp, anomalous and message; every store uses it.

        A record without a time is in no span; an unjudged record is not anomalous. Words are never patterns,
        and the empty word selects nothing."""
        import polars as pl

        from pipeline.records.schema import UTC_US

        wanted = pl.lit(value=True)
        if self.workloads:
            wanted &= pl.col("workload").is_in(list(self.workloads))
        if self.since is not None:
            wanted &= pl.col("timestamp") >= pl.lit(self.since.astimezone(UTC), dtype=UTC_US)
        if self.until is not None:
            wanted &= pl.col("timestamp") < pl.lit(self.until.astimezone(UTC), dtype=UTC_US)
        if self.exclude_anomalous:
            wanted &= ~pl.col("anomalous").fill_null(value=False)
        words = [word for word in self.exclude_words if word]
        for ascii_only in (True, False):
            some = [word for word in words if word.isascii() == ascii_only]
            if not some:
                continue
            # Lower-casing every message is the slow way, taken only where a word needs it.
            text = pl.col("message") if ascii_only else pl.col("message").str.to_lowercase()
            some = some if ascii_only else [word.lower() for word in some]
            found = text.str.contains_any(some, ascii_case_insensitive=ascii_only)
            wanted &= ~found.fill_null(value=False)
        return wanted


_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)


def begin_of(now: datetime, span_s: float) -> datetime:
    """So far back, and up to a hundredth more: requests that follow each other are equal, and are merged."""
    step = timedelta(seconds=max(1.0, span_s / 100))
    begin = now - timedelta(seconds=span_s)
    return begin - (begin - _ZERO) % step
