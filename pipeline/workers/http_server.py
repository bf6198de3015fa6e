"""The HTTP server of one listener, its bounds on connections, and a short way for requests that repeat.

A request goes the short way (`short_way/`) if its head is known and its body small. It has no parser, no
task, no scope and no messages of ASGI. Every other request goes the usual way of uvicorn.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pipeline.settings.listeners import Listener
from pipeline.upkeep import call_at, start_task
from pipeline.workers.bounds.connection_budget import ConnectionBudget, Doing
from pipeline.workers.short_way.known_heads import KnownHead, parted_head
from pipeline.workers.short_way.requests import WAITED, ShortRequest, ShortWay
from pipeline.workers.sockets import ACCEPTED_AT_ONCE, KERNEL_BACKLOG, TlsFiles

# For a whole request; one of ours is answered earlier (bodies.py). It also bounds silence after connecting.
REQUEST_S: Final = 60.0
STREAMED: Final = b"/upload"  # a journal may arrive for as long as it does arrive
KEEP_ALIVE_S: Final = 75  # more than the pauses of most shippers
STOP_S: Final = 8  # for requests that are being answered
# Heads of one connection that are learned. A client whose heads differ each time is not worth it.
_HEADS: Final = 8
MOST_HEAD: Final = 64 << 10  # bytes of a head that has not ended, as other servers have it
HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """Cuts clients that are too slow, and those that are too many."""

    # One timer a connection. A timer for each request takes a fiftieth of the processor time of a small one.
    _due: float | None = None  # on the clock of the loop: when the request must have arrived
    _timer: asyncio.TimerHandle | None = None
    _idle = False  # at `_due` the connection has been idle for long enough
    _arriving = False  # a request on the usual way has not wholly come
    _head: KnownHead | None = None
    _heads = _HEADS  # that may still be learned
    _short: ShortRequest | None = None
    _later = b""  # came before that one was answered
    _stopping = False
    heard = 0.0  # when bytes last came, on the clock of the loop
    _spoke = False
    _waited = False  # the bytes that are read had their turn
    _in_head = False  # one has begun and not ended
    _begun = 0  # its bytes

    def __init__(
        self, *args: Any, budget: ConnectionBudget, short_way: ShortWay | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._short_way = short_way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.heard = self.loop.time()
        super().connection_made(transport)
        if not self._budget.enter(self):
            transport.abort()
        self._expect(REQUEST_S)

    def doing(self) -> Doing:
        """What the client does now, for the budget of connections."""
        if self._arriving or (self._short is not None and self._short.missing):
            return Doing.WITHIN_A_MESSAGE
        if self._short is not None or not (self.cycle is None or self.cycle.response_complete):
            return Doing.BUSY
        return Doing.IDLE if self._spoke else Doing.NEVER_SENT

    def give_way(self) -> None:
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._budget.leave(self)
        self._held(0)
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        if self._short is not None:
            self._short.gone = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.heard, self._spoke = self.loop.time(), True
        short = self._short
        if short is not None:
            if len(data) <= short.missing:
                short.add(data)
            else:
                self._later += data
                self.flow.pause_reading()
            return
        if (
            self._short_way is None
            or self._arriving
            or not (self.cycle is None or self.cycle.response_complete)
        ):
            self._parse(data)
            return
        if (
            self._head is not None
            and (measured := self._head.measure(data)) is not None
            and self._begin_short(self._head, data, *measured)
        ):
            return
        self._parse(data)
        if self._heads:
            self._learn(self._short_way, data)

    def _parse(self, data: bytes) -> None:
        """The usual way. A parser keeps all of a head, so one without an end is cut."""
        went_on = self._in_head
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            self._held(0)
            return
        # A head that began within these bytes has few of them, or they are whole fields.
        fields = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        size = self._begun + len(data) if went_on else 1 + fields
        self._held(size)
        if size > MOST_HEAD:
            self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()

    def _held(self, size: int) -> None:
        if size != self._begun:
            self._begun = size
            self._budget.held.hold(self, size)

    def _begin_short(self, head: KnownHead, data: bytes, length: int, begins: int) -> bool:
        """False for a request that cannot go the short way."""
        request = ShortRequest(self, head.facts, data, length=length, begins=begins)
        if request.missing < 0 or self.flow.write_paused or self._short_way is None:
            return False
        self._short = request
        if not self._short_way.begin(request):
            self._short = None
            return False
        self._due = None  # the short way takes less, and the usual way begins its own time
        self._unset_keepalive_if_required()
        return True

    def _learn(self, short_way: ShortWay, data: bytes) -> None:
        self._heads -= 1
        if self.cycle is None or not self.cycle.keep_alive:
            return
        if (parts := parted_head(data, self.cycle.scope)) is not None:
            self._head = short_way.head_of(*parts, self.cycle.scope)

    def answer_short(self, status: int, headers_and_body: bytes, *, cut: bool) -> None:
        """Writes the answer to the request on the short way."""
        self._short = None
        if self.transport.is_closing():
            return
        cut = cut or self._stopping
        content = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            content += (name, b": ", value, b"\r\n")
        if self._stopping:
            content.append(b"connection: close\r\n")
        content.append(headers_and_body)
        self.transport.write(b"".join(content))
        self.server_state.total_requests += 1
        if cut:
            self.transport.close()
            return
        self._expect(KEEP_ALIVE_S, idle=True)
        self._go_on()

    def leave_short_way(self, data: bytes) -> None:
        """The bytes of the request on the short way go the usual way."""
        self._short = None
        if self._later:
            data, self._later = data + self._later, b""
            self.flow.resume_reading()
        self._waited = True
        self._parse(data)
        self._waited = False
        if self._stopping:
            super().shutdown()

    def _go_on(self) -> None:
        if self._later:
            later, self._later = self._later, b""
            self.flow.resume_reading()
            self.data_received(later)

    def shutdown(self) -> None:
        if self._short is None:
            super().shutdown()
        self._stopping = True

    def on_message_begin(self) -> None:
        self._arriving = self._in_head = True
        self._expect(REQUEST_S)
        super().on_message_begin()
        if self._waited:
            self.scope[WAITED] = True  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.url.startswith(STREAMED):
            self._expect(REQUEST_S)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = False
        self._due = None
        super().on_message_complete()

    def _expect(self, within_s: float, *, idle: bool = False) -> None:
        self._idle = idle
        self._due = self.loop.time() + within_s
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = call_at(self._due, "http-deadline", self._look)

    def _look(self) -> None:
        """Ends a connection whose request is late. Else looks again when the newest one would be."""
        self._timer = None
        if self._due is None:
            return
        if self._due > self.loop.time():
            self._timer = call_at(self._due, "http-deadline", self._look)
        elif self._idle:
            self.transport.close()
        else:
            self.transport.abort()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, which ends all its servers in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves on a socket that listens already."""

    def __init__(
        self,
        app: Any,
        listener: Listener,
        opened: socket.socket,
        *,
        forwarded: bool = True,
        short_way: ShortWay | None = None,
        budget: ConnectionBudget | None = None,
    ) -> None:
        """`app`: of ASGI. `forwarded`: a proxy on this machine may say where a client is. `budget`: that
        of all listeners of the process, by default one of this server. Raises BadInput for a certificate that
        cannot be used."""
        self.opened = opened
        config = uvicorn.Config(
            app,
            http=functools.partial(  # type: ignore[arg-type]
                BoundedProtocol, budget=budget or ConnectionBudget(), short_way=short_way
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # it would name each connection that is cut on purpose
            access_log=False,
            server_header=False,
            proxy_headers=forwarded,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
            backlog=ACCEPTED_AT_ONCE,
        )
        config.load()
        if listener.cert is not None and listener.key is not None:
            config.ssl = TlsFiles(cert=listener.cert, key=listener.key).context()
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        self._task = start_task("http", self._server.serve(sockets=[self.opened]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if not self._task.done():
            self.opened.listen(KERNEL_BACKLOG)

    async def stop(self) -> None:
        """Takes no new connection, answers what it has, and closes."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
