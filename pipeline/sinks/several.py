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
        """Stores in every sink. Raises SinkUnavailable, Rejected, and the errors of `last` before each."""
        for sink in self._sinks:
            sink.write(batch_id, frame, last=last)

    def write_all(self, batches: Sequence[tuple[str, pl.DataFrame]], *, last: Last = at_once) -> None:
        """Stores in every sink. Raises SinkUnavailable, Rejected, and the errors of `last` before each."""
        for sink in self._sinks:
            sink.write_all(batches, last=last)

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results, None when no sink has them. Raises SinkUnavailable."""
        for sink in self._sinks:
            frame = sink.read(batch_id, workload)
            if frame is not None:
                return frame
        return None

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Removes from every sink. Raises SinkUnavailable, and the errors of `last` before each."""
        for sink in self._sinks:
            sink.remove(batch_id, workload, last=last)
