"""The use that later needs could still make of a node, as two figures from the distribution of recent needs.

*Fragments* are the free GPU of a node that a shape cannot use, on average over shapes (Weng et al., "Beware
of Fragmentation", USENIX ATC 2023). There a shape weighs as often as it comes. Here it weighs by its
pressure: its needs over the number of them that the empty pool takes. So nodes are kept for a rare shape that
fits on few.

*Worth* is the GPU that the node would take of random later needs, if they came to it alone (a rollout). All
nodes see the same needs, drawn evenly from the distribution (common random numbers, stratified). So
differences between nodes are no noise of the draw.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pipeline.gpu.policy.shapes import Free, NeedShape, NodeRoom, free_share, serves
from pipeline.gpu.values import FULL_PERCENT

ROLLOUTS: Final = 4
NEEDS: Final = 64  # in each: enough to fill a node of 8 GPUs
SHAPES: Final = 256  # the commonest ones count
SEED: Final = 42
REMEMBERED: Final = 20_000  # sets of devices

_Offer = tuple[int, int, int, int, int, bool, int]  # CPU, memory, devices, MiB, percent, exclusive, groups


class Outlook:
    """The figures of one distribution of shapes, over the rooms of the empty nodes of one pool."""

    def __init__(
        self, counts: Mapping[NeedShape, int], empty: Iterable[NodeRoom], sizes_mib: Sequence[int]
    ) -> None:
        self._sizes_mib = sizes_mib
        ordered = sorted(counts, key=lambda shape: (-counts[shape], shape))[:SHAPES]
        self._classes = _classes(ordered, counts, Counter(empty))
        self._offers = _offers(sorted(ordered), counts)
        self._unusable: dict[tuple[Free, ...], list[int]] = {}

    def fragments(self, room: NodeRoom) -> float:
        """Thousandths of a GPU that later needs cannot use, of all that is free."""
        free = sum([one.share for one in room.devices])
        unusable = self._unusable.get(room.devices)
        if unusable is None:
            if len(self._unusable) > REMEMBERED:
                self._unusable.clear()
            unusable = self._unusable[room.devices] = [
                _unusable(room.devices, shape, free) for shape, _, _ in self._classes
            ]
        cpu, memory, lost = room.cpu_milli, room.memory_mib, 0.0
        for (_, pressures, pressure_sum), part in zip(self._classes, unusable, strict=True):
            if part == free:
                lost += pressure_sum * free
                continue
            fitting = 0.0
            for need_cpu, need_memory, pressure in pressures:
                if need_cpu <= cpu and need_memory <= memory:
                    fitting += pressure
            lost += fitting * part + (pressure_sum - fitting) * free
        return lost

    def worth(self, room: NodeRoom) -> float:
        """Thousandths of a GPU that the node would take of later needs."""
        return sum(self._rollout(room, offers) for offers in self._offers) / ROLLOUTS

    def _rollout(self, room: NodeRoom, offers: Sequence[_Offer]) -> int:
        cpu, memory, sizes = room.cpu_milli, room.memory_mib, self._sizes_mib
        devices = [(one.memory_mib, one.compute_percent, one.empty, one.group) for one in room.devices]
        for need_cpu, need_memory, count, mib, percent, exclusive, groups in offers:
            if need_cpu > cpu or need_memory > memory:
                continue
            if exclusive:
                fit = [n for n, one in enumerate(devices) if one[2] and groups >> one[3] & 1]
            elif count:
                fit = [
                    n
                    for n, one in enumerate(devices)
                    if one[0] >= mib and one[1] >= percent and groups >> one[3] & 1
                ]
            else:
                fit = []
            if len(fit) < count:
                continue
            cpu, memory = cpu - need_cpu, memory - need_memory
            if not count:
                continue
            if exclusive:
                for n in reversed(fit[:count]):
                    del devices[n]
                if not devices:
                    break
                continue
            for n in sorted(fit, key=devices.__getitem__)[:count] if len(fit) > 1 else fit:
                has_mib, has_percent, _, group = devices[n]
                devices[n] = has_mib - mib, has_percent - percent, False, group
        # Shares that are left, as `free_share` counts them: so no more is taken than was free.
        remaining = sum([free_share(mib, percent, sizes[group]) for mib, percent, _, group in devices])
        return sum([one.share for one in room.devices]) - remaining


def _classes(
    shapes: Sequence[NeedShape], counts: Mapping[NeedShape, int], empty: Mapping[NodeRoom, int]
) -> list[tuple[NeedShape, list[tuple[int, int, float]], float]]:
    """Shapes that agree in all but CPU and memory of the node, with the pressure of each; all sum to 1."""
    pressures: dict[NeedShape, list[tuple[int, int, float]]] = defaultdict(list)
    for shape in shapes:
        room_for = sum(n * _times(room, shape) for room, n in empty.items()) if shape.devices else 0
        if room_for:
            base = shape._replace(cpu_milli=0, node_memory_mib=0)
            pressures[base].append((shape.cpu_milli, shape.node_memory_mib, counts[shape] / room_for))
    in_all = sum(part[2] for parts in pressures.values() for part in parts)
    return [
        (shape, [(c, m, p / in_all) for c, m, p in parts], sum(part[2] for part in parts) / in_all)
        for shape, parts in sorted(pressures.items())
    ]


def _times(room: NodeRoom, shape: NeedShape) -> int:
    """How many needs of this shape the empty node takes."""
    bounds = [
        amount // part
        for amount, part in (
            (room.cpu_milli, shape.cpu_milli),
            (room.memory_mib, shape.node_memory_mib),
        )
        if part
    ]
    parts = 0
    for one in room.devices:
        if serves(one, shape):
            by_memory = one.memory_mib // shape.memory_mib if shape.memory_mib else FULL_PERCENT
            by_compute = FULL_PERCENT // shape.compute_percent if shape.compute_percent else by_memory
            parts += 1 if shape.exclusive else min(by_memory, by_compute)
    return min([parts // shape.devices, *bounds])


def _unusable(devices: Sequence[Free], shape: NeedShape, free: int) -> int:
    """The free part of the devices that the shape cannot use; all of it where the shape fits nowhere."""
    count, usable = 0, 0
    for one in devices:
        if serves(one, shape):
            count, usable = count + 1, usable + one.share
    return free - usable if count >= shape.devices else free


def _offers(shapes: Sequence[NeedShape], counts: Mapping[NeedShape, int]) -> list[list[_Offer]]:
    """The needs of all rollouts: evenly drawn from the distribution, then shuffled."""
    flat: list[_Offer] = []
    total, at, until = sum(counts[shape] for shape in shapes), 0, 0
    for shape in shapes:
        until += counts[shape]
        while at < ROLLOUTS * NEEDS and (at + 0.5) * total < until * ROLLOUTS * NEEDS:
            flat.append(
                (
                    shape.cpu_milli,
                    shape.node_memory_mib,
                    shape.devices,
                    shape.memory_mib,
                    shape.compute_percent,
                    shape.exclusive,
                    shape.groups,
                )
            )
            at += 1
    random.Random(SEED).shuffle(flat)  # noqa: S311 - a sample, no secret
    return [flat[n * NEEDS : (n + 1) * NEEDS] for n in range(ROLLOUTS)]
