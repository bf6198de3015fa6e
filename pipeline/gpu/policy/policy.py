"""The scheduling policy, a pure function: a snapshot gives grants, the one reservation, requests to yield.

Needs come by priority, then fair share (fairness.py), then age. A gang gets all of its devices or none. The
first need that does not fit reserves concrete devices (reservation.py); later ones are backfilled if they do
not delay it. Only for the reserved need are leases preempted (preemption.py). The same snapshot gives the
same plan, however its parts are ordered.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from pipeline.gpu.policy.budgets import exhausted
from pipeline.gpu.policy.fairness import ENTRY_S, Shares, need_size
from pipeline.gpu.policy.line import next_in_line
from pipeline.gpu.policy.packing import Capacities, Capacity, affordable, given_together
from pipeline.gpu.policy.pool_index import PoolIndex
from pipeline.gpu.policy.preemption import Preemption
from pipeline.gpu.policy.reservation import (
    Candidate,
    MayPreempt,
    ReservedCapacity,
    best_candidate,
    no_preemption,
    same_candidate,
)
from pipeline.gpu.values import (
    Backfill,
    Grant,
    LeaseMode,
    LeasePart,
    LeaseState,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Reservation,
    Snapshot,
    Yield,
)

YIELD_MS: Final = 150_000  # the default of the setting gpu_yield_s

Queues = Mapping[str, Sequence[PoolRequest]]  # the waiting needs of one priority by tenant, oldest first


def make_plan(
    snapshot: Snapshot,
    *,
    backfill: Backfill = Backfill.EASY,
    yield_ms: int = YIELD_MS,
    index: PoolIndex | None = None,
) -> PoolPlan:
    """The plan for now. A lease that is asked to yield has `yield_ms` for it.

    `index` changes nothing but the time: a snapshot that differs little from its last one is planned faster.
    """
    before = snapshot.reservation
    if snapshot.quarantine_ms > 0:
        return PoolPlan(reservation=before)
    draft = Draft(
        snapshot=snapshot,
        backfill=backfill,
        yield_by_ms=snapshot.now_ms + yield_ms,
        index=PoolIndex() if index is None else index,
    )
    levels: dict[int, dict[str, list[PoolRequest]]] = defaultdict(lambda: defaultdict(list))
    for request in sorted(snapshot.waiting, key=lambda r: (r.since_ms, r.request_id)):
        levels[request.need.priority][request.need.tenant].append(request)
    head = next((r for r in snapshot.waiting if before and r.request_id == before.request_id), None)
    for priority in sorted(levels, reverse=True):
        settled = ""
        if head is not None and head.need.priority == priority and draft.reserved is None:
            settled = head.request_id if _reserve_head(draft, head, levels[priority]) else ""
        if not _fair_share(draft, levels[priority], settled):
            break
    return PoolPlan(
        grants=tuple(draft.grants),
        yields=tuple(draft.yields),
        reservation=draft.reservation,
        line=_line(draft, levels),
    )


def _line(draft: "Draft", levels: Mapping[int, Queues]) -> tuple[str, ...]:
    """Those that are served next. Nobody where the highest priority has no reservation."""
    place = draft.reservation
    queues = levels[max(levels)] if place is not None and levels else {}
    for request in chain.from_iterable(queues.values()):
        if place is not None and request.request_id == place.request_id:
            return next_in_line(draft.shares, queues, request, draft.granted)
    return ()


def open_to_shared(snapshot: Snapshot, need: Need) -> bool:
    """Whether some device outside the reservation would take this shared need now."""
    if snapshot.quarantine_ms > 0 or need.mode is LeaseMode.EXCLUSIVE or need.devices < 1:
        return False
    if exhausted(snapshot.tenants.get(need.tenant)):
        return False
    if need.devices > 1:
        return len(_less_reserved(snapshot).best_fit(need)) == need.devices
    # Which device it would be is of no interest here, and costs more.
    return any(one.matches(need) and one.fits(need) for one in not_reserved(snapshot, need))


def not_reserved(snapshot: Snapshot, need: Need) -> list[Capacity]:
    """The devices outside the reservation that the need may name, large and free enough or not."""
    return [one for one in _less_reserved(snapshot).candidates(need) if not one.reserved]


def _less_reserved(snapshot: Snapshot) -> Capacities:
    capacities = Capacities(snapshot)
    if snapshot.reservation is not None:
        named = (capacities.by_uuid.get(uuid) for uuid in dict.fromkeys(snapshot.reservation.uuids))
        capacities.reserve([one for one in named if one is not None])
    return capacities


def served(snapshot: Snapshot, need: Need) -> bool:
    """Whether a lease like this need is held and stays: our own workers fill the device."""
    reserved = set() if snapshot.reservation is None else set(snapshot.reservation.uuids)
    usable = {device.uuid for device in snapshot.devices if device.usable} - reserved
    return any(
        lease.yield_by_ms is None
        and lease.deadline_ms > snapshot.now_ms
        and replace(lease.need, node="", device="") == replace(need, node="", device="")
        and all(part.uuid in usable for part in lease.parts)
        for lease in snapshot.leases
    )


@dataclass(slots=True, kw_only=True)
class Draft:
    """A plan in the making: grants, yields, the reservation, and the capacity that is left for the next need.

    Only `grant` and `reserve` change it. Capacity only shrinks, so a shape in `rejected` is not tried again.
    """

    snapshot: Snapshot
    backfill: Backfill
    yield_by_ms: int
    index: PoolIndex
    shares: Shares = field(init=False)
    capacities: Capacities = field(init=False)
    grants: list[Grant] = field(default_factory=list)
    yields: list[Yield] = field(default_factory=list)
    reservation: Reservation | None = None
    reserved: ReservedCapacity | None = None
    granted: set[str] = field(default_factory=set)
    rejected: set[tuple[object, ...]] = field(default_factory=set)
    stand_ins: dict[tuple[str, float | None], PoolLease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares, self.capacities = self.index.follow(self.snapshot)

    def grant(self, request: PoolRequest, devices: Sequence[Capacity]) -> None:
        """Give the need these devices, and charge its tenant."""
        need, stand_in = request.need, self._stand_in(request.need)
        parts = []
        for one in devices:
            if self.reserved is not None and one.reserved:
                self.reserved.take(one, need)
            memory, compute = self.capacities.take(one, need)
            one.entries.append((stand_in, memory, compute))
            parts.append(LeasePart(uuid=one.device.uuid, memory_mib=memory, compute_percent=compute))
        memory, compute = sum(p.memory_mib for p in parts), sum(p.compute_percent for p in parts)
        share = self.shares.dominant(memory, compute)
        self.shares.add(need.tenant, memory, compute)
        self.granted.add(request.request_id)
        self.grants.append(
            Grant(request_id=request.request_id, parts=tuple(parts), share=share, prepaid=share * ENTRY_S)
        )

    def _stand_in(self, need: Need) -> PoolLease:
        """A lease that stands for the grants of this plan: it has an end, and it is not preempted.

        Reservations look at its tenant and its end only, so one stand-in serves all grants that agree in
        both.
        """
        key, now_ms = (need.tenant, need.max_duration_s), self.snapshot.now_ms
        if key not in self.stand_ins:
            self.stand_ins[key] = PoolLease(
                lease_id="",
                holder="",
                need=replace(need, preemptible=False),
                parts=(),
                state=LeaseState.GRANTED,
                granted_ms=now_ms,
                deadline_ms=now_ms,
                ttl_ms=0,
            )
        return self.stand_ins[key]

    def reserve(self, request: PoolRequest, candidate: Candidate, victims: Sequence[PoolLease]) -> None:
        """Close the door of these devices and ask the victims to yield."""
        uuids = tuple(one.device.uuid for one in candidate.devices)
        for lease in victims:
            why = _why(request.need, [part.uuid for part in lease.parts if part.uuid in uuids])
            self.yields.append(Yield(lease_id=lease.lease_id, by_ms=self.yield_by_ms, why=why))
        before, now_ms = self.snapshot.reservation, self.snapshot.now_ms
        same = before is not None and (before.request_id, before.uuids) == (request.request_id, uuids)
        ids = {lease.lease_id for lease in victims}
        self.reserved = ReservedCapacity(request, candidate, ids, now_ms=now_ms)
        self.reservation = Reservation(
            request_id=request.request_id,
            uuids=uuids,
            start_ms=candidate.start_ms,
            made_ms=before.made_ms if same and before is not None else now_ms,
        )
        self.capacities.reserve(candidate.devices)
        for node, cpu_milli, memory_mib in self.reserved.spare_of_nodes():
            self.capacities.limit(node, cpu_milli, memory_mib)


def _reserve_head(draft: Draft, head: PoolRequest, queues: Queues) -> bool:
    """The need that has the reservation comes first within its priority while its start is in sight.

    False when it has to queue again.
    """
    if not _within_quota(draft, head.need):
        return False
    devices = _startable(draft, head.need)
    if devices:
        draft.grant(head, devices)
        return True
    if not _may_reserve(draft, head, queues):
        return False
    candidate = _candidate(draft, head)
    if candidate is None or candidate.unknown:
        return False
    _preempt_and_reserve(draft, head, candidate)
    return True


def _fair_share(draft: Draft, queues: Queues, settled: str) -> bool:
    """Serve the needs of one priority, the tenant with the smallest share first.

    False when no later need may start.
    """
    waiting = {tenant: iter(requests) for tenant, requests in queues.items()}
    order = draft.shares.order if len(waiting) > 1 else _alone
    heap = [order(tenant) for tenant in waiting]
    heapq.heapify(heap)
    while heap:
        tenant = heap[0][2]
        for request in waiting[tenant]:
            if draft.reserved is not None and draft.backfill is Backfill.STRICT:
                return False
            if request.request_id != settled and _grant_or_reserve(draft, request, queues):
                heapq.heapreplace(heap, order(tenant))
                break
        else:
            heapq.heappop(heap)
    return draft.reserved is None or draft.backfill is not Backfill.STRICT


def _alone(tenant: str) -> tuple[float, float, str]:
    """The order of a tenant that waits alone: its past has not to be summed up."""
    return 0.0, 0.0, tenant


def _grant_or_reserve(draft: Draft, request: PoolRequest, queues: Queues) -> bool:
    """Grant the need if it fits; reserve for it if it is the first that does not. True when granted."""
    need = request.need
    short = draft.reserved is not None and draft.reserved.ends_before(need)
    # An exclusive need takes what its devices have, so its tenant's quota decides too.
    tenant = need.tenant if need.mode is LeaseMode.EXCLUSIVE else ""
    shape = (
        need.memory_mib, need.compute_percent, need.devices, need.node, need.device, short, tenant,
        need.device_kind, need.model, need.cpu_milli, need.node_memory_mib, need.same_node,
    )  # fmt: skip
    if shape in draft.rejected or not _within_quota(draft, need):
        return False
    devices = _startable(draft, need)
    if devices:
        draft.grant(request, devices)
        return True
    draft.rejected.add(shape)
    if draft.reserved is None and _may_reserve(draft, request, queues):
        candidate = _candidate(draft, request)
        if candidate is not None:
            pair = _incumbent(draft, request, candidate, queues) or (request, candidate)
            _preempt_and_reserve(draft, *pair)
    return False


def _startable(draft: Draft, need: Need) -> list[Capacity]:
    """The devices on which the need can start now, backfilled ones last; none when it cannot."""
    if need.devices < 1 or need.memory_mib < 0 or need.compute_percent < 0:
        return []  # admission.py refuses it in words; a plan does not trust what it reads
    most_mib = _most_mib(draft, need)
    for form in draft.capacities.resolve(need):
        devices = draft.capacities.best_fit(form, most_mib)
        if draft.reserved is not None and len(devices) < need.devices:
            more = draft.reserved.backfill(form)
            if more and most_mib is not None:
                devices = draft.capacities.best_by_size(form, more)
            else:
                devices = (devices + more)[: need.devices]
            if not (affordable(devices, most_mib) and given_together(devices, form)):
                continue
        if len(devices) == need.devices:
            return devices
    return []


def _most_mib(draft: Draft, need: Need) -> int | None:
    """The quota that is left for the devices of an exclusive need: it is charged with all their memory."""
    return draft.shares.quota_left_mib(need.tenant) if need.mode is LeaseMode.EXCLUSIVE else None


def _within_quota(draft: Draft, need: Need) -> bool:
    """False too where the budget of the tenant is used up."""
    if exhausted(draft.shares.tenants.get(need.tenant)):
        return False
    quota_mib = draft.shares.quota_left_mib(need.tenant)
    return quota_mib is None or need_size(need)[0] <= quota_mib


def _may_reserve(draft: Draft, request: PoolRequest, queues: Queues) -> bool:
    """False for a shared need whose tenant has an exclusive need that preemption would serve."""
    if request.need.mode is LeaseMode.EXCLUSIVE:
        return True
    if draft.backfill is Backfill.FREE:
        return False
    exclusive = next(
        (
            r
            for r in queues[request.need.tenant]
            if r.need.mode is LeaseMode.EXCLUSIVE and r.request_id not in draft.granted
        ),
        None,
    )
    if exclusive is None or not _within_quota(draft, exclusive.need):
        return True
    candidate = _candidate(draft, exclusive)
    return candidate is None or not candidate.needs_only_yields


def _candidate(draft: Draft, request: PoolRequest) -> Candidate | None:
    """The devices to reserve. An earlier choice stands unless another is strictly better: no oscillation."""
    need, before, now_ms = request.need, draft.snapshot.reservation, draft.snapshot.now_ms
    most_mib = _most_mib(draft, need)
    new = _realistic(
        draft,
        need,
        lambda may: best_candidate(draft.capacities, need, may, now_ms=now_ms, most_mib=most_mib),
    )
    if before is None or before.request_id != request.request_id:
        return new
    old = _realistic(
        draft,
        need,
        lambda may: same_candidate(before, draft.capacities, need, may, now_ms=now_ms, most_mib=most_mib),
    )
    return new if old is None or (new is not None and new.quality < old.quality) else old


def _realistic(draft: Draft, need: Need, find: Callable[[MayPreempt], Candidate | None]) -> Candidate | None:
    """Count on preemption only where all its victims together may be asked."""
    rule = Preemption(need, draft.shares, draft.snapshot.now_ms)
    candidate = find(rule.may_preempt)
    hollow = candidate is not None and candidate.needs_only_yields and not rule.victims(candidate.devices)
    return find(no_preemption) if hollow else candidate


def _preempt_and_reserve(draft: Draft, request: PoolRequest, candidate: Candidate) -> None:
    rule = Preemption(request.need, draft.shares, draft.snapshot.now_ms)
    draft.reserve(request, candidate, rule.victims(candidate.devices))


def _incumbent(
    draft: Draft, request: PoolRequest, candidate: Candidate, queues: Queues
) -> tuple[PoolRequest, Candidate] | None:
    """A waiting need of a tenant that holds these devices and would come before this one without them.

    A tenant that holds a device has the larger share of the two, whatever their weights and their past.
    Without this rule two tenants with whole needs would take turns on one device.
    """
    need = request.need
    if candidate.needs_only_yields:
        return None
    limit = draft.shares.memory_mib, draft.shares.compute_percent
    if need.mode is LeaseMode.SHARED:
        limit = need_size(need)
    returned: dict[str, tuple[int, int]] = {}
    for one in candidate.devices:
        for lease, memory, compute in one.entries:
            mib, percent = returned.get(lease.need.tenant, (0, 0))
            returned[lease.need.tenant] = min(limit[0], mib + memory), min(limit[1], percent + compute)

    def standing(tenant: str) -> tuple[float, float]:
        return draft.shares.order(tenant, returned.get(tenant, (0, 0)))[:2]

    before = [t for t in returned if t in queues and standing(t) < standing(need.tenant)]
    for tenant in sorted(before, key=lambda t: (standing(t), t)):
        other = next((r for r in queues[tenant] if r.request_id not in draft.granted), None)
        if other is None or not _within_quota(draft, other.need):
            continue
        if len(draft.capacities.best_fit(other.need, _most_mib(draft, other.need))) == other.need.devices:
            continue  # it starts when it is its turn
        if not _may_reserve(draft, other, queues):
            continue
        place = _candidate(draft, other)
        if place is not None:
            return other, place
    return None


def _why(need: Need, uuids: Sequence[str]) -> str:
    amount = "the whole of" if need.mode is LeaseMode.EXCLUSIVE else f"{need.memory_mib:,} MiB of"
    return f"{need.tenant} waits for {amount} {', '.join(uuids)}"
