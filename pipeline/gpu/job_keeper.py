"""Moves jobs on: asks for their leases, calls their nodes, and notices that a node died.

Any process may keep jobs, and one does at a time. A round reads the records anew and changes them by
compare-and-set. So a keeper that is killed, or is slow, loses and doubles nothing.
"""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pipeline.errors import BadInput, LeaseRefused
from pipeline.gpu.gang import ranks_of
from pipeline.gpu.jobs import KEPT_S, JobState, PoolJob, PoolJobs, lost
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseState, PoolLease, PoolRequest
from pipeline.logs import logger
from pipeline.redis.connection import answering, now_ms

TURN_MS: Final = 900  # from one round to the next, over all processes that keep jobs
CALL_AGAIN_S: Final = 5.0  # between two messages to a node, of which one may be lost
START_MS: Final = 20_000  # for a node to begin; then the job waits again
# Waiting jobs that ask the pool at a time. All of 10,000 made a round of minutes, in which the agent that
# kept them fell silent and its node lost every lease.
MOST_ASKING: Final = 256
# So long a job that came back goes to other nodes, where they can take it: a node with a full disk fails each
# job at once, so it is the first that is free again.
AVOID_S: Final = 60.0
IDLE_S: Final = 600.0  # between two looks for old jobs while none lives
KEPT_ENDED: Final = 200  # jobs; each has up to 256 KiB of output
BEHIND: Final = f"{MOST_ASKING} jobs ask for a GPU already; it asks when its turn has come"
NO_NODE: Final = "no node takes jobs; set gpu_jobs = true on one with a GPU"
NO_ENGINE: Final = (
    "none of these nodes has a container engine: {}; install Podman or start Docker there, "
    "then start the process that takes jobs again"
)


