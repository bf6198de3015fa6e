"""Wake-ups that ask for nothing any more: their batches went along with others in this process.

Celery takes 3 ms of processor time for a message, however little there is to do. A worker that has finished a
batch beside its own drops the message of that batch when it comes. A message that is dropped too early is no
loss: the sweeper sends what still waits in the ledger. So a batch is remembered for one message and a short
time.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

KEPT_S: Final = 30.0  # messages wait in order, so that of a batch comes soon, or went to another worker
MOST: Final = 10_000


class SpentWakeUps:
    """Belongs to one thread of a process that consumes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()  # by queue and batch

    def add(self, queue: str, batch_id: str) -> None:
        """The batch is done in the stage of this queue, and its message waits there."""
        self._until[queue, batch_id] = self._clock() + KEPT_S
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def take(self, queue: str, batch_id: str) -> bool:
        """Whether the next message of this batch asks for nothing. True once."""
        until = self._until.pop((queue, batch_id), None)
        return until is not None and self._clock() <= until


spent: Final = SpentWakeUps()
