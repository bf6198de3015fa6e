"""A worker's heartbeat in Redis."""

import os
import threading
from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.observe.embedded import called
from pipeline.observe.presence import Pace, Presence
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.upkeep import FaultSeries, UpkeepThread
from pipeline.workers.liveness import Liveness, LivenessMonitor, Progress

BEAT_S: Final = 4.0


class Heartbeat(UpkeepThread):
    """Reports every BEAT_S that this process lives. An unreachable Redis only delays it."""

    def __init__(
        self,
        settings: Settings,
        *,
        role_name: str,
        queues: tuple[str, ...],
        name: str,
        progress: Progress | None = None,
        ends: bool = True,
        engine: str = "",
    ) -> None:
        """`progress`: of the work, to be reported. `ends`: a stall ends the process (liveness.py). `engine`:
        as in WorkerView."""
        super().__init__("heartbeat")
        self.presence = Presence(connect(settings), settings)
        self.role = role_name
        self.queues = queues
        self.engine = engine
        self.worker = called(settings, name, embedded=bool(settings.internal.supervisor_pid))
        self.progress = progress
        self.monitor: LivenessMonitor | None = None
        if progress is not None:
            keys = list(map(Keys(settings.redis.key_prefix).kombu, queues))
            # A client of its own: neither waits behind the other.
            liveness = Liveness(connect(settings), progress, keys, stall_s=settings.internal.stall_s)
            self.monitor = LivenessMonitor(liveness) if ends else LivenessMonitor(liveness, end=lambda: None)
        self.stopping = threading.Event()

    def work(self) -> None:
        if self.monitor is not None:
            self.monitor.start()
        faults = FaultSeries("heartbeat.failed", RedisUnavailable, redis.RedisError)
        while True:
            with faults.outlived():  # a worker without a heartbeat would count as dead
                self.presence.beat(
                    name=self.worker,
                    role=self.role,
                    pid=os.getpid(),
                    queues=self.queues,
                    progress=self._pace(),
                    engine=self.engine,
                )
            if self.stopping.wait(BEAT_S):
                return

    def _pace(self) -> Pace | None:
        if self.progress is None or self.monitor is None:
            return None
        moment = self.progress.now()
        return Pace(quiet_s=moment.quiet_s, busy=moment.busy, stalled_s=self.monitor.stalled_s)

    def leave(self) -> None:
        self.stopping.set()
        if self.monitor is not None:
            self.monitor.stopping.set()
        try:
            self.presence.leave(self.worker)
        except (RedisUnavailable, redis.RedisError):
            return  # the sweep forgets silent workers
