"""A server of the intake in a thread, and a door that keeps what it takes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from polling import wait_until

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import NO_IDENTITY, Accepted, Full, RequestIdentity
from pipeline.records.pushed import PushedRecords
from pipeline.service.senders import SenderCounts, SentBy
from pipeline.sources.protocols.contract import Decoded

TIMEOUT_S = 20.0
T = TypeVar("T")


@dataclass(slots=True)
class MemoryDoor:
    """Takes requests into a list. `full`, `away`: how many more tries are answered with Full, or with an
    error of Redis."""

    full: int = 0
    away: int = 0
    tries: int = 0
    senders: SenderCounts = field(default_factory=SenderCounts)
    requests: list[tuple[Decoded, RequestIdentity, SentBy]] = field(default_factory=list)

    async def take(self, decoded: Decoded, *, identity: RequestIdentity, sender: SentBy) -> Accepted | Full:
        self.tries += 1
        if self.full > 0:
            self.full -= 1
            return Full(pending_bytes=0, pending_batches=1, retry_after_s=0.02)
        if self.away > 0:
            self.away -= 1
            raise RedisUnavailable("Redis does not answer")
        duplicate = identity != NO_IDENTITY and any(identity == known for _, known, _ in self.requests)
        if not duplicate:
            self.requests.append((decoded, identity, sender))
        return Accepted(batch_id=str(self.tries), duplicate=duplicate)

    @property
    def records(self) -> list[PushedRecords]:
        return [decoded.records for decoded, *_ in self.requests]

    @property
    def raws(self) -> list[str]:
        """The raw texts of all records, in their order."""
        return [text for records in self.records for text in records.texts]

    @property
    def workloads(self) -> list[str]:
        return [name for records in self.records for name in records.workloads or ()]

    def waits_for(self, count: int) -> list[str]:
        """The raw texts, once there are so many."""
        assert wait_until(lambda: len(self.raws) >= count, timeout_s=TIMEOUT_S, poll_s=0.01), self.raws
        return self.raws


def listening(port: int = 0) -> socket.socket:
    """An open socket, as the process of the intake hands it to a server."""
    return socket.create_server(("127.0.0.1", port))


class _Listener(Protocol):
    async def stop(self) -> None: ...


class LoopThread:
    """An event loop in a thread: clients of the tests block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(TIMEOUT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


@contextlib.contextmanager
def serving(listener: _Listener, start: Coroutine[Any, Any, None]) -> Iterator[LoopThread]:
    """Runs a listener until the block ends."""
    run = LoopThread()
    try:
        run(start)
        yield run
        run(listener.stop())
        run(asyncio.sleep(0))  # transports close in the next round of the loop
    finally:
        run.close()
