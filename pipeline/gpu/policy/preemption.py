"""Who is asked to yield for the reserved need: as few as possible, whole leases, and never in turns.

Between tenants the winner's new share must stay below the share that each victim's tenant would have if it got that one lease back
(after Kueue's rule S2-b, made stricter for several victims): then no victim can displace the winner in return. Within a tenant a
higher priority displaces a lower one, and an exclusive need displaces shared leases of its own priority (the door of training); a
shared need never displaces an exclusive lease of its own priority, so this cannot turn round either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.policy.fairness import Shares, size, taken
from pipeline.gpu.policy.packing import Room
from pipeline.gpu.policy.reservation import going
from pipeline.gpu.values import WHOLE, LeaseMode, Need, PoolLease

# A lease is left alone for so long after its grant: loading a model and CUDA takes about as long. The door within one tenant
# does not wait for it, for training shall start when the longest batch is over.
MIN_RUNTIME_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Asking:
    """The rule for one need that waits, over the shares of now."""

    need: Need
    shares: Shares
    now_ms: int

    def may_ask(self, lease: PoolLease) -> bool:
        """Whether this lease alone may be asked to yield for the need."""
        need, other = self.need, lease.need
        if not other.preemptible or other.priority > need.priority or going(lease):
            return False
        upward = need.mode is LeaseMode.SHARED and other.mode is LeaseMode.EXCLUSIVE
        if other.priority == need.priority and upward:
            return False
        if (
            other.tenant == need.tenant
            and need.mode is LeaseMode.EXCLUSIVE
            and other.mode is LeaseMode.SHARED
        ):
            return True
        if self.now_ms - lease.granted_ms < MIN_RUNTIME_MS:
            return False
        if other.tenant == need.tenant:
            return other.priority < need.priority
        return self._new_share(size(need)) < self.shares.weighted(other.tenant)

    def victims(self, rooms: Sequence[Room]) -> list[PoolLease]:
        """The fewest leases that, gone, let the need start on all these devices; none where asking does not help."""
        offered = {
            lease.lease_id: lease for room in rooms for lease, _, _ in room.held if self.may_ask(lease)
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
        asked: dict[str, PoolLease] = {}
        for lease in ordered:
            if self._enough(rooms, asked):
                break
            asked[lease.lease_id] = lease
        if not self._enough(rooms, asked):
            return []
        for lease in reversed(list(asked.values())):
            fewer = {key: other for key, other in asked.items() if key != lease.lease_id}
            if self._enough(rooms, fewer):
                asked = fewer
        found = list(asked.values())
        return found if self._fair(rooms, found) else []

    def _enough(self, rooms: Sequence[Room], asked: dict[str, PoolLease]) -> bool:
        need = self.need
        for room in rooms:
            stay = [e for e in room.held if not going(e[0]) and e[0].lease_id not in asked]
            if need.mode is LeaseMode.EXCLUSIVE:
                if stay or room.left:
                    return False
                continue
            gone = [e for e in room.held if going(e[0]) or e[0].lease_id in asked]
            if room.memory_mib + sum(e[1] for e in gone) < need.memory_mib:
                return False
            if room.compute_percent + sum(e[2] for e in gone) < need.compute_percent:
                return False
        return True

    def _fair(self, rooms: Sequence[Room], found: Sequence[PoolLease]) -> bool:
        """The rule between tenants for all victims together."""
        need = self.need
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        cost = (
            (sum(room.device.schedulable_mib for room in rooms), WHOLE * len(rooms))
            if exclusive
            else size(need)
        )
        new = self._new_share(cost)
        lost: dict[str, list[int]] = {}
        others = [lease for lease in found if lease.need.tenant != need.tenant]
        for lease in others:
            memory, compute = taken(lease)
            sums = lost.setdefault(lease.need.tenant, [0, 0])
            sums[0] += memory
            sums[1] += compute
        for lease in others:
            memory, compute = taken(lease)
            sums = lost[lease.need.tenant]
            if not new < self.shares.weighted(lease.need.tenant, memory - sums[0], compute - sums[1]):
                return False
        return True

    def _new_share(self, cost: tuple[int, int]) -> float:
        return self.shares.weighted(self.need.tenant, *cost)
