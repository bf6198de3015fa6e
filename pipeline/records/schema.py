"""The columns of records, results and samples; frames as bytes are Arrow IPC streams with zstd-compressed
columns, behind their size in memory and a digest."""

import hashlib
import io
import struct
from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from pipeline.errors import BadPayload

UTC_US: Final = pl.Datetime("us", "UTC")

# Unparsed records, one row each. Producers fill the nullable columns that they know; `sources.formats.parse`
# fills those of raw lines.
RAW_SCHEMA: Final[dict[str, Any]] = {
    "raw": pl.String,  # the record as it was read, continuation lines joined by "\n"
    "line": pl.UInt64,  # 1-based first physical line in its source
    "lines": pl.UInt32,  # physical lines it spans
    "timestamp": UTC_US,
    "timed": pl.Boolean,  # null: not parsed yet; false: no time was found, `timestamp` is that of arrival
    "level": pl.String,
    "host": pl.String,
    "process": pl.String,
    "service": pl.String,
    "message": pl.String,  # null: not parsed yet
    "source": pl.String,  # null: that of the batch; else the file of a pack, and `line` is one of it
}

# Stored results: the public columns of ARCHITECTURE.md §7, then the header columns.
RESULT_SCHEMA: Final[dict[str, Any]] = {
    "record_id": pl.String,
    "source": pl.String,
    "line": pl.UInt64,
    "lines": pl.UInt32,
    "timestamp": UTC_US,
    "timed": pl.Boolean,  # false: no time was found in the record, `timestamp` is that of arrival
    "workload": pl.String,
    "level": pl.String,
    "message": pl.String,
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,
    "score": pl.Float64,  # null while warming
    "anomalous": pl.Boolean,  # null while warming
    "p_value": pl.Float64,  # null while warming, or without a measurement
    "reasons": pl.List(pl.String),
    "model_version": pl.String,  # null while warming
    "host": pl.String,
    "process": pl.String,
    "service": pl.String,
    "raw": pl.String,
}

# A training sample: distinct masked lines and their counts.
SAMPLE_SCHEMA: Final[dict[str, Any]] = {
    "masked": pl.String,
    "pattern_id": pl.UInt64,
    "count": pl.UInt64,
    "severe": pl.Boolean,  # seen at an error-like level; of a baseline: there
    "template_id": pl.Int64,
    "baseline": pl.Boolean,  # seen in a baseline, whose lines people declared normal
}

# Pages of stored lines that a training reads, from any store.
LEARN_SCHEMA: Final[dict[str, Any]] = {
    "message": pl.String,
    "level": pl.String,
    "workload": pl.String,
    "timestamp": UTC_US,
    "timed": pl.Boolean,  # false: `timestamp` is that of arrival
    "pattern_id": pl.UInt64,  # null: not masked yet (a document that another program wrote)
    "template_id": pl.Int64,  # null: not known
    "anomalous": pl.Boolean,  # null: not judged
    "raw": pl.String,  # null: as the message; what a header holds, such as a trace id, stands here alone
}

MAX_FRAME_BYTES: Final = 256 << 20  # a frame may unpack to, unless its reader knows better


def of_lines() -> pl.Expr:
    """Selects records that were lines. Findings of watching have negative ids, foreign records perhaps
    none."""
    return pl.col("template_id").fill_null(0) >= 0


def is_timed() -> pl.Expr:
    """Selects records whose `timestamp` was in the record. Foreign records, which do not say so, count."""
    return pl.col("timed").fill_null(value=True)


# Begins a packed frame: the bytes that it takes in memory, and the digest of all that follows.
_FRAME_HEAD: Final = struct.Struct("<Q16s")


def pack_frame(frame: pl.DataFrame) -> bytes:
    """Arrow IPC stream of one record batch with zstd-compressed columns, behind its head.

    Polars reads and writes files by other threads. That takes 0.3 ms more, and a few waits for them."""
    frame = frame.rechunk()  # each chunk would become a record batch
    out = io.BytesIO()
    out.write(bytes(_FRAME_HEAD.size))
    frame.write_ipc_stream(out, compression="zstd")
    view = out.getbuffer()
    _FRAME_HEAD.pack_into(view, 0, int(frame.estimated_size()), _frame_digest(view[_FRAME_HEAD.size :]))
    view.release()
    return out.getvalue()


def unpack_frame(blob: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> pl.DataFrame:
    """The inverse of `pack_frame`. Raises BadPayload for damaged bytes, and for a frame that needs more than
    `max_bytes` of memory.

    Polars allocates the lengths that the bytes state, so damage has to be found before it reads them. Whoever
    can write to Redis can forge a frame; the worker that dies of it counts as a try of its batch."""
    body = memoryview(blob)[_FRAME_HEAD.size :]
    size, found = _FRAME_HEAD.unpack_from(blob.ljust(_FRAME_HEAD.size, b"\0"))
    if found != _frame_digest(body):
        raise BadPayload(f"a payload of {len(blob)} bytes is damaged: its digest is another one")
    if size > max_bytes:
        raise BadPayload(
            f"a payload of {len(blob)} bytes says that it unpacks to {size}; at most {max_bytes} are read"
        )
    try:
        return pl.read_ipc_stream(io.BytesIO(body))
    # Polars raises several unrelated classes, and its panics are no Exceptions.
    except (Exception, pl.exceptions.PanicException) as exc:
        raise BadPayload(f"a payload of {len(blob)} bytes is not a readable Arrow stream: {exc}") from exc


def _frame_digest(body: memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def raw_frame(lines: Sequence[str] | pl.Series, *, first_line: int = 1) -> pl.DataFrame:
    """RAW_SCHEMA frame of unparsed one-line records."""
    n = len(lines)
    frame = pl.DataFrame(
        {
            "raw": pl.Series(lines, dtype=pl.String),
            "line": pl.int_range(first_line, first_line + n, dtype=pl.UInt64, eager=True),
            "lines": pl.repeat(1, n, dtype=pl.UInt32, eager=True),
        }
    )
    return with_missing_columns(frame)


def nulls(name: str, rows: int) -> pl.Series:
    """This column of RAW_SCHEMA without a value."""
    return pl.Series(name, [None], dtype=RAW_SCHEMA[name]).new_from_index(0, rows)


def with_missing_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """RAW_SCHEMA in its order; columns that the frame lacks are null."""
    missing = [
        pl.lit(None, dtype=kind).alias(name) for name, kind in RAW_SCHEMA.items() if name not in frame.columns
    ]
    return frame.with_columns(missing).select(list(RAW_SCHEMA))
