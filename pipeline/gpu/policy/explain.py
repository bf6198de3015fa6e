"""The pool in words: how a device stands, why a need waits, sizes and times as people say them. Pure.

What is free is what the policy counts with (fitting.py), so that no picture promises or denies what a plan would not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.gpu.policy import packing as fitting
from pipeline.gpu.values import (
    WHOLE,
    Device,
    LeaseMode,
    Need,
    Orphan,
    PoolLease,
    PoolRequest,
    Reservation,
    Snapshot,
)
from pipeline.units import listed, plural, seconds, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One device, usable or not, with who is there. Signed: one that shrank may have less than nothing free."""

    device: Device
    counted: fitting.Room
    leases: tuple[PoolLease, ...]
    left: tuple[Orphan, ...]

    @property
    def free_mib(self) -> int:
        return min(0, self.counted.memory_mib) if self.closed else self.counted.memory_mib

    @property
    def free_percent(self) -> int:
        return min(0, self.counted.compute_percent) if self.closed else self.counted.compute_percent

    @property
    def leased_mib(self) -> int:
        """Held by leases, or still taken by what is left of ended ones."""
        return self.device.schedulable_mib - self.free_mib

    @property
    def leased_percent(self) -> int:
        return WHOLE - self.free_percent

    @property
    def closed(self) -> bool:
        """Somebody has all of it, or had and may still be there."""
        return self.counted.closed


def rooms_of(s: Snapshot) -> list[Room]:
    """Every device with who is there, by node and index."""
    # Devices out of order are counted like the others: what is leased there is leased all the same.
    counted = fitting.Rooms(replace(s, devices=tuple(replace(device, why="") for device in s.devices)))
    known = {device.uuid: device for device in s.devices}
    left: dict[str, list[Orphan]] = {}
    for x in s.orphans:
        left.setdefault(x.uuid, []).append(x)
    return [
        Room(
            device=known[room.device.uuid],
            counted=room,
            leases=tuple(lease for lease, _, _ in room.held),
            left=tuple(left.get(room.device.uuid, ())),
        )
        for room in counted.rooms
    ]


def why_it_waits(s: Snapshot, request: PoolRequest, rooms: Sequence[Room]) -> str:
    """What stands between this need and its lease, in words."""
    need = request.need
    if s.quarantine_ms > 0:
        return f"Redis was restarted, so nothing is granted for {seconds(s.quarantine_ms / 1000)} more"
    near = [room for room in rooms if need.node in ("", room.device.node)]
    near = [room for room in near if need.device in ("", room.device.uuid)]
    where = cut(need.device or need.node)
    if not near:
        return f"there is no GPU {where} in the pool now" if where else "there is no GPU in the pool now"
    usable = [room for room in near if room.device.usable]
    if len(usable) < need.devices:
        return _unusable(need, near, len(usable))
    quota = _over_quota(s, request)
    if quota:
        return quota
    if s.reservation is not None and s.reservation.request_id == request.request_id:
        return _kept(s, s.reservation, request, rooms)
    return _no_room(s, request, usable)


def _unusable(need: Need, near: Sequence[Room], usable: int) -> str:
    """Too few of the devices that the need may have can be used at all."""
    bad = [f"{short(room.device.uuid)}: {room.device.why}" for room in near if not room.device.usable]
    if need.device:
        return f"needs the GPU {', '.join(bad)}"
    there = f" of {cut(need.node)}" if need.node else ""
    count = f"{need.devices} GPU{'' if need.devices == 1 else 's'}{there}"
    whose = f"its {len(near)}" if need.node else f"{len(near)}"
    why = f": {listed(bad, 2)}" if bad else ""
    return f"needs {count}; {usable or 'none'} of {whose} can be used{why}"


def _no_room(s: Snapshot, request: PoolRequest, usable: Sequence[Room]) -> str:
    need = request.need
    kept = () if s.reservation is None else s.reservation.uuids
    free = [room for room in usable if room.counted.fits(need)]
    what = wanted(need)
    if len(free) < need.devices:
        if need.devices > 1:
            alone = need.mode is LeaseMode.EXCLUSIVE
            return f"needs {what}; free now: {len(free)}{_when_gone(usable) if alone else ''}"
        return f"needs {what}; {_most(need.mode, usable)}"
    if sum(room.device.uuid not in kept for room in free) < need.devices and s.reservation is not None:
        return f"needs {what}; what is free is kept for {s.reservation.request_id}"
    if any(other.request_id != request.request_id for other in s.waiting):
        return "others come first, by priority or by what their tenant has used lately"
    return f"needs {what}; that has just become free"


def wanted(need: Need) -> str:
    """A need in words: `1 whole device`, `4.0 GiB and 25 %`."""
    if need.mode is LeaseMode.EXCLUSIVE:
        return "1 whole device" if need.devices == 1 else f"{need.devices} whole devices"
    percent = f" and {need.compute_percent} %" if need.compute_percent else ""
    each = "" if need.devices == 1 else f" on each of {need.devices} devices"
    return f"{size(need.memory_mib)}{percent}{each}"


