"""The bound on connections of all listeners of a process, and which of them give way at it."""

import heapq
import resource
import time
from enum import IntEnum
from typing import Final, Protocol
from weakref import WeakSet

from pipeline.logs import logger
from pipeline.workers.bounds.byte_budget import ByteBudget

MOST_CONNECTIONS: Final = 10_000  # of all listeners of a process
_OTHER_FILES: Final = 128  # of its process, that are no connections of senders
# A look at all connections takes some ms, so several are closed in one.
CLOSED_AT_ONCE: Final = 64
STALLED_S: Final = 5.0  # of silence within a message; a sender on a bad line pauses for less
_QUIET_S: Final = 60.0


def connection_limit(elsewhere: int = 0) -> int:
    """How many connections a process takes at most, by the open files that it may have. `elsewhere`: files of
    other connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, soft - _OTHER_FILES - elsewhere)


class Doing(IntEnum):
    """What a connection does, in the order in which connections give way."""

    NEVER_SENT = 0
    WITHIN_A_MESSAGE = 1
    IDLE = 2
    BUSY = 3


class Bounded(Protocol):
    """A connection, as the budget sees it."""

    heard: float  # when the last bytes came, on the monotonic clock; at first, when it began

    def doing(self) -> Doing: ...

    def give_way(self) -> None:
        """The connection ends."""


class ConnectionBudget:
    """One bound for all listeners of a process, and the order in which connections give way at it.

    Whoever holds a connection has shown no key yet, and each connection is a file. So all listeners share one
    bound, which leaves files for Redis and logs. At the bound those give way first that have never sent
    anything, then those that stopped within a message, then the longest idle ones. Syslog has no
    acknowledgement, so closing a connection that has sent something may lose a line. A connection whose
    message is being stored stays.

    Belongs to the event loop of the process.
    """

    def __init__(self, held: ByteBudget | None = None, *, most: int = MOST_CONNECTIONS) -> None:
        """`held`: the bytes of the same connections. `most`: connections, if files allow them."""
        self.held = held or ByteBudget()
        self._most = most
        self._open: WeakSet[Bounded] = WeakSet()
        self._elsewhere = 0
        self._warned = -_QUIET_S

    def set_apart(self, count: int) -> None:
        """Files of connections that have a budget of their own."""
        self._elsewhere += count

    @property
    def limit(self) -> int:
        """How many connections there are at most; a few even where hardly a file may be open."""
        return max(8, min(self._most, connection_limit(self._elsewhere)))

    def enter(self, connection: Bounded) -> bool:
        """Counts a new connection. False where it must end, because every other one is busy."""
        if len(self._open) >= self.limit and not self._make_space():
            if time.monotonic() - self._warned >= _QUIET_S:
                self._warned = time.monotonic()
                logger().warning("intake_connections_full", most=self.limit)
            return False
        self._open.add(connection)
        return True

    def leave(self, connection: Bounded) -> None:
        self._open.discard(connection)

    def _make_space(self) -> bool:
        silent_since = time.monotonic() - STALLED_S
        ranked = [(one.doing(), one.heard, number, one) for number, one in enumerate(self._open)]
        able = [
            entry
            for entry in ranked
            if entry[0] in (Doing.NEVER_SENT, Doing.IDLE)
            or (entry[0] is Doing.WITHIN_A_MESSAGE and entry[1] < silent_since)
        ]
        # A sender that just connected needs a moment, so few go where few are open.
        for *_, one in heapq.nsmallest(min(CLOSED_AT_ONCE, 1 + len(ranked) // 16), able):
            self.leave(one)
            one.give_way()
        return bool(able)
