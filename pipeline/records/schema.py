"""Records, batches and verdicts, and their wire forms.

Many records travel as one Polars frame (Arrow IPC, zstd); a single thing is a frozen dataclass.
Wire forms carry a version; readers accept older ones.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgpack
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records import arrow

WIRE_VERSION: Final = 1
VERDICT_VERSION: Final = 2  # of cached verdicts; 1 had no p-value

UTC_US: Final = pl.Datetime("us", "UTC")

# What a source or producer hands over: one row per record. The nullable columns are filled by
# producers that already know them; for raw lines `pipeline.sources.formats.parse` fills them.
RAW_SCHEMA: Final[dict[str, Any]] = {
    "raw": pl.String,  # the record as it was read, continuation lines joined by "\n"
    "line": pl.UInt64,  # 1-based first physical line in its source
    "lines": pl.UInt32,  # physical lines it spans
    "timestamp": UTC_US,
    "level": pl.String,
    "host": pl.String,
    "process": pl.String,
    "service": pl.String,
    "message": pl.String,  # null: not parsed yet
}

# What a sink stores: the public columns of ARCHITECTURE.md §7, then the header columns.
RESULT_SCHEMA: Final[dict[str, Any]] = {
    "record_id": pl.String,
    "source": pl.String,
    "line": pl.UInt64,
    "lines": pl.UInt32,
    "timestamp": UTC_US,
    "workload": pl.String,
    "level": pl.String,
    "message": pl.String,
    "pattern_id": pl.UInt64,
    "template_id": pl.Int64,
    "score": pl.Float64,  # null while warming
    "anomalous": pl.Boolean,  # null while warming
    "p_value": pl.Float64,  # null while warming, where nothing was measured, and in files older than the column
    "reasons": pl.List(pl.String),
    "model_version": pl.String,  # null while warming
    "host": pl.String,
    "process": pl.String,
    "service": pl.String,
    "raw": pl.String,
}

# What a model is trained on: distinct masked lines and how often they were seen.
SAMPLE_SCHEMA: Final[dict[str, Any]] = {
    "masked": pl.String,
    "pattern_id": pl.UInt64,
    "count": pl.UInt64,
    "severe": pl.Boolean,  # seen at an error-like level
    "template_id": pl.Int64,
}

# What a training reads, from whatever store, a page at a time.
LEARN_SCHEMA: Final[dict[str, Any]] = {
    "message": pl.String,
    "level": pl.String,
    "workload": pl.String,
    "timestamp": UTC_US,
    "pattern_id": pl.UInt64,  # null: not masked yet (a document that another program wrote)
    "template_id": pl.Int64,  # null: not known
    "anomalous": pl.Boolean,  # null: not judged
    "raw": pl.String,  # null: as the message; what a header holds, such as a trace id, stands here alone
}

MAX_FRAME_BYTES: Final = 256 << 20  # what a frame may unpack to where its reader knows nothing better
MAX_NAME: Final = 200  # characters of a workload or batch id: they become part of keys and file names

# One spelling per severity, lowest first; formats map their own words to these.
LEVELS: Final = ("trace", "debug", "info", "notice", "warning", "error", "critical", "fatal")
ERROR_LEVELS: Final = frozenset({"error", "critical", "fatal"})


# Beginning of the source of what is stored and was no line: what watching found in sessions and rates.
OURS: Final = "logweir:"


def of_lines() -> pl.Expr:
    """Stored records that were lines. What watching found has template ids below zero; a record of another program may
    have none."""
    return pl.col("template_id").fill_null(0) >= 0


class Reason(StrEnum):
    """Why a line is worth reading. On the wire a reason is `name` or `name:data`."""

    NEW_TEMPLATE = "new-template"  # no line of this shape in the training data
    UNLIKELY_TOKENS = "unlikely-tokens"  # data: the words, most surprising first, space separated
    RARE = "rare"  # data: "count/total" in the training data
    ERROR_SEVERITY = "error-severity"  # data: the level or the word that says so
    WARMING = "warming"  # no model yet: neither normal nor anomalous
    MARKED = "marked"  # somebody said so; data: "normal by NAME" or "anomalous by NAME"
    UNCLASSIFIED = "unclassified"  # past the template limit of its workload
    # Of a session, not of a line (watching/sessions/model.py); data begins with the template id.
    SESSION_EVENT = "session-event"  # an event that no normal session has
    SESSION_LENGTH = "session-length"  # data: "length/shortest-longest"
    SESSION_COUNTS = "session-counts"  # data: "id here/usual"
    SESSION_ORDER = "session-order"  # data: "id after id", "id first" or "id last"
    RATE_BURST = "rate-burst"  # a template, or the workload, came far oftener than its past expects
    RATE_SILENCE = "rate-silence"  # what came steadily stopped
    RATE_MIX = "rate-mix"  # the lines divide otherwise over the templates


def reason(name: Reason, data: str = "") -> str:
    """A reason as it is stored: `name` or `name:data`."""
    return f"{name.value}:{data}" if data else name.value


class Purpose(StrEnum):
    """What a batch is for: to be scored, or to be learnt from as known-normal."""

    SCORE = "score"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for one masked line under one model version.

    `score` is 0..1, higher is more anomalous; None, with `anomalous` None, while warming. `p_value`, in (0, 1], is the
    share of normal templates never seen before that would score at least as high; None where nothing was measured.
    """

    template_id: int
    score: float | None
    anomalous: bool | None
    reasons: tuple[str, ...]
    p_value: float | None = None

    def pack(self) -> bytes:
        """msgpack of version and fields."""
        return bytes(
            msgpack.packb(
                [
                    VERDICT_VERSION,
                    self.template_id,
                    self.score,
                    self.anomalous,
                    self.reasons,
                    self.p_value,
                ]
            )
        )

    @classmethod
    def unpack(cls, blob: bytes) -> "Verdict":
        """Raises BadPayload when the bytes are not a verdict."""
        try:
            version, *rest = msgpack.unpackb(blob)
            if version > VERDICT_VERSION:
                raise BadPayload(
                    f"a cached verdict has wire version {version}; this build reads up to {VERDICT_VERSION}"
                )
            template_id, score, anomalous, reasons, p_value = rest if version > 1 else [*rest, None]
            if not (
                isinstance(template_id, int)
                and isinstance(p_value, float | None)
                and isinstance(score, float | None)
                and isinstance(anomalous, bool | None)
                and isinstance(reasons, list)
                and all(isinstance(text, str) for text in reasons)
            ):
                raise TypeError("its fields have other types")
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadPayload(f"a cached verdict of {len(blob)} bytes is not readable: {exc}") from exc
        return cls(
            template_id=template_id,
            score=score,
            anomalous=anomalous,
            reasons=tuple(reasons),
            p_value=p_value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records accepted together: the unit of delivery.

    `source_key` and the first line make the id, so reading the same place again gives the same id.
    """

    batch_id: str
    workload: str
    source: str  # as users know it: a path, "stdin", "push"
    source_key: str  # 16 hex digits; names the source in record ids
    purpose: Purpose
    arrived: datetime  # aware UTC; the time of records that carry none
    formats: tuple[str, ...]  # names of `pipeline.sources.formats`, most likely first
    zone: str  # IANA zone of header times without offset
    records: pl.DataFrame  # RAW_SCHEMA

    @property
    def physical_lines(self) -> int:
        """Lines as a user counts them: a stack trace is one record of many lines."""
        return int(self.records["lines"].sum())


def digest(*parts: str | bytes, size: int = 8) -> str:
    """Hex blake2b of the parts, length-prefixed so that no two part lists collide."""
    h = hashlib.blake2b(digest_size=size)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def pattern_ids(masked: Sequence[str]) -> list[int]:
    """The 64-bit `pattern_id` of each masked line; stable across machines and versions."""
    return [int.from_bytes(hashlib.blake2b(m.encode(), digest_size=8).digest(), "little") for m in masked]


def pack_frame(frame: pl.DataFrame) -> bytes:
    """Arrow IPC file with zstd-compressed columns."""
    out = io.BytesIO()
    frame.write_ipc(out, compression="zstd")
    return out.getvalue()


def unpack_frame(blob: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> pl.DataFrame:
    """Raises BadPayload when the bytes are not an Arrow file, or one that needs more than `max_bytes` of memory."""
    arrow.check(blob, max_bytes)
    try:
        return pl.read_ipc(io.BytesIO(blob))
    # Polars raises several unrelated classes on damaged files, and its panics are no Exceptions.
    except (Exception, pl.exceptions.PanicException) as exc:
        raise BadPayload(f"a payload of {len(blob)} bytes is not a readable Arrow file: {exc}") from exc


def raw_frame(lines: Sequence[str], *, first_line: int = 1) -> pl.DataFrame:
    """RAW_SCHEMA frame of unparsed one-line records."""
    n = len(lines)
    frame = pl.DataFrame(
        {
            "raw": pl.Series(lines, dtype=pl.String),
            "line": pl.int_range(first_line, first_line + n, dtype=pl.UInt64, eager=True),
            "lines": pl.repeat(1, n, dtype=pl.UInt32, eager=True),
        }
    )
    missing = [
        pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in RAW_SCHEMA.items()
        if name not in frame.columns
    ]
    return frame.with_columns(missing).select(list(RAW_SCHEMA))


def utc_now() -> datetime:
    """The only place that reads the wall clock for data; pass the value on."""
    return datetime.now(UTC)


UNCLASSIFIED: Final = 0  # the template id of lines past their workload's limit; real ids begin at 1
