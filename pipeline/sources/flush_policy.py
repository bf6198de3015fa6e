"""When lines that come one by one are sent: soon while the pipeline keeps up, many at once while it does not.

A batch costs the pipeline some 25 ms of CPU and one file, whatever is in it. So a line waits LEAST_S for others, and as many
times longer as batches are waiting already, up to MOST_S: then fewer and larger batches come until the pipeline is
through. Where lines come faster than that, chunks fill by themselves and nothing here counts.

The last record of a source stays open, because the next line may belong to it (a stack trace). Sending what is finished
does not close it; only silence does. Programs write a trace in one go, so QUIET_S without a byte ends a record; but
not after half a line, for then its writer is not through (a buffer was full) and MOST_S is waited.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

LEAST_S: Final = 0.25
MOST_S: Final = 1.0
# A pause inside a trace is one of the scheduler or of a garbage collector: tens of milliseconds.
QUIET_S: Final = 0.25
# Between two looks at a source of which something waits or has come lately.
POLL_S: Final = 0.05


class Due(StrEnum):
    """What has waited long enough."""

    NOTHING = "nothing"
    FINISHED = "finished"  # all but the open record
    EVERYTHING = "everything"


def delay_s(pending_batches: int, *, least_s: float = LEAST_S, most_s: float = MOST_S) -> float:
    """How long a line waits for others while so many batches are in the pipeline."""
    return min(most_s, least_s * max(1, pending_batches))


class FlushPolicy:
    """Of one source: its reader says what came and asks what is due, its sender says what accept answered."""

    def __init__(
        self,
        *,
        least_s: float = LEAST_S,
        most_s: float = MOST_S,
        quiet_s: float = QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least_s, self._most_s, self._quiet_s = least_s, most_s, quiet_s
        self._clock = clock
        self._pending = 0
        self._oldest: float | None = (
            None  # when the first line came that is in no chunk; of what stays behind, the last chunk
        )
        self._last = clock()
        self._half = False

    def answered(self, pending_batches: int) -> None:
        """So many batches were in the pipeline when it last took or refused one."""
        self._pending = pending_batches

    def came(self, *, half_line: bool) -> None:
        """Bytes came, and were looked at; `half_line`: they end inside a line."""
        self._last, self._half = self._clock(), half_line
        if self._oldest is None:
            self._oldest = self._last

    def handed_over(self) -> None:
        """A chunk went. What stays behind has come just now, or is the open record."""
        self._oldest = self._clock()

    def due(self, *, unsent: bool, settled: bool) -> Due:
        """What is to be sent now. `unsent`: some whole line is in no chunk. Before the formats are `settled` nothing can be
        sent without closing the open record, so lines wait for silence, or MOST_S."""
        if not unsent or self._oldest is None:
            self._oldest = None
            return Due.NOTHING
        now = self._clock()
        silent = now - self._last >= (self._most_s if self._half else self._quiet_s)
        waits_s = self._most_s
        if settled or silent:
            waits_s = delay_s(self._pending, least_s=self._least_s, most_s=self._most_s)
        if now - self._oldest < waits_s:
            return Due.NOTHING
        return Due.EVERYTHING if silent else Due.FINISHED

    def poll_s(self, idle_s: float) -> float:
        """How long to wait before the next look: `idle_s` where nothing waits and nothing came lately."""
        lively = self._oldest is not None or self._clock() - self._last < self._most_s
        return min(POLL_S, idle_s) if lively else idle_s
