"""`python -m pipeline.workers.agent NAME`: the node agent reports the GPUs of this machine and their health
to the pool, ends overdue leases, and moves jobs on.

Without a driver it reports no GPU and asks again; without Redis it goes on and logs that once. On SIGTERM it
takes its node out of the pool at once; if killed, its node expires after `gpu_node_ttl_ms`."""

import threading
import time
from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.gpu.job_keeper import JobKeeper
from pipeline.gpu.jobs import PoolJobs
from pipeline.gpu.node.agent import Agent
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.node.mps import PATHS
from pipeline.gpu.node.mps_watch import MpsWatch
from pipeline.gpu.pool import Pool
from pipeline.logs import logger, set_up
from pipeline.messages.submit import Submit
from pipeline.redis.connection import connect
from pipeline.settings import Settings, inherited
from pipeline.workers.exits import exit_code
from pipeline.workers.liveness import Progress
from pipeline.workers.loops import tend

ROLE: Final = "agent"


class AgentWorker:
    """The loop of the process. `run` returns after `stop` was set."""

    def __init__(self, settings: Settings, *, agent: Agent, pool: Pool) -> None:
        self.settings = settings
        self.agent = agent
        self.pool = pool
        self.stop = threading.Event()
        self.progress = Progress()
        self._away = False
        self._reaches_jobs = True
        self._jobs: JobKeeper | None = None

    def run(self) -> None:
        """Beat until `stop` is set, then leave the pool."""
        while not self.stop.is_set():
            began = time.monotonic()
            self._beat()
            self.progress.pulse()
            self.stop.wait(max(self.settings.internal.gpu_beat_s - (time.monotonic() - began), 0.01))
        self._leave()

    def _beat(self) -> None:
        try:
            self.agent.beat()
            self._keep_jobs()
        except (RedisUnavailable, redis.RedisError) as exc:
            if not self._away:  # once: not with every beat of a long night
                self._away = True
                logger(role=ROLE).warning("redis.away", why=str(exc))
        except Exception:  # noqa: BLE001 - the edge of a loop that must not end: the node would fall silent
            logger(role=ROLE).exception("agent.failed")
        else:
            if self._away:
                self._away = False
                logger(role=ROLE).info("redis.back")

    def _keep_jobs(self) -> None:
        """Move jobs on; Celery is loaded when the first one waits.

        An agent with a Redis user of its own reaches no jobs: others move them on.
        """
        if not self._reaches_jobs:
            return
        if self._jobs is None:
            jobs = PoolJobs(self.pool.client, self.settings)
            try:
                if not jobs.count():
                    return
            except redis.exceptions.NoPermissionError:
                self._reaches_jobs = False
                logger(role=ROLE).info("agent.without_jobs", why="its Redis user has no right to them")
                return
            from pipeline.messages.app import app_of

            submit = Submit(app_of(self.settings), self.pool.client, self.settings)
            self._jobs = JobKeeper(self.pool, jobs, nodes=submit.job_nodes, send=submit.start_job)
        self._jobs.round()

    def _leave(self) -> None:
        try:
            self.pool.ledger.leave(self.agent.node, self.agent.name)
        except (RedisUnavailable, redis.RedisError):
            return  # it is missed after gpu_node_ttl_ms


def main(argv: list[str]) -> int:
    (name,) = argv
    settings = Settings.load()
    set_up(settings.stack.log_level)
    pool = Pool(connect(settings), settings)
    mps = MpsWatch(path=inherited("PATH").get("PATH", PATHS))
    worker = AgentWorker(settings, agent=Agent(pool, settings, this_node(), mps=mps), pool=pool)
    tend(settings, worker.run, worker.stop, role_name=ROLE, name=name, progress=worker.progress)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
