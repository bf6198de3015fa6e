"""Events as Server-Sent Events: one look a second for all clients that follow."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Final

import msgspec
import redis

from pipeline.observe.events import BEGIN, EventPage, event_place, newest_event_id, read_events
from pipeline.settings import Settings
from pipeline.workers.api.changes import LOOK_S, SharedFeed

PAGE: Final = 200


class EventFeed(SharedFeed):
    """The id of the newest event, as of the last look."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        super().__init__("api-events")
        self._client, self._settings = client, settings
        self._newest = BEGIN

    async def follow(self, since: str | None, types: Sequence[str]) -> AsyncGenerator[bytes, None]:
        """Each event behind an id, None from now on. `: gap` says that older ones are missing."""
        with self._following():
            yield b"retry: 2000\n\n"
            last = since
            while not self._closed:
                if last is None:
                    last = await self._answer(self._look)
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
                if len(page.events) < PAGE and not await self._until(partial(self._is_behind, last)):
                    yield b": nothing new\n\n"

    async def _page(self, since: str, types: Sequence[str]) -> EventPage | None:
        return await self._answer(
            partial(read_events, self._client, self._settings, since=since, limit=PAGE, types=types)
        )

    def _is_behind(self, last: str) -> bool:
        return self._closed or event_place(self._newest) > event_place(last)

    def _look(self) -> str:
        return newest_event_id(self._client, self._settings)

    def _is_new(self, found: str) -> bool:
        before, self._newest = self._newest, found
        return found != before

    def _forget(self) -> None:
        self._newest = BEGIN
