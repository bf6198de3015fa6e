"""Time in tests: waiting for a state, and a clock that stands still."""

import time
from collections.abc import Callable


def wait_until(done: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.05) -> bool:
    """Poll a state with a deadline on the monotonic clock; True when it was reached."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now
