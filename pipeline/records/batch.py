"""A batch: records that are accepted together, the unit of delivery. Importing it needs no Polars."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pipeline.records.pushed import Pushed, PushedLines, PushedRecords

if TYPE_CHECKING:
    import polars as pl

# Of version 1 frames were Arrow files. Of version 2 all pushed payloads were packed by zlib.
WIRE_VERSION: Final = 3
# The version of batches without a payload by Zstandard, so that workers of that build read them too.
FRAME_WIRE: Final = 2
# The workload of a batch whose records name their own. Names of workloads are printable, this is not.
SEVERAL: Final = "\tseveral"
PREFIX_BYTES: Final = 8  # of the length of a part of a digest
MAX_NAME: Final = 200  # characters of a workload or batch id: names become part of keys and file names


class Purpose(StrEnum):
    """Why a batch is sent: to be scored, or to be learnt from as known-normal."""

    SCORE = "score"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records accepted together.

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
    records: "pl.DataFrame | Pushed"  # RAW_SCHEMA, or as a producer packed them
    lines: int | None = None  # physical lines, if they are counted already
    content: str = ""  # tells batches of one id apart; "": a digest of the records does

    @property
    def physical_lines(self) -> int:
        """Lines as a user counts them: a stack trace is one record of many lines."""
        if self.lines is not None:
            return self.lines
        if isinstance(self.records, PushedLines | PushedRecords):
            return self.records.lines
        return int(self.records["lines"].sum())


def digest(*parts: str | bytes, size: int = 8) -> str:
    """Hex blake2b of the parts, length-prefixed so that no two part lists collide."""
    return digest_of_prefixed((piece for part in parts for piece in prefixed(part)), size=size)


def digest_of_prefixed(pieces: Iterable[bytes | memoryview], *, size: int = 8) -> str:
    """`digest` of parts that have their length in front (`prefixed`), in pieces of any size."""
    h = hashlib.blake2b(digest_size=size)
    for piece in pieces:
        h.update(piece)
    return h.hexdigest()


def prefixed(part: str | bytes) -> tuple[bytes, bytes]:
    """The length of a part in PREFIX_BYTES bytes, the lowest first, and its bytes."""
    data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
    return len(data).to_bytes(PREFIX_BYTES, "little"), data


def file_key(purpose: Purpose, name: str) -> str:
    """The `source_key` of a file that is read from its beginning, alone or in a pack."""
    return digest("file", purpose.value, name)


def utc_now() -> datetime:
    """The only place that reads the wall clock for data; callers pass the value on."""
    return datetime.now(UTC)
