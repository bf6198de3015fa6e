"""Where a need fits: best fit by free memory over an index, so that no need looks at every device.

Partly used devices are filled first, so that whole ones survive for exclusive needs and gangs. All or none of a gang.
Free amounts are signed: a device that shrank below what is leased there is full, not endless.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from pipeline.gpu.values import WHOLE, Device, LeaseMode, Need, PoolLease, Snapshot

Entry = tuple[PoolLease, int, int]  # a lease and the (MiB, percent) that it has on one device


@dataclass(slots=True, eq=False)
class Room:
    """What is free on one usable device. `order` is its place among all by (node, index, uuid): it breaks ties."""

    device: Device
    order: int
    memory_mib: int
    compute_percent: int
    held: list[Entry] = field(default_factory=list)
    left: bool = False  # somebody who lost a lease may still be there
    closed: bool = False  # one has it alone
    empty: bool = True
    kept: bool = False  # for the reservation

    def fits(self, need: Need) -> bool:
        if need.mode is LeaseMode.EXCLUSIVE:
            return self.empty and not self.closed and self.memory_mib >= need.memory_mib
        return (
            not self.closed
            and self.memory_mib >= need.memory_mib
            and self.compute_percent >= need.compute_percent
        )

    def could(self, need: Need) -> bool:
        """Whether the device is large enough and where the need wants it."""
        return (
            self.device.schedulable_mib >= need.memory_mib
            and need.node in ("", self.device.node)
            and need.device in ("", self.device.uuid)
        )

    def take(self, need: Need) -> tuple[int, int]:
        """Count a new lease; the (MiB, percent) that it has here."""
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        memory, compute = (
            (self.device.schedulable_mib, WHOLE) if exclusive else (need.memory_mib, need.compute_percent)
        )
        self.memory_mib -= memory
        self.compute_percent -= compute
        self.empty = False
        self.closed = exclusive
        return memory, compute


class _Index:
    """Rooms by free compute, and for each amount by free memory: the best fit is one bisection per amount (at most 101)."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def fill(self, rooms: list[Room]) -> None:
        for room in rooms:
            self._buckets[room.compute_percent].append((room.memory_mib, room.order))
        for bucket in self._buckets.values():
            bucket.sort()

    def add(self, room: Room) -> None:
        insort(self._buckets[room.compute_percent], (room.memory_mib, room.order))

    def remove(self, room: Room) -> None:
        bucket = self._buckets[room.compute_percent]
        del bucket[bisect_left(bucket, (room.memory_mib, room.order))]

    def first(self, memory_mib: int, compute_percent: int) -> int | None:
        """The order number of the best fit."""
        best: tuple[int, int] | None = None
        for amount, bucket in self._buckets.items():
            if amount >= compute_percent and bucket and bucket[-1][0] >= memory_mib:
                found = bucket[bisect_left(bucket, (memory_mib, -1))]
                if best is None or found < best:
                    best = found
        return None if best is None else best[1]

    def all(self, memory_mib: int, compute_percent: int) -> Iterator[int]:
        """The order numbers of all that fit, the best first."""
        runs = [
            islice(bucket, bisect_left(bucket, (memory_mib, -1)), None)
            for amount, bucket in self._buckets.items()
            if amount >= compute_percent
        ]
        return (order for _, order in heapq.merge(*runs))


class Rooms:
    """All usable devices. Those that are kept for a reservation are outside the index."""

    def __init__(self, snapshot: Snapshot) -> None:
        usable = sorted((d for d in snapshot.devices if d.usable), key=lambda d: (d.node, d.index, d.uuid))
        self.rooms = [
            Room(device=device, order=order, memory_mib=device.schedulable_mib, compute_percent=WHOLE)
            for order, device in enumerate(usable)
        ]
        self.by_uuid = {room.device.uuid: room for room in self.rooms}
        self._by_node: dict[str, list[Room]] = defaultdict(list)
        for room in self.rooms:
            self._by_node[room.device.node].append(room)
        self._count(snapshot)
        self._used, self._empty = _Index(), _Index()
        opened = [room for room in self.rooms if not room.closed]
        self._used.fill([room for room in opened if not room.empty])
        self._empty.fill([room for room in opened if room.empty])

    def _count(self, snapshot: Snapshot) -> None:
        """Take off what is held and what was left behind."""
        for lease in snapshot.leases:
            for part in lease.parts:
                room = self.by_uuid.get(part.uuid)
                if room is None:
                    continue  # its device is not usable
                room.held.append((lease, part.memory_mib, part.compute_percent))
                room.memory_mib -= part.memory_mib
                room.compute_percent -= part.compute_percent
                room.empty = False
                room.closed |= lease.need.mode is LeaseMode.EXCLUSIVE
        for left in snapshot.orphans:
            room = self.by_uuid.get(left.uuid)
            if room is not None:
                room.memory_mib -= left.memory_mib
                room.compute_percent -= left.compute_percent
                room.empty, room.left = False, True
                room.closed |= left.exclusive

    def candidates(self, need: Need) -> list[Room]:
        """Devices that the need may name, large enough or not, kept or not."""
        if need.device:
            room = self.by_uuid.get(need.device)
            return [] if room is None else [room]
        return self._by_node.get(need.node, []) if need.node else self.rooms

    def find(self, need: Need) -> list[Room] | None:
        """Rooms outside the reservation for every device of the need, or None."""
        found = self.some(need)
        return found if len(found) == need.devices else None

    def some(self, need: Need) -> list[Room]:
        """The best rooms outside the reservation, as many as there are, at most as many as the need has devices."""
        if need.node or need.device:
            fitting = [
                room
                for room in self.candidates(need)
                if not room.kept and room.could(need) and room.fits(need)
            ]
            return sorted(fitting, key=lambda room: (room.empty, room.memory_mib, room.order))[: need.devices]
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        memory, compute = need.memory_mib, WHOLE if exclusive else need.compute_percent
        indexes = (self._empty,) if exclusive else (self._used, self._empty)
        found: list[Room] = []
        if need.devices == 1:
            for index in indexes:
                order = index.first(memory, compute)
                if order is not None:
                    return [self.rooms[order]]
            return found
        for index in indexes:
            missing = need.devices - len(found)
            found += [self.rooms[order] for order in islice(index.all(memory, compute), missing)]
        return found

    def take(self, room: Room, need: Need) -> tuple[int, int]:
        """Count a new lease; the (MiB, percent) that it has on the device."""
        indexed = not room.closed and not room.kept
        if indexed:
            (self._empty if room.empty else self._used).remove(room)
        parts = room.take(need)
        if indexed and not room.closed:
            self._used.add(room)
        return parts

    def keep(self, rooms: list[Room]) -> None:
        """Take these out of what `find` offers."""
        for room in rooms:
            if not room.closed:
                (self._empty if room.empty else self._used).remove(room)
            room.kept = True
