"""What every sink does. Both kinds pass the same contract suite (tests/sink_contract.py)."""

from typing import Protocol

import polars as pl


class Sink(Protocol):
    """Stores the results of batches; writing a batch again replaces what it wrote, so delivery is exactly once in effect."""

    def write(self, batch_id: str, frame: pl.DataFrame) -> None:
        """Store a batch's results (RESULT_SCHEMA). Raises SinkUnavailable (try again), Rejected (never those records)."""

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results in RESULT_SCHEMA and the order they were written, None when there are none.

        Raises SinkUnavailable."""

    def remove(self, batch_id: str, workload: str) -> None:
        """Take back what was stored under this id. Raises SinkUnavailable."""
