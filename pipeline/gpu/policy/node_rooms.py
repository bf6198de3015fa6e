"""The devices for a need by the landscape of nodes: between capacities of devices and rooms of nodes.

The landscape is built when a need first asks for it, and follows the nodes that have changed since.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pipeline.gpu.policy.device_names import names_model
from pipeline.gpu.policy.landscape import Choice, Landscape
from pipeline.gpu.policy.outlook import Outlook
from pipeline.gpu.policy.shapes import FULL_SHARE, Free, NeedShape, NodeRoom, free_share, takes
from pipeline.gpu.values import FULL_PERCENT, DeviceKind, LeaseMode, Need

if TYPE_CHECKING:
    from pipeline.gpu.policy.packing import Capacity, NodeCapacity

SHAPES: Final = 1024  # remembered
# Without recent needs whole devices are kept whole, as best fit does.
UNKNOWN: Final = {Need(mode=LeaseMode.EXCLUSIVE): 1}
_Group = tuple[DeviceKind, str, int]  # kind, name, schedulable MiB


class NodeRooms:
    """All nodes with usable devices, and the recent needs that they are kept for."""

    def __init__(self, nodes: "Iterable[NodeCapacity]") -> None:
        self._nodes = list(nodes)
        devices = [one.device for node in self._nodes for one in node.devices]
        self._groups = sorted({(one.kind, one.name, one.schedulable_mib) for one in devices})
        self._number = {group: number for number, group in enumerate(self._groups)}
        self._sizes_mib = [size for _, _, size in self._groups]
        self._demand: Mapping[Need, int] = {}
        self._shapes: dict[Need, NeedShape] = {}
        self._land: Landscape | None = None
        self._stale: set[int] = set()

    @property
    def expects(self) -> bool:
        """Whether recent needs are known."""
        return bool(self._demand)

    def expect(self, demand: Mapping[Need, int]) -> None:
        """Later needs will be like these."""
        if demand is not self._demand and demand != self._demand:
            self._land = None
        self._demand = demand

    def changed(self, node: int) -> None:
        """Something of the node is free or taken now that was not."""
        self._stale.add(node)

    def best(self, need: Need, most_mib: int | None = None) -> "list[Capacity]":
        """The best devices: as many as fit, at most as many as the need asks for.

        `most_mib` bounds the memory of devices chosen one by one together. A gang on one node may exceed it.
        """
        land = self.landscape()
        if need.devices == 1 or need.same_node:
            choice = land.best(self._affordable(self.shape(need), need.devices, most_mib))
            return [] if choice is None else self._devices(choice, set())
        found: list[Capacity] = []
        orders: set[int] = set()  # of the devices that are found
        alone = self.shape(replace(need, devices=1))
        while len(found) < need.devices:
            shape = self._affordable(alone, need.devices - len(found), most_mib)
            choice = land.best(shape)
            if choice is None:
                break
            one = self._devices(choice, orders)[0]
            found.append(one)
            orders.add(one.order)
            if most_mib is not None:
                most_mib -= one.device.schedulable_mib
            after = dict(takes(land.room(choice.node), shape, self._sizes_mib))[choice.devices]
            # One device serves one part of a gang, so it is out of the question for the next part.
            land.move(
                choice.node, after._replace(devices=self._room(self._nodes[choice.node], orders).devices)
            )
            self._stale.add(choice.node)
        return found

    def foresee(self, need: Need) -> Choice | None:
        """The place of such a need, or of the first device of a gang over nodes."""
        alone = need if need.same_node else replace(need, devices=1)
        return self.landscape().best(self.shape(alone))

    def landscape(self) -> Landscape:
        """The rooms of all nodes as they are now."""
        if self._land is None:
            counts: dict[NeedShape, int] = {}
            for need, count in (self._demand or UNKNOWN).items():
                alone = need if need.same_node else replace(need, devices=1)
                shape = self.shape(alone)
                counts[shape] = counts.get(shape, 0) + count * (need.devices // alone.devices)
            outlook = Outlook(counts, map(self._empty_room, self._nodes), self._sizes_mib)
            rooms = {node.order: self._room(node) for node in self._nodes}
            self._land = Landscape(outlook, self._sizes_mib, rooms)
        else:
            for number in self._stale:
                self._land.move(number, self._room(self._nodes[number]))
        self._stale.clear()
        return self._land

    def shape(self, need: Need) -> NeedShape:
        """The demand on one node."""
        shape = self._shapes.get(need)
        if shape is None:
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
            exclusive = need.mode is LeaseMode.EXCLUSIVE
            shape = self._shapes[need] = NeedShape(
                devices=need.devices,
                memory_mib=0 if exclusive else need.memory_mib,
                compute_percent=0 if exclusive else need.compute_percent,
                exclusive=exclusive,
                groups=sum(1 << n for n, group in enumerate(self._groups) if _serves(group, need)),
                cpu_milli=need.cpu_milli * need.devices,
                node_memory_mib=need.node_memory_mib * need.devices,
            )
        return shape

    def _affordable(self, shape: NeedShape, devices: int, most_mib: int | None) -> NeedShape:
        """The shape without devices so large that as few as `devices` of them exceed `most_mib`.

        The others are counted as the smallest of the pool that serve the shape.
        """
        if most_mib is None:
            return shape
        sizes = {n: size for n, size in enumerate(self._sizes_mib) if shape.groups >> n & 1}
        largest = most_mib - (devices - 1) * min(sizes.values(), default=0)
        return shape._replace(groups=sum(1 << n for n, size in sizes.items() if size <= largest))

    def _devices(self, choice: Choice, without: set[int]) -> "list[Capacity]":
        """The devices of a choice, by what is free of them; none twice."""
        chosen: list[Capacity] = []
        open_ = [
            one for one in self._nodes[choice.node].devices if not one.reserved and one.order not in without
        ]
        for free in choice.devices:
            one = next(one for one in open_ if self._free(one) == free and one not in chosen)
            chosen.append(one)
        return chosen

    def _room(self, node: "NodeCapacity", without: Iterable[int] = ()) -> NodeRoom:
        devices = [self._free(one) for one in node.devices if not one.reserved and one.order not in without]
        return NodeRoom(max(0, node.cpu_milli), max(0, node.memory_mib), tuple(sorted(devices)))

    def _empty_room(self, node: "NodeCapacity") -> NodeRoom:
        devices = [
            Free(FULL_SHARE, one.device.schedulable_mib, FULL_PERCENT, True, self._group(one))
            for one in node.devices
        ]
        return NodeRoom(node.total_cpu_milli, node.total_memory_mib, tuple(sorted(devices)))

    def _free(self, one: "Capacity") -> Free:
        group = self._group(one)
        if one.closed:
            return Free(0, 0, 0, False, group)
        memory, compute = max(0, one.memory_mib), max(0, one.compute_percent)
        return Free(free_share(memory, compute, self._sizes_mib[group]), memory, compute, one.empty, group)

    def _group(self, one: "Capacity") -> int:
        device = one.device
        return self._number[device.kind, device.name, device.schedulable_mib]


def _serves(group: _Group, need: Need) -> bool:
    kind, name, size_mib = group
    if need.device_kind is not DeviceKind.ANY and need.device_kind is not kind:
        return False
    return size_mib >= need.memory_mib and (not need.model or names_model(name, need.model))
