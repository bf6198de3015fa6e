"""One record of every template, so that a pattern can be seen as it was written."""

from pathlib import Path
from typing import Final

import polars as pl

from pipeline.sinks.answers.folder import engine_over, files_in
from pipeline.sinks.answers.overview import samples_of

CHARS: Final = 300  # of a sample


def first_records(results: Path) -> pl.DataFrame:
    """template_id (0: unclassified), source, line and raw of the first stored record of each template.

    `raw` has at most CHARS characters, so memory grows with templates alone. Raises BadPayload when a file
    is damaged."""
    with engine_over(results) as engine:
        # One more character tells that the text goes on.
        return samples_of(engine, files_in(results), CHARS + 1)
