"""The home of nats-py's client: a connection in a thread of its own, used by threads that wait for answers.

The library connects again for ever. Where it gave up all the same, as after a refused login, the next call
makes a new connection. `fault` is its last word while no server answers.
"""

import asyncio
import concurrent.futures
import logging
import re
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from pipeline.errors import SourceUnavailable
from pipeline.logs import logger
from pipeline.settings.nats import PLAIN, TLS, NatsSource
from pipeline.upkeep import start_thread

T = TypeVar("T")
CONNECT_S: Final = 5.0
ASK_S: Final = 5.0  # for answers of JetStream
RECONNECT_S: Final = 1.0  # between two tries
PING_S: Final = 10  # a server that is silent for two of these is left
# Messages that wait in this process while no server answers. More are refused, and tried again by the caller.
PENDING_BYTES: Final = 16 << 20
_REFUSED: Final = re.compile("authoriz|authentic", re.IGNORECASE)
_FAULTS: Final = (NatsError, OSError, TimeoutError, ValueError)


class NatsConnection:
    """One connection. `call` may be used by any thread but its own."""

    def __init__(self, source: NatsSource, *, name: str = "logweir") -> None:
        self.source = source
        self.fault = ""
        self._name = name
        self._client: Client | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread("nats", self._loop.run_forever)
        # The library repeats each failed try; `fault` says it.
        quiet = logging.getLogger("nats.aio.client")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False

    @property
    def client(self) -> Client:
        """The connected client. Raises SourceUnavailable."""
        with self._opening:
            if self._closed:  # a request that is still answered must not open it again
                raise self.unavailable("the connection was closed")
            if self._client is None or self._client.is_closed:
                self._client = self._connected()
            return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        return self.client.jetstream(timeout=ASK_S)

    @property
    def max_payload(self) -> int:
        """Bytes of a message that the server takes."""
        return self.client.max_payload

    def call(self, work: Coroutine[Any, Any, T], within_s: float = ASK_S) -> T:
        """The result of a coroutine that runs in the thread of the connection.

        Raises SourceUnavailable for errors of the library, of the network, and after `within_s`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError as exc:
            future.cancel()
            raise self.unavailable(f"no answer within {within_s:g} s") from exc
        except _FAULTS as exc:
            raise self.unavailable(f"{type(exc).__name__}: {exc}") from exc

    def unavailable(self, why: str) -> SourceUnavailable:
        """The error about a server that does not do what it is asked for."""
        return SourceUnavailable(f"{self.source} does not answer ({self.fault or why}); it is tried again")

    def close(self) -> None:
        """Sends what waits, and ends the thread."""
        self._closed = True
        try:
            if self._client is not None and not self._client.is_closed:
                self.call(self._client.close(), 2.0)
        except SourceUnavailable:
            pass  # a server that is away has no use for it
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)
            if not self._thread.is_alive():
                self._loop.close()

    def _connected(self) -> Client:
        for file in (self.source.ca, self.source.cert, self.source.key, self.source.creds):
            if file is not None and not file.is_file():
                raise SourceUnavailable(
                    f"{self.source} cannot be read: the file {file} of nats_source is not there"
                )
        return self.call(self._connect(), CONNECT_S + 1.0)

    async def _connect(self) -> Client:
        client = Client()
        try:
            await asyncio.wait_for(client.connect(**self._options()), CONNECT_S)
        except BaseException:
            await client.close()
            raise
        self.fault = ""
        return client

    def _options(self) -> dict[str, Any]:
        source = self.source
        scheme = TLS if source.tls else PLAIN
        options: dict[str, Any] = {
            "servers": [f"{scheme}://{server}" for server in source.servers],
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_S,
            "ping_interval": PING_S,
            "pending_size": PENDING_BYTES,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_lost,
            "reconnected_cb": self._on_back,
        }
        if source.tls:
            options["tls"] = _tls(source)
        if source.creds is not None:
            options["user_credentials"] = str(source.creds)
        if source.user:
            options |= {"user": source.user, "password": source.password}
        if source.token:
            options["token"] = source.token
        return options

    async def _on_error(self, exc: Exception) -> None:
        # A server that refuses a login closes the connection too, and says less by that.
        if not _REFUSED.search(self.fault):
            self.fault = f"{type(exc).__name__}: {exc}".removesuffix(": ")
        if isinstance(exc, nats.errors.SlowConsumerError):
            logger(subject=exc.subject).warning("nats.slow_consumer")

    async def _on_lost(self) -> None:
        self.fault = self.fault or "the connection broke"

    async def _on_back(self) -> None:
        self.fault = ""


def _tls(source: NatsSource) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=source.ca)
    if source.cert is not None:
        context.load_cert_chain(source.cert, source.key)
    return context
