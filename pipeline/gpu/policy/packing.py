"""Best-fit packing: free capacity per device, in an index, so that no need looks at every device.

Partly used devices are filled first, so that whole ones survive for exclusive needs and gangs. A gang gets
all of its devices or none. Free amounts are signed: a device that shrank below its leases is full.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pipeline.gpu.values import FULL_PERCENT, Device, LeaseMode, Need, PoolLease, Snapshot

Entry = tuple[PoolLease, int, int]  # a lease and the (MiB, percent) that it has on one device


@dataclass(slots=True, eq=False)
class Capacity:
    """Free capacity of one usable device. `order` is its rank by (node, index, uuid): it breaks ties."""

    device: Device
    order: int
    memory_mib: int
    compute_percent: int
    entries: list[Entry] = field(default_factory=list)
    orphaned: bool = False  # processes of an ended lease may still be there
    closed: bool = False  # one lease has the whole device
    empty: bool = True
    reserved: bool = False

    def fits(self, need: Need) -> bool:
        if need.mode is LeaseMode.EXCLUSIVE:
            return self.empty and not self.closed and self.memory_mib >= need.memory_mib
        if self.closed:
            return False
        return self.memory_mib >= need.memory_mib and self.compute_percent >= need.compute_percent

    def matches(self, need: Need) -> bool:
        """Whether the device is large enough and where the need wants it, free or not."""
        here = need.node in ("", self.device.node) and need.device in ("", self.device.uuid)
        return here and self.device.schedulable_mib >= need.memory_mib

    @property
    def best_fit_key(self) -> tuple[bool, int, int]:
        return self.empty, self.memory_mib, self.order

    def take(self, need: Need) -> tuple[int, int]:
        """Count a new lease; the (MiB, percent) that it has here."""
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        memory, compute = need.memory_mib, need.compute_percent
        if exclusive:
            memory, compute = self.device.schedulable_mib, FULL_PERCENT
        self.memory_mib -= memory
        self.compute_percent -= compute
        self.empty = False
        self.closed = exclusive
        return memory, compute


class _Index:
    """Devices by free compute, then by free memory: a best fit is one bisection per percentage (at most
    101)."""

    def __init__(self, devices: Sequence[Capacity]) -> None:
        self._buckets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for one in devices:
            self._buckets[one.compute_percent].append((one.memory_mib, one.order))
        for bucket in self._buckets.values():
            bucket.sort()

    def add(self, one: Capacity) -> None:
        insort(self._buckets[one.compute_percent], (one.memory_mib, one.order))

    def remove(self, one: Capacity) -> None:
        bucket = self._buckets[one.compute_percent]
        del bucket[bisect_left(bucket, (one.memory_mib, one.order))]

    def best(self, memory_mib: int, compute_percent: int) -> int | None:
        """The order number of the best fit."""
        best: tuple[int, int] | None = None
        for amount, bucket in self._buckets.items():
            if amount >= compute_percent and bucket and bucket[-1][0] >= memory_mib:
                candidate = bucket[bisect_left(bucket, (memory_mib, -1))]
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[1]

    def all(self, memory_mib: int, compute_percent: int) -> Iterator[int]:
        """The order numbers of all that fit, the best first."""
        runs = [
            islice(bucket, bisect_left(bucket, (memory_mib, -1)), None)
            for amount, bucket in self._buckets.items()
            if amount >= compute_percent
        ]
        return (order for _, order in heapq.merge(*runs))


class Capacities:
    """All usable devices. Reserved ones are outside the index."""

    def __init__(self, snapshot: Snapshot) -> None:
        usable = sorted((d for d in snapshot.devices if d.usable), key=lambda d: (d.node, d.index, d.uuid))
        self.devices = [
            Capacity(
                device=device, order=order, memory_mib=device.schedulable_mib, compute_percent=FULL_PERCENT
            )
            for order, device in enumerate(usable)
        ]
        self.by_uuid = {one.device.uuid: one for one in self.devices}
        self._by_node: dict[str, list[Capacity]] = defaultdict(list)
        for one in self.devices:
            self._by_node[one.device.node].append(one)
        self._subtract(snapshot)
        opened = [one for one in self.devices if not one.closed]
        self._used = _Index([one for one in opened if not one.empty])
        self._empty = _Index([one for one in opened if one.empty])

    def _subtract(self, snapshot: Snapshot) -> None:
        """Take off leases and orphaned allocations; those on unusable devices are skipped."""
        for lease in snapshot.leases:
            for part in lease.parts:
                one = self.by_uuid.get(part.uuid)
                if one is not None:
                    one.entries.append((lease, part.memory_mib, part.compute_percent))
                    one.memory_mib -= part.memory_mib
                    one.compute_percent -= part.compute_percent
                    one.empty = False
                    one.closed |= lease.need.mode is LeaseMode.EXCLUSIVE
        for orphan in snapshot.orphans:
            one = self.by_uuid.get(orphan.uuid)
            if one is not None:
                one.memory_mib -= orphan.memory_mib
                one.compute_percent -= orphan.compute_percent
                one.empty, one.orphaned = False, True
                one.closed |= orphan.exclusive

    def candidates(self, need: Need) -> list[Capacity]:
        """Devices that the need may name, large enough or not, reserved or not."""
        if need.device:
            one = self.by_uuid.get(need.device)
            return [] if one is None else [one]
        return self._by_node.get(need.node, []) if need.node else self.devices

    def best_fit(self, need: Need) -> list[Capacity]:
        """The best devices outside the reservation: as many as fit, at most as many as the need asks for."""
        if need.node or need.device:
            fitting = [
                one
                for one in self.candidates(need)
                if not one.reserved and one.matches(need) and one.fits(need)
            ]
            return sorted(fitting, key=lambda one: one.best_fit_key)[: need.devices]
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        memory, compute = need.memory_mib, FULL_PERCENT if exclusive else need.compute_percent
        indexes = (self._empty,) if exclusive else (self._used, self._empty)
        fits: list[Capacity] = []
        for index in indexes:
            if need.devices == 1:
                order = index.best(memory, compute)
                if order is not None:
                    return [self.devices[order]]
            else:
                missing = need.devices - len(fits)
                fits += [self.devices[order] for order in islice(index.all(memory, compute), missing)]
        return fits

    def take(self, one: Capacity, need: Need) -> tuple[int, int]:
        """Count a new lease; the (MiB, percent) that it has on the device."""
        indexed = not one.closed and not one.reserved
        if indexed:
            (self._empty if one.empty else self._used).remove(one)
        amounts = one.take(need)
        if indexed and not one.closed:
            self._used.add(one)
        return amounts

    def reserve(self, devices: Sequence[Capacity]) -> None:
        """Take these devices out of the index."""
        for one in devices:
            if not one.closed:
                (self._empty if one.empty else self._used).remove(one)
            one.reserved = True
