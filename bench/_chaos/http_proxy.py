"""A proxy in front of an S3 server, which may answer requests itself: with an error, or as a full store.

It reads every request whole before it answers it, so that a client gets the answer and no reset. It changes
nothing of the others: the signature of S3 covers the name that the client used."""

import asyncio
import re
from typing import Final

from bench._chaos.proxy import PIECE, Link, Proxy

FULL: Final = 507
_WRITES: Final = (b"PUT", b"POST", b"DELETE")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class HttpProxy(Proxy):
    """`answer` turns requests away until it is called with 0."""

    _status = 0

    def answer(self, status: int) -> None:
        """All requests with this status; those that write alone with 507. 0: they are passed on again."""

        def turn() -> None:
            self._status = status

        self._ask(turn)

    def _refusal(self, head: bytes) -> int:
        """The status by which a request is turned away; 0 for one that is passed on."""
        if self._status == FULL and head.partition(b" ")[0] not in _WRITES:
            return 0
        return self._status

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        if answers:
            await super()._pump(link, reader, writer, answers=True)
            return
        try:
            while await self._request(link, reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # cut by us or by either side: the end is the same
        finally:
            link.abort()

    async def _request(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Passes one request on or answers it; False where the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        status = self._refusal(head)
        if not status:
            writer.write(head)
        found = _LENGTH.search(head)
        remaining = int(found[1]) if found else 0
        while remaining:
            piece = await reader.read(min(remaining, PIECE))
            if not piece:
                return False
            remaining -= len(piece)
            await self._held_back()
            if not status:
                writer.write(piece)
                await writer.drain()
        if status:
            body = b"<Error><Code>ServiceUnavailable</Code></Error>"
            link.client.write(
                b"HTTP/1.1 %d Chaos\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                % (status, len(body), body)
            )
            await link.client.drain()
            return False
        return True
