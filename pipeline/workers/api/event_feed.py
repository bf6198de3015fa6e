"""Events as Server-Sent Events: one look a second for all clients that follow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec
import redis

from pipeline.errors import RedisUnavailable
from pipeline.observe.events import BEGIN, EventPage, event_place, newest_event_id, read_events
from pipeline.settings import Settings
from pipeline.workers.api.changes import COMMENT_S, LOOK_S, MOST_FOLLOWERS

PAGE: Final = 200

T = TypeVar("T")


class EventFeed:
    """The id of the newest event, as of the last look. It looks while somebody follows."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self._client, self._settings = client, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="api-events")
        self._newest = BEGIN
        self._changed = asyncio.Condition()
        self._followers = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def full(self) -> bool:
        """No further client may follow."""
        return self._followers >= MOST_FOLLOWERS

    async def follow(self, since: str | None, types: Sequence[str]) -> AsyncIterator[bytes]:
        """Each event behind an id, None from now on. `: gap` says that older ones are missing."""
        self._followers += 1
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look_on())
            yield b"retry: 2000\n\n"
            last = since
            while not self._closed:
                if last is None:
                    last = await self._answer(partial(newest_event_id, self._client, self._settings))
                page = None if last is None else await self._page(last, types)
                if page is None:
                    yield b": Redis does not answer\n\n"
                    await asyncio.sleep(LOOK_S)
                    continue
                if page.gap:
                    yield b"event: gap\ndata: {}\n\n"
                for event in page.events:
                    data = msgspec.json.encode(event).decode()
                    yield f"id: {event.id}\nevent: {event.type}\ndata: {data}\n\n".encode()
                last = page.last
                if len(page.events) < PAGE and not await self._news(last):
                    yield b": nothing new\n\n"
        finally:
            self._followers -= 1

    async def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        async with self._changed:
            self._changed.notify_all()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _page(self, since: str, types: Sequence[str]) -> EventPage | None:
        return await self._answer(
            partial(read_events, self._client, self._settings, since=since, limit=PAGE, types=types)
        )

    async def _answer(self, ask: Callable[[], T]) -> T | None:
        """None where Redis does not answer."""
        with suppress(RedisUnavailable, redis.RedisError):
            return await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        return None

    async def _news(self, last: str) -> bool:
        """Waits for an event behind `last`, COMMENT_S at most."""
        place = event_place(last)
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._closed or event_place(self._newest) > place),
                    COMMENT_S,
                )
                return True
        return False

    async def _look_on(self) -> None:
        while self._followers and not self._closed:
            found = await self._answer(partial(newest_event_id, self._client, self._settings))
            if found is not None and found != self._newest:
                self._newest = found
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(LOOK_S)
