"""The way of a request to the door: small ones over HTTP begin in turns; the servers of streams try again.

Streams have no answer that asks for a retry.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import Full, RequestIdentity
from pipeline.sources.protocols.contract import Decoded
from pipeline.upkeep import call_at, call_soon

if TYPE_CHECKING:
    from pipeline.service.senders import SentBy
    from pipeline.workers.intake.door import Door

# The door has tried for two seconds itself.
_AWAY_S: Final = 1.0
IDLE_S: Final = 0.02  # a lone request waits so long for companions
# A turn ends at once with so many requests, or bytes: it holds up the loop for some 20 ms.
_MOST_REQUESTS: Final = 64
_MOST_BYTES: Final = 256 << 10


class Turns:
    """Small requests that begin when their window ends, one directly after the other.

    A request that comes alone finds the caches of the processor cold, which doubles its time. Belongs to an
    event loop."""

    def __init__(self, due: Callable[[], float]) -> None:
        """`due`: when the next window ends, on the clock of the loop."""
        self._due = due
        self._waiting: list[asyncio.Future[None]] = []
        self._runs: dict[Callable[[], None], None] = {}  # in their order
        self._count = self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def begin(self, size: int) -> None:
        """Until the turn of a request with a body of so many bytes. The body may arrive meanwhile."""
        if self._closed:
            return
        began = asyncio.get_running_loop().create_future()
        self._waiting.append(began)
        self._grow(size)
        await began

    def join(self, size: int, run: Callable[[], None]) -> None:
        """`run` is called once in the turn of this request, however many others name it too."""
        self._runs[run] = None
        self._grow(size)

    def _grow(self, size: int) -> None:
        self._count += 1
        self._size += size
        if self._closed or self._count >= _MOST_REQUESTS or self._size >= _MOST_BYTES:
            self.release()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = call_at(max(loop.time() + IDLE_S, self._due()), "intake-turn", self.release)

    def release(self) -> bool:
        """The turn of all that wait: they run in the next iteration of the loop. False if none waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, runs = self._waiting, self._runs
        self._waiting, self._runs, self._count, self._size = [], {}, 0, 0
        for began in waiting:
            if not began.done():
                began.set_result(None)
        for run in runs:
            call_soon("intake-turn", run)
        return bool(waiting or runs)

    def close(self) -> None:
        """No request waits from now on."""
        self._closed = True
        self.release()


async def seconds_to_next_try(
    door: "Door", decoded: Decoded, *, identity: RequestIdentity, sender: "SentBy"
) -> float | None:
    """None when the records are in. While Redis is away that is unknown: without an identity, the next try
    may store them twice."""
    try:
        answer = await door.take(decoded, identity=identity, sender=sender)
    except RedisUnavailable:
        return _AWAY_S
    return answer.retry_after_s if isinstance(answer, Full) else None
