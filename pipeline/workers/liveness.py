"""Whether a worker gets on, and the end of one that does not.

A Celery consumer can go deaf on a living connection: it answers pings and takes nothing, and from outside it looks like an
idle one. So every worker looks at its own queues: when they have work for `stall_s` and it has nothing in hand and took
nothing in that time, it ends itself, to be started again. Redis being away is no stall, nor is a process that was stopped.
"""

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

# The exit code of a worker that served its queues no more.
STALLED: Final = 75
# A call that holds the interpreter's lock lets no thread of ours run; it gets so much longer than a step.
HELD_S: Final = 60.0
# A look that comes so much later than meant: this process was stopped in between, or Redis answered late.
LATE: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How far a process has come: what it took, how long ago the last of it (or its loop came round), and whether it
    works on something now."""

    taken: int
    quiet_s: float
    busy: bool


class Progress:
    """What a process took, and has in hand. Written by the work, read by the threads that look after it."""

    def __init__(self) -> None:
        self._taken = 0
        self._at = time.monotonic()

    def pulse(self, **_: object) -> None:
        """The process took a message, or its loop came round once more."""
        self._taken += 1
        self._at = time.monotonic()

    def follow_celery(self) -> None:
        """Every message that a Celery worker takes is a pulse from now on."""
        signals.task_received.connect(self.pulse, weak=False)

    def now(self) -> Moment:
        quiet_s = time.monotonic() - self._at
        return Moment(taken=self._taken, quiet_s=quiet_s, busy=len(state.reserved_requests) > 0)


class Liveness:
    """Decides from one look after another whether the process is deaf. `queues` empty: a loop, which always has work."""

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
        self._taken = -1

    def look(self) -> float:
        """For how many seconds now work has waited that this process does not take; 0 when all is well."""
        now, moment = self.clock(), self.progress.now()
        late = now - self._last > LATE * self.look_s
        self._last = now
        idle = not moment.busy and moment.taken == self._taken
        self._taken = moment.taken
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


class LivenessMonitor(threading.Thread):
    """Looks on and on, and ends the process when it is deaf. `stalled_s` is for the heartbeat to tell."""

    def __init__(self, liveness: Liveness, end: Callable[[], Any] = lambda: os._exit(STALLED)) -> None:
        super().__init__(name="liveness", daemon=True)
        self.liveness = liveness
        self.end = end
        self.stopping = threading.Event()
        self.stalled_s = 0.0

    def run(self) -> None:
        while not self.stopping.wait(self.liveness.look_s):
            self.stalled_s = self.liveness.look()
            if self.stalled_s >= self.liveness.stall_s and not self.stopping.is_set():
                what = ", ".join(self.liveness.queues) or "its loop"
                why = f"work has waited for {self.stalled_s:.0f} s and nothing is taken ({what})"
                logger().error("worker.deaf", why=why)
                self.end()
                return


def end_when_held(limit_s: float) -> None:
    """End this process when a call holds the interpreter's lock for so long: no thread of ours could do it then.

    The traceback of every thread goes to standard error first.
    """

    def beat() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            time.sleep(min(limit_s / 4, 5.0))

    threading.Thread(target=beat, name="interpreter", daemon=True).start()
