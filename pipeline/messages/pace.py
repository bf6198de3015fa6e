"""The pace of stage ingest where few records come: batches gather, so that one pass takes several.

A pass costs 20 to 30 ms of processor time however few records it has. Where the intake accepts a window five
times a second, passes of their own took a fifth of a core. So one small pass may begin in a second, and it
takes along what waits by then. A few may begin sooner after a pause: a person who sends a line waits
for nothing. A group takes 64 batches at most, so many small batches a second are no trickle either.
"""

import time
from collections.abc import Callable
from typing import Final

PASSES_PER_S: Final = 1.0  # small ones, over time
AT_ONCE: Final = 3.0  # small ones after a pause
# A pass of so many records or batches costs more by them than by itself, so its stream is no trickle.
SMALL: Final = 2_000
FEW_BATCHES: Final = 32


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

    def began(self, records: int, batches: int = 1) -> None:
        """A pass of so many records of so many batches began. A large one gives all tokens back."""
        tokens = self._refilled()
        small = records < SMALL and batches < FEW_BATCHES
        self._tokens = max(0.0, tokens - 1.0) if small else AT_ONCE

    def _refilled(self) -> float:
        now = self._clock()
        self._tokens = min(AT_ONCE, self._tokens + (now - self._looked) * PASSES_PER_S)
        self._looked = now
        return self._tokens
