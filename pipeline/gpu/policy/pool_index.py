"""What planning keeps of one snapshot for the next: capacities of devices, shares of tenants.

A plan is a function of its snapshot alone. The index saves the work of counting all devices and leases for
every plan.
"""

from pipeline.gpu.policy.fairness import Shares
from pipeline.gpu.policy.packing import Capacities
from pipeline.gpu.values import FULL_PERCENT, Snapshot


class PoolIndex:
    """One per planner; one plan at a time."""

    def __init__(self) -> None:
        self._capacities: Capacities | None = None

    def follow(self, snapshot: Snapshot) -> tuple[Shares, Capacities]:
        """Shares and capacities of this snapshot, for one plan to change."""
        if self._capacities is None:
            self._capacities = Capacities(snapshot)
        else:
            self._capacities.follow(snapshot)
        capacities = self._capacities
        sizes = capacities.memory_mib, FULL_PERCENT * len(capacities.devices)
        return Shares(snapshot, sizes, capacities.holdings), capacities
