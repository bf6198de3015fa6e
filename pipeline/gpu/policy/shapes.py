"""Needs and free capacity of one node as plain tuples, small enough to be compared a million times.

A *shape* is the part of a need that one node has to give at once. Equal devices of the pool form a *group*. A
shape holds the groups that it may use as bits. Shares of a device are thousandths, so that sums are exact.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pipeline.gpu.values import FULL_PERCENT

FULL_SHARE: Final = 1000  # thousandths of a device
UNLIMITED: Final = 2**62  # CPU or memory of a node whose agent does not report it


class Free(NamedTuple):
    """The free part of one device. `share` is the smaller part of its memory and its compute."""

    share: int
    memory_mib: int
    compute_percent: int
    empty: bool
    group: int


class NodeRoom(NamedTuple):
    """The free part of one node. Devices are sorted, so that equal rooms are equal tuples."""

    cpu_milli: int
    memory_mib: int
    devices: tuple[Free, ...]


class NeedShape(NamedTuple):
    """A demand on one node: `devices` of its devices at once, CPU and memory for all of them together.

    Without devices it is work on the CPU. `exclusive` devices are empty ones, taken whole.
    """

    devices: int
    memory_mib: int  # on each device
    compute_percent: int  # on each device
    exclusive: bool
    groups: int  # bits of the groups of devices that serve it
    cpu_milli: int
    node_memory_mib: int


def free_share(memory_mib: int, compute_percent: int, size_mib: int) -> int:
    """Thousandths of a device, the smaller of both parts; 0 where nothing is free."""
    by_memory = memory_mib * FULL_SHARE // size_mib if size_mib > 0 else 0
    return max(0, min(by_memory, compute_percent * FULL_SHARE // FULL_PERCENT))


def serves(one: Free, shape: NeedShape) -> bool:
    """Whether the device can give its part of the shape."""
    if not shape.groups >> one.group & 1:
        return False
    if shape.exclusive:
        return one.empty
    return one.memory_mib >= shape.memory_mib and one.compute_percent >= shape.compute_percent


def takes(
    room: NodeRoom, shape: NeedShape, sizes_mib: Sequence[int]
) -> Iterator[tuple[tuple[Free, ...], NodeRoom]]:
    """Every different way to give the shape: the devices as they are before, and the room that is left.

    A single shared device may be any that serves it. More devices, and whole ones, are those with the least
    free.
    """
    cpu, memory = room.cpu_milli - shape.cpu_milli, room.memory_mib - shape.node_memory_mib
    if cpu < 0 or memory < 0:
        return
    if shape.devices == 0:
        yield (), NodeRoom(cpu, memory, room.devices)
        return
    serving = [one for one in room.devices if serves(one, shape)]
    if len(serving) < shape.devices:
        return
    if shape.devices == 1 and not shape.exclusive:
        choices: list[tuple[Free, ...]] = [(one,) for one in dict.fromkeys(serving)]
    else:
        choices = [tuple(serving[: shape.devices])]
    for chosen in choices:
        devices = list(room.devices)
        for one in chosen:
            devices.remove(one)
            devices.append(_after(one, shape, sizes_mib[one.group]))
        devices.sort()
        yield chosen, NodeRoom(cpu, memory, tuple(devices))


def _after(one: Free, shape: NeedShape, size_mib: int) -> Free:
    if shape.exclusive:
        return Free(0, 0, 0, False, one.group)
    memory, compute = one.memory_mib - shape.memory_mib, one.compute_percent - shape.compute_percent
    return Free(free_share(memory, compute, size_mib), memory, compute, False, one.group)
