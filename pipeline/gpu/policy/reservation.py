"""The one reservation: which devices are kept for the need that waits first, and what may still start there.

EASY backfill after Lifka (1995): a later need may start where it ends before the reserved one can begin, or fits into what is spare
beyond it. Ends are what holders said (`max_duration_s`); one that overran, or said nothing, never ends. A lease that was asked to
yield goes at any moment, so nothing counts on its place.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.policy.packing import Entry, Room, Rooms
from pipeline.gpu.values import WHOLE, LeaseMode, Need, PoolLease, PoolRequest, Reservation

MayAsk = Callable[[PoolLease], bool]
# A lease that ran over its time is still expected for so long, or for a tenth of its time; after that nobody knows its end.
# Otherwise giving back a second late would move the reservation elsewhere.
GRACE_MS: Final = 10_000


def end_ms(lease: PoolLease, now_ms: int) -> int | None:
    """When it ends by what its holder said, perhaps just before now; None where nobody knows."""
    if lease.need.max_duration_s is None:
        return None
    lasts = int(lease.need.max_duration_s * 1000)
    end = lease.granted_ms + lasts
    return end if now_ms < end + max(GRACE_MS, lasts // 10) else None


def nobody(_lease: PoolLease) -> bool:
    """For what stands when nobody is asked to yield."""
    return False


def going(lease: PoolLease) -> bool:
    return lease.yield_by_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """When a device can serve its part of a need. `ready_ms` is 0 where only yields, or nothing, stand between.

    `blocked_mib` is held by leases of which nobody knows when they end; then the device is `unknown`.
    """

    room: Room
    unknown: bool = False
    ready_ms: int = 0
    asks: int = 0
    blocked_mib: int = 0

    @property
    def key(self) -> tuple[bool, int, int, int, bool, int, int]:
        """The best device first; among equals the one that a best fit takes."""
        room = self.room
        return (
            self.unknown,
            self.ready_ms,
            self.asks,
            self.blocked_mib,
            room.empty,
            room.memory_mib,
            room.order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The devices of a reservation. `unknown` of them may never become free by themselves."""

    rooms: tuple[Room, ...]
    unknown: int
    ready_ms: int
    asks: int

    @property
    def quality(self) -> tuple[int, int]:
        return self.unknown, self.ready_ms

    @property
    def start_ms(self) -> int | None:
        return self.ready_ms if not self.unknown and self.ready_ms else None

    @property
    def by_yields(self) -> bool:
        """Asking others is all that is missing."""
        return self.asks > 0 and self.quality == (0, 0)


def outlook(room: Room, need: Need, may_ask: MayAsk, now_ms: int) -> Outlook:
    """What the device promises to the need. It is large enough for it."""
    if room.fits(need):
        return Outlook(room=room)
    askable: list[Entry] = []
    others: list[Entry] = []
    memory, compute = room.memory_mib, room.compute_percent
    for entry in room.held:
        if going(entry[0]):
            memory, compute = memory + entry[1], compute + entry[2]
        else:
            (askable if may_ask(entry[0]) else others).append(entry)
    if need.mode is LeaseMode.EXCLUSIVE:
        return _alone(room, askable, others, now_ms)
    if memory >= need.memory_mib and compute >= need.compute_percent:
        return Outlook(room=room)
    for asks, (_, mib, percent) in enumerate(askable, 1):
        memory, compute = memory + mib, compute + percent
        if memory >= need.memory_mib and compute >= need.compute_percent:
            return Outlook(room=room, asks=asks)
    known = [(end, entry) for entry in others if (end := end_ms(entry[0], now_ms)) is not None]
    for end, (_, mib, percent) in sorted(known, key=lambda pair: pair[0]):
        memory, compute = memory + mib, compute + percent
        if memory >= need.memory_mib and compute >= need.compute_percent:
            return Outlook(room=room, asks=len(askable), ready_ms=end)
    return Outlook(room=room, unknown=True, asks=len(askable), blocked_mib=need.memory_mib - memory)


def _alone(room: Room, askable: list[Entry], others: list[Entry], now_ms: int) -> Outlook:
    """The same for an exclusive need: everybody has to go."""
    ends = [end_ms(lease, now_ms) for lease, _, _ in others]
    return Outlook(
        room=room,
        unknown=room.left or None in ends,
        ready_ms=max((end for end in ends if end is not None), default=0),
        asks=len(askable),
        blocked_mib=sum(mib for (_, mib, _), end in zip(others, ends, strict=True) if end is None),
    )


