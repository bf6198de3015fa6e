"""Ends containers of jobs whose lease has ended, after the processes that watched them were killed.

The container of Docker belongs to its daemon, and that of Podman to nobody, so it would run on for ever.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from pipeline.errors import RedisUnavailable
from pipeline.gpu.jobs import PoolJobs
from pipeline.gpu.node.engine import ContainerEngine, container_name, container_owner
from pipeline.logs import logger
from pipeline.redis.connection import answering
from pipeline.settings import Settings
from pipeline.upkeep import FaultSeries, start_thread

EVERY_S: Final = 10.0


class JobContainers:
    """The containers of jobs in one data directory."""

    def __init__(
        self, engine: ContainerEngine, jobs: PoolJobs, settings: Settings, *, busy: Callable[[], bool]
    ) -> None:
        """`busy`: processes live that may start a container."""
        self.engine, self.jobs, self.busy = engine, jobs, busy
        self.begin = container_name(container_owner(settings.data.dir), "")
        self.wake = threading.Event()  # a process begins that may start one

    def sweep(self) -> int | None:
        """Removes orphans. How many containers are left; None when the engine does not answer. Raises
        RedisUnavailable."""
        names = self.engine.names(self.begin)
        if names is None:
            return None
        left = 0
        for name in names:
            lease_id = name.removeprefix(self.begin)
            if self._lives(lease_id) or not self.engine.remove(name):
                left += 1
            else:
                logger(lease=lease_id).warning("gpu.container_removed", why="its lease has ended")
        return left

    def _lives(self, lease_id: str) -> bool:
        """Its lease, or the process that watches it and may still grant it a grace."""
        run_id = lease_id.rpartition(".")[0]
        with answering():
            leased = self.jobs.client.hexists(self.jobs.keys.gpu("leases"), lease_id)
            return bool(leased or self.jobs.client.exists(self.jobs.keys.gpu("job_beat", run_id)))

    def start(self) -> None:
        """Sweep now, and every EVERY_S while there are containers or may come some."""
        start_thread("gpu-containers", self._run)

    def _run(self) -> None:
        faults = FaultSeries("gpu.containers_failed", RedisUnavailable)
        while True:
            self.wake.clear()
            busy, left = self.busy(), None  # in this order: one that ends now may leave a container
            with faults.outlived():
                left = self.sweep()
            if left == 0 and not busy:
                self.wake.wait()
            else:
                time.sleep(EVERY_S)
