"""Nodes by what is free of them, and the best node for a shape. Equal nodes are looked at once.

Two steps bound a decision. The first ranks classes of equal nodes by the fragments that a shape would leave
there. The second compares the NEAREST of them by what later needs would lose, worth and fragments together.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.gpu.policy.outlook import Outlook
from pipeline.gpu.policy.shapes import Free, NeedShape, NodeRoom, takes

NEAREST: Final = 8
# Of the change in fragments, beside that in worth. From 0.25 to 0.5 the openb workloads differ by 0.1 points.
FRAGMENTS: Final = 0.4
DIGITS: Final = 6  # figures are compared so exactly: sums of floats differ by their order
REMEMBERED: Final = 20_000  # kinds of node; about 1 KiB each


class NodeClass:
    """All nodes with one room, and the figures of that room. `nodes` are sorted."""

    __slots__ = ("after", "fragments", "nodes", "room", "share", "worth")

    def __init__(self, room: NodeRoom) -> None:
        self.room = room
        self.nodes: list[int] = []
        self.share = sum(one.share for one in room.devices)
        self.fragments: float | None = None
        self.worth: float | None = None
        self.after: dict[NeedShape, list[tuple[tuple[Free, ...], NodeClass]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A node for a shape, with the devices as they are there; `loss` is the score that made it best.

    Losses are thousandths of a GPU: `worth` what later needs would get less, beyond the need itself;
    `fragments` what becomes unusable for them.
    """

    node: int
    devices: tuple[Free, ...]
    worth: float
    fragments: float
    compared: int  # classes of nodes

    @property
    def loss(self) -> float:
        return self.worth + FRAGMENTS * self.fragments


_Entry = tuple[float, int, NodeRoom, NodeClass]  # loss of fragments, free GPU, room


@dataclass(slots=True)
class _Ranking:
    """The kinds of node that take one shape, the smallest loss of fragments first."""

    heap: list[_Entry] = field(default_factory=list)
    inside: set[NodeClass] = field(default_factory=set)
    position: int = 0


class Landscape:
    """The rooms of all nodes under one outlook. `move` keeps it up to date."""

    def __init__(self, outlook: Outlook, sizes_mib: Sequence[int], rooms: Mapping[int, NodeRoom]) -> None:
        self._outlook = outlook
        self._sizes_mib = sizes_mib
        self._of: dict[int, NodeClass] = {}
        self._forget()
        for node, room in rooms.items():
            self.move(node, room)

    def _forget(self) -> None:
        self._kinds: dict[NodeRoom, NodeClass] = {}
        self._rankings: dict[NeedShape, _Ranking] = {}
        self._arrived: list[NodeClass] = []  # a kind each time that its first node comes

    def room(self, node: int) -> NodeRoom:
        return self._of[node].room

    def move(self, node: int, room: NodeRoom | None) -> None:
        """The node has this room now; None takes it out."""
        before = self._of.pop(node, None)
        if before is not None:
            del before.nodes[bisect_left(before.nodes, node)]
        if room is None:
            return
        if len(self._kinds) > REMEMBERED or len(self._arrived) > REMEMBERED:
            self._trim()
        kind = self._of[node] = self._kind(room)
        if not kind.nodes:
            self._arrived.append(kind)
        insort(kind.nodes, node)

    def best(self, shape: NeedShape) -> Choice | None:
        """The node that loses least by giving this shape; None where it fits on no node."""
        best: float | None = None
        choice: Choice | None = None
        classes = self._nearest(shape)
        for kind in classes:
            worth, fragments, node = self._worth(kind), self._fragments(kind), kind.nodes[0]
            for devices, after in self._after(kind, shape):
                less = worth - self._worth(after) - (kind.share - after.share)
                more = self._fragments(after) - fragments
                score = round(less + FRAGMENTS * more, DIGITS)
                if best is None or score < best:
                    best = score
                    choice = Choice(
                        node=node, devices=devices, worth=less, fragments=more, compared=len(classes)
                    )
        return choice

    def _nearest(self, shape: NeedShape) -> list[NodeClass]:
        ranking = self._rankings.setdefault(shape, _Ranking())
        for kind in self._arrived[ranking.position :]:
            if kind.nodes and kind not in ranking.inside:
                ways = self._after(kind, shape)
                if ways:
                    ranking.inside.add(kind)
                    more = min([self._fragments(after) for _, after in ways]) - self._fragments(kind)
                    heapq.heappush(ranking.heap, (round(more, DIGITS), kind.share, kind.room, kind))
        ranking.position = len(self._arrived)
        entries: list[_Entry] = []
        while ranking.heap and len(entries) < NEAREST:
            entry = heapq.heappop(ranking.heap)
            if entry[3].nodes:
                entries.append(entry)
            else:
                ranking.inside.discard(entry[3])
        for entry in entries:
            heapq.heappush(ranking.heap, entry)
        return [entry[3] for entry in entries]

    def _kind(self, room: NodeRoom) -> NodeClass:
        kind = self._kinds.get(room)
        if kind is None:
            kind = self._kinds[room] = NodeClass(room)
        return kind

    def _after(self, kind: NodeClass, shape: NeedShape) -> list[tuple[tuple[Free, ...], NodeClass]]:
        ways = kind.after.get(shape)
        if ways is None:
            ways = kind.after[shape] = [
                (devices, self._kind(room)) for devices, room in takes(kind.room, shape, self._sizes_mib)
            ]
        return ways

    def _fragments(self, kind: NodeClass) -> float:
        if kind.fragments is None:
            kind.fragments = self._outlook.fragments(kind.room)
        return kind.fragments

    def _worth(self, kind: NodeClass) -> float:
        if kind.worth is None:
            kind.worth = self._outlook.worth(kind.room)
        return kind.worth

    def _trim(self) -> None:
        """Forget all kinds without a node: figures are computed again when they are needed."""
        rooms = {node: kind.room for node, kind in self._of.items()}
        self._of = {}
        self._forget()
        for node, room in rooms.items():
            self.move(node, room)

    def rooms(self) -> Iterator[tuple[int, NodeRoom]]:
        """Every node with its room."""
        return ((node, kind.room) for node, kind in self._of.items())
