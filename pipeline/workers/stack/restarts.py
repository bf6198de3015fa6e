"""When a dead process is started again, and when it is given up.

A process that dies at work is started again for ever, with growing pauses: the ledger bounds a batch that
kills, and Redis comes back. A process that dies again and again before it is ready means a broken
installation. A sidecar or GPU process is started again at once, and given up if it dies too often."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

# Pauses before the next start, the last one for every further death. A life of CALM_S resets them.
PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
CALM_S: Final = 15.0
# Deaths in a row before it was ready after which a process will not come back by itself.
UNREADY: Final = 5
# A process that the stack can do without is given up after so many deaths within CRASH_WINDOW_S.
CRASHES: Final = 5
CRASH_WINDOW_S: Final = 60.0


@dataclass(slots=True)
class Restarts:
    """The deaths of one process that the stack needs."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    in_a_row: int = 0
    unready: int = 0  # the newest deaths, as many as there were before it was ready
    again_at: float | None = None  # None: it runs

    def __post_init__(self) -> None:
        self.began = self.clock()

    def died(self, *, ready: bool | None) -> None:
        """`ready`: whether it had become so; None: nobody can tell now, and so it is not held against it."""
        now = self.clock()
        calm = now - self.began > CALM_S
        if calm:
            self.in_a_row = 0
        self.again_at = now + PAUSES_S[min(self.in_a_row, len(PAUSES_S) - 1)]
        self.in_a_row += 1
        if ready or calm:
            self.unready = 0
        elif ready is not None:
            self.unready += 1

    @property
    def due(self) -> bool:
        """It is down and its pause is over."""
        return self.again_at is not None and self.clock() >= self.again_at

    @property
    def hopeless(self) -> bool:
        """It could not be started so often that it will not come back by itself."""
        return self.unready >= UNREADY

    def started(self) -> None:
        self.began = self.clock()
        self.again_at = None

    def __str__(self) -> str:
        return f"died {self.unready} times in a row before it was ready"


@dataclass(slots=True)
class Crashes:
    """The deaths of one process that is not vital."""

    clock: Callable[[], float] = time.monotonic
    at: list[float] = field(default_factory=list)  # the newest

    def died(self) -> None:
        now = self.clock()
        self.at = [t for t in self.at if now - t < CRASH_WINDOW_S] + [now]

    @property
    def hopeless(self) -> bool:
        """It died so often that the stack goes on without it."""
        return len(self.at) >= CRASHES

    def __str__(self) -> str:
        return f"died {len(self.at)} times within {CRASH_WINDOW_S:.0f} s"
