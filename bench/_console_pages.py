"""Open pages of the console, as static/console.js behaves: each follows the events, and asks for itself again
a moment after one of them; the line of figures is asked for every ten seconds.

    python -m bench._console_pages URL COOKIE PAGES SECONDS

Prints how many pages and pieces were fetched, and the bytes of all of them."""

import asyncio
import random
import sys
import time
from typing import Final
from urllib.parse import urlsplit

STRIP_S: Final = 10.0
WANTED: Final = frozenset(
    {"incidents", "silences", "marks", "models", "dead-letters"}
)  # of templates/now.html


class OpenPage:
    """One tab: a stream of events, and requests one after another."""

    def __init__(self, host: str, port: int, cookie: str) -> None:
        self.host, self.port, self.cookie = host, port, cookie
        self.fetched = self.strips = self.bytes = 0
        self._lock = asyncio.Lock()
        self._waiting = False
        self._asked: asyncio.Task[None] | None = None
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def live(self, until: float) -> None:
        """Until this moment of the monotonic clock."""
        await asyncio.sleep(random.random() * STRIP_S)
        await self._get("/")
        strips = asyncio.create_task(self._strips())
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._follow()
        except TimeoutError:
            pass
        finally:
            strips.cancel()
            if self._asked is not None:
                self._asked.cancel()

    async def _follow(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(self._request(f"/events?of={'+'.join(sorted(WANTED))}", "Accept: text/event-stream\r\n"))
        async for line in reader:
            name, _, value = line.decode().strip().partition(": ")
            if name == "event" and value in WANTED and not self._waiting:
                self._waiting = True
                self._asked = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        await asyncio.sleep(0.15 + random.random() * 0.35)
        self._waiting = False
        await self._get("/")
        self.fetched += 1

    async def _strips(self) -> None:
        while True:
            await asyncio.sleep(STRIP_S)
            await self._get("/strip")
            self.strips += 1

    async def _get(self, path: str) -> None:
        async with self._lock:
            if self._connection is None:
                self._connection = await asyncio.open_connection(self.host, self.port)
            reader, writer = self._connection
            writer.write(self._request(path, "HX-Request: true\r\n"))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if " 200 " not in head.partition("\r\n")[0]:
                raise RuntimeError(f"{path}: {head[:200]}")
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            self.bytes += len(await reader.readexactly(size))

    def _request(self, path: str, more: str) -> bytes:
        return (
            f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nCookie: {self.cookie}\r\n"
            f"Accept-Encoding: gzip\r\n{more}\r\n"
        ).encode()


async def main(url: str, cookie: str, count: int, seconds: float) -> None:
    place = urlsplit(url)
    pages = [OpenPage(place.hostname or "", place.port or 80, cookie) for _ in range(count)]
    until = time.monotonic() + seconds
    await asyncio.gather(*(page.live(until) for page in pages))
    print(sum(p.fetched for p in pages), sum(p.strips for p in pages), sum(p.bytes for p in pages))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
