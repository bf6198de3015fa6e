"""The pool in words: how a device stands, why a need waits, sizes and times for people. Pure.

Free capacity is what the policy counts with (packing.py), so no picture promises or denies what a plan would
not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.gpu.policy import admission
from pipeline.gpu.policy.budgets import why_exhausted
from pipeline.gpu.policy.device_names import names_node
from pipeline.gpu.policy.packing import Capacities, Capacity
from pipeline.gpu.policy.shapes import UNLIMITED
from pipeline.gpu.values import (
    FULL_PERCENT,
    Device,
    DeviceKind,
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
class DeviceView:
    """One device, usable or not, with its leases.

    Signed: a device that shrank may have less than nothing free.
    """

    device: Device
    capacity: Capacity
    leases: tuple[PoolLease, ...]
    orphans: tuple[Orphan, ...]

    @property
    def free_mib(self) -> int:
        return min(0, self.capacity.memory_mib) if self.closed else self.capacity.memory_mib

    @property
    def free_percent(self) -> int:
        return min(0, self.capacity.compute_percent) if self.closed else self.capacity.compute_percent

    @property
    def leased_mib(self) -> int:
        """Held by leases, or still taken by orphaned allocations."""
        return self.device.schedulable_mib - self.free_mib

    @property
    def leased_percent(self) -> int:
        return FULL_PERCENT - self.free_percent

    @property
    def closed(self) -> bool:
        """An exclusive holder has all of it, or had and may still be there."""
        return self.capacity.closed


def device_views(s: Snapshot) -> list[DeviceView]:
    """Every device with its leases, by node and index."""
    # Unusable devices are counted like the others: their leases exist all the same.
    capacities = Capacities(replace(s, devices=tuple(replace(device, why="") for device in s.devices)))
    devices = {device.uuid: device for device in s.devices}
    orphans: dict[str, list[Orphan]] = {}
    for orphan in s.orphans:
        orphans.setdefault(orphan.uuid, []).append(orphan)
    return [
        DeviceView(
            device=devices[capacity.device.uuid],
            capacity=capacity,
            leases=tuple(lease for lease, _, _ in capacity.entries),
            orphans=tuple(orphans.get(capacity.device.uuid, ())),
        )
        for capacity in capacities.devices
    ]


def why_it_waits(s: Snapshot, request: PoolRequest, views: Sequence[DeviceView]) -> str:
    """The obstacle between this need and its lease, in words."""
    need = request.need
    if s.quarantine_ms > 0:
        return f"Redis was restarted, so nothing is granted for {seconds(s.quarantine_ms / 1000)} more"
    candidates = [view for view in views if names_node(view.device.node, need.node)]
    candidates = [view for view in candidates if need.device in ("", view.device.uuid)]
    where = shorten(need.device or need.node)
    if not candidates:
        return f"there is no GPU {where} in the pool now" if where else "there is no GPU in the pool now"
    candidates = _of_one_kind(need, candidates)
    if not candidates:
        there = f" of {where}" if where else ""
        return f"there is no {admission.form_words(need, 1)}{there} in the pool now"
    usable = [view for view in candidates if view.device.usable]
    if len(usable) < need.devices:
        return _unusable(need, candidates, len(usable))
    if bound := _over_budget(s, need) or _over_quota(s, request):
        return bound
    if s.reservation is not None and s.reservation.request_id == request.request_id:
        return _reserved(s, s.reservation, request, views)
    return _no_room(s, request, usable)


def _of_one_kind(need: Need, views: Sequence[DeviceView]) -> list[DeviceView]:
    """The devices of the form that the need accepts; those of a gang are of the kind that it waits for."""
    views = [view for view in views if admission.of_form(view.device, need)]
    if need.device_kind is not DeviceKind.ANY or need.device:
        return views
    if need.mode is LeaseMode.SHARED and need.devices == 1:
        return views
    kinds = [[v for v in views if v.device.kind is kind] for kind in (DeviceKind.GPU, DeviceKind.SLICE)]
    large = [sum(v.device.schedulable_mib >= need.memory_mib for v in of_kind) for of_kind in kinds]
    return kinds[0] if large[0] >= min(need.devices, large[1] + 1) else kinds[1]


def _unusable(need: Need, candidates: Sequence[DeviceView], usable: int) -> str:
    """Too few of the devices that the need may have are usable at all."""
    bad = [f"{short(view.device.uuid)}: {view.device.why}" for view in candidates if not view.device.usable]
    if need.device:
        return f"needs the GPU {', '.join(bad)}"
    there = f" of {shorten(need.node)}" if need.node else ""
    count = f"{need.devices} GPU{'' if need.devices == 1 else 's'}{there}"
    whose = f"its {len(candidates)}" if need.node else f"{len(candidates)}"
    why = f": {listed(bad, 2)}" if bad else ""
    return f"needs {count}; {usable or 'none'} of {whose} can be used{why}"


def _no_room(s: Snapshot, request: PoolRequest, usable: Sequence[DeviceView]) -> str:
    need = request.need
    reserved = () if s.reservation is None else s.reservation.uuids
    free = [view for view in usable if view.capacity.fits(need)]
    wish = wanted(need)
    if need.cpu_milli or need.node_memory_mib or need.same_node:
        roomy = [view for view in usable if view.capacity.has_room(need)]
        if len(roomy) >= need.devices and (why := _node_obstacle(need, roomy)):
            return f"needs {wish}; {why}"
    if len(free) < need.devices:
        if need.devices > 1:
            alone = need.mode is LeaseMode.EXCLUSIVE
            return f"needs {wish}; free now: {len(free)}{_obstacle(usable) if alone else ''}"
        return f"needs {wish}; {_largest_free(need.mode, usable)}"
    if sum(view.device.uuid not in reserved for view in free) < need.devices and s.reservation is not None:
        return f"needs {wish}; what is free is kept for {s.reservation.request_id}"
    if any(other.request_id != request.request_id for other in s.waiting):
        return "others come first, by priority or by what their tenant has used lately"
    return f"needs {wish}; that has just become free"


def _node_obstacle(need: Need, roomy: Sequence[DeviceView]) -> str:
    """The words for nodes that have devices with room, and too little beside them."""
    by_node: dict[int, list[Capacity]] = {}
    for view in roomy:
        by_node.setdefault(view.capacity.node.order, []).append(view.capacity)
    counts = [min(len(devices), devices[0].node.parts(need)) for devices in by_node.values()]
    if need.same_node and max(counts) < need.devices:
        return f"the most that one node can give now is {max(counts)}"
    if sum(counts) >= need.devices:
        return ""
    best = max((devices[0].node for devices in by_node.values()), key=lambda n: (n.cpu_milli, n.memory_mib))
    cpu = "" if best.cpu_milli >= UNLIMITED // 2 else f"{max(0, best.cpu_milli) / 1000:g} cores"
    memory = "" if best.memory_mib >= UNLIMITED // 2 else size(max(0, best.memory_mib))
    amounts = " and ".join(filter(None, (cpu, memory)))
    return f"nodes with a free device have too little CPU or memory: the most free on one is {amounts}"


def wanted(need: Need) -> str:
    """A need in words: `1 whole device`, `4.0 GiB and 25 %`, `2 whole GPUs of model A100 on one node`."""
    noun = admission.form_words(need, need.devices)
    beside = [f"{need.cpu_milli / 1000:g} cores"] if need.cpu_milli else []
    beside += [f"{size(need.node_memory_mib)} of its node"] if need.node_memory_mib else []
    extra = f" with {' and '.join(beside)}{' each' if need.devices > 1 else ''}" if beside else ""
    extra += " on one node" if need.same_node and need.devices > 1 else ""
    if need.mode is LeaseMode.EXCLUSIVE:
        return f"{need.devices} whole {noun}{extra}"
    percent = f" and {need.compute_percent} %" if need.compute_percent else ""
    plain = need.device_kind is DeviceKind.ANY and not need.model
    each = f" on each of {need.devices} {noun}" if need.devices > 1 else "" if plain else f" of a {noun}"
    return f"{size(need.memory_mib)}{percent}{each}{extra}"


def _largest_free(mode: LeaseMode, usable: Sequence[DeviceView]) -> str:
    if mode is LeaseMode.EXCLUSIVE:
        return f"none is free{_obstacle(usable)}"
    best = max((r for r in usable if not r.closed), key=lambda r: r.free_mib, default=None)
    if best is None:
        return "every device is taken whole"
    free = f"{size(max(0, best.free_mib))} and {max(0, best.free_percent)} %"
    return f"the most that is free on one is {free} ({short(best.device.uuid)}{_still_taken(best)})"


def _obstacle(usable: Iterable[DeviceView]) -> str:
    """The obstacle and its remedy where only orphaned allocations keep a whole device from being free."""
    waits = next((view for view in usable if view.orphans and not view.leases), None)
    if waits is None:
        return ""
    uuid = short(waits.device.uuid)
    return f": {uuid} is when {_who(waits.orphans[0])} has gone, or after `logweir gpu clear {uuid}`"


def _reserved(
    s: Snapshot, reservation: Reservation, request: PoolRequest, views: Sequence[DeviceView]
) -> str:
    """The reason for the need that has the reservation."""
    reserved = [view for view in views if view.device.uuid in reservation.uuids]
    holders = {lease.lease_id: lease for view in reserved for lease in view.leases}
    yielding = [lease for lease in holders.values() if lease.yield_by_ms is not None]
    words = f"needs {wanted(request.need)}; {', '.join(short(u) for u in reservation.uuids)} "
    words += "is kept for it" if len(reservation.uuids) == 1 else "are kept for it"
    if yielding:
        latest = max(lease.yield_by_ms or 0 for lease in yielding) - s.now_ms
        words += (
            f", {plural(len(yielding), 'holder')} asked to give back within {seconds(max(0, latest) / 1000)}"
        )
    elif holders:
        start = until(s, reservation.start_ms)
        when = "" if start is None else f", by what they said in {seconds(max(0.0, start))}"
        words += f", {plural(len(holders), 'holder')} still there{when}"
    orphans = [orphan for view in reserved for orphan in view.orphans]
    if orphans:
        words += f", {_who(orphans[0])} may still be there"
        words += f"; if not, say `logweir gpu clear {short(orphans[0].uuid)}`"
    return words


def _over_budget(s: Snapshot, need: Need) -> str:
    tenant = s.tenants.get(need.tenant)
    return "" if tenant is None else why_exhausted(tenant, s.now_ms)


def _over_quota(s: Snapshot, request: PoolRequest) -> str:
    tenant = s.tenants.get(request.need.tenant)
    if tenant is None or tenant.quota_mib is None:
        return ""
    used_mib = held_mib(s).get(tenant.name, 0)
    if used_mib + request.need.memory_mib * request.need.devices <= tenant.quota_mib:
        return ""
    return f"its tenant {tenant.name} holds {size(used_mib)} of its quota of {size(tenant.quota_mib)}"


def held_mib(s: Snapshot) -> dict[str, int]:
    """Memory that each tenant holds now, over all devices."""
    by_tenant: dict[str, int] = {}
    for lease in s.leases:
        total = sum(part.memory_mib for part in lease.parts)
        by_tenant[lease.need.tenant] = by_tenant.get(lease.need.tenant, 0) + total
    return by_tenant


def open_door(s: Snapshot, view: DeviceView) -> bool:
    """New shared leases may be granted there, if they fit."""
    reserved = () if s.reservation is None else s.reservation.uuids
    return view.device.usable and not view.closed and view.device.uuid not in reserved


def state_of(s: Snapshot, view: DeviceView) -> str:
    """How a device stands, in words."""
    device = view.device
    if not device.usable:
        return f"no new leases: {device.why}"
    exclusive = [x for x in view.orphans if x.exclusive]
    if exclusive:
        return f"closed: {_who(exclusive[0])} may still be there"
    if s.reservation is not None and device.uuid in s.reservation.uuids:
        return f"door closed: kept for {s.reservation.request_id}{_still_taken(view)}"
    if view.closed:
        return f"taken whole{_still_taken(view)}"
    outside = outside_mib(view)
    also = f"{_still_taken(view)}, {size(outside)} used outside the pool" if outside else _still_taken(view)
    if not view.leases and not view.orphans:
        return f"free{also}"
    return f"open, {size(max(0, view.free_mib))} free{also}"


def _still_taken(view: DeviceView) -> str:
    """The memory that ended leases may still have of a shared device."""
    if not view.orphans:
        return ""
    more = len(view.orphans) - 1
    who = _who(view.orphans[0]) + (f" and {more} more" if more else "")
    return f", {size(sum(x.memory_mib for x in view.orphans))} still taken by {who}"


def _who(orphan: Orphan) -> str:
    """`process 123 of lease old`."""
    return f"{f'process {orphan.pids[0]} of' if orphan.pids else 'whoever used'} lease {orphan.lease_id}"


def outside_mib(view: DeviceView) -> int | None:
    """Memory of processes that no lease names; None where the driver does not say."""
    device = view.device
    if device.processes is None:
        return None
    leased_pids = {pid for lease in view.leases if lease.host == device.node for pid in lease.pids}
    leased_pids |= {pid for x in view.orphans for pid in x.pids}
    return sum(process.used_mib or 0 for process in device.processes if process.pid not in leased_pids)


def until(s: Snapshot, at_ms: int | None) -> float | None:
    """Seconds from the snapshot to a moment; negative when it has passed."""
    return None if at_ms is None else (at_ms - s.now_ms) / 1000


def short(uuid: str) -> str:
    """The beginning of a UUID: it tells devices apart, and `gpu clear` takes it."""
    kind, mark, digits = uuid.partition("-")
    return f"{kind}-{digits[:8]}" if mark and kind in ("GPU", "MIG") else uuid[:12]


def shorten(name: str, limit: int = 64) -> str:
    """A foreign name, cut to `limit` characters."""
    return name if len(name) <= limit else name[: limit - 3] + "..."
