"""The policies of the packing benchmark: Random, BestFit and FGD as published, and ours.

The published ones give a node an integer from 0 to 100, and the first node in order wins among equals. Scores
are kept by node and shape, and only nodes that have changed are scored again."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bench._packing import Cluster
from pipeline.gpu.policy.demand import DemandHistory
from pipeline.gpu.policy.landscape import Landscape
from pipeline.gpu.policy.outlook import Outlook
from pipeline.gpu.policy.shapes import FULL_SHARE, Free, NeedShape, NodeRoom, serves, takes

COMMON: Final = 0.95  # FGD looks at the commonest types that make so much of the trace
CPU_MILLI: Final = 256_000  # BestFit: the largest node, by which free amounts are divided
GPUS: Final = 16
NOWHERE: Final = -1


class Scored:
    """Nodes with a score for each shape: the highest wins, the first among equals."""

    def __init__(self, rooms: Sequence[NodeRoom], sizes_mib: Sequence[int]) -> None:
        self.rooms = list(rooms)
        self.sizes_mib = sizes_mib
        self._scores: dict[NeedShape, list[int]] = {}
        self._positions: dict[NeedShape, int] = {}
        self._placements: dict[tuple[NeedShape, NodeRoom], tuple[int, NodeRoom]] = {}
        self._changed: list[int] = []

    def score(self, before: NodeRoom, after: NodeRoom) -> float:
        """The score of a node for one way to place a task there."""
        raise NotImplementedError

    def decide(self, shape: NeedShape) -> tuple[int, NodeRoom] | None:
        node = self.choose(self._scored(shape))
        if node is None:
            return None
        room = self.rooms[node] = self.place(shape, self.rooms[node])
        self._changed.append(node)
        return node, room

    def choose(self, scores: Sequence[int]) -> int | None:
        best = max(scores)
        return None if best == NOWHERE else scores.index(best)

    def place(self, shape: NeedShape, room: NodeRoom) -> NodeRoom:
        return self._placements[shape, room][1]

    def _scored(self, shape: NeedShape) -> list[int]:
        scores = self._scores.get(shape)
        if scores is None:
            scores = self._scores[shape] = [NOWHERE] * len(self.rooms)
            stale: Iterable[int] = range(len(self.rooms))
        else:
            stale = set(self._changed[self._positions[shape] :])
        self._positions[shape] = len(self._changed)
        for node in stale:
            room = self.rooms[node]
            entry = self._placements.get((shape, room))
            if entry is None:
                entry = self._placements[shape, room] = self._best(shape, room)
            scores[node] = entry[0]
        return scores

    def _best(self, shape: NeedShape, room: NodeRoom) -> tuple[int, NodeRoom]:
        best, best_score = room, -math.inf
        for _, after in takes(room, shape, self.sizes_mib):
            score = self.score(room, after)
            if score > best_score:
                best, best_score = after, score
        return (NOWHERE if best_score == -math.inf else max(0, int(best_score))), best


class Random(Scored):
    """Any node that fits, any device."""

    def __init__(self, rooms: Sequence[NodeRoom], sizes_mib: Sequence[int], chance: random.Random) -> None:
        super().__init__(rooms, sizes_mib)
        self.chance = chance

    def score(self, _: NodeRoom, __: NodeRoom) -> float:
        return 0.0

    def choose(self, scores: Sequence[int]) -> int | None:
        fitting = [node for node, score in enumerate(scores) if score != NOWHERE]
        return self.chance.choice(fitting) if fitting else None

    def place(self, shape: NeedShape, room: NodeRoom) -> NodeRoom:
        ways = dict(takes(room, shape, self.sizes_mib))
        if len(ways) == 1:
            return next(iter(ways.values()))
        return ways[(self.chance.choice([one for one in room.devices if serves(one, shape)]),)]


class BestFit(Scored):
    """The node with the least CPU and GPU left, a share on the fullest device."""

    def score(self, _: NodeRoom, after: NodeRoom) -> float:
        gpus = sum(one.share for one in after.devices) / FULL_SHARE
        return 100 * (1 - after.cpu_milli / CPU_MILLI - gpus / GPUS)

    def _best(self, shape: NeedShape, room: NodeRoom) -> tuple[int, NodeRoom]:
        for _, after in takes(room, shape, self.sizes_mib):  # the fullest device comes first
            return max(0, int(self.score(room, after))), after
        return NOWHERE, room


class Fgd(Scored):
    """Fragmentation gradient descent: the node whose fragments grow least."""

    def __init__(
        self, rooms: Sequence[NodeRoom], sizes_mib: Sequence[int], tasks: Sequence[NeedShape]
    ) -> None:
        super().__init__(rooms, sizes_mib)
        counts = Counter(task._replace(node_memory_mib=0) for task in tasks)
        self._types: dict[NeedShape, list[tuple[int, float]]] = defaultdict(list)
        covered = 0
        for shape, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
            if covered >= COMMON * len(tasks):
                break
            covered += count
            self._types[shape._replace(cpu_milli=0)].append((shape.cpu_milli, count / len(tasks)))
        self._fragments: dict[tuple[int, tuple[Free, ...]], float] = {}

    def score(self, before: NodeRoom, after: NodeRoom) -> float:
        return 100 / (1 + math.exp((self.fragments(after) - self.fragments(before)) / FULL_SHARE))

    def fragments(self, room: NodeRoom) -> float:
        """The free GPU that a type cannot use, on average; no type is asked for its memory of the node."""
        key = room.cpu_milli, room.devices
        found = self._fragments.get(key)
        if found is None:
            found = self._fragments[key] = sum(
                self._of(shape, types, room) for shape, types in self._types.items()
            )
        return found

    @staticmethod
    def _of(shape: NeedShape, types: Sequence[tuple[int, float]], room: NodeRoom) -> float:
        free = sum(one.share for one in room.devices)
        usable = [one.share for one in room.devices if serves(one, shape)]
        fits = 0 < shape.devices <= len(usable)
        return sum(
            part * (free - sum(usable) if fits and cpu <= room.cpu_milli else free) for cpu, part in types
        )


class Ours:
    """The policy of the pool, told the distribution of the trace."""

    def __init__(self, rooms: Sequence[NodeRoom], cluster: Cluster, counts: Mapping[NeedShape, int]) -> None:
        self._sizes_mib = cluster.sizes_mib
        outlook = Outlook(counts, cluster.rooms, self._sizes_mib)
        self._land = Landscape(outlook, self._sizes_mib, dict(enumerate(rooms)))

    def decide(self, shape: NeedShape) -> tuple[int, NodeRoom] | None:
        choice = self._land.best(shape)
        if choice is None:
            return None
        room = dict(takes(self._land.room(choice.node), shape, self._sizes_mib))[choice.devices]
        self._land.move(choice.node, room)
        return choice.node, room


class OursLearnt(Ours):
    """The same as the pool runs it: the distribution is that of the arrivals so far."""

    def __init__(self, rooms: Sequence[NodeRoom], cluster: Cluster) -> None:
        super().__init__(rooms, cluster, {})
        self._cluster = cluster
        self._history: DemandHistory[NeedShape] = DemandHistory()

    def decide(self, shape: NeedShape) -> tuple[int, NodeRoom] | None:
        if self._history.add(shape):
            outlook = Outlook(self._history.counts, self._cluster.rooms, self._sizes_mib)
            self._land = Landscape(outlook, self._sizes_mib, dict(self._land.rooms()))
        return super().decide(shape)
