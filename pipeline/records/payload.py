"""The records of a batch as bytes in Redis: a frame as an Arrow stream, pushed lines as compressed msgpack.

Only the reader and writer of frames need Polars, and only those of dense payloads Zstandard. This module
imports either with them.
"""

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from pipeline.errors import BadPayload
from pipeline.records.batch import Batch, digest
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.records.wire import Codec

if TYPE_CHECKING:
    import polars as pl

# Begins a pushed payload. A frame has its size there, which is not as large as these numbers are.
MAGIC: Final = b"\0PUSHED\xf0"
DENSE_MAGIC: Final = b"\0PUSHED\xf1"  # by Zstandard
# zlib takes three times as long as Zstandard, for half as many bytes more. A producer in other people's
# services has only zlib: Zstandard would take 22 MB of their disk.
_LEVEL: Final = 1  # of both
_CODEC: Final[Codec[Pushed]] = Codec(Pushed, version=1, what="a pushed batch")  # type: ignore[arg-type]


class Packed(NamedTuple):
    """A batch's records for the ledger. `content` tells batches of one id apart; `records` counts at most."""

    blob: bytes
    content: str
    lines: int
    records: int


def pack(batch: Batch, *, zstd: bool = False) -> Packed:
    """`zstd`: pushed records by Zstandard. Raises UnicodeEncodeError for pushed lone surrogates."""
    records = batch.records
    if isinstance(records, PushedLines | PushedRecords):
        data = _CODEC.pack(records)
        content = batch.content or digest(batch.workload, data)
        blob = _dense(data) if zstd else MAGIC + zlib.compress(data, _LEVEL)
        return Packed(blob, content, batch.physical_lines, records.height)
    from pipeline.records.schema import pack_frame

    content = batch.content or _content(batch.workload, records)
    return Packed(pack_frame(records), content, batch.physical_lines, records.height)


def content_of(workload: str, records: Pushed) -> str:
    """`content` of the packed batch of these records. Raises UnicodeEncodeError for lone surrogates."""
    return digest(workload, _CODEC.pack(records))


def pack_pushed(records: Pushed) -> bytes:
    """The payload of some records of a batch."""
    return _dense(_CODEC.pack(records))


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
    """Hashed by value: another Polars may write the same records as other bytes. No text holds a NUL. Raw
    lines fill three columns."""
    import polars as pl

    filled = [name for name in records.columns if records[name].null_count() < records.height]
    texts = (records[name].cast(pl.String).fill_null("\0").str.join("\n\0").item() for name in filled)
    return digest(workload, *filled, *texts)
