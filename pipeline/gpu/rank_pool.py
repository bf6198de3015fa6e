"""The pool as one rank of a gang uses it: all ranks hold one lease, and the last one gives it back.

A program runs in the part of its rank (`own`). Renewals, processes and the end concern the whole lease. So a
lease that is lost on any node is lost for every rank.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.gpu.gang import devices_of_rank
from pipeline.gpu.jobs import PoolJob, PoolJobs
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import PoolLease, Renewed


class RankPool(Pool):
    """`whole`: the lease of the gang."""

    def __init__(self, pool: Pool, jobs: PoolJobs, job: PoolJob, rank: int, whole: PoolLease) -> None:
        super().__init__(pool.client, pool.settings)
        self.jobs, self.job, self.rank, self.whole = jobs, job, rank, whole
        self.clean = True

    @property
    def own(self) -> PoolLease:
        """The parts that the program of this rank sees."""
        uuids = devices_of_rank(self.job.ranks, self.rank)
        order = {rank.uuid: number for number, rank in enumerate(self.job.ranks)}
        parts = sorted((part for part in self.whole.parts if part.uuid in uuids), key=lambda x: order[x.uuid])
        return replace(self.whole, parts=tuple(parts))

    def activate(self, lease: PoolLease, *, pids: Sequence[int], host: str = "") -> bool:
        return super().activate(self._whole(lease), pids=pids, host=host)

    def renew(self, lease: PoolLease) -> Renewed:
        return super().renew(self._whole(lease))

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:  # noqa: ARG002 - as of a Pool
        """Only notes whether the program is off its device: other ranks may still use theirs."""
        self.clean = self.clean and clean
        return True

    def _whole(self, own: PoolLease) -> PoolLease:
        return replace(own, parts=self.whole.parts)

    def leave(self) -> bool:
        """This rank is over. True for the last one, which has given the lease back. Raises
        RedisUnavailable."""
        ends = self.jobs.end_rank(self.job, self.rank, clean=self.clean)
        if len(ends) < self.job.size:
            return False
        super().release(self.whole, clean=all(ends.values()))
        return True
