"""The protocol of sinks. Both kinds pass the same contract suite (tests/sink_contract.py)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import polars as pl

# Called when a change is ready and before it is made; an error stops the change.
Last = Callable[[], None]


def at_once() -> None:
    """The `Last` that allows every change."""


class Sink(Protocol):
    """Stores the results of batches. Writes are idempotent per batch, so delivery is exactly once in
    effect."""

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Stores a batch's results (RESULT_SCHEMA).

        Raises SinkUnavailable (retry), Rejected (never those records), and the errors of `last`."""

    def write_all(self, batches: Sequence[tuple[str, pl.DataFrame]], *, last: Last = at_once) -> None:
        """Stores the results of several batches, each as `write` does; in one commit where the sink has such.

        Raises what `write` raises. Some of the batches may be stored then."""

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results in RESULT_SCHEMA and the order they were written, None when there are
        none.

        Raises SinkUnavailable."""

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Removes the results of a batch; results stored after the call of `last` stay.

        Raises SinkUnavailable and the errors of `last`."""
