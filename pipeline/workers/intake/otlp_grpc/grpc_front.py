"""Connections of gRPC under the budget of all listeners.

gRPC accepts connections for itself, without an order in which they give way: silent ones would keep senders
out. So this accepts them, and hands the bytes of one that has spoken on to gRPC, over a socket in a folder of
this process. TLS and HTTP/2 stay gRPC's own."""

import asyncio
import contextlib
import itertools
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Final, cast

from pipeline.logs import logger
from pipeline.upkeep import start_task
from pipeline.workers.bounds.connection_budget import ConnectionBudget, Doing
from pipeline.workers.sockets import ACCEPTED_AT_ONCE, KERNEL_BACKLOG, socket_at

FILES: Final = 3  # of each connection: its own, and both ends of the one to gRPC


class GrpcFront:
    """The listening socket of a gRPC server that listens at `inner`, as gRPC writes addresses."""

    def __init__(self, budget: ConnectionBudget) -> None:
        self.budget = budget
        self._folder = Path(tempfile.mkdtemp(prefix="logweir-grpc-"))
        self._place = self._folder / "s"
        self.inner = f"unix:{self._place}"
        self.peers: dict[str, str] = {}  # addresses of clients, by what gRPC takes for them
        self._numbers = itertools.count()
        self._relays: set[_Outer] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, *, share: bool) -> int:
        """Listens from now on; the port. Raises OSError."""
        opened = socket_at(host, port, tries=1, backlog=KERNEL_BACKLOG, share=share)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Outer(self), sock=opened, backlog=ACCEPTED_AT_ONCE
        )
        opened.listen(KERNEL_BACKLOG)
        return int(opened.getsockname()[1])

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Ends what is left."""
        self.stop_listening()
        for relay in list(self._relays):
            relay.give_way()
        shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, relay: "_Outer") -> bool:
        """A client has connected. False where it must end."""
        self._relays.add(relay)
        return self.budget.enter(relay)

    def end(self, relay: "_Outer") -> None:
        self._relays.discard(relay)
        self.budget.leave(relay)
        self.peers.pop(relay.name, None)

    async def connect(self, relay: "_Outer") -> None:
        """The connection of a client to gRPC."""
        name = self._folder / f"{next(self._numbers)}"
        try:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.setblocking(False)
                opened.bind(str(name))
                relay.name = f"unix:{name}"
                self.peers[relay.name] = relay.peer
                loop = asyncio.get_running_loop()
                await loop.sock_connect(opened, str(self._place))
                await loop.create_unix_connection(lambda: _Inner(relay), sock=opened.dup())
        except OSError as exc:
            logger().warning("intake_connection_failed", protocol="otlp", peer=relay.peer, why=str(exc))
            relay.give_way()
        finally:
            name.unlink(missing_ok=True)  # gRPC knows the name all the same


class _Side(asyncio.Protocol):
    """One of the two ends, whose bytes go to the other one."""

    transport: asyncio.Transport
    other: "_Side | None" = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.other is not None:
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()


class _Outer(_Side):
    """The connection of a client."""

    def __init__(self, front: GrpcFront) -> None:
        self._front = front
        self._first = b""
        self.peer = self.name = ""
        self.heard = time.monotonic()

    def doing(self) -> Doing:
        """For the budget. Whether a request is under way, only gRPC knows."""
        return Doing.NEVER_SENT if not self._first else Doing.IDLE

    def give_way(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._front.begin(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.end(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if self.other is not None:
            self.other.transport.write(data)
        elif not self._first:
            self._first = data
            self.transport.pause_reading()
            start_task("grpc-relay", self._front.connect(self))

    def joined(self, inner: "_Inner") -> None:
        """gRPC has the connection."""
        self.other = inner
        inner.transport.write(self._first)
        self._first = b"."
        if self.transport.is_closing():
            inner.transport.close()
        else:
            self.transport.resume_reading()


class _Inner(_Side):
    """The connection to gRPC."""

    def __init__(self, outer: _Outer) -> None:
        self._outer = outer
        self.other = outer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._outer.joined(self)

    def data_received(self, data: bytes) -> None:
        self._outer.heard = time.monotonic()
        with contextlib.suppress(RuntimeError):  # it is closing
            self._outer.transport.write(data)
