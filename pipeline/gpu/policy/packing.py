"""Free capacity per device and node, in indexes that follow the pool, and the devices for a need.

Without recent needs, packing is best fit: partly used devices are filled first, so that whole ones survive
for exclusive needs and gangs. With recent needs, the devices win that cost later needs least (landscape.py).
A gang gets all of its devices or none, of one kind. Free amounts are signed: a device that shrank below its
leases is full.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final

from pipeline.gpu.policy.device_index import DeviceIndex
from pipeline.gpu.policy.device_names import names_model, names_node
from pipeline.gpu.policy.difference import difference
from pipeline.gpu.policy.fairness import Holdings
from pipeline.gpu.policy.landscape import Choice
from pipeline.gpu.policy.node_rooms import NodeRooms
from pipeline.gpu.policy.shapes import UNLIMITED
from pipeline.gpu.values import (
    FULL_PERCENT,
    Device,
    DeviceKind,
    LeaseMode,
    Need,
    Node,
    Orphan,
    PoolLease,
    Snapshot,
)

RESOLVED: Final = 1024  # forms of needs that are remembered
Entry = tuple[PoolLease, int, int]  # a lease and the (MiB, percent) that it has on one device


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """Free CPU and memory of one node, signed, and its devices. UNLIMITED where the agent reports none."""

    order: int
    cpu_milli: int
    memory_mib: int
    total_cpu_milli: int
    total_memory_mib: int
    devices: "list[Capacity]" = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # unusable devices, whose leases have CPU all the same

    def parts(self, need: Need) -> int:
        """For how many devices of the need the node has CPU and memory now."""
        bounds = [need.devices]
        if need.cpu_milli > 0:
            bounds.append(max(0, self.cpu_milli // need.cpu_milli))
        if need.node_memory_mib > 0:
            bounds.append(max(0, self.memory_mib // need.node_memory_mib))
        return min(bounds)

    def could_give(self, need: Need, devices: int) -> bool:
        """Whether the node, with nothing on it, has CPU and memory for so many devices of the need."""
        cpu, memory = need.cpu_milli * devices, need.node_memory_mib * devices
        return cpu <= self.total_cpu_milli and memory <= self.total_memory_mib

    def count(self, need: Need, sign: int) -> None:
        self.cpu_milli += sign * need.cpu_milli
        self.memory_mib += sign * need.node_memory_mib


@dataclass(slots=True, eq=False)
class Capacity:
    """Free capacity of one usable device. `order` is its rank by (node, index, uuid): it breaks ties."""

    device: Device
    order: int
    node: NodeCapacity
    memory_mib: int
    compute_percent: int
    entries: list[Entry] = field(default_factory=list)
    orphaned: bool = False  # processes of an ended lease may still be there
    closed: bool = False  # one lease has the whole device
    empty: bool = True
    reserved: bool = False

    def fits(self, need: Need) -> bool:
        """Whether the device can give its part of the need now, with CPU and memory of its node."""
        if need.cpu_milli > 0 or need.node_memory_mib > 0:
            return self.node.parts(need) > 0 and self.has_room(need)
        return self.has_room(need)

    def has_room(self, need: Need) -> bool:
        """The same without a look at the node."""
        if self.closed:
            return False
        if need.mode is LeaseMode.EXCLUSIVE:
            return self.empty and self.memory_mib >= need.memory_mib
        return self.memory_mib >= need.memory_mib and self.compute_percent >= need.compute_percent

    def matches(self, need: Need) -> bool:
        """Whether the device is of a form, of a size and in a place that serve the need, free or not."""
        return device_matches(self.device, need) and self.node.could_give(
            need, need.devices if need.same_node else 1
        )

    @property
    def best_fit_key(self) -> tuple[bool, int, int]:
        return self.empty, self.memory_mib, self.order

    def clear(self) -> None:
        """As if no lease and no orphan were there."""
        self.memory_mib, self.compute_percent = self.device.schedulable_mib, FULL_PERCENT
        self.entries = []
        self.orphaned = self.closed = self.reserved = False
        self.empty = True

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
        self.node.count(need, -1)
        return memory, compute


def device_matches(device: Device, need: Need) -> bool:
    """Whether the device is where the need wants it, of its kind and model, and large enough."""
    if not names_node(device.node, need.node) or need.device not in ("", device.uuid):
        return False
    if device.schedulable_mib < need.memory_mib:
        return False
    if need.device_kind is not DeviceKind.ANY and need.device_kind is not device.kind:
        return False
    return not need.model or names_model(device.name, need.model)


class Capacities:
    """All usable devices. Reserved ones are outside the indexes.

    A plan changes it: `follow` brings it to another snapshot, at the cost of the difference.
    """

    _all_devices: tuple[Device, ...]  # usable or not
    _nodes_known: tuple[Node, ...]
    _node_sizes: Mapping[str, tuple[int, int]]
    by_uuid: dict[str, Capacity]
    _rooms: NodeRooms

    def __init__(self, snapshot: Snapshot) -> None:
        self._build(snapshot)

    def follow(self, snapshot: Snapshot) -> None:
        """Become what a new one for this snapshot would be."""
        if not (self._same_nodes(snapshot) and self._same_devices(snapshot.devices)):
            self._build(snapshot)
            return
        self._follow_leases(snapshot)
        self._rooms.expect(snapshot.demand)

    def _same_nodes(self, snapshot: Snapshot) -> bool:
        if snapshot.nodes is not self._nodes_known:
            if _sizes(snapshot) != self._node_sizes:
                return False
            self._nodes_known = snapshot.nodes
        return True

    def _same_devices(self, devices: tuple[Device, ...]) -> bool:
        """Whether a plan cannot tell these from the known devices. Takes over new readings of them."""
        if devices is self._all_devices:
            return True
        if len(devices) != len(self._all_devices):
            return False
        fresh = [pair for pair in zip(self._all_devices, devices, strict=True) if pair[0] is not pair[1]]
        if not all(_same_device(before, device) for before, device in fresh):
            return False
        for _, device in fresh:
            if device.usable:
                self.by_uuid[device.uuid].device = device
        self._all_devices = devices
        return True

    def _build(self, snapshot: Snapshot) -> None:
        usable = sorted((d for d in snapshot.devices if d.usable), key=lambda d: (d.node, d.index, d.uuid))
        self._all_devices, self._nodes_known = snapshot.devices, snapshot.nodes
        self._node_sizes = _sizes(snapshot)
        self.memory_mib = sum(device.schedulable_mib for device in usable)
        self.nodes: dict[str, NodeCapacity] = {}
        self.devices: list[Capacity] = []
        for order, device in enumerate(usable):
            node = self.nodes.get(device.node)
            if node is None:
                cpu, memory = self._node_sizes.get(device.node, (UNLIMITED, UNLIMITED))
                node = self.nodes[device.node] = NodeCapacity(len(self.nodes), cpu, memory, cpu, memory)
            one = Capacity(device, order, node, device.schedulable_mib, FULL_PERCENT)
            self.devices.append(one)
            node.devices.append(one)
        self.by_uuid = {one.device.uuid: one for one in self.devices}
        self._node_of = {device.uuid: self.nodes.get(device.node) for device in snapshot.devices}
        for device in snapshot.devices:
            if not device.usable and device.node in self.nodes:
                self.nodes[device.node].broken.append(device.uuid)
        self._leases = snapshot.leases
        self._of_device: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._orphans: tuple[Orphan, ...] = ()
        self._touched: set[int] = set()  # nodes that a plan has changed
        self._resolved: dict[Need, tuple[Need, ...]] = {}
        self._gpus: dict[tuple[str, str, int], int] = {}
        self._node_names = list(self.nodes)
        self._rooms = NodeRooms(self.nodes.values())
        self._rooms.expect(snapshot.demand)
        self.holdings = Holdings()
        self._add_leases(snapshot.leases)
        self._add_orphans(snapshot.orphans)
        opened = [one for one in self.devices if not one.closed]
        self._indexes = {
            (kind, empty): DeviceIndex(
                (one.compute_percent, one.memory_mib, one.order)
                for one in opened
                if one.device.kind is kind and one.empty is empty
            )
            for kind in (DeviceKind.GPU, DeviceKind.SLICE)
            for empty in (False, True)
        }

    def _add_leases(self, leases: Iterable[PoolLease]) -> None:
        """Count leases; those on unusable devices for their nodes alone."""
        for lease in leases:
            self.holdings.add(lease)
            need = lease.need
            for part in lease.parts:
                node = self._node_of.get(part.uuid)
                if node is None:
                    continue
                entry = lease, part.memory_mib, part.compute_percent
                self._of_device[part.uuid][lease.lease_id] = entry
                if need.cpu_milli or need.node_memory_mib:
                    node.count(need, -1)
                if part.uuid in self.by_uuid:
                    _count_entry(self.by_uuid[part.uuid], entry)
        for one in self.devices:
            if len(one.entries) > 1:
                one.entries.sort(key=_entry_order)

    def _add_orphans(self, orphans: Iterable[Orphan]) -> None:
        self._orphans = tuple(orphans)
        for orphan in self._orphans:
            one = self.by_uuid.get(orphan.uuid)
            if one is not None:
                one.memory_mib -= orphan.memory_mib
                one.compute_percent -= orphan.compute_percent
                one.empty, one.orphaned = False, True
                one.closed |= orphan.exclusive

    def _follow_leases(self, snapshot: Snapshot) -> None:
        """Devices whose leases or orphans differ are counted anew, and those that a plan has changed."""
        touched, self._touched = self._touched, set()
        gone, new = difference(self._leases, snapshot.leases)
        self._leases = snapshot.leases
        ended = {lease.lease_id: lease for lease in gone}
        for lease in new:
            before = ended.get(lease.lease_id)
            if before is not None and _same_lease(before, lease):
                del ended[lease.lease_id]  # a renewal, as far as a plan can tell
                continue
            if before is not None:
                touched |= self._drop(ended.pop(lease.lease_id))
            self.holdings.add(lease)
            for part in lease.parts:
                node = self._node_of.get(part.uuid)
                if node is not None:
                    entry = lease, part.memory_mib, part.compute_percent
                    self._of_device[part.uuid][lease.lease_id] = entry
                    touched.add(node.order)
        for lease in ended.values():
            touched |= self._drop(lease)
        if snapshot.orphans != self._orphans:
            for orphan in (*self._orphans, *snapshot.orphans):
                if orphan.uuid in self.by_uuid:
                    touched.add(self.by_uuid[orphan.uuid].node.order)
        self._recount([node for node in self.nodes.values() if node.order in touched], snapshot.orphans)

    def _drop(self, lease: PoolLease) -> set[int]:
        """A lease has ended; its nodes have to be counted anew."""
        nodes = set()
        self.holdings.drop(lease)
        for part in lease.parts:
            node = self._node_of.get(part.uuid)
            if node is not None:
                del self._of_device[part.uuid][lease.lease_id]
                nodes.add(node.order)
        return nodes

    def _recount(self, nodes: Sequence[NodeCapacity], orphans: tuple[Orphan, ...]) -> None:
        """Count leases and orphans of these nodes anew."""
        for node in nodes:
            for one in node.devices:
                self._unindex(one)
                one.clear()
            node.cpu_milli, node.memory_mib = node.total_cpu_milli, node.total_memory_mib
            for uuid in node.broken:
                for lease, _, _ in self._of_device[uuid].values():
                    node.count(lease.need, -1)
            for one in node.devices:
                for entry in sorted(self._of_device[one.device.uuid].values(), key=_entry_order):
                    _count_entry(one, entry)
                    node.count(entry[0].need, -1)
        usable = [orphan for orphan in orphans if orphan.uuid in self.by_uuid]
        orders = {node.order for node in nodes}
        self._add_orphans(o for o in usable if self.by_uuid[o.uuid].node.order in orders)
        self._orphans = orphans
        for node in nodes:
            for one in node.devices:
                self._index(one)
            self._rooms.changed(node.order)

    def _index(self, one: Capacity) -> None:
        if not one.closed and not one.reserved:
            index = self._indexes[one.device.kind, one.empty]
            index.add(one.compute_percent, one.memory_mib, one.order)

    def _unindex(self, one: Capacity) -> None:
        if not one.closed and not one.reserved:
            index = self._indexes[one.device.kind, one.empty]
            index.remove(one.compute_percent, one.memory_mib, one.order)

    def resolve(self, need: Need) -> tuple[Need, ...]:
        """The need with the kind of its devices settled: one form, or two to be tried in this order."""
        if need.device_kind is not DeviceKind.ANY or need.device:
            return (need,)
        if need.mode is LeaseMode.SHARED and need.devices == 1:
            return (need,)
        found = self._resolved.get(need)
        if found is None:
            gpus, slices = (replace(need, device_kind=k) for k in (DeviceKind.GPU, DeviceKind.SLICE))
            found = gpus, slices
            if need.mode is LeaseMode.EXCLUSIVE:
                # Broken and silent GPUs count: their failure must not turn a GPU into a slice.
                found = (gpus,) if self._known_gpus(gpus) >= need.devices else (slices,)
            if len(self._resolved) > RESOLVED:
                self._resolved.clear()
            self._resolved[need] = found
        return found

    def _known_gpus(self, need: Need) -> int:
        """How many GPUs there are for the need, usable or not."""
        key = need.node, need.model, need.memory_mib
        count = self._gpus.get(key)
        if count is None:
            if len(self._gpus) > RESOLVED:
                self._gpus.clear()
            count = self._gpus[key] = sum(device_matches(device, need) for device in self._all_devices)
        return count

    def candidates(self, need: Need) -> Sequence[Capacity]:
        """Devices that the need may name, large enough or not, reserved or not."""
        if need.device:
            one = self.by_uuid.get(need.device)
            return [] if one is None else [one]
        if need.node:
            return [
                one for name in need.node.split("|") if name in self.nodes for one in self.nodes[name].devices
            ]
        return self.devices

    def best_fit(self, need: Need, most_mib: int | None = None) -> list[Capacity]:
        """The best devices outside the reservation: as many as fit, at most as many as the need asks for.

        `most_mib` bounds the memory of all devices of an exclusive need, as its tenant's quota does.
        """
        best: list[Capacity] = []
        for form in self.resolve(need):
            found = self._best_fit(form, most_mib)
            if len(found) == need.devices:
                return found
            best = max(best, found, key=len)
        return best

    def _best_fit(self, need: Need, most_mib: int | None) -> list[Capacity]:
        bound = need.cpu_milli or need.node_memory_mib or need.model or need.same_node
        if need.node or need.device:
            found = self.best_by_size(need)
        elif bound or self._rooms.expects:
            found = self._rooms.best(need, most_mib)
            # Smaller devices may be enough, but not where the bound leaves not even a first one.
            enough = len(found) == need.devices and affordable(found, most_mib)
            if most_mib is not None and found and not enough:
                found = self.best_by_size(need)
        else:
            found = self._best_indexed(need)
        return found if affordable(found, most_mib) else []

    def best_by_size(self, need: Need, opened: Sequence[Capacity] = ()) -> list[Capacity]:
        """The best fit by free memory alone: no devices of an exclusive need have less memory together.

        The need is of one kind. `opened`: reserved devices that take it nevertheless.
        """
        by_node: dict[int, list[Capacity]] = {}
        for one in chain((one for one in self.candidates(need) if not one.reserved), opened):
            if one.matches(need) and one.fits(need):
                by_node.setdefault(one.node.order, []).append(one)
        best = [
            sorted(fitting, key=lambda one: one.best_fit_key)[
                : min(fitting[0].node.parts(need), need.devices)
            ]
            for fitting in by_node.values()
        ]
        if need.same_node or len(best) <= 1:
            return min(
                best, key=lambda found: (-len(found), sum(one.memory_mib for one in found)), default=[]
            )
        return sorted(chain.from_iterable(best), key=lambda one: one.best_fit_key)[: need.devices]

    def _best_indexed(self, need: Need) -> list[Capacity]:
        exclusive = need.mode is LeaseMode.EXCLUSIVE
        memory, compute = need.memory_mib, FULL_PERCENT if exclusive else need.compute_percent
        kinds: tuple[DeviceKind, ...] = (need.device_kind,)
        if need.device_kind is DeviceKind.ANY:
            kinds = (DeviceKind.GPU, DeviceKind.SLICE)
        fits: list[Capacity] = []
        for empty in (True,) if exclusive else (False, True):
            indexes = [self._indexes[kind, empty] for kind in kinds]
            if need.devices == 1:
                keys = [key for index in indexes if (key := index.best(memory, compute)) is not None]
                if keys:
                    return [self.devices[min(keys)[1]]]
            else:
                missing = need.devices - len(fits)
                for index in indexes:  # of one: a gang has its kind settled
                    fits += [self.devices[rank] for _, rank in islice(index.all(memory, compute), missing)]
        return fits

    def foresee(self, need: Need) -> tuple[str, Choice] | None:
        """The node that such a need would get now by recent needs, or the first device of a gang, and why."""
        for form in self.resolve(need):
            choice = self._rooms.foresee(form)
            if choice is not None:
                return self._node_names[choice.node], choice
        return None

    def take(self, one: Capacity, need: Need) -> tuple[int, int]:
        """Count a new lease; the (MiB, percent) that it has on the device."""
        self._touched.add(one.node.order)
        self._unindex(one)
        amounts = one.take(need)
        self._index(one)
        self._rooms.changed(one.node.order)
        return amounts

    def limit(self, node: NodeCapacity, cpu_milli: int, memory_mib: int) -> None:
        """Later needs get no more CPU and memory of the node than this."""
        node.cpu_milli, node.memory_mib = min(node.cpu_milli, cpu_milli), min(node.memory_mib, memory_mib)
        self._rooms.changed(node.order)

    def reserve(self, devices: Sequence[Capacity]) -> None:
        """Take these devices out of the indexes."""
        for one in devices:
            self._touched.add(one.node.order)
            self._unindex(one)
            one.reserved = True
            self._rooms.changed(one.node.order)


def affordable(devices: Iterable[Capacity], most_mib: int | None) -> bool:
    """Whether these devices, taken whole, have at most so much memory; None is no bound."""
    return most_mib is None or sum(one.device.schedulable_mib for one in devices) <= most_mib


def given_together(devices: Sequence[Capacity], need: Need) -> bool:
    """Whether the nodes have CPU and memory for all these devices of a need, on one node if it says so."""
    by_node = Counter(one.node.order for one in devices)
    if need.same_node and len(by_node) > 1:
        return False
    if not need.cpu_milli and not need.node_memory_mib:
        return True
    nodes = {one.node.order: one.node for one in devices}
    return all(count <= nodes[order].parts(need) for order, count in by_node.items())


def _count_entry(one: Capacity, entry: Entry) -> None:
    lease, memory, compute = entry
    one.entries.append(entry)
    one.memory_mib -= memory
    one.compute_percent -= compute
    one.empty = False
    one.closed |= lease.need.mode is LeaseMode.EXCLUSIVE


def _entry_order(entry: Entry) -> tuple[int, str]:
    return entry[0].granted_ms, entry[0].lease_id


def _same_lease(a: PoolLease, b: PoolLease) -> bool:
    """Whether a plan cannot tell the two states of a lease apart."""
    if (a.granted_ms, a.yield_by_ms) != (b.granted_ms, b.yield_by_ms):
        return False
    return (a.need is b.need or a.need == b.need) and (a.parts is b.parts or a.parts == b.parts)


def _sizes(snapshot: Snapshot) -> Mapping[str, tuple[int, int]]:
    """CPU and memory of the nodes that report them."""
    return {
        node.name: (node.cpu_milli or UNLIMITED, node.memory_mib or UNLIMITED)
        for node in snapshot.nodes
        if node.cpu_milli or node.memory_mib
    }


def _same_device(a: Device, b: Device) -> bool:
    """Whether a plan cannot tell the two readings of a device apart."""
    return (
        a.uuid == b.uuid
        and a.schedulable_mib == b.schedulable_mib
        and a.why == b.why
        and (a.node, a.index, a.name, a.parent) == (b.node, b.index, b.name, b.parent)
    )
