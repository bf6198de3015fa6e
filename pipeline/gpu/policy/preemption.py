"""Preemption for the reserved need: the fewest leases, whole leases, and never back and forth.

Between tenants, the winner's new share must stay below the share that each victim's tenant would have with
that one lease back (Kueue's rule S2-b, stricter for several victims). So no victim can displace the winner in
return. Within a tenant a higher priority displaces a lower one, and an exclusive need displaces shared leases
of its own priority: training closes the door. A shared need never displaces an exclusive lease of its own
priority.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.policy.fairness import Shares, lease_size, need_size
from pipeline.gpu.policy.packing import Capacity
from pipeline.gpu.policy.reservation import is_yielding
from pipeline.gpu.values import FULL_PERCENT, LeaseMode, Need, PoolLease

# A new lease is safe for this long: loading a model and CUDA takes about as long. Training does not wait for
# it within its own tenant, because it shall start when the longest batch has ended.
MIN_RUNTIME_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Preemption:
    """The rule for one waiting need, over the shares of now."""

    need: Need
    shares: Shares
    now_ms: int

    def may_preempt(self, lease: PoolLease) -> bool:
        """Whether this lease alone may be asked to yield to the need."""
        need, other = self.need, lease.need
        if not other.preemptible or other.priority > need.priority or is_yielding(lease):
            return False
        upward = need.mode is LeaseMode.SHARED and other.mode is LeaseMode.EXCLUSIVE
        if other.priority == need.priority and upward:
            return False
        downward = need.mode is LeaseMode.EXCLUSIVE and other.mode is LeaseMode.SHARED
        if other.tenant == need.tenant and downward:
            return True
        if self.now_ms - lease.granted_ms < MIN_RUNTIME_MS:
            return False
        if other.tenant == need.tenant:
            return other.priority < need.priority
        return self._new_share(need_size(need)) < self.shares.weighted(other.tenant)

    def victims(self, devices: Sequence[Capacity]) -> list[PoolLease]:
        """The fewest leases whose end lets the need start on all these devices, or none."""
        # Where a node lacks CPU or memory, leases on its other devices may be in the way too.
        parts = Counter(one.node.order for one in devices)
        nodes = [one.node for one in devices if one.node.parts(self.need) < parts[one.node.order]]
        places = {one.order: one for one in (*devices, *(one for node in nodes for one in node.devices))}
        offered = {
            lease.lease_id: lease
            for one in places.values()
            for lease, _, _ in one.entries
            if self.may_preempt(lease)
        }
        ordered = sorted(
            offered.values(),
            key=lambda lease: (
                lease.need.priority,
                -self.shares.weighted(lease.need.tenant),
                -lease.granted_ms,
                lease.lease_id,
            ),
        )
        chosen: dict[str, PoolLease] = {}
        for lease in ordered:
            if self._enough(devices, chosen):
                break
            chosen[lease.lease_id] = lease
        if not self._enough(devices, chosen):
            return []
        for lease in reversed(list(chosen.values())):
            fewer = {key: other for key, other in chosen.items() if key != lease.lease_id}
            if self._enough(devices, fewer):
                chosen = fewer
        victims = list(chosen.values())
        return victims if self._fair(devices, victims) else []

    def _enough(self, devices: Sequence[Capacity], chosen: dict[str, PoolLease]) -> bool:
        need = self.need
        for one in devices:
            ending = [e for e in one.entries if is_yielding(e[0]) or e[0].lease_id in chosen]
            if need.mode is LeaseMode.EXCLUSIVE:
                if len(ending) < len(one.entries) or one.orphaned:
                    return False
                continue
            if one.memory_mib + sum(e[1] for e in ending) < need.memory_mib:
                return False
            if one.compute_percent + sum(e[2] for e in ending) < need.compute_percent:
                return False
        return self._enough_of_nodes(devices, chosen)

    def _enough_of_nodes(self, devices: Sequence[Capacity], chosen: dict[str, PoolLease]) -> bool:
        need = self.need
        if not need.cpu_milli and not need.node_memory_mib:
            return True
        parts = Counter(one.node.order for one in devices)
        for node in {one.node.order: one.node for one in devices}.values():
            cpu, memory = node.cpu_milli, node.memory_mib
            for one in node.devices:
                for lease, _, _ in one.entries:
                    if is_yielding(lease) or lease.lease_id in chosen:
                        cpu, memory = cpu + lease.need.cpu_milli, memory + lease.need.node_memory_mib
            if cpu < need.cpu_milli * parts[node.order] or memory < need.node_memory_mib * parts[node.order]:
                return False
        return True

    def _fair(self, devices: Sequence[Capacity], victims: Sequence[PoolLease]) -> bool:
        """The rule between tenants, for all victims together."""
        need = self.need
        cost = need_size(need)
        if need.mode is LeaseMode.EXCLUSIVE:
            cost = sum(one.device.schedulable_mib for one in devices), FULL_PERCENT * len(devices)
        new_share = self._new_share(cost)
        losses: dict[str, list[int]] = {}
        others = [lease for lease in victims if lease.need.tenant != need.tenant]
        for lease in others:
            memory, compute = lease_size(lease)
            sums = losses.setdefault(lease.need.tenant, [0, 0])
            sums[0] += memory
            sums[1] += compute
        for lease in others:
            memory, compute = lease_size(lease)
            sums = losses[lease.need.tenant]
            if not new_share < self.shares.weighted(lease.need.tenant, memory - sums[0], compute - sums[1]):
                return False
        return True

    def _new_share(self, cost: tuple[int, int]) -> float:
        return self.shares.weighted(self.need.tenant, *cost)
