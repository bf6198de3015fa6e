"""Bodies of requests: read within a time, decompressed within a size, in memory that all requests share."""

import asyncio
import gzip
import io
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

import zstandard

from pipeline.workers.intake.refusals import Refusal, RequestRefused

MAX_COMPRESSED: Final = 8 << 20
MAX_BODY: Final = 20 << 20  # decompressed, as the collector of OpenTelemetry has it
DRAINED: Final = 64 << 20  # of a body that is too large
SLOW_S: Final = 30.0  # for a whole body
HELD_BYTES: Final = 128 << 20  # of bodies that are read or decoded at a time
ENCODINGS: Final = ("identity", "gzip", "deflate", "zstd")
# A thread costs more than decompressing such a body. The worst one becomes 4 MiB and takes 9 ms. Zstandard
# makes 20 MiB of it, in 26 ms.
INLINE_BYTES: Final = 4 << 10
_STEP: Final = 1 << 20
_ZLIB, _RAW = 15, -15  # window bits of zlib


class Room:
    """The memory of bodies in one process."""

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.limit = limit
        self.held = 0

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
        if self.room.held + size > self.room.limit:
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
        if encoding == "zstd":
            with zstandard.ZstdDecompressor(max_window_size=MAX_BODY).stream_reader(
                io.BytesIO(body), read_across_frames=True
            ) as reader:
                return _bounded(reader)
        if encoding == "gzip":
            # Members cost what they hold: a decompressor of each would copy all that follows it.
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as members:
                return _bounded(members)
        try:
            return _inflated(body, _ZLIB)
        except zlib.error:
            return _inflated(body, _RAW)  # some clients leave the header of zlib out
    except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError, EOFError) as exc:
        raise RequestRefused(Refusal.UNDECODABLE, f"the body is no {encoding} ({exc})") from None


def _bounded(reader: "gzip.GzipFile | zstandard.ZstdDecompressionReader") -> bytes:
    plain = bytearray()
    while piece := reader.read(_STEP):
        plain += piece
        if len(plain) > MAX_BODY:
            raise too_large(MAX_BODY)
    return bytes(plain)


def _inflated(body: bytes, window: int) -> bytes:
    stream = zlib.decompressobj(window)
    plain = stream.decompress(body, MAX_BODY + 1)
    if len(plain) > MAX_BODY:
        raise too_large(MAX_BODY)
    if not stream.eof:
        raise EOFError("it is cut off")
    return plain
