"""More than one store for the same results."""

from collections.abc import Sequence

import polars as pl

from pipeline.sinks.sink import Last, Sink, at_once


class Several:
    """Writes to all sinks in their order; reads from the first that has the batch.

    When a later one fails, the batch is written again to all, which changes nothing in the earlier ones.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Store a batch's results everywhere. Raises SinkUnavailable, Rejected, and what `last` raises before each."""
        for sink in self._sinks:
            sink.write(batch_id, frame, last=last)

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results, None when no sink has them. Raises SinkUnavailable."""
        for sink in self._sinks:
            frame = sink.read(batch_id, workload)
            if frame is not None:
                return frame
        return None

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Take back what was stored under this id, everywhere. Raises SinkUnavailable, and what `last` raises before each."""
        for sink in self._sinks:
            sink.remove(batch_id, workload, last=last)
