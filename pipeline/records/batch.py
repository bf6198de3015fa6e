"""A batch: records that are accepted together, the unit of delivery. Importing it needs no Polars."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from pipeline.records.pushed import Pushed, PushedLines, PushedRecords

if TYPE_CHECKING:
    import polars as pl

WIRE_VERSION: Final = 1  # of payloads, and of the work of stages
# The workload of a batch whose records name their own. Names of workloads are printable, this is not.
SEVERAL: Final = "\tseveral"
PREFIX_BYTES: Final = 8  # of the length of a part of a digest
MAX_NAME: Final = 200  # characters of a workload or batch id: names become part of keys and file names
# Of patterns of workloads. A workload that a sender calls `*` would otherwise name all of them in a silence.
WILDCARDS: Final = "*?"


def is_workload_name(text: str) -> bool:
    """Whether a text can be the name of a workload as it stands."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and not any(c in text for c in WILDCARDS)


def as_workload_name(text: str) -> str:
    """A text from elsewhere as the name of a workload, of any length: other characters stand as `_`."""
    return "".join(c if c.isprintable() and c not in WILDCARDS else "_" for c in text)


class Purpose(StrEnum):
    """Why a batch is sent: to be scored, or to be learnt from as known-normal."""

    SCORE = "score"
    BASELINE = "baseline"


class LearntFrom(StrEnum):
    """What a training learns a workload from."""

    BASELINE = "baseline"  # lines that people declared normal, of any time
    RESULTS = "results"  # lines that the pipeline has stored, in which faults may hide
    DOCUMENTS = "documents"  # of other programs, in OpenSearch


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
    h = hashlib.blake2b(digest_size=size)
    for part in parts:
        for piece in prefixed(part):
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
