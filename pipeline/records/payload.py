"""The records of a batch as bytes in Redis: a frame as an Arrow stream, pushed lines as compressed msgpack.

Only the reader and writer of frames need Polars, and only those of dense payloads Zstandard. This module
imports either with them.
"""

import itertools
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from pipeline.errors import BadPayload
from pipeline.records.batch import (
    FRAME_WIRE,
    PREFIX_BYTES,
    WIRE_VERSION,
    Batch,
    digest,
    digest_of_prefixed,
    prefixed,
)
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.records.wire import Codec

if TYPE_CHECKING:
    import polars as pl

# Begins a pushed payload; an Arrow stream begins with 0xFF, a file of a build before with ARROW1.
MAGIC: Final = b"PUSHED\x00"
DENSE_MAGIC: Final = b"PUSHED\x01"  # by Zstandard
MARK_BYTES: Final = len(MAGIC)  # of each
# zlib takes three times as long as Zstandard, for half as many bytes more. A producer in other people's
# services has only zlib: Zstandard would take 22 MB of their disk.
_LEVEL: Final = 1  # of both
_CODEC: Final[Codec[Pushed]] = Codec(Pushed, version=1, what="a pushed batch")  # type: ignore[arg-type]


class Packed(NamedTuple):
    """A batch's records for the ledger. `content` tells batches of one id apart; `records` counts at most.

    `wire`: the oldest wire version whose builds read it."""

    blob: bytes
    content: str
    lines: int
    records: int
    wire: int


def pack(batch: Batch, *, zstd: bool = False) -> Packed:
    """`zstd`: pushed records by Zstandard. Raises UnicodeEncodeError for pushed lone surrogates."""
    records = batch.records
    if isinstance(records, PushedLines | PushedRecords):
        data = _CODEC.pack(records)
        content = batch.content or digest(batch.workload, data)
        blob, wire = (_dense(data), WIRE_VERSION) if zstd else (_compressed(data), FRAME_WIRE)
        return Packed(blob, content, batch.physical_lines, records.height, wire)
    from pipeline.records.schema import pack_frame

    content = batch.content or _content(batch.workload, records)
    return Packed(pack_frame(records), content, batch.physical_lines, records.height, FRAME_WIRE)


def content_of(workload: str, records: Pushed) -> str:
    """`content` of the packed batch of these records. Raises UnicodeEncodeError for lone surrogates."""
    return digest(workload, _CODEC.pack(records))


def pack_pushed(records: Pushed, *, source: bytes) -> bytes:
    """The payload of some records of a batch, packed as its own is. `source`: that payload, or its first
    MARK_BYTES. Builds that read the batch read this one too, so the wire version of its entry still holds."""
    pack = _dense if source.startswith(DENSE_MAGIC) else _compressed
    return pack(_CODEC.pack(records))


def _compressed(data: bytes) -> bytes:
    return MAGIC + zlib.compress(data, _LEVEL)


def _dense(data: bytes) -> bytes:
    import zstandard

    # A compressor belongs to one thread; a new one takes 10 us.
    return DENSE_MAGIC + zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def unpack(blob: bytes, *, max_bytes: int) -> "pl.DataFrame | Pushed":
    """The inverse of `pack`. Raises BadPayload, also for records of more than `max_bytes`, and TooNew."""
    if blob.startswith(MAGIC):
        return _records(_inflated(blob, max_bytes), len(blob))
    if blob.startswith(DENSE_MAGIC):
        return _records(_expanded(blob, max_bytes), len(blob))
    from pipeline.records.schema import unpack_frame

    return unpack_frame(blob, max_bytes=max_bytes)


def _inflated(blob: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(blob[len(MAGIC) :], max_bytes)
    except zlib.error as exc:
        raise BadPayload(f"a pushed payload of {len(blob)} bytes is not readable: {exc}") from exc
    if not stream.eof:
        raise BadPayload(
            f"a pushed payload of {len(blob)} bytes is cut off, or unpacks to more than {max_bytes} bytes"
        )
    return data


def _expanded(blob: bytes, max_bytes: int) -> bytes:
    """Unpacks a frame that states its size; the decompressor refuses one that is larger."""
    import zstandard

    data = memoryview(blob)[len(DENSE_MAGIC) :]
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise BadPayload(
                f"a pushed payload of {len(blob)} bytes does not say that it unpacks to at most {max_bytes} "
                "bytes"
            )
        # A frame without its end, or with bytes behind it, is an error.
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise BadPayload(f"a pushed payload of {len(blob)} bytes is not readable: {exc}") from exc


def _records(data: bytes, size: int) -> Pushed:
    """Reads an unpacked payload. `size`: its packed bytes, for the error."""
    records = _CODEC.unpack(data)
    columns = records.columns if isinstance(records, PushedRecords) else ()
    if any(column is not None and len(column) != records.height for column in columns):
        raise BadPayload(f"a pushed payload of {size} bytes has columns of different lengths")
    if not records.height:
        raise BadPayload(f"a pushed payload of {size} bytes has no records")
    return records


def _content(workload: str, records: "pl.DataFrame") -> str:
    """Hashed by value: another Polars may write the same records as other bytes. Raw lines fill three
    columns."""
    filled = [name for name in records.columns if records[name].null_count() < records.height]
    heads = (piece for name in (workload, *filled) for piece in prefixed(name))
    values = itertools.chain.from_iterable(_prefixed_values(records[name]) for name in filled)
    return digest_of_prefixed(itertools.chain(heads, values))


def _prefixed_values(column: "pl.Series") -> Iterator[bytes | memoryview]:
    """The values of a column as `str` writes them, each with its length in front."""
    import numpy as np
    import polars as pl

    if column.dtype != pl.String and not column.dtype.is_integer():
        yield from itertools.chain.from_iterable(map(prefixed, map(str, column.to_list())))
        return
    if column.dtype.is_integer() and not column.null_count() and column.min() == column.max():
        yield b"".join(prefixed(str(column[0]))) * column.len()  # most records are one line
        return
    # Each value as a string of Python took as long as all other work on it.
    texts = column.cast(pl.String)
    if texts.null_count():
        texts = texts.fill_null("None")
    sizes = texts.str.len_bytes().to_numpy().astype(np.int64)
    data = bytearray(texts.str.join(bytes(PREFIX_BYTES).decode()).cast(pl.Binary).item())
    ends = np.cumsum(sizes[:-1] + PREFIX_BYTES) - PREFIX_BYTES
    values = np.frombuffer(data, dtype=np.uint8)
    for place in range(-(-int(sizes.max()).bit_length() // 8)):
        values[ends + place] = sizes[1:] >> (8 * place) & 0xFF
    yield int(sizes[0]).to_bytes(PREFIX_BYTES, "little")
    yield memoryview(data)
