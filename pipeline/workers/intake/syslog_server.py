"""Syslog over UDP, TCP and TLS. No sender of syslog learns whether its messages were stored.

TCP has no answers: a message counts as sent when the sender's kernel has it. While the door is full, a
connection is not read, so TCP holds the sender back. A process that ends, or a connection that breaks, loses
the bytes that lay in sockets and up to a batch of messages that waited here. RELP answers each message.
UDP loses more: datagrams that find no room here or in the kernel's buffer. Both are counted.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import ClassVar, Final

from pipeline.observe import counters as metrics
from pipeline.service.senders import SentBy
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.streams.syslog import SyslogFraming, syslog_records
from pipeline.upkeep import call_later
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake.connections import STOP_S, Connection, StreamServer
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.gathering import Gathering, Message
from pipeline.workers.intake.rule_book import RuleBook

# Linux's SO_MEMINFO: nine numbers, and the last one is how many datagrams found the buffer full.
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("=9I")
LOOK_S: Final = 2.0


def _gathering(door: Door, key: str, book: RuleBook) -> Gathering:
    def decode(messages: Sequence[Message]) -> Decoded:
        return syslog_records(messages, Hints(protocol="syslog", key=key, rules=book.rules))

    return Gathering(door, SentBy(protocol="syslog", key=key, peer=""), decode)


class SyslogServer(StreamServer):
    """Syslog over TCP, or over TLS where `start` is given files."""

    protocol: ClassVar[str] = "syslog"

    def __init__(
        self,
        door: Door,
        *,
        key: str = "",
        rules: RuleBook | None = None,
        budget: ConnectionBudget | None = None,
    ) -> None:
        super().__init__(door, key=key, rules=rules, budget=budget)
        self._gathering = _gathering(door, key, self.rules)

    async def converse(self, connection: Connection) -> None:
        framing = SyslogFraming()
        while data := await connection.read(partial=framing.partial):
            if messages := framing.feed(data):
                connection.message_ended()
                await self._gathering.add(messages, connection.peer)
            connection.keep(framing.size)
            self._count(framing)
        await self._gathering.add(framing.close(), connection.peer)
        self._count(framing)

    async def stop(self) -> None:
        await super().stop()
        await self._gathering.close(STOP_S)

    def _count(self, framing: SyslogFraming) -> None:
        metrics.messages_shortened(self.protocol, framing.shortened)
        framing.shortened = 0


class SyslogDatagrams(asyncio.DatagramProtocol):
    """Syslog over UDP: a datagram is a message."""

    def __init__(self, door: Door, *, key: str = "", rules: RuleBook | None = None) -> None:
        self._gathering = _gathering(door, key, rules or RuleBook())
        self._transport: asyncio.DatagramTransport | None = None
        self.address = ("", 0)  # where it listens
        self._lost = 0  # what the kernel said last
        self._timer: asyncio.TimerHandle | None = None

    @property
    def dropped(self) -> int:
        """Datagrams that found no room, here or in the kernel's buffer."""
        return self._gathering.dropped

    async def start(self, opened: socket.socket) -> None:
        """Receives from a bound socket from now on."""
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, sock=opened
        )
        self.address = opened.getsockname()[:2]
        self._look(opened)

    async def stop(self) -> None:
        """Receives no more, and hands over what was received."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._count_lost(self._transport.get_extra_info("socket"))
            self._transport.close()
        await self._gathering.close(STOP_S)

    def _look(self, opened: socket.socket) -> None:
        self._count_lost(opened)
        self._timer = call_later(LOOK_S, "syslog-dropped", self._look, opened)

    def _count_lost(self, opened: socket.socket) -> None:
        """Counts the datagrams that the kernel has dropped since the last look."""
        with contextlib.suppress(OSError):
            dropped = _MEMINFO.unpack(opened.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[-1]
            self._gathering.count_dropped((dropped - self._lost) % 2**32)
            self._lost = dropped

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if message := data.rstrip(b"\r\n\0"):
            self._gathering.offer(message, addr[0])
