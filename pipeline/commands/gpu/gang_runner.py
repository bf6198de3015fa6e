"""One rank of a gang: its program begins with all others, and ends with the first that fails.

    prepare --> ready --(all are; rank 0 says where it listens)--> program --> over --(the last)--> lease back

The record of the job holds the attempt. A rank that fails passes the job on, and the others find another
attempt in the record. The last rank that succeeds ends the job. Only rank 0 stores results.
"""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from pipeline.commands.gpu.job_runner import JobRun, Outcome
from pipeline.commands.gpu.run import Run
from pipeline.errors import RedisUnavailable
from pipeline.gpu.gang import rank_variables
from pipeline.gpu.jobs import ENDED, JobState, PoolJob
from pipeline.gpu.node.address import LOOPBACK, free_port, interface_of, own_address, redis_host
from pipeline.gpu.rank_pool import RankPool
from pipeline.redis.connection import now_ms
from pipeline.settings import Settings

POLL_S: Final = 0.1
# Gloo asks the name of the host for its address, and many hosts answer 127.0.1.1 (/etc/hosts of Debian).
GLOO: Final = "GLOO_SOCKET_IFNAME"


class GangRun(JobRun):
    """One rank in one attempt."""

    look_s = 1.0  # the others end so late after the first one, and their grace

    def __init__(self, pool: RankPool, settings: Settings) -> None:
        self.rank = pool.rank
        self.gang = pool
        super().__init__(pool, pool.jobs, settings, pool.job, pool.own)
        several = len({rank.node for rank in pool.job.ranks}) > 1
        self.address = own_address(redis_host(str(settings.redis.url))) if several else LOOPBACK

    def _begin(self) -> PoolJob | None:
        """Wait until all ranks are ready; the keeper of jobs bounds that time."""
        self.ready = True
        self.jobs.beat(self.job.run_id(self.rank), ready=True)
        while True:
            with suppress(RedisUnavailable):  # the keeper of jobs waits for our sign of life
                job = self.jobs.find(self.job.job_id)
                if job is None or self._why_over(job):
                    return None
                if job.state is JobState.RUNNING:
                    self.job = job
                    return job
                if self.rank == 0 and len(self.jobs.beating(job, ready=True)) == job.size:
                    self.jobs.change(job.job_id, self._led)
                    continue
            time.sleep(POLL_S)

    def _led(self, job: PoolJob) -> PoolJob | None:
        """All ranks begin, and find rank 0 at its address."""
        if job.state is not JobState.STARTING or job.start_id != self.job.start_id:
            return None
        started_ms, master = now_ms(self.pool.client), f"{self.address}:{free_port(self.address)}"
        return replace(job, state=JobState.RUNNING, master=master, started_ms=started_ms, why="")

    def _unused(self, why: str) -> Outcome:
        """A later start has the same lease: it is given back only while this start stands in the record."""
        if self._why_over(self.jobs.find(self.job.job_id)):
            return Outcome(failed=why)
        return super()._unused(why)

    def _variables(self) -> dict[str, str]:
        job = self.job
        variables = rank_variables(
            job.ranks,
            self.rank,
            master=job.master,
            run=job.lease_id,
            attempt=job.attempt,
            retries=job.retries,
        )
        interface = interface_of(self.address)
        if interface and not any(one.startswith(f"{GLOO}=") for one in job.environment):
            variables[GLOO] = interface
        return super()._variables() | variables

    def _run_of(self) -> Run:
        return self._new_run(locked=(self.job.ranks[self.rank].uuid,))

    def _why_over(self, job: PoolJob | None) -> str:
        if why := super()._why_over(job):
            return why
        if job is None or job.state in ENDED or job.attempt != self.job.attempt:
            return "another rank has ended"
        return "" if job.start_id == self.job.start_id else "its ranks did not begin together"

    def _report(self, outcome: Outcome) -> None:
        """A rank that fails reports before it leaves: the others end while it stores nothing more."""
        where = f"rank {self.rank} on node {self.job.places[self.rank]}"
        outcome = replace(outcome, rank=where)
        if not outcome.good:
            super()._report(outcome)
        if self.gang.leave() and outcome.good:
            super()._report(outcome)