class JobKeeper:
    """`nodes`: those that take jobs now, each with its container engine, "" without one. `send`: calls a node
    for a rank of a job, False when that failed."""

    def __init__(
        self,
        pool: Pool,
        jobs: PoolJobs,
        *,
        nodes: Callable[[], Mapping[str, str]],
        send: Callable[[str, str, int], bool],
    ) -> None:
        self.pool, self.jobs = pool, jobs
        self.nodes, self.send = nodes, send
        self.name = uuid.uuid4().hex
        self._called: dict[tuple[str, int], float] = {}  # lease, rank -> monotonic, of the last call
        self._asked: set[str] = set()  # leases that this process asked for before
        self._new: dict[str, PoolJob] = {}  # those of this round that it had not, by lease
        self._returned: dict[str, float] = {}  # jobs that came back -> monotonic
        self._tidied = float("-inf")

    def round(self) -> None:
        """One round; nothing while another process keeps. Raises RedisUnavailable."""
        if not self.jobs.count() and time.monotonic() - self._tidied < IDLE_S:
            return
        with answering():
            key = self.jobs.keys.gpu("job_keeper")
            if not self.pool.client.set(key, self.name, nx=True, px=TURN_MS):
                return
        live = self.jobs.live()
        nodes = self.nodes() if any(job.state is JobState.WAITING for job in live) else {}
        asking = asking_jobs(live, self._asked)
        self._new, notes = {}, MOST_ASKING
        for job in live:
            if job.state is JobState.WAITING and not job.cancel and job.lease_id not in asking:
                if job.why != BEHIND and notes:
                    notes -= 1
                    self._note(job, BEHIND)
                continue
            try:
                self._move(job, nodes)
            except (LeaseRefused, BadInput) as exc:  # of this job; the others go on
                self._note(job, str(exc))
        if self._new:
            for lease in self.pool.planner.first():
                if lease.lease_id in self._new:
                    self._start(self._new[lease.lease_id], lease)
        if any(job.state is JobState.WAITING for job in live):
            self.pool.planner.poll()
        leases = {job.lease_id for job in live}
        self._asked &= leases
        ids = {job.job_id for job in live}
        self._returned = {job_id: at for job_id, at in self._returned.items() if job_id in ids}
        self._called = {key: at for key, at in self._called.items() if key[0] in leases}
        self._tidy()

    def _move(self, job: PoolJob, nodes: Mapping[str, str]) -> None:
        if job.cancel and job.state is not JobState.RUNNING:
            self.pool.ledger.abandon(job.lease_id, job.holder)
            if not self.jobs.beating(job):
                self._end(job, JobState.CANCELLED, "it was cancelled before it began")
        elif job.state is JobState.WAITING:
            self._ask(job, nodes)
        elif job.state is JobState.STARTING:
            self._await_start(job)
        elif why := self._died(job):
            self._put(job, lambda now: lost(now, why))

    def _died(self, job: PoolJob) -> str:
        """Why a job that runs is lost, "" while it is not."""
        beating = self.jobs.beating(job)
        if not job.gang:
            over = not beating and not self._has_lease(job)
            return f"node {job.node} died, or its lease was taken away" if over else ""
        # The others of a gang go on renewing its lease, so the lease tells nothing about one rank.
        silent = sorted(set(range(job.size)) - beating - self.jobs.ended_ranks(job))
        if silent:
            return f"rank {silent[0]} on node {job.places[silent[0]]} died"
        return "" if beating else "its ranks ended, and none of them told how"

    def _ask(self, job: PoolJob, nodes: Mapping[str, str]) -> None:
        """Ask for the lease, on the nodes that take jobs now."""
        wanted = job.need.node.split("|") if job.need.node else nodes
        takers = [name for name in sorted(nodes) if name in wanted]
        allowed = [name for name in takers if nodes[name] or not job.image]
        if not allowed:
            there = f"node {job.need.node} takes no jobs now" if job.need.node and nodes else NO_NODE
            self._note(job, NO_ENGINE.format(", ".join(takers)) if takers else there)
            return
        allowed = self._elsewhere(job, allowed)
        request = self._request(replace(job, need=replace(job.need, node="|".join(allowed))))
        if why := self.pool.refusal(request.need):
            self._note(job, why)
            return
        if job.why == BEHIND:
            self._note(job, "")
        lease = self.pool.ledger.wait(request, self.pool.settings.internal.lease_ttl_ms)
        if lease is None and job.lease_id not in self._asked:
            self._new[job.lease_id] = job
        self._asked.add(job.lease_id)
        if lease is not None:
            self._start(job, lease)

    def _elsewhere(self, job: PoolJob, allowed: list[str]) -> list[str]:
        """These nodes without those that the job came back from, for AVOID_S, where others can take it."""
        others = [name for name in allowed if name not in job.node.split(", ")]
        if not job.node or not others:
            return allowed
        since = self._returned.setdefault(job.job_id, time.monotonic())
        if time.monotonic() - since > AVOID_S:
            return allowed
        need = replace(job.need, node="|".join(others))
        return allowed if self.pool.refusal(need) else others

    def _start(self, job: PoolJob, lease: PoolLease) -> None:
        """Call the node that has the lease."""
        self._returned.pop(job.job_id, None)
        uuids = {part.uuid for part in lease.parts}
        devices = self.pool.snapshot().devices
        nodes = sorted({device.node for device in devices if device.uuid in uuids})
        ranks = ranks_of(lease, devices) if job.gang else ()
        if job.gang and not ranks:
            self._note(job, "the pool does not know its devices any more")
            self.pool.ledger.abandon(job.lease_id, job.holder)
            return
        changes: dict[str, Any] = {"node": ", ".join(nodes), "ranks": ranks}
        at = now_ms(self.pool.client)
        self._put(
            job,
            lambda now: replace(now, state=JobState.STARTING, granted_ms=at, why="", **changes),
        )
        self._call(replace(job, **changes), range(job.size))

    def _await_start(self, job: PoolJob) -> None:
        """Keep the lease until all its nodes have begun."""
        missing = sorted(set(range(job.size)) - self.jobs.beating(job))
        if missing and now_ms(self.pool.client) - job.granted_ms > START_MS:
            why = f"node {job.places[missing[0]]} did not start it within {START_MS // 1000} s"
            self._put(job, lambda now: replace(now, state=JobState.WAITING, why=why, granted_ms=0))
            self.pool.ledger.abandon(job.lease_id, job.holder)
            return
        lease = self.pool.ledger.wait(self._request(job), self.pool.settings.internal.lease_ttl_ms)
        if lease is None:
            why = "its lease ended before it began"
            self._put(job, lambda now: replace(now, state=JobState.WAITING, why=why, granted_ms=0))
            self.pool.ledger.abandon(job.lease_id, job.holder)
        elif missing and lease.state is LeaseState.GRANTED:
            self._call(job, missing)

    def _call(self, job: PoolJob, ranks: Iterable[int]) -> None:
        now = time.monotonic()
        for rank in ranks:
            if now - self._called.get((job.lease_id, rank), 0.0) > CALL_AGAIN_S:
                self._called[job.lease_id, rank] = now
                self.send(job.places[rank], job.job_id, rank)

    def _request(self, job: PoolJob) -> PoolRequest:
        ttl_ms = self.pool.settings.internal.lease_ttl_ms
        return PoolRequest(request_id=job.lease_id, holder=job.holder, need=job.need, ttl_ms=ttl_ms)

    def _has_lease(self, job: PoolJob) -> bool:
        with answering():
            return bool(self.pool.client.hexists(self.jobs.keys.gpu("leases"), job.lease_id))

    def _note(self, job: PoolJob, why: str) -> None:
        """Why it waits, for people; written once."""
        if job.why != why:
            self._put(job, lambda now: replace(now, why=why))

    def _end(self, job: PoolJob, state: JobState, why: str) -> None:
        self._put(job, lambda now: replace(now, state=state, why=why))

    def _put(self, job: PoolJob, change: Callable[[PoolJob], PoolJob]) -> None:
        """Change the record, if the job is still where this round found it."""

        def decide(now: PoolJob) -> PoolJob | None:
            return change(now) if (now.state, now.attempt) == (job.state, job.attempt) else None

        changed = self.jobs.change(job.job_id, decide)
        if changed is not None and changed.state is not job.state:
            logger(job=job.job_id, node=changed.node).info(
                "gpu.job", state=changed.state.value, why=changed.why
            )

    def _tidy(self) -> None:
        """Forget the oldest jobs that have ended."""
        if time.monotonic() - self._tidied < CALL_AGAIN_S:
            return
        self._tidied = time.monotonic()
        ended, old = self.jobs.ended(), now_ms(self.pool.client) - 1000 * KEPT_S
        ended.sort(key=lambda job: job.ended_ms)
        for number, job in enumerate(ended):
            if job.ended_ms < old or number < len(ended) - KEPT_ENDED:
                self.jobs.forget(job.job_id)


def asking_jobs(live: Sequence[PoolJob], asked: Collection[str]) -> frozenset[str]:
    """The leases of the waiting jobs that ask the pool now: at most MOST_ASKING. Pure.

    Those of the highest priority come first, and those that asked before. Then tenants take turns, and so do
    the needs of one tenant that differ. So neither many jobs nor one need that never fits keep others away.
    """
    waiting = [job for job in live if job.state is JobState.WAITING and not job.cancel]
    if len(waiting) <= MOST_ASKING:
        return frozenset(job.lease_id for job in waiting)
    forms: Counter[object] = Counter()
    turns: Counter[str] = Counter()
    ranked = []
    for job in sorted(waiting, key=lambda one: (one.lease_id not in asked, one.submitted_ms, one.job_id)):
        form = (job.need, bool(job.image))
        ranked.append((-job.need.priority, forms[form], job.need.tenant, job.lease_id))
        forms[form] += 1
    found = []
    for priority, _, tenant, lease_id in sorted(ranked, key=lambda one: one[:2]):
        found.append((priority, turns[tenant], lease_id))
        turns[tenant] += 1
    return frozenset(lease_id for *_, lease_id in sorted(found)[:MOST_ASKING])
