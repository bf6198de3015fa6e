"""Who calls whom, where records carry the id of their span and that of its parent.

A span whose parent was written by another workload was called by that workload. Fields are read by the names
that libraries give them: `parent_span_id`, `parentSpanId`, `parent_id`, `parent.id`. Lines of OTLP carry no
parent; there the order of events tells (trace_shape.py). Past MAX_LINKS half of the traces are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import polars as pl

from pipeline.watching.sessions.keys import SEPARATOR

MAX_LINKS: Final = 300_000  # distinct spans of traces; 28 bytes each
_HINT: Final = "arent|ARENT"
_PATTERN: Final = r"""(?i)(?:^|[^0-9a-z])parent[_.-]?(?:span)?[_.-]?id["']?[ \t]*[=:][ \t]*["']?([0-9a-f]{16})(?:[^0-9a-z]|$)"""
_LINKS: Final[dict[str, Any]] = {
    "trace": pl.UInt64,
    "workload": pl.UInt32,
    "span": pl.UInt64,  # hash of its id; null where the record has none
    "parent": pl.UInt64,
}


class ParentSpans:
    """Takes in records that have keys."""

    def __init__(self) -> None:
        self._links = pl.DataFrame(schema=_LINKS)
        self._halvings = 0  # one of 2**halvings traces is drawn
        self._parents = False

    def add(self, keyed: pl.DataFrame, events: pl.DataFrame) -> None:
        """`keyed`: record, sessions (a key each), raw and message; `events`: record, workload (its number)
        and key (its hash), of the keys that are traces."""
        if events.is_empty():
            return
        span = pl.col("sessions").str.strip_prefix("span" + SEPARATOR)
        spans = keyed.filter(pl.col("sessions").str.starts_with("span" + SEPARATOR)).select(
            "record", span.str.to_lowercase().hash(0).alias("span")
        )
        texts = keyed.select("record", pl.coalesce("raw", "message").alias("text")).unique("record")
        parents = texts.filter(pl.col("text").str.contains(_HINT)).select(
            "record", pl.col("text").str.extract(_PATTERN).str.to_lowercase().alias("parent")
        )
        parents = parents.drop_nulls().with_columns(pl.col("parent").hash(0))
        self._parents |= not parents.is_empty()
        if spans.is_empty() and parents.is_empty():
            return
        links = (
            events.select("record", "workload", pl.col("key").alias("trace"))
            .join(spans, on="record", how="left")
            .join(parents, on="record", how="left")
            .filter(pl.any_horizontal(pl.col("span", "parent").is_not_null()))
        )
        self._links = self._drawn(
            pl.concat([self._links, links.select(list(_LINKS)).cast(pl.Schema(_LINKS))]).unique()
        )
        while self._links.height > MAX_LINKS:
            self._halvings += 1
            self._links = self._drawn(self._links)

    def calls(self, names: Sequence[str]) -> Mapping[tuple[str, str], int]:
        """The traces in which the first workload is the parent of the second. `names`: by their numbers."""
        if not self._parents:
            return {}
        callers = self._links.drop_nulls("span").select("trace", "span", pl.col("workload").alias("caller"))
        pairs = (
            self._links.drop_nulls("parent")
            .join(callers.unique(), left_on=["trace", "parent"], right_on=["trace", "span"])
            .filter(pl.col("caller") != pl.col("workload"))
            .group_by("caller", "workload")
            .agg(pl.col("trace").n_unique())
        )
        return {(names[caller], names[called]): traces for caller, called, traces in pairs.iter_rows()}

    def _drawn(self, links: pl.DataFrame) -> pl.DataFrame:
        mask = 2**self._halvings - 1
        return links.filter(pl.col("trace") & mask == 0) if self._halvings else links
