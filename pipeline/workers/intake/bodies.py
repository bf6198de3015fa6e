"""Bodies of requests: read within a time, decompressed within a size, in memory that all requests share."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.inflating import TooLong, inflated
from pipeline.workers.bounds.byte_budget import ByteBudget
from pipeline.workers.intake.refusals import Refusal, RequestRefused

MAX_COMPRESSED: Final = 8 << 20
MAX_BODY: Final = 20 << 20  # decompressed, as the collector of OpenTelemetry has it
DRAINED: Final = 64 << 20  # of a body that is too large
SLOW_S: Final = 30.0  # for a whole body
ENCODINGS: Final = ("identity", "gzip", "deflate", "zstd")
# A thread costs more than decompressing such a body. The worst one becomes 4 MiB and takes 9 ms. Zstandard
# makes 20 MiB of it, in 26 ms.
INLINE_BYTES: Final = 4 << 10


class Room(ByteBudget):
    """The memory of what listeners hold in one process, and the parts of requests in it."""

    @contextmanager
    def shared(self) -> Iterator["Share"]:
        """The part of one request, returned with it."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.size


class Share:
    """The part of the room that one request holds."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.size = 0

    def take(self, size: int) -> None:
        """Raises RequestRefused when the process holds too much."""
        if not self.room.make_space(size):
            raise RequestRefused(Refusal.FULL, "too many requests are being read; send again in a moment")
        self.room.held += size
        self.size += size

    def give(self, size: int) -> None:
        """Gives a part back before the request ends."""
        self.room.held -= size
        self.size -= size


async def receive_body(
    chunks: AsyncIterator[bytes], *, encoding: str, share: Share, slow_s: float = SLOW_S
) -> bytes:
    """The decompressed body. Raises RequestRefused: too large, too slow, an unknown encoding, damaged."""
    if encoding not in ENCODINGS:
        raise RequestRefused(
            Refusal.ENCODING, f"Content-Encoding {encoding[:40]!r} is not known; use {', '.join(ENCODINGS)}"
        )
    limit = MAX_BODY if encoding == "identity" else MAX_COMPRESSED
    body = bytearray()
    surplus = 0
    try:
        async with asyncio.timeout(slow_s):
            async for chunk in chunks:
                if surplus or len(body) + len(chunk) > limit:
                    # A client that still sends would not see the answer.
                    surplus += len(chunk)
                    body.clear()
                    if surplus > DRAINED:
                        break
                    continue
                share.take(len(chunk))
                body += chunk
    except TimeoutError:
        raise RequestRefused(
            Refusal.SLOW, f"the body did not arrive within {slow_s:g} s; send smaller requests"
        ) from None
    if surplus:
        raise too_large(limit)
    if encoding == "identity" or not body:
        return bytes(body)
    if len(body) <= INLINE_BYTES and encoding != "zstd":
        plain = decompressed(bytes(body), encoding)
    else:
        plain = await asyncio.to_thread(decompressed, bytes(body), encoding)
    share.take(len(plain))
    return plain


def too_large(limit: int) -> RequestRefused:
    return RequestRefused(
        Refusal.TOO_LARGE, f"the body has more than {limit >> 20} MiB; send smaller requests"
    )


def decompressed(body: bytes, encoding: str) -> bytes:
    """Stops at MAX_BODY, however much there would be. Raises RequestRefused."""
    try:
        return inflated(body, encoding, most=MAX_BODY)
    except TooLong:
        raise too_large(MAX_BODY) from None
    except Undecodable as exc:
        raise RequestRefused(Refusal.UNDECODABLE, f"the body cannot be decompressed: {exc}") from None
