"""Which kinds of keys say something of their own: two kinds that cut a workload's records alike are one.

A gateway writes a request id and a trace id into each line. Their sessions are the same records, so the
sessions of the later kind (in the order of `keys.KINDS`) would find each fault a second time. Counted on the
first records of a training. Pure.
"""

from typing import Final

import polars as pl

MOST_RECORDS: Final = 200_000  # counted
_ALIKE: Final = 0.95  # of the records of one kind have the other, with one key for one key


class KindOverlap:
    """Counts how kinds of keys stand together in records."""

    def __init__(self) -> None:
        self._pages: list[pl.DataFrame] = []
        self._records = 0

    def add(self, keyed: pl.DataFrame) -> None:
        """`keyed`: record, workload, kind (their numbers) and key (its hash), a row for each key."""
        if self._records < MOST_RECORDS:
            page = keyed.filter(pl.struct("record", "kind").is_first_distinct())
            self._pages.append(page)
            self._records += page["record"].n_unique()

    def repeated(self) -> dict[tuple[int, int], set[int]]:
        """For (workload, kind) the earlier kinds that cut its records as it does."""
        if not self._pages:
            return {}
        keyed = pl.concat(self._pages)
        several = keyed.filter(pl.len().over("record") > 1)
        pairs = several.join(several, on="record", suffix="_earlier").filter(
            pl.col("kind_earlier") < pl.col("kind")
        )
        if pairs.is_empty():
            return {}
        every = keyed.group_by("workload", "kind").agg(pl.len().alias("records"))
        both = pairs.group_by("workload", "kind", "kind_earlier").agg(
            pl.len().alias("both"),
            pl.struct("key", "key_earlier").n_unique().alias("pairs"),
            pl.col("key").n_unique().alias("keys"),
            pl.col("key_earlier").n_unique().alias("earlier"),
        )
        alike = both.join(every, on=["workload", "kind"]).filter(
            (pl.col("both") >= _ALIKE * pl.col("records"))
            & (pl.col("keys") >= _ALIKE * pl.col("pairs"))
            & (pl.col("earlier") >= _ALIKE * pl.col("pairs"))
        )
        found: dict[tuple[int, int], set[int]] = {}
        for workload, kind, earlier in alike.select("workload", "kind", "kind_earlier").iter_rows():
            found.setdefault((workload, kind), set()).add(earlier)
        return found
