"""Sessions as units: a record counts for the session of each of its keys.

A kind of key that cuts the records as an earlier kind does would show each session twice, so it is left out
once all records are known.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from pipeline.service.stored.sessions import key_of_finding
from pipeline.watching.sessions.keys import KINDS, SEPARATOR, KeyPattern, find_keys
from pipeline.watching.sessions.kinds import KindOverlap
from pipeline.watching.units.unit_lines import UnitFold, UnitTable, unit_lines

_AT_ONCE: Final = 10_000  # records; one of them may have 128 keys


class SessionUnits:
    """Folds pages of records by their keys. `unnamed`: records without a key."""

    def __init__(self, patterns: Sequence[KeyPattern]) -> None:
        self.unnamed = 0
        self._patterns = patterns
        self._fold = UnitFold()
        self._overlap = KindOverlap()
        self._kinds = pl.DataFrame(schema={"unit": pl.String, "kind": pl.UInt8})
        self._records = 0

    def add(self, page: pl.DataFrame, found: pl.Series) -> None:
        """`page`: records of the store; `found`: which of them are findings. Raises BadInput past a limit."""
        keys = find_keys(page, self._patterns).list.drop_nulls()
        of_finding = page.select(key_of_finding(pl.col("message")))["message"]
        blank = pl.Series([None], dtype=pl.String).new_from_index(0, page.height)
        rows = unit_lines(page, blank, pl.Series(np.zeros(page.height, dtype=np.int32)), found)
        rows = rows.with_columns(keys.alias("keys"), of_finding.alias("of_finding"))
        rows = rows.with_row_index("record", offset=self._records)
        self._records += page.height
        none = (pl.col("keys").list.len().fill_null(0) == 0) & ~pl.col("found")
        self.unnamed += int(rows.select(none.sum()).item())
        for part in rows.iter_slices(_AT_ONCE):
            self._take(part)

    def _take(self, rows: pl.DataFrame) -> None:
        lines = rows.filter(~pl.col("found")).explode("keys").drop_nulls("keys")
        parts = pl.col("keys").str.split_exact(SEPARATOR, 1).struct
        places = {kind: at for at, kind in enumerate(KINDS)}
        lines = lines.with_columns(
            parts.field("field_0").replace_strict(places, return_dtype=pl.UInt8).alias("kind"),
            parts.field("field_1").alias("unit"),
        )
        self._overlap.add(
            lines.select(
                "record",
                pl.lit(0, dtype=pl.UInt32).alias("workload"),
                "kind",
                pl.col("unit").hash().alias("key"),
            )
        )
        self._kinds = pl.concat([self._kinds, lines.select("unit", "kind").unique()]).unique()
        findings = rows.filter("found").with_columns(pl.col("of_finding").alias("unit"))
        for page in (lines.unique(["record", "unit"], maintain_order=True), findings):
            self._fold.add(page.drop("record", "keys", "of_finding", "kind", strict=False))

    def table(self) -> UnitTable:
        """The sessions of all kinds but those that repeat an earlier kind."""
        table = self._fold.table()
        repeated = [kind for _, kind in self._overlap.repeated()]
        alone = pl.col("kind").is_in(repeated).all()
        dropped = self._kinds.group_by("unit").agg(alone).filter("kind")["unit"]
        return table.chosen((~table.units["unit"].is_in(dropped.to_list())).arg_true())