def choose(
    rooms: Rooms, need: Need, may_ask: MayAsk, *, now_ms: int, most_mib: int | None = None
) -> Choice | None:
    """The devices that serve the need first, or None where the pool cannot serve it, within `most_mib` for an exclusive one."""
    found = [room for room in rooms.candidates(need) if room.could(need)]
    if need.devices < 1 or len(found) < need.devices:
        return None
    views = (outlook(room, need, may_ask, now_ms) for room in found)
    best = heapq.nsmallest(need.devices, views, key=lambda view: view.key)
    if need.mode is LeaseMode.EXCLUSIVE and most_mib is not None:
        if sum(view.room.device.schedulable_mib for view in best) > most_mib:
            found = heapq.nsmallest(need.devices, found, key=lambda r: (r.device.schedulable_mib, r.order))
            best = [outlook(room, need, may_ask, now_ms) for room in found]
        if sum(view.room.device.schedulable_mib for view in best) > most_mib:
            return None
    return _choice(best)


def kept(
    reservation: Reservation, rooms: Rooms, need: Need, may_ask: MayAsk, *, now_ms: int
) -> Choice | None:
    """The devices of an earlier reservation as they look now; None where they cannot serve the need any more."""
    found = [rooms.by_uuid.get(uuid) for uuid in reservation.uuids]
    still = [room for room in found if room is not None and room.could(need)]
    if len(still) != need.devices or len(set(reservation.uuids)) != need.devices:
        return None
    return _choice([outlook(room, need, may_ask, now_ms) for room in still])


def _choice(views: list[Outlook]) -> Choice:
    ordered = sorted(views, key=lambda view: view.room.order)
    return Choice(
        rooms=tuple(view.room for view in ordered),
        unknown=sum(view.unknown for view in views),
        ready_ms=max(view.ready_ms for view in views),
        asks=sum(view.asks for view in views),
    )


class Kept:
    """The reservation in force, and the door of its devices."""

    def __init__(self, request: PoolRequest, choice: Choice, victims: set[str], *, now_ms: int) -> None:
        self.request = request
        self.rooms = choice.rooms
        self.start_ms = choice.start_ms
        self._now_ms = now_ms
        self._spare = {room.order: self._beyond(room, victims) for room in choice.rooms}

    def _beyond(self, room: Room, victims: set[str]) -> tuple[int, int]:
        """(MiB, percent) that the reserved need leaves unused on the device when it starts."""
        need = self.request.need
        if need.mode is LeaseMode.EXCLUSIVE:
            return -1, -1
        memory, compute = room.memory_mib, room.compute_percent
        for lease, mib, percent in room.held:
            end = end_ms(lease, self._now_ms)
            ended = self.start_ms is not None and end is not None and end <= self.start_ms
            if going(lease) or lease.lease_id in victims or ended:
                memory, compute = memory + mib, compute + percent
        return memory - need.memory_mib, compute - need.compute_percent

    def ends_before(self, need: Need) -> bool:
        """Whether the need, started now, is over when the reserved one can begin."""
        return (
            self.start_ms is not None
            and need.max_duration_s is not None
            and self._now_ms + int(need.max_duration_s * 1000) <= self.start_ms
        )

    def admitted(self, need: Need) -> list[Room]:
        """Kept devices where the need may start now, the best fit first."""
        before = self.ends_before(need)
        found = [
            room
            for room in self.rooms
            if room.could(need) and room.fits(need) and (before or self._spares(room, need))
        ]
        return sorted(found, key=lambda room: (room.empty, room.memory_mib, room.order))

    def _spares(self, room: Room, need: Need) -> bool:
        memory, compute = self._spare[room.order]
        percent = WHOLE if need.mode is LeaseMode.EXCLUSIVE else need.compute_percent
        mib = room.device.schedulable_mib if need.mode is LeaseMode.EXCLUSIVE else need.memory_mib
        return memory >= mib and compute >= percent

    def took(self, room: Room, need: Need) -> None:
        """A need was let in. One that ends before leaves what is spare as it is."""
        if room.order in self._spare and not self.ends_before(need):
            memory, compute = self._spare[room.order]
            self._spare[room.order] = memory - need.memory_mib, compute - need.compute_percent
