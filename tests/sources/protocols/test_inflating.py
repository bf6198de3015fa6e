"""Compressed bodies: every member and frame is read, and one that was cut anywhere is refused."""

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
import zstandard

from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.inflating import TooLong, inflated

MOST = 4 << 20
RANDOM = random.Random(19)
PARTS = [RANDOM.randbytes(900), b"", b"a" * 300_000, RANDOM.randbytes(2_000)]


def flushed(parts: list[bytes]) -> bytes:
    """A frame of Zstandard with a block for each part."""
    compressor = zstandard.ZstdCompressor().compressobj()
    blocks = [
        compressor.compress(part) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for part in parts
    ]
    return b"".join(blocks) + compressor.flush()


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a member of gzip": ("gzip", lambda: gzip.compress(b"".join(PARTS))),
    "members of gzip": ("gzip", lambda: b"".join(map(gzip.compress, PARTS))),
    "zlib": ("deflate", lambda: zlib.compress(b"".join(PARTS))),
    "deflate without a header": ("deflate", lambda: raw_deflate(b"".join(PARTS))),
    "a frame of zstd": ("zstd", lambda: zstandard.compress(b"".join(PARTS))),
    "a frame of blocks": ("zstd", lambda: flushed(PARTS)),
    "frames of zstd": ("zstd", lambda: b"".join(map(zstandard.compress, PARTS))),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_is_read_whole_or_refused_wherever_it_was_cut(kind: str) -> None:
    how, packed = BODIES[kind]
    body, whole = packed(), b"".join(PARTS)
    assert inflated(body, how, most=MOST) == whole
    for cut in {*range(1, 30), *RANDOM.sample(range(1, len(body)), 60)}:
        try:
            found = inflated(body[:-cut], how, most=MOST)
        except Undecodable:
            continue
        # What ends with a member or a frame is whole by itself.
        assert kind in ("members of gzip", "frames of zstd")
        assert found in [b"".join(PARTS[:count]) for count in range(len(PARTS))]


@pytest.mark.parametrize(
    ("how", "packed"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)]
)
def test_a_body_that_grows_too_long_is_refused_before_it_is_read(
    how: str, packed: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(TooLong, match="send less"):
        inflated(packed(bytes(50 << 20)), how, most=MOST)


def test_thousands_of_empty_members_cost_what_they_hold() -> None:
    body = gzip.compress(b"one ") + gzip.compress(b"") * 2_000 + gzip.compress(b"two")
    assert inflated(body, "gzip", most=MOST) == b"one two"


def test_an_unknown_compression_names_those_that_are_known() -> None:
    with pytest.raises(Undecodable, match="use gzip or zstd"):
        inflated(b"x", "lzma", most=MOST)
