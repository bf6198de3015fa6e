"""Waiting for a state in tests."""

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
