"""What every sink does. Both kinds pass the same contract suite (tests/sink_contract.py)."""

from collections.abc import Callable
from typing import Protocol

import polars as pl

# Called when a change is ready and before it is made: what it raises stops the change, which nobody sees then.
Last = Callable[[], None]


def at_once() -> None:
    """The `Last` of who has nobody to ask."""


class Sink(Protocol):
    """Stores the results of batches; writing a batch again replaces what it wrote, so delivery is exactly once in effect."""

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Store a batch's results (RESULT_SCHEMA). Raises SinkUnavailable (try again), Rejected (never those records), and
        what `last` raises."""

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results in RESULT_SCHEMA and the order they were written, None when there are none.

        Raises SinkUnavailable."""

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Take back what was stored under this id; what is stored after `last` was called stays. Raises SinkUnavailable,
        and what `last` raises."""
