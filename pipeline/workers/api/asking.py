"""How requests ask: in threads, few at a time, and not longer than their client waits.

A question about stored results needs an engine of DuckDB. There are ENGINES of them, and a bounded line
before them. A client that goes away cancels its question, and its place in the line is free.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import redis
from fastapi import Request

from pipeline.service.access.keys import SenderKeys
from pipeline.service.running.progress import ProgressWatch
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.sinks.answers.choose import answers_of
from pipeline.upkeep import start_awaited_task
from pipeline.workers.api.access import Doorkeeper
from pipeline.workers.api.changes import ChangeFeed
from pipeline.workers.api.event_feed import EventFeed
from pipeline.workers.api.problems import AskRefused
from pipeline.workers.api.sharing import FRESH_S, SharedAnswers

ENGINES: Final = 2
ENGINE_MEMORY: Final = "256MB"  # each; the process needs about 300 MB more
QUESTION_S: Final = 30.0
MOST_WAITING: Final = 64
WAIT_S: Final = 20.0
REDIS_THREADS: Final = 8
STREAMS: Final = 16  # downloads at a time

T = TypeVar("T")


class Api:
    """The parts that all requests share."""

    def __init__(
        self, client: "redis.Redis", settings: Settings, doorkeeper: Doorkeeper, keys: SenderKeys
    ) -> None:
        self.client = client
        self.settings = settings
        self.doorkeeper = doorkeeper
        self.keys = keys
        self.feed = ChangeFeed(client, settings)
        self.events = EventFeed(client, settings)
        self.shared = SharedAnswers()
        self.watch = ProgressWatch()
        self.streams = asyncio.Semaphore(STREAMS)
        self._threads = ThreadPoolExecutor(REDIS_THREADS, thread_name_prefix="api")
        self._engine_threads = ThreadPoolExecutor(ENGINES, thread_name_prefix="api-engine")
        self._free: asyncio.Queue[Answers] = asyncio.Queue()
        self._made = 0
        self._waiting = 0

    async def facts(self, ask: Callable[..., T], *args: Any, **how: Any) -> T:
        """The answer of a question to Redis and the store, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(ask, *args, **how))

    async def stored(self, request: Request, ask: Callable[[Answers], T]) -> T:
        """The answer of a question about stored results, which ends when the client of `request` goes away.

        Raises AskRefused where too many wait or the client went away."""
        return await self._stored(partial(_until_gone, request), ask)

    async def shared_stored(
        self, question: Hashable, ask: Callable[[Answers], T], *, fresh_s: float = FRESH_S
    ) -> T:
        """The answer of `stored`, for all that ask this question within `fresh_s`. No client ends it by going
        away, because others wait for it too."""
        return await self.shared.ask(question, partial(self._stored_for_all, ask), fresh_s=fresh_s)

    async def _stored_for_all(self, ask: Callable[[Answers], T]) -> T:
        return await self._stored(_never, ask)

    async def _stored(self, ends: Callable[[], Coroutine[Any, Any, None]], ask: Callable[[Answers], T]) -> T:
        async with self._engine() as answers:
            loop = asyncio.get_running_loop()
            asked = loop.run_in_executor(self._engine_threads, ask, answers)
            gone = start_awaited_task("client-gone", ends())
            try:
                await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    raise AskRefused(499, "the client went away")
                return await asked
            finally:
                gone.cancel()
                while not asked.done():  # the engine is free again only after the question
                    answers.cancel()
                    await asyncio.wait((asked,), timeout=0.05)
                if asked.done() and not asked.cancelled():
                    asked.exception()  # it is known, or nobody waits for it

    async def close(self) -> None:
        """Frees the engines."""
        await self.feed.close()
        await self.events.close()
        while not self._free.empty():
            answers = self._free.get_nowait()
            await asyncio.get_running_loop().run_in_executor(self._engine_threads, answers.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._engine_threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Answers]:
        if self._waiting >= MOST_WAITING:
            raise AskRefused(503, f"{self._waiting} questions wait already; ask again in a moment")
        self._waiting += 1
        try:
            answers = await self._next_engine()
        except TimeoutError:
            raise AskRefused(503, f"no engine was free for {WAIT_S:.0f} s; ask again, or for less") from None
        finally:
            self._waiting -= 1
        try:
            yield answers
        finally:
            self._free.put_nowait(answers)

    async def _next_engine(self) -> Answers:
        if self._free.empty() and self._made < ENGINES:
            self._made += 1
            try:
                make = partial(answers_of, self.settings, limit_s=QUESTION_S, memory=ENGINE_MEMORY)
                return await asyncio.get_running_loop().run_in_executor(self._engine_threads, make)
            except BaseException:
                self._made -= 1
                raise
        return await asyncio.wait_for(self._free.get(), WAIT_S)


def api_of(request: Request) -> Api:
    """The parts of the application that got this request."""
    found: Api = request.app.state.api
    return found


async def _never() -> None:
    await asyncio.Event().wait()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
