"""The one reservation: which devices wait for the head of the queue, and which needs may be backfilled there.

EASY backfill after Lifka (1995): a later need may start on a reserved device under one of two conditions. It
ends before the reserved start (the shadow time), or it fits into the capacity that the reserved need leaves
over. Ends are those that holders announced (`max_duration_s`); a lease that overran or announced nothing
never ends. A lease that was asked to yield may go at any moment.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from pipeline.gpu.policy.packing import Capacities, Capacity, Entry, NodeCapacity, affordable
from pipeline.gpu.values import FULL_PERCENT, LeaseMode, Need, PoolLease, PoolRequest, Reservation

MayPreempt = Callable[[PoolLease], bool]
# A lease that overran is still expected to end for this long, or for a tenth of its announced time if that is
# longer. Without the grace, giving back a second late would move the reservation elsewhere.
GRACE_MS: Final = 10_000


def end_ms(lease: PoolLease, now_ms: int) -> int | None:
    """The announced end of a lease, perhaps just before now; None where it is unknown."""
    if lease.need.max_duration_s is None:
        return None
    lasts = int(lease.need.max_duration_s * 1000)
    end = lease.granted_ms + lasts
    return end if now_ms < end + max(GRACE_MS, lasts // 10) else None


def no_preemption(_lease: PoolLease) -> bool:
    """The rule under which no lease may be asked to yield."""
    return False


def is_yielding(lease: PoolLease) -> bool:
    return lease.yield_by_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """When one device can serve its part of a need (EASY's availability profile, for one need).

    `ready_ms` is 0 where only yields, or nothing, stand in the way. `yields`: leases that would have to be
    asked. `blocked_mib`: memory of leases with unknown ends; the device is `unknown` then.
    """

    capacity: Capacity
    unknown: bool = False
    ready_ms: int = 0
    yields: int = 0
    blocked_mib: int = 0

    @property
    def key(self) -> tuple[bool, int, int, int, bool, int, int]:
        """The best device first; among equals the best fit."""
        return (self.unknown, self.ready_ms, self.yields, self.blocked_mib, *self.capacity.best_fit_key)

    @property
    def size_key(self) -> tuple[int, ...]:
        """The smallest device first; among equals the best."""
        return (self.capacity.device.schedulable_mib, *self.key)


ByKey = Callable[[Availability], tuple[int, ...]]
# The devices of a bounded need: the best, and the smallest where the best exceed the bound together.
KEYS: Final[tuple[ByKey, ByKey]] = lambda view: view.key, lambda view: view.size_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Devices that could be reserved. `unknown` of them may never become free by themselves."""

    devices: tuple[Capacity, ...]
    unknown: int
    ready_ms: int
    yields: int

    @property
    def quality(self) -> tuple[int, int]:
        return self.unknown, self.ready_ms

    @property
    def start_ms(self) -> int | None:
        return self.ready_ms if not self.unknown and self.ready_ms else None

    @property
    def needs_only_yields(self) -> bool:
        return self.yields > 0 and self.quality == (0, 0)


def availability(
    one: Capacity, need: Need, may_preempt: MayPreempt, now_ms: int, *, parts: int = 1
) -> Availability:
    """When this device, which is large enough, can serve the need. Its node gives CPU and memory for `parts`
    devices."""
    device = _of_device(one, need, may_preempt, now_ms)
    if (not need.cpu_milli and not need.node_memory_mib) or one.node.parts(need) >= parts:
        return device
    return _with_node(device, need, may_preempt, now_ms, parts)


def _with_node(
    device: Availability, need: Need, may_preempt: MayPreempt, now_ms: int, parts: int
) -> Availability:
    """The same where the node has too little CPU or memory: leases on any of its devices have to end."""
    one, node = device.capacity, device.capacity.node
    cpu = need.cpu_milli * parts - node.cpu_milli
    memory = need.node_memory_mib * parts - node.memory_mib
    ends: list[tuple[int, int, PoolLease]] = []  # when, 1 for one more yield, lease
    for other in node.devices:
        for lease, _, _ in other.entries:
            end = end_ms(lease, now_ms)
            if is_yielding(lease):
                ends.append((0, 0, lease))
            elif may_preempt(lease):
                ends.append((0, 0 if other is one and device.yields else 1, lease))
            elif end is not None:
                ends.append((end, 0, lease))
    ready_ms, yields = device.ready_ms, device.yields
    for end, extra, lease in sorted(ends, key=lambda e: (e[0], e[1], e[2].granted_ms, e[2].lease_id)):
        if cpu <= 0 and memory <= 0:
            break
        cpu, memory = cpu - lease.need.cpu_milli, memory - lease.need.node_memory_mib
        ready_ms, yields = max(ready_ms, end), yields + extra
    unknown = device.unknown or cpu > 0 or memory > 0
    return replace(device, ready_ms=ready_ms, yields=yields, unknown=unknown)


def _of_device(one: Capacity, need: Need, may_preempt: MayPreempt, now_ms: int) -> Availability:
    """The same for the device alone."""
    if one.has_room(need):
        return Availability(capacity=one)
    preemptible: list[Entry] = []
    staying: list[Entry] = []
    memory, compute = one.memory_mib, one.compute_percent
    for entry in one.entries:
        if is_yielding(entry[0]):
            memory, compute = memory + entry[1], compute + entry[2]
        else:
            (preemptible if may_preempt(entry[0]) else staying).append(entry)
    if need.mode is LeaseMode.EXCLUSIVE:
        return _availability_alone(one, preemptible, staying, now_ms)
    if memory >= need.memory_mib and compute >= need.compute_percent:
        return Availability(capacity=one)
    for yields, (_, mib, percent) in enumerate(preemptible, 1):
        memory, compute = memory + mib, compute + percent
        if memory >= need.memory_mib and compute >= need.compute_percent:
            return Availability(capacity=one, yields=yields)
    ends = [(end, entry) for entry in staying if (end := end_ms(entry[0], now_ms)) is not None]
    for end, (_, mib, percent) in sorted(ends, key=lambda pair: pair[0]):
        memory, compute = memory + mib, compute + percent
        if memory >= need.memory_mib and compute >= need.compute_percent:
            return Availability(capacity=one, yields=len(preemptible), ready_ms=end)
    blocked_mib = need.memory_mib - memory
    return Availability(capacity=one, unknown=True, yields=len(preemptible), blocked_mib=blocked_mib)


def _availability_alone(
    one: Capacity, preemptible: list[Entry], staying: list[Entry], now_ms: int
) -> Availability:
    """The same for an exclusive need: every lease has to end."""
    ends = [end_ms(lease, now_ms) for lease, _, _ in staying]
    return Availability(
        capacity=one,
        unknown=one.orphaned or None in ends,
        ready_ms=max((end for end in ends if end is not None), default=0),
        yields=len(preemptible),
        blocked_mib=sum(mib for (_, mib, _), end in zip(staying, ends, strict=True) if end is None),
    )


def best_candidate(
    capacities: Capacities, need: Need, may_preempt: MayPreempt, *, now_ms: int, most_mib: int | None = None
) -> Candidate | None:
    """The devices that serve the need first; None where the pool cannot serve it.

    `most_mib`: what the tenant's quota leaves for all devices of an exclusive need; None is no bound.
    """
    found = [
        candidate
        for form in capacities.resolve(need)
        if (candidate := _best_of_kind(capacities, form, may_preempt, now_ms, most_mib)) is not None
    ]
    return min(found, key=lambda candidate: (*candidate.quality, candidate.yields), default=None)


def _best_of_kind(
    capacities: Capacities, need: Need, may_preempt: MayPreempt, now_ms: int, most_mib: int | None
) -> Candidate | None:
    matching = [one for one in capacities.candidates(need) if one.matches(need)]
    if need.devices < 1:
        return None
    if most_mib is not None:
        others = heapq.nsmallest(need.devices - 1, (one.device.schedulable_mib for one in matching))
        largest_mib = most_mib - sum(others)
        matching = [one for one in matching if one.device.schedulable_mib <= largest_mib]
    if len(matching) < need.devices:
        return None
    together = need.devices > 1 and (need.same_node or need.cpu_milli or need.node_memory_mib)
    for key in KEYS[:1] if most_mib is None else KEYS:
        if together:
            best = _best_by_node(matching, need, may_preempt, now_ms, key=key, most_mib=most_mib)
        else:
            views = (availability(one, need, may_preempt, now_ms) for one in matching)
            best = heapq.nsmallest(need.devices, views, key=key)
        if len(best) == need.devices and affordable((view.capacity for view in best), most_mib):
            return _candidate(best)
    return None


def _best_by_node(
    matching: Iterable[Capacity],
    need: Need,
    may_preempt: MayPreempt,
    now_ms: int,
    *,
    key: ByKey,
    most_mib: int | None,
) -> list[Availability]:
    """The devices by this key for a gang that needs CPU and memory of nodes, or one node for all of it."""
    by_node: dict[int, list[Capacity]] = defaultdict(list)
    for one in matching:
        by_node[one.node.order].append(one)
    groups = []
    for devices in by_node.values():
        views = sorted((_of_device(one, need, may_preempt, now_ms) for one in devices), key=key)
        limit = sum(devices[0].node.could_give(need, n) for n in range(1, len(devices) + 1))
        if need.same_node:
            chosen = [view.capacity for view in views[: need.devices]]
            if limit >= need.devices and affordable(chosen, most_mib):
                groups.append(
                    [availability(one, need, may_preempt, now_ms, parts=need.devices) for one in chosen]
                )
        else:
            groups += [
                [availability(view.capacity, need, may_preempt, now_ms, parts=n)]
                for n, view in enumerate(views[:limit], 1)
            ]
    if need.same_node:
        return min(groups, key=lambda views: sorted((v.key for v in views), reverse=True), default=[])
    return heapq.nsmallest(need.devices, (view for views in groups for view in views), key=key)


def same_candidate(
    before: Reservation,
    capacities: Capacities,
    need: Need,
    may_preempt: MayPreempt,
    *,
    now_ms: int,
    most_mib: int | None = None,
) -> Candidate | None:
    """The devices of an earlier reservation as they are now; None where they can no longer serve the need.

    `most_mib`: as in `best_candidate`.
    """
    named = [capacities.by_uuid.get(uuid) for uuid in before.uuids]
    devices = [one for one in named if one is not None]
    if len(devices) != need.devices or len(set(before.uuids)) != need.devices:
        return None
    if not affordable(devices, most_mib):
        return None
    if not any(all(one.matches(form) for one in devices) for form in capacities.resolve(need)):
        return None
    parts = Counter(one.node.order for one in devices)
    if (need.same_node and len(parts) > 1) or any(
        not one.node.could_give(need, parts[one.node.order]) for one in devices
    ):
        return None
    return _candidate(
        [availability(one, need, may_preempt, now_ms, parts=parts[one.node.order]) for one in devices]
    )


def _candidate(views: list[Availability]) -> Candidate:
    ordered = sorted(views, key=lambda view: view.capacity.order)
    return Candidate(
        devices=tuple(view.capacity for view in ordered),
        unknown=sum(view.unknown for view in views),
        ready_ms=max(view.ready_ms for view in views),
        yields=sum(view.yields for view in views),
    )


class ReservedCapacity:
    """The reservation in force, and the admission of backfilled needs to its devices."""

    def __init__(self, request: PoolRequest, candidate: Candidate, victims: set[str], *, now_ms: int) -> None:
        self.request = request
        self.devices = candidate.devices
        self.start_ms = candidate.start_ms
        self._now_ms = now_ms
        self._victims = victims
        self._spare = {one.order: self._left_over(one) for one in candidate.devices}

    def _left_over(self, one: Capacity) -> tuple[int, int]:
        """(MiB, percent) that the reserved need leaves unused on the device when it starts."""
        need = self.request.need
        if need.mode is LeaseMode.EXCLUSIVE:
            return -1, -1
        memory, compute = one.memory_mib, one.compute_percent
        for lease, mib, percent in one.entries:
            if self._ends(lease):
                memory, compute = memory + mib, compute + percent
        return memory - need.memory_mib, compute - need.compute_percent

    def _ends(self, lease: PoolLease) -> bool:
        """Whether the lease is expected to have ended when the reserved need starts."""
        end = end_ms(lease, self._now_ms)
        ended = self.start_ms is not None and end is not None and end <= self.start_ms
        return is_yielding(lease) or lease.lease_id in self._victims or ended

    def spare_of_nodes(self) -> Iterator[tuple[NodeCapacity, int, int]]:
        """CPU and memory that the reserved need leaves unused on its nodes when it starts.

        Leases that stand in its way on its own devices have ended by then, also where nobody knows when.
        """
        need = self.request.need
        if not need.cpu_milli and not need.node_memory_mib:
            return
        parts = Counter(one.node.order for one in self.devices)
        reserved = {one.order for one in self.devices}
        for node in {one.node.order: one.node for one in self.devices}.values():
            cpu, memory = node.cpu_milli, node.memory_mib
            for one in node.devices:
                in_the_way = one.order in reserved and (
                    need.mode is LeaseMode.EXCLUSIVE or self.start_ms is None
                )
                for lease, _, _ in one.entries:
                    if in_the_way or self._ends(lease):
                        cpu, memory = cpu + lease.need.cpu_milli, memory + lease.need.node_memory_mib
            count = parts[node.order]
            yield node, cpu - count * need.cpu_milli, memory - count * need.node_memory_mib

    def ends_before(self, need: Need) -> bool:
        """Whether the need, started now, ends before the reserved start."""
        return (
            self.start_ms is not None
            and need.max_duration_s is not None
            and self._now_ms + int(need.max_duration_s * 1000) <= self.start_ms
        )

    def backfill(self, need: Need) -> list[Capacity]:
        """Reserved devices where the need may start now, the best fit first."""
        short = self.ends_before(need)
        fitting = [
            one
            for one in self.devices
            if one.matches(need) and one.fits(need) and (short or self._spares(one, need))
        ]
        return sorted(fitting, key=lambda one: one.best_fit_key)

    def _spares(self, one: Capacity, need: Need) -> bool:
        memory, compute = self._spare[one.order]
        if need.mode is LeaseMode.EXCLUSIVE:
            return memory >= one.device.schedulable_mib and compute >= FULL_PERCENT
        return memory >= need.memory_mib and compute >= need.compute_percent

    def take(self, one: Capacity, need: Need) -> None:
        """A need was backfilled. One that ends before the reserved start uses no spare capacity."""
        if one.order in self._spare and not self.ends_before(need):
            memory, compute = self._spare[one.order]
            self._spare[one.order] = memory - need.memory_mib, compute - need.compute_percent
