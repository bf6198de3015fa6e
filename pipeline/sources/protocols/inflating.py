"""Compressed bodies and messages, as HTTP and forward bring them: whole, and within a size."""

import io
import zlib
from typing import Final

from pipeline.errors import BadInput
from pipeline.sources.packed.unpacking import Unpacked
from pipeline.sources.protocols.contract import Undecodable

_ZLIB, _RAW = 15, -15  # window bits of zlib
_STEP: Final = 1 << 20


class TooLong(Undecodable):
    """There is more than may be."""


def inflated(data: bytes, how: str, *, most: int) -> bytes:
    """What was compressed by gzip, deflate or zstd, in all its members or frames, the last one whole.

    Stops at `most` bytes, however many there would be. Raises Undecodable, TooLong."""
    if how not in ("gzip", "deflate", "zstd"):
        raise Undecodable(f"it is compressed by {how[:20]!r}; use gzip or zstd")
    try:
        if how != "deflate":
            return _of_frames(data, how, most)
        try:
            return _of_deflate(data, _ZLIB, most)
        except zlib.error:
            return _of_deflate(data, _RAW, most)  # some clients leave the header of zlib out
    except Undecodable:
        raise
    except (BadInput, zlib.error) as exc:
        raise Undecodable(f"it is not readable as {how} ({exc}); send it whole") from exc


def _of_frames(data: bytes, how: str, most: int) -> bytes:
    def refuse(note: str) -> None:
        raise BadInput(note)

    stream, plain = Unpacked(how, io.BytesIO(data), "the body", refuse, window=most), bytearray()
    while piece := stream.read(_STEP):
        plain += piece
        _check(plain, most)
    return bytes(plain)


def _of_deflate(data: bytes, window: int, most: int) -> bytes:
    stream = zlib.decompressobj(window)
    plain = stream.decompress(data, most + 1)
    _check(plain, most)
    if not stream.eof:
        raise BadInput("it is cut off")
    return plain


def _check(plain: bytes | bytearray, most: int) -> None:
    if len(plain) > most:
        raise TooLong(f"it has more than {most >> 20} MiB when it is decompressed; send less at a time")
