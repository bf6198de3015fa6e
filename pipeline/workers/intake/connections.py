"""Connections of the protocols that are no HTTP: reading and writing within bounds.

An idle connection costs a few KiB, because all of them read into one buffer. Bytes that nobody has
read are at most 64 KiB a connection; then TCP holds the client back. A client that is slow within a message,
or does not read its answers, is cut off. An error closes its own connection, with one line in the log.
"""

import asyncio
import contextlib
import socket
import time
from abc import ABC, abstractmethod
from asyncio import sslproto
from typing import ClassVar, Final, cast

from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import RequestIdentity
from pipeline.service.senders import SentBy
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.upkeep import start_task
from pipeline.workers.bounds.connection_budget import ConnectionBudget, Doing
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.intake.taking import seconds_to_next_try
from pipeline.workers.sockets import ACCEPTED_AT_ONCE, KERNEL_BACKLOG, TlsFiles

# A message must end within this time, and a large one must go on by SLOW_BYTES in it.
SLOW_S: Final = 60.0
SLOW_BYTES: Final = 1024 * 1024
# How long a server that stops waits for the answers that clients wait for, and then for what is gathered.
STOP_S: Final = 4.0
_AT_ONCE: Final = 32 * 1024
_FEW: Final = 2 * 1024  # bytes
_TLS_RECORD: Final = 16 * 1024
_HANDSHAKE_S: Final = 10.0


