"""Flush policy of slow sources: short waits while the pipeline keeps up, larger batches while it lags.

A batch costs about 25 ms of CPU and one file, whatever its size. A line waits LEAST_S for others, multiplied
by the batches in the pipeline, up to MOST_S. Fast sources fill chunks before any wait ends.

The last record of a source stays open, because the next line may belong to it (a stack trace). A flush does
not close the open record. QUIET_S without a byte closes it, because programs write a trace in one go. After
half a line the writer is still busy (its buffer was full), so the open record waits MOST_S."""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

LEAST_S: Final = 0.25
MOST_S: Final = 1.0
# A pause inside a trace is one of the scheduler or of a garbage collector: tens of milliseconds.
QUIET_S: Final = 0.25
# Between two polls of a source with waiting or recent lines.
POLL_S: Final = 0.05


class Due(StrEnum):
    """Records whose wait is over."""

    NOTHING = "nothing"
    FINISHED = "finished"  # all but the open record
    EVERYTHING = "everything"


def delay_s(pending_batches: int, *, least_s: float = LEAST_S, most_s: float = MOST_S) -> float:
    """How long a line waits for others."""
    return min(most_s, least_s * max(1, pending_batches))


class FlushPolicy:
    """Debounces one source. The reader reports bytes and asks `due`; the sender reports the answers of
    accept. Where a source has several files, each has a policy of its own, `for_file`."""

    def __init__(
        self,
        *,
        least_s: float = LEAST_S,
        most_s: float = MOST_S,
        quiet_s: float = QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least_s, self._most_s, self._quiet_s = least_s, most_s, quiet_s
        self.clock = clock
        self._answers = [
            0
        ]  # batches that the pipeline held at the last accept; the policies of files share it
        # The arrival of the first line in no chunk. After a chunk: the time of that chunk.
        self._oldest: float | None = None
        self._last = clock()
        self._half = False

    def for_file(self) -> "FlushPolicy":
        """A policy of the same times for one file of the source."""
        made = FlushPolicy(
            least_s=self._least_s, most_s=self._most_s, quiet_s=self._quiet_s, clock=self.clock
        )
        made._answers = self._answers
        return made

    def answered(self, pending_batches: int) -> None:
        """The pipeline held this many batches at the last accept."""
        self._answers[0] = pending_batches

    def came(self, *, half_line: bool) -> None:
        """Bytes were read; `half_line`: they end inside a line."""
        self._last, self._half = self.clock(), half_line
        if self._oldest is None:
            self._oldest = self._last

    def handed_over(self) -> None:
        """A chunk was sent. Remaining lines came just now, or are the open record."""
        self._oldest = self.clock()

    def due(self, *, unsent: bool, settled: bool) -> Due:
        """The records to send now. `unsent`: some whole line is in no chunk.

        Before the formats are `settled` every flush closes the open record, so lines wait for silence or
        MOST_S."""
        if not unsent or self._oldest is None:
            self._oldest = None
            return Due.NOTHING
        now = self.clock()
        silent = now - self._last >= (self._most_s if self._half else self._quiet_s)
        waits_s = self._most_s
        if settled or silent:
            waits_s = delay_s(self._answers[0], least_s=self._least_s, most_s=self._most_s)
        if now - self._oldest < waits_s:
            return Due.NOTHING
        return Due.EVERYTHING if silent else Due.FINISHED

    def poll_s(self, idle_s: float) -> float:
        """Seconds until the next poll: `idle_s` without waiting or recent lines."""
        lively = self._oldest is not None or self.clock() - self._last < self._most_s
        return min(POLL_S, idle_s) if lively else idle_s
