"""One bound on the bytes that all listeners of a process hold, and which connections give way at it.

Bytes of a message that has begun are held before anybody knows whose they are: a head of HTTP, a line of
syslog, a chunk of forward. At the bound those connections end that have held much for long, so that a sender
whose message ends soon is never among them. Messages that are being read or decoded for a known sender are
counted too, and stay."""

import heapq
import time
from typing import Final, Protocol

HELD_BYTES: Final = 96 << 20
FREED: Final = 8  # a look at all connections takes some ms, so it frees one of so many parts of the bound


class Holder(Protocol):
    """A connection, as the budget sees it."""

    def give_way(self) -> None:
        """The connection ends."""


class ByteBudget:
    """Belongs to the event loop of the process."""

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.limit = limit
        self.held = 0
        self._unfinished: dict[Holder, tuple[int, float]] = {}  # bytes, and since when

    def hold(self, holder: Holder, size: int) -> None:
        """The unfinished message of a connection has so many bytes now; 0: there is none."""
        before, since = self._unfinished.get(holder, (0, 0.0))
        if size:
            self._unfinished[holder] = size, since or time.monotonic()
        elif before:
            del self._unfinished[holder]
        self.held += size - before
        if size > before and self.held > self.limit:
            self.make_space(0)

    def make_space(self, size: int) -> bool:
        """Whether so many more bytes fit, after unfinished messages have given way where they must."""
        if self.held + size > self.limit:
            now, aim = time.monotonic(), self.limit - self.limit // FREED
            ranked = [
                (-held * (now - since), number, holder)
                for number, (holder, (held, since)) in enumerate(self._unfinished.items())
            ]
            heapq.heapify(ranked)
            while ranked and self.held + size > aim:
                *_, holder = heapq.heappop(ranked)
                self.hold(holder, 0)
                holder.give_way()
        return self.held + size <= self.limit
