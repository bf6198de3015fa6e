"""The pace of stage ingest where few records come: batches gather, so that one pass takes several.

A pass costs 20 to 30 ms of processor time however few records it has. Where the intake accepts a window five
times a second, passes of their own took a fifth of a core. So two small passes may begin in a second, and
each takes along what waits by then. A few may begin sooner after a pause: a person who sends a line waits
for nothing.
"""

import time
from collections.abc import Callable
from typing import Final

PASSES_PER_S: Final = 2.0  # small ones, over time
AT_ONCE: Final = 3.0  # small ones after a pause
SMALL: Final = 1_000  # records of a pass whose lines cost less than the pass


class PassPace:
    """A bucket of tokens, one for each small pass. Belongs to one process."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._tokens, self._looked = AT_ONCE, clock()

    def wait(self) -> None:
        """Until the next pass may begin; at most 1 / PASSES_PER_S seconds."""
        if (tokens := self._refilled()) < 1.0:
            self._sleep((1.0 - tokens) / PASSES_PER_S)

    def began(self, records: int) -> None:
        """A pass of so many records began. A large one gives all tokens back: there is no trickle."""
        tokens = self._refilled()
        self._tokens = max(0.0, tokens - 1.0) if records < SMALL else AT_ONCE

    def _refilled(self) -> float:
        now = self._clock()
        self._tokens = min(AT_ONCE, self._tokens + (now - self._looked) * PASSES_PER_S)
        self._looked = now
        return self._tokens
