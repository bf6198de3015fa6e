"""Keeps one lease alive while its holder works, and says when the holder must stop.

Two threads: one renews, the other only compares the clock. A renewal can hang in a dead connection for longer
than a lease lives; the clock still runs out in time, measured from before the last confirmed renewal was
sent. A question whether the lease is lost compares the clock, too. After a pause of the whole process the
holder may run before either thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from pipeline.errors import RedisUnavailable
from pipeline.upkeep import FaultSeries, start_thread

SAFE: Final = 0.8  # of a TTL without a confirmed renewal: the holder stops before another one may start
JOIN_S: Final = 1.0  # a renewal that hangs may outlive the keeper; by then it can change nothing


class _Lost(threading.Event):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def is_set(self) -> bool:
        if not super().is_set():
            self._look()
        return super().is_set()


class Keeper:
    """The renewals of one lease. `lost` is set once, with `why`, and then the lease stays lost."""

    def __init__(
        self, renew: Callable[[], str], *, ttl_ms: int, beat_s: float, log: Any, event: tuple[str, str]
    ) -> None:
        """`renew` answers "" or why the lease has ended.

        `event`: the log events of a loss and of a failed renewal.
        """
        self.lost: threading.Event = _Lost(self._look)
        self.why = ""
        self.confirmed = time.monotonic()  # when the last confirmed renewal was sent
        self._renew = renew
        self._ttl_s = ttl_ms / 1000
        self._beat_s = min(self._ttl_s / 3, beat_s)
        self._log = log
        self._lost_event, self._failed_event = event
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []

    def renew(self) -> bool:
        """One renewal; False when the lease has ended. Raises as the `renew` given does."""
        sent = time.monotonic()
        if why := self._renew():
            self._lose(why)
            return False
        self.confirmed = sent
        return True

    def start(self) -> None:
        for work in (self._watch, self._beat):
            self._threads.append(start_thread(f"lease-{work.__name__.strip('_')}", work))

    def stop(self) -> None:
        """No loss is announced afterwards."""
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _beat(self) -> None:
        faults = FaultSeries(self._failed_event, RedisUnavailable, log=self._log)
        while not self._stop.wait(self._beat_s) and not self.lost.is_set():
            with faults.outlived():
                if not self.renew():
                    return

    def _watch(self) -> None:
        while not self.lost.is_set():
            if self._stop.wait(max(0.0, self._left_s())):
                return

    def _left_s(self) -> float:
        return self.confirmed + SAFE * self._ttl_s - time.monotonic()

    def _look(self) -> None:
        if self._left_s() <= 0:
            self._lose(f"not renewed for {SAFE * self._ttl_s:.1f} s, so it may have expired")

    def _lose(self, why: str) -> None:
        with self._guard:
            if self._stop.is_set() or self.why:
                return
            self.why = why
            self.lost.set()
        self._log.warning(self._lost_event, why=why)
