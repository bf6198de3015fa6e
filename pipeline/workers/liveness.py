"""Liveness of a worker, and the end of one that has stalled.

A Celery consumer can stall on a living connection: it answers pings but takes no message, and looks idle from
outside. So every worker polls its own queues. If they have work for `stall_s` while it works on nothing and
takes nothing, it ends itself, and its supervisor starts it again. An unreachable Redis or a stopped process
is no stall."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from celery import signals
from celery.worker import state

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.redis.connection import answering
from pipeline.upkeep import FaultSeries, UpkeepThread, start_thread

# The exit code of a stalled worker.
STALLED: Final = 75
# A call that holds the interpreter's lock stops every Python thread; it gets so much longer than a step.
HELD_S: Final = 60.0
# A poll that comes later than this many intervals: the process was stopped in between, or Redis answered
# late.
LATE: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Progress of a process: messages taken, time since the last one (or the last round of its loop), busy or
    not."""

    pulses: int
    quiet_s: float
    busy: bool


class Progress:
    """Messages that a process took and works on. The work writes it, monitoring threads read it."""

    def __init__(self) -> None:
        self._pulses = 0
        self._at = time.monotonic()

    def pulse(self, **_: object) -> None:
        """The process took a message, or its loop came round once more."""
        self._pulses += 1
        self._at = time.monotonic()

    def follow_celery(self) -> None:
        """Every message that a Celery worker takes is a pulse from now on."""
        signals.task_received.connect(self.pulse, weak=False)

    def now(self) -> Moment:
        quiet_s = time.monotonic() - self._at
        return Moment(pulses=self._pulses, quiet_s=quiet_s, busy=len(state.reserved_requests) > 0)


class Liveness:
    """Decides from polls whether the process has stalled. `queues` empty: a loop, which always has work."""

    def __init__(
        self,
        client: "redis.Redis",
        progress: Progress,
        queues: Sequence[str],
        *,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.progress = progress
        self.queues = tuple(queues)
        self.stall_s = stall_s
        self.clock = clock
        self.look_s = min(4.0, stall_s / 4)
        self._last = clock()
        self._since: float | None = None
        self._pulses = -1

    def look(self) -> float:
        """Seconds for which work has waited and this process took none; 0 if all is well."""
        now, moment = self.clock(), self.progress.now()
        late = now - self._last > LATE * self.look_s
        self._last = now
        idle = not moment.busy and moment.pulses == self._pulses
        self._pulses = moment.pulses
        if late or not idle or not self._waits():
            self._since = None
        elif self._since is None:
            self._since = now
        return 0.0 if self._since is None else now - self._since

    def _waits(self) -> bool:
        try:
            with answering():
                if not self.queues:
                    self.client.ping()
                    return True
                return any(self.client.llen(queue) for queue in self.queues)
        except (RedisUnavailable, redis.RedisError):
            return False


class LivenessMonitor(UpkeepThread):
    """Polls liveness and ends a stalled process. The heartbeat reports `stalled_s`."""

    def __init__(self, liveness: Liveness, end: Callable[[], Any] = lambda: os._exit(STALLED)) -> None:
        super().__init__("liveness")
        self.liveness = liveness
        self.end = end
        self.stopping = threading.Event()
        self.stalled_s = 0.0

    def work(self) -> None:
        faults = FaultSeries("liveness.failed")
        while not self.stopping.wait(self.liveness.look_s):
            with faults.outlived():  # such as OSError without a free file; a stall must still be seen
                self.stalled_s = self.liveness.look()
            if faults.failing:
                continue
            if self.stalled_s >= self.liveness.stall_s and not self.stopping.is_set():
                source = ", ".join(self.liveness.queues) or "its loop"
                why = f"work has waited for {self.stalled_s:.0f} s and nothing is taken ({source})"
                logger().error("worker.deaf", why=why)
                self.end()
                return


def end_when_held(limit_s: float) -> None:
    """End this process if a call holds the interpreter's lock for `limit_s`, when no Python thread could.

    The traceback of every thread goes to standard error first.
    """

    def beat() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            time.sleep(min(limit_s / 4, 5.0))

    start_thread("interpreter", beat)
