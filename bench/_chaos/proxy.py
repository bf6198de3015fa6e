"""A TCP proxy in front of a server that does to connections what networks do to them.

`cut` resets all connections, `refuse` takes no new ones, `delay` slows every piece. `half_open` lets requests
through and loses every answer from then on, as a peer does that has lost its way back. Such a connection
never heals; a new one does."""

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Final, Self, TypeVar

PIECE: Final = 65_536
START_S: Final = 10.0

T = TypeVar("T")


class Link:
    """One connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.swallows = False

    def abort(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """Runs in a thread of its own between `__enter__` and `__exit__`. Its methods may be called from any
    other."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._links: set[Link] = set()
        self._refuses = False
        self._delay_s = 0.0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError(f"the proxy did not listen within {START_S:.0f} s; look at the machine's load")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    # ---- what it does to connections --------------------------------------------------------------

    def cut(self) -> int:
        """Reset every connection; how many there were."""
        return self._ask(lambda: self._abort(list(self._links)))

    def refuse(self, on: bool) -> int:
        """Reset every connection and take no new ones, until it is told otherwise."""

        def turn() -> int:
            self._refuses = on
            return self._abort(list(self._links)) if on else 0

        return self._ask(turn)

    def delay(self, seconds: float) -> None:
        """Hold every piece back for so long; 0 for no delay."""

        def turn() -> None:
            self._delay_s = seconds

        self._ask(turn)

    def half_open(self, share: float, rng: random.Random) -> int:
        """From now on lose every answer on this share of the connections; how many those are."""

        def turn() -> int:
            links = [link for link in self._links if not link.swallows and rng.random() < share]
            for link in links:
                link.swallows = True
            return len(links)

        return self._ask(turn)

    # ---- the loop ---------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], T]) -> T:
        async def answer() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(START_S)

    def _abort(self, links: list[Link]) -> int:
        for link in links:
            link.abort()
        return len(links)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._abort(list(self._links))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._turned_away():
            writer.transport.abort()
            return
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, back_writer)
        self._links.add(link)
        if self._turned_away():  # it was told while we connected
            link.abort()
        try:
            await asyncio.gather(
                self._pump(link, reader, back_writer, answers=False),
                self._pump(link, back_reader, writer, answers=True),
            )
        except asyncio.CancelledError:
            pass  # the proxy ends; asyncio's streams complain about tasks that end so
        finally:
            link.abort()
            self._links.discard(link)

    def _turned_away(self) -> bool:
        return self._refuses

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        """Until one side ends; then the other is ended too, as a relay does."""
        try:
            while piece := await reader.read(PIECE):
                await self._held_back()
                if answers and link.swallows:
                    continue
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass  # cut by us or by either side: the end is the same
        finally:
            link.abort()

    async def _held_back(self) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
