"""A discrete-event simulation of a workload over the real `make_plan()`.

No simulated job overruns or dies. A job that is asked to yield gives back after YIELD_S and waits again with
its remaining work.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from pipeline.gpu.policy.fairness import Shares, accrued, decayed, lease_size
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.policy.preemption import MIN_RUNTIME_MS
from pipeline.gpu.values import (
    Backfill,
    Device,
    Grant,
    LeaseState,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Reservation,
    Snapshot,
    Tenant,
    Usage,
    Yield,
)

PATIENCE_S: Final = 1_800.0  # a job that still waits at the end after so long is starved
YIELD_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A need that comes at `arrival_s` and really works for `duration_s`."""

    name: str
    arrival_s: float
    duration_s: float
    need: Need


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTimes:
    """Waiting times in seconds. Jobs that still wait count with their wait so far."""

    count: int = 0
    pending: int = 0
    mean_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of a simulation.

    `utilisation`: mean dominant share leased until `end_s`; `shares`: by tenant.
    """

    gangs: WaitTimes
    small: WaitTimes
    utilisation: float
    shares: Mapping[str, float]
    starved: int
    grants: int
    yields: int
    end_s: float


def simulate(
    jobs: Sequence[Job],
    devices: Sequence[Device],
    *,
    tenants: Mapping[str, Tenant] | None = None,
    backfill: Backfill = Backfill.EASY,
    half_life_s: float = 86_400.0,
    end_s: float | None = None,
) -> SimulationResult:
    """Work through the jobs until `end_s`, or until no event is left."""
    if tenants is None:
        tenants = {job.need.tenant: Tenant(name=job.need.tenant) for job in jobs}
    world = Snapshot(epoch=0, now_ms=0, devices=tuple(devices), tenants=tenants, half_life_s=half_life_s)
    simulation = _Simulation(world, jobs, backfill, Shares(world))
    simulation.work(math.inf if end_s is None else int(end_s * 1000))
    return simulation.result(jobs)


@dataclass(slots=True)
class _Progress:
    """The remaining work of a job and its time in the queue."""

    job: Job
    remaining_ms: int
    since_ms: int = 0
    waited_ms: int = 0
    started: bool = False


@dataclass(slots=True)
class _Simulation:
    """State and clock of one run.

    Events are (ms, kind, number, name); ends come before arrivals of the same moment.
    """

    world: Snapshot
    jobs: Sequence[Job]
    backfill: Backfill
    shares: Shares
    events: list[tuple[int, int, int, str]] = field(default_factory=list)
    leases: dict[str, PoolLease] = field(default_factory=dict)
    waiting: dict[str, PoolRequest] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    reservation: Reservation | None = None
    works: dict[str, _Progress] = field(default_factory=dict)
    now_ms: int = 0
    held_ms: dict[str, float] = field(default_factory=dict)  # dominant share x time, by tenant; "" of all
    grants: int = 0
    yields: int = 0
    numbers: int = 0
    arrived: int = 0

    END: ClassVar = 0
    GAVE_BACK: ClassVar = 1
    ARRIVAL: ClassVar = 2
    POLL: ClassVar = 3  # a lease is old enough now to be preempted

    def work(self, until_ms: float) -> None:
        for job in self.jobs:
            self.works[job.name] = _Progress(job=job, remaining_ms=int(job.duration_s * 1000))
            self._at(int(job.arrival_s * 1000), _Simulation.ARRIVAL, job.name)
        while self.events and self.events[0][0] < until_ms:
            self._pass(self.events[0][0])
            while self.events and self.events[0][0] == self.now_ms:
                _, kind, _, name = heapq.heappop(self.events)
                self._happen(kind, name)
            self._plan()
        if until_ms < math.inf:
            self._pass(int(until_ms))

    def _at(self, when_ms: int, kind: int, name: str) -> int:
        self.numbers += 1
        heapq.heappush(self.events, (when_ms, kind, self.numbers, name))
        return self.numbers

    def _pass(self, now_ms: int) -> None:
        amounts_of: dict[str, list[tuple[int, int]]] = {}
        for lease in self.leases.values():
            for whose in ("", lease.need.tenant):
                amounts_of.setdefault(whose, []).append(lease_size(lease))
        for whose, amounts in amounts_of.items():
            share = self.shares.dominant(
                sum(mib for mib, _ in amounts), sum(percent for _, percent in amounts)
            )
            self.held_ms[whose] = self.held_ms.get(whose, 0.0) + share * (now_ms - self.now_ms)
        self.now_ms = now_ms

    def _happen(self, kind: int, name: str) -> None:
        work = self.works.get(name)
        if work is None:
            return
        if kind == _Simulation.ARRIVAL:
            self.arrived += 1
            self._wait(work)
        elif (
            kind in (_Simulation.END, _Simulation.GAVE_BACK) and (lease := self.leases.get(name)) is not None
        ):
            if kind == _Simulation.END and lease.deadline_ms != self.now_ms:
                return  # of an earlier lease of this job, which gave back before
            del self.leases[name]
            self._settle(lease)
            work.remaining_ms -= self.now_ms - lease.granted_ms
            if kind == _Simulation.GAVE_BACK and work.remaining_ms > 0:
                self._wait(work)

    def _wait(self, work: _Progress) -> None:
        work.since_ms = self.now_ms
        self.waiting[work.job.name] = PoolRequest(
            request_id=work.job.name,
            holder=work.job.name,
            need=work.job.need,
            ttl_ms=1_000,
            since_ms=self.now_ms,
        )

    def _plan(self) -> None:
        while self.waiting:
            plan = make_plan(self._snapshot(), backfill=self.backfill, yield_ms=int(YIELD_S * 1000))
            same = plan.reservation == self.reservation
            self._do(plan)
            if not plan.grants and not plan.yields and same:
                break
        else:
            self.reservation = None
        preemptible = any(lease.need.preemptible for lease in self.leases.values())
        if (
            self.reservation is not None
            and preemptible
            and not any(e[1] == _Simulation.POLL for e in self.events)
        ):
            self._at(self.now_ms + MIN_RUNTIME_MS, _Simulation.POLL, "")

    def _snapshot(self) -> Snapshot:
        return replace(
            self.world,
            now_ms=self.now_ms,
            leases=tuple(self.leases.values()),
            waiting=tuple(self.waiting.values()),
            usage=self.usage,
            reservation=self.reservation,
        )

    def _do(self, plan: PoolPlan) -> None:
        self.reservation = plan.reservation
        for grant in plan.grants:
            self._begin(grant)
        for request in plan.yields:
            self._ask(request)

    def _begin(self, grant: Grant) -> None:
        name = grant.request_id
        request, work = self.waiting.pop(name), self.works[name]
        work.waited_ms += self.now_ms - work.since_ms
        work.started = True
        self.grants += 1
        end_ms = self.now_ms + max(1, work.remaining_ms)
        self.leases[name] = PoolLease(
            lease_id=name,
            holder=name,
            need=request.need,
            parts=grant.parts,
            state=LeaseState.ACTIVE,
            granted_ms=self.now_ms,
            deadline_ms=end_ms,
            ttl_ms=1_000,
            share=grant.share,
            prepaid=grant.prepaid,
        )
        self._at(end_ms, _Simulation.END, name)
        self._charge(request.need.tenant, grant.prepaid)

    def _ask(self, request: Yield) -> None:
        lease = self.leases[request.lease_id]
        self.leases[lease.lease_id] = replace(lease, yield_by_ms=request.by_ms, yield_why=request.why)
        self.yields += 1
        self._at(min(request.by_ms, lease.deadline_ms), _Simulation.GAVE_BACK, lease.lease_id)

    def _charge(self, tenant: str, amount: float) -> None:
        before = decayed(self.usage.get(tenant, Usage()), self.now_ms, self.world.half_life_s)
        self.usage = self.usage | {tenant: Usage(value=max(0.0, before.value + amount), at_ms=self.now_ms)}

    def _settle(self, lease: PoolLease) -> None:
        """Charge the real use instead of the prepayment."""
        half_life_s = self.world.half_life_s
        paid = decayed(Usage(value=lease.prepaid, at_ms=lease.granted_ms), self.now_ms, half_life_s).value
        used = accrued(lease.share, (self.now_ms - lease.granted_ms) / 1000, half_life_s)
        self._charge(lease.need.tenant, used - paid)

    def result(self, jobs: Sequence[Job]) -> SimulationResult:
        gangs: list[_Progress] = []
        small: list[_Progress] = []
        for job in jobs:
            work = self.works[job.name]
            if job.name in self.waiting:
                work.waited_ms += self.now_ms - work.since_ms
            if work.started or job.name in self.waiting:
                (gangs if job.need.devices > 1 else small).append(work)
        starved = [
            name for name in self.waiting if self.works[name].waited_ms > PATIENCE_S * 1000 or not self.events
        ]
        return SimulationResult(
            gangs=self._waits(gangs),
            small=self._waits(small),
            utilisation=self._mean_share(""),
            shares={whose: self._mean_share(whose) for whose in sorted(self.held_ms) if whose},
            starved=len(starved),
            grants=self.grants,
            yields=self.yields,
            end_s=self.now_ms / 1000,
        )

    def _mean_share(self, whose: str) -> float:
        return round(self.held_ms.get(whose, 0.0) / self.now_ms, 4) if self.now_ms else 0.0

    def _waits(self, works: Sequence[_Progress]) -> WaitTimes:
        if not works:
            return WaitTimes()
        waits = sorted(work.waited_ms / 1000 for work in works)
        return WaitTimes(
            count=len(waits),
            pending=sum(work.job.name in self.waiting for work in works),
            mean_s=round(math.fsum(waits) / len(waits), 3),
            p99_s=round(waits[math.ceil(0.99 * len(waits)) - 1], 3),
            max_s=round(waits[-1], 3),
        )
