"""Changes of the pipeline: one look a second for all clients that wait for events.

An event carries only the name of what changed. The id of an event holds the versions of everything at that
moment, so a client that comes back with it misses no change, in whatever process it arrives.
"""

import asyncio
from abc import ABC, abstractmethod
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import redis

from pipeline.errors import RedisUnavailable
from pipeline.records.batch import digest
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.upkeep import start_task

LOOK_S: Final = 1.0
COMMENT_S: Final = 15.0  # proxies close a connection that is silent
MOST_FOLLOWERS: Final = 200
Versions = dict[str, str]
T = TypeVar("T")


class SharedFeed(ABC):
    """A stream for each client that follows, and one look a second for all of them while there are some."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        # Set once, and then replaced by another one. A condition has a lock, which a client that goes away at
        # the wrong moment leaves taken: asyncio.wait_for of Python 3.11 gets it in a task of its own.
        self._changed = asyncio.Event()
        self._followers = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def full(self) -> bool:
        """No further client may follow."""
        return self._followers >= MOST_FOLLOWERS

    async def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._wake()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Around the stream of one client."""
        self._followers += 1
        try:
            if self._looking is None or self._looking.done():
                self._forget()
                self._looking = start_task("changes", self._look_on())
            yield
        finally:
            self._followers -= 1

    async def _until(self, news: Callable[[], bool]) -> bool:
        """Waits for news, COMMENT_S at most; whether they came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMENT_S):
                while not news():
                    await self._changed.wait()
                return True
        return False

    def _wake(self) -> None:
        """All that wait look for their news."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _answer(self, ask: Callable[[], T]) -> T | None:
        """None where Redis does not answer."""
        with suppress(RedisUnavailable, redis.RedisError):
            return await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        return None

    async def _look_on(self) -> None:
        while self._followers and not self._closed:
            found = await self._answer(self._look)
            if found is not None and self._is_new(found):
                self._wake()
            await asyncio.sleep(LOOK_S)

    @abstractmethod
    def _look(self) -> Any:
        """What Redis holds now, by the thread of the feed."""

    @abstractmethod
    def _is_new(self, found: Any) -> bool:
        """Takes in what a look has found; whether it is another thing than before."""

    @abstractmethod
    def _forget(self) -> None:
        """What the last look found is old: nobody has looked for a while."""


class ChangeFeed(SharedFeed):
    """The versions of everything, as of the last look."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        super().__init__("api-changes")
        self._client = client
        self._keys = Keys(settings.redis.key_prefix)
        self._now: Versions = {}

    async def follow(self, last_id: str, names: Collection[str] = ()) -> AsyncGenerator[bytes, None]:
        """The stream of Server-Sent Events behind an id, "" from now on. `names`: of the changes that count;
        empty: all."""
        with self._following():
            yield b"retry: 2000\n\n"
            seen = versions_of(last_id)
            while not self._closed:
                await self._until(partial(self._news, seen, names))
                now = self._now
                if not self._news(seen, names):
                    yield b": nothing new\n\n"
                    continue
                if seen is not None:
                    for name in self._changed_names(seen, names):
                        yield _event(name, now)
                else:
                    yield _event("begin", now)
                seen = now

    def _forget(self) -> None:
        self._now = {}

    def _is_new(self, found: Versions) -> bool:
        before, self._now = self._now, found
        return found != before

    def _news(self, seen: Versions | None, names: Collection[str]) -> bool:
        return self._closed or (bool(self._now) and (seen is None or bool(self._changed_names(seen, names))))

    def _changed_names(self, seen: Versions, names: Collection[str]) -> list[str]:
        now = self._now
        return [name for name in now if seen.get(name) != now[name] and (not names or name in names)]

    def _look(self) -> Versions:
        keys, pipe = self._keys, self._client.pipeline(transaction=False)
        pipe.hget(keys.marks, "")
        pipe.hget(keys.watch, "")
        pipe.hgetall(keys.model())
        pipe.smembers(keys.model_names)
        pipe.get(keys.training_now)
        pipe.zrange(keys.training_queue, 0, 20)
        pipe.zrevrange(keys.trainings_ended, 0, 0, withscores=True)
        pipe.zcard(keys.dead)
        pipe.zrevrange(keys.dead, 0, 0)
        pipe.hgetall(keys.counts)
        pipe.xrevrange(keys.audit, count=1)
        pipe.hgetall(keys.silences)
        pipe.hlen(keys.senders)  # counted some seconds after their first lines
        with answering():
            marks, watch, model, names, now, queue, ended, dead, newest, counts, audit, silences, senders = (
                pipe.execute()
            )
        incidents = Scripts(self._client).run("watching/fingerprint", [keys.watching("incidents")], [])
        found: dict[str, Any] = {
            "incidents": incidents,
            "marks": marks,
            "silences": sorted(silences.items()),
            "watchlist": watch,
            "models": (sorted(model.items()), sorted(names)),
            "trainings": (now, queue, ended),
            "dead-letters": (dead, newest),
            "status": (sorted(counts.items()), senders),
            "audit": audit[0][0] if audit else "",
        }
        return {name: digest(str(value))[:8] for name, value in found.items()}


def versions_of(event_id: str) -> Versions | None:
    """The versions in an id, None for one that is none of ours."""
    try:
        packed = urlsafe_b64decode(event_id.encode("ascii") + b"=" * (-len(event_id) % 4))
        return msgspec.json.decode(packed, type=dict[str, str]) if packed else None
    except (ValueError, msgspec.MsgspecError):
        return None


def _event(name: str, now: Versions) -> bytes:
    event_id = urlsafe_b64encode(msgspec.json.encode(now)).rstrip(b"=").decode()
    data = msgspec.json.encode({"changed": name, "version": now.get(name, "")}).decode()
    return f"id: {event_id}\nevent: {name}\ndata: {data}\n\n".encode()
