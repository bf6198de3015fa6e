"""One record of every template, so that a pattern can be seen as it was written."""

from pathlib import Path
from typing import Final

import polars as pl

from pipeline.records.schema import of_lines
from pipeline.sinks.results import readable, scan

CHARS: Final = 300  # of a sample


def first_records(results: Path) -> pl.DataFrame:
    """template_id (0: unclassified), source, line and raw of the first stored record of each template.

    `raw` has at most CHARS characters, so memory grows with templates alone. Raises BadPayload when a file
    is damaged."""
    raw = pl.col("raw").fill_null(pl.col("message")).fill_null("")
    with readable(results):
        return (
            scan(results)
            .filter(of_lines())
            .select(
                pl.col("template_id").fill_null(0),
                pl.col("source").fill_null(""),
                pl.col("line").fill_null(0),
                # One more character tells that the text goes on.
                raw.str.head(CHARS + 1),
            )
            .group_by("template_id")
            .agg(pl.col("source", "line", "raw").first())
            .sort("template_id")
            .collect(engine="streaming")
        )