class Connection(asyncio.BufferedProtocol):
    """One client. The coroutine of its server reads and writes; nobody else does."""

    def __init__(self, server: "StreamServer") -> None:
        self.peer = ""
        # The client has closed the connection, or the server stops.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = server
        self._transport: asyncio.Transport
        self._chunks: list[bytes] = []
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._patience_s = SLOW_S
        self._bytes = 0
        self.heard = time.monotonic()
        self._spoke = self._partial = False
        self._unread = self._unfinished = self._held = 0
        self._lost = False

    def doing(self) -> Doing:
        """What the client does now, for the budget of connections."""
        if not self._spoke:
            return Doing.NEVER_SENT
        if self._arrival is None or self._chunks:
            return Doing.BUSY
        return Doing.WITHIN_A_MESSAGE if self._partial else Doing.IDLE

    def give_way(self) -> None:
        self.abort()

    async def read(self, *, partial: bool, gather_s: float = 0.0) -> bytes:
        """The next bytes, none at the end. `partial`: they belong to a message that has begun. `gather_s`:
        how long the first of them wait for others.

        Raises Undecodable for a client that is slow within a message."""
        self._partial = partial
        if not self._chunks and not self.ended.done():
            self._arrival = asyncio.get_running_loop().create_future()
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._patience_s if partial else None):
                    await self._arrival
            except TimeoutError as exc:
                raise Undecodable(f"a message did not end within {SLOW_S:.0f} s") from exc
            finally:
                self._arrival = None
            self._patience_s -= time.monotonic() - began if partial else 0
        if gather_s and not self.ended.done():
            await asyncio.sleep(gather_s)
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._unread = 0
        self._bytes += len(data)
        if self._bytes >= SLOW_BYTES:
            self.message_ended()
        if self._paused and not self.ended.done() and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return data

    def keep(self, size: int) -> None:
        """So many bytes of what was read belong to a message that has not ended."""
        self._unfinished = size
        self._count()

    def message_ended(self) -> None:
        """The time for the next message begins."""
        self._patience_s = SLOW_S
        self._bytes = 0

    async def write(self, data: bytes) -> None:
        """Raises Undecodable for a client that does not read."""
        self._transport.write(data)
        if self._writable is not None:
            try:
                async with asyncio.timeout(SLOW_S):
                    await asyncio.shield(self._writable)
            except TimeoutError as exc:
                raise Undecodable(f"the client has read no answer for {SLOW_S:.0f} s") from exc

    def end(self) -> None:
        """No byte is received any more; what has been received can still be read."""
        if not self.ended.done():
            self.ended.set_result(None)
            self._pause()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """The answers that were written still go out."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # ---- asyncio calls these --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        if (client := transport.get_extra_info("socket")) is not None:
            # A machine that lost its power says no goodbye.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.begin(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._chunks.append(bytes(self._server.buffer[:nbytes]))
        self._unread += nbytes
        self._count()
        self.heard, self._spoke = time.monotonic(), True
        if self._arrival is not None:
            if not self._arrival.done():
                self._arrival.set_result(None)
        elif self._unread >= _AT_ONCE:
            self._pause()

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._server.budget.leave(self)
        self._lost = True
        self._count()
        self.end()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _count(self) -> None:
        """Tells the budget what is held here; a few bytes are not worth it."""
        size = self._unread + self._unfinished
        if self._lost or size <= _FEW:
            size = 0
        if size != self._held:
            self._held = size
            self._server.budget.held.hold(self, size)

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()


class StreamServer(ABC):
    """A listener whose connections a subclass serves, each in a task. `key`: the name of the API key that
    stands for all its senders. `budget`: that of all listeners of the process."""

    protocol: ClassVar[str]

    def __init__(
        self,
        door: Door,
        *,
        key: str = "",
        rules: RuleBook | None = None,
        budget: ConnectionBudget | None = None,
    ) -> None:
        self.door = door
        self.budget = budget or ConnectionBudget()
        self.key = key
        self.rules = rules or RuleBook()
        self.address = ("", 0)  # where it listens
        self.buffer = memoryview(bytearray(_AT_ONCE))
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    @abstractmethod
    async def converse(self, connection: Connection) -> None:
        """Serves a client to its end. Raises Undecodable to close the connection."""

    async def start(self, opened: socket.socket, *, tls: TlsFiles | None = None) -> None:
        """Serves a listening socket from now on. Raises BadInput for files that are no certificate."""
        context = None if tls is None else tls.context()
        if context is not None:
            # Each connection has a buffer of this size for what is still encrypted, 256 KiB by default.
            sslproto.SSLProtocol.max_size = _TLS_RECORD
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self),
            sock=opened,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
            backlog=ACCEPTED_AT_ONCE,
        )
        opened.listen(KERNEL_BACKLOG)
        self.address = opened.getsockname()[:2]

    async def stop(self) -> None:
        """Listens no more; answers what has arrived, within STOP_S."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.end()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=STOP_S)
        remaining = dict(self._connections)
        for connection, task in remaining.items():
            task.cancel()
            connection.abort()
        await asyncio.gather(*remaining.values(), return_exceptions=True)

    def begin(self, connection: Connection) -> None:
        """A client has connected."""
        if not self.budget.enter(connection):
            connection.abort()
            return
        task = start_task(f"{self.protocol}-connection", self._serve(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    def hints(self, peer: str = "") -> Hints:
        """Of a message of this address."""
        return Hints(protocol=self.protocol, key=self.key, peer=peer, rules=self.rules.rules)

    async def take(
        self, connection: Connection, decoded: Decoded, *, identity: RequestIdentity, repeats: bool
    ) -> bool:
        """Waits until the door has the records. False when the connection ends before that.

        `repeats`: the client sends again what was not answered. Without that, records are also taken from a
        client that is gone."""
        sender = SentBy(protocol=self.protocol, key=self.key, peer=connection.peer)
        while not (repeats and connection.ended.done()):
            wait_s = await seconds_to_next_try(self.door, decoded, identity=identity, sender=sender)
            if wait_s is None:
                return True
            if repeats:
                await asyncio.wait([connection.ended], timeout=wait_s)
            else:
                await asyncio.sleep(wait_s)
        return False

    async def _serve(self, connection: Connection) -> None:
        try:
            await self.converse(connection)
        except Undecodable as exc:
            metrics.request_refused(self.protocol)
            sender = SentBy(protocol=self.protocol, key=self.key, peer=connection.peer)
            self.door.senders.heard(sender, refused=True)
            logger().warning(
                "intake_connection_closed", protocol=self.protocol, peer=connection.peer, why=str(exc)
            )
        except Exception:  # noqa: BLE001 - one connection must not end the others
            logger().exception("intake_connection_failed", protocol=self.protocol, peer=connection.peer)
        finally:
            with contextlib.suppress(OSError):
                connection.close()