def _most(mode: LeaseMode, usable: Sequence[Room]) -> str:
    if mode is LeaseMode.EXCLUSIVE:
        return f"none is free{_when_gone(usable)}"
    best = max((r for r in usable if not r.closed), key=lambda r: r.free_mib, default=None)
    if best is None:
        return "every device is taken whole"
    free = f"{size(max(0, best.free_mib))} and {max(0, best.free_percent)} %"
    return f"the most that is free on one is {free} ({short(best.device.uuid)}{_still(best)})"


def _when_gone(usable: Iterable[Room]) -> str:
    """What stands in the way of a whole device where only parts of ended leases do, and the remedy."""
    waits = next((room for room in usable if room.left and not room.leases), None)
    if waits is None:
        return ""
    uuid = short(waits.device.uuid)
    return f": {uuid} is when {_who(waits.left[0])} has gone, or after `logweir gpu clear {uuid}`"


def _kept(s: Snapshot, reservation: Reservation, request: PoolRequest, rooms: Sequence[Room]) -> str:
    """For the one need that devices are kept free for."""
    kept = [room for room in rooms if room.device.uuid in reservation.uuids]
    holders = {lease.lease_id: lease for room in kept for lease in room.leases}
    asked = [lease for lease in holders.values() if lease.yield_by_ms is not None]
    said = f"needs {wanted(request.need)}; {', '.join(short(u) for u in reservation.uuids)} "
    said += "is kept for it" if len(reservation.uuids) == 1 else "are kept for it"
    if asked:
        latest = max(lease.yield_by_ms or 0 for lease in asked) - s.now_ms
        said += f", {_people(len(asked))} asked to give back within {seconds(max(0, latest) / 1000)}"
    elif holders:
        start = until(s, reservation.start_ms)
        when = "" if start is None else f", by what they said in {seconds(max(0.0, start))}"
        said += f", {_people(len(holders))} still there{when}"
    gone = [left for room in kept for left in room.left]
    if gone:
        said += f", {_who(gone[0])} may still be there; if not, say `logweir gpu clear {short(gone[0].uuid)}`"
    return said


def _people(count: int) -> str:
    return plural(count, "holder")


def _over_quota(s: Snapshot, request: PoolRequest) -> str:
    tenant = s.tenants.get(request.need.tenant)
    if tenant is None or tenant.quota_mib is None:
        return ""
    held = held_mib(s).get(tenant.name, 0)
    if held + request.need.memory_mib * request.need.devices <= tenant.quota_mib:
        return ""
    return f"its tenant {tenant.name} holds {size(held)} of its quota of {size(tenant.quota_mib)}"


def held_mib(s: Snapshot) -> dict[str, int]:
    """Memory that each tenant holds now, over all devices."""
    held: dict[str, int] = {}
    for lease in s.leases:
        total = sum(part.memory_mib for part in lease.parts)
        held[lease.need.tenant] = held.get(lease.need.tenant, 0) + total
    return held


def open_door(s: Snapshot, room: Room) -> bool:
    """New shared leases may be granted there, if they fit."""
    kept = () if s.reservation is None else s.reservation.uuids
    return room.device.usable and not room.closed and room.device.uuid not in kept


def state(s: Snapshot, room: Room) -> str:
    """How a device stands, in words."""
    device = room.device
    if not device.usable:
        return f"no new leases: {device.why}"
    alone_left = [x for x in room.left if x.exclusive]
    if alone_left:
        return f"closed: {_who(alone_left[0])} may still be there"
    if s.reservation is not None and device.uuid in s.reservation.uuids:
        return f"door closed: kept for {s.reservation.request_id}{_still(room)}"
    if room.closed:
        return f"taken whole{_still(room)}"
    outside = outside_mib(room)
    also = f"{_still(room)}, {size(outside)} used outside the pool" if outside else _still(room)
    if not room.leases and not room.left:
        return f"free{also}"
    return f"open, {size(max(0, room.free_mib))} free{also}"


def _still(room: Room) -> str:
    """What ended leases may still have of a shared device."""
    if not room.left:
        return ""
    more = len(room.left) - 1
    who = _who(room.left[0]) + (f" and {more} more" if more else "")
    return f", {size(sum(x.memory_mib for x in room.left))} still taken by {who}"


def _who(left: Orphan) -> str:
    """`process 123 of lease old`."""
    return f"{f'process {left.pids[0]} of' if left.pids else 'whoever used'} lease {left.lease_id}"


def outside_mib(room: Room) -> int | None:
    """What processes that no lease names use there; None where the driver does not say."""
    device = room.device
    if device.processes is None:
        return None
    known = {pid for lease in room.leases if lease.host == device.node for pid in lease.pids}
    known |= {pid for x in room.left for pid in x.pids}
    return sum(process.used_mib or 0 for process in device.processes if process.pid not in known)


def until(s: Snapshot, at_ms: int | None) -> float | None:
    """Seconds from the snapshot to a moment; negative when it has passed."""
    return None if at_ms is None else (at_ms - s.now_ms) / 1000


def short(uuid: str) -> str:
    """The beginning of a UUID: enough to tell devices apart, and `gpu clear` takes it."""
    kind, mark, rest = uuid.partition("-")
    return f"{kind}-{rest[:8]}" if mark and kind in ("GPU", "MIG") else uuid[:12]


def cut(name: str, most: int = 64) -> str:
    """A name from elsewhere, not longer than it is worth a line."""
    return name if len(name) <= most else name[: most - 3] + "..."
