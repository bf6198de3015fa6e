"""The HTTP server of one listener, and its bounds on connections."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.settings.listeners import Listener
from pipeline.workers.sockets import TlsFiles

MOST_CONNECTIONS: Final = 4_096
# Of all files of this process that are no connections of senders.
OTHER_FILES: Final = 128
# For a whole request; one of ours is answered earlier (bodies.py). It also bounds silence after connecting.
REQUEST_S: Final = 60.0
STREAMED: Final = b"/upload"  # a journal may arrive for as long as it does arrive
KEEP_ALIVE_S: Final = 75  # more than the pauses of most shippers
STOP_S: Final = 8  # for requests that are being answered


class BoundedProtocol(HttpToolsProtocol):
    """Cuts clients that are too slow, and those that are too many."""

    # One timer a connection. A timer for each request takes a fiftieth of the processor time of a small one.
    _due: float | None = None  # on the clock of the loop: when the request must have arrived
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= most_connections():
            transport.abort()
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._expect()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        if self.url.startswith(STREAMED):
            self._expect()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._due = None
        super().on_message_complete()

    def _expect(self) -> None:
        self._due = self.loop.time() + REQUEST_S
        if self._timer is None:
            self._timer = self.loop.call_at(self._due, self._look)

    def _look(self) -> None:
        """Ends a connection whose request is late. Else looks again when the newest one would be."""
        self._timer = None
        if self._due is None:
            return
        if self._due <= self.loop.time():
            self.transport.abort()
        else:
            self._timer = self.loop.call_at(self._due, self._look)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, which ends all its servers in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves on a socket that listens already."""

    def __init__(
        self, app: Any, listener: Listener, opened: socket.socket, *, forwarded: bool = True
    ) -> None:
        """`app`: of ASGI. `forwarded`: a proxy on this machine may say where a client is. Raises BadInput for
        a certificate that cannot be used."""
        self.opened = opened
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # it would name each connection that is cut on purpose
            access_log=False,
            server_header=False,
            proxy_headers=forwarded,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        config.load()
        if listener.cert is not None and listener.key is not None:
            config.ssl = TlsFiles(cert=listener.cert, key=listener.key).context()
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self.opened]), name="http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Takes no new connection, answers what it has, and closes."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def most_connections() -> int:
    """How many connections a process has at most: each of them is a file."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(MOST_CONNECTIONS, soft - OTHER_FILES))
