"""What the ledger says about batches: their stages, how they are taken in, who holds them, what died. Values only."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from pipeline.errors import BadPayload, TooNew
from pipeline.records.batch import WIRE_VERSION, Purpose
from pipeline.units import plural

# Stands in the ids of halves and in no other, so that a half never takes the place of somebody's batch.
HALF: Final = "~"
# What backfill may fill of max_pending_*: the rest is for fresh batches, which so get in beside any backfill.
BACKFILL_PART: Final = 0.8


class Stage(StrEnum):
    """Where an unfinished batch waits; also the first part of its queue's name."""

    INGEST = "ingest"
    INFER = "infer"
    DRAIN = "drain"
    STORE = "store"


UNFINISHED: Final = tuple(Stage)


def half_ids(batch_id: str) -> list[str]:
    """The ids of the two halves of a split batch: `x~0`, `x~1`; of such a half `x~00`, `x~01`."""
    return [f"{batch_id}{'' if HALF in batch_id else HALF}{side}" for side in ("0", "1")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The batch is in. `duplicate`: its id had been accepted before, nothing was added. `skipped`: its workload is
    not watched, so it was only counted (setting `unwatched`). `pending_batches`: how many were in the pipeline then, this
    one among them."""

    batch_id: str
    duplicate: bool = False
    skipped: bool = False
    pending_batches: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The batch was not taken. Try again after `retry_after_s`.

    `reason`: "bytes" or "batches" when too much waits, "memory" when Redis has used four fifths of its own, "dead" when
    dead letters fill their room, "closed" when an operator drains the pipeline.
    """

    pending_bytes: int
    pending_batches: int
    retry_after_s: float
    reason: str = "batches"
    refused: int = 1  # how many tries of this process in a row

    def __str__(self) -> str:
        match self.reason:
            case "closed":
                return "the pipeline is being drained and takes nothing in; `logweir drain --undo` opens it again"
            case "memory":
                return (
                    f"Redis has used four fifths of its memory while {self.pending_batches:,} batches wait; "
                    "give it more (redis_max_mib, maxmemory)"
                )
            case "dead":
                return "dead letters fill their room (max_dead_mib); `logweir dead list` shows them, retry or discard some"
            case _:
                mib = self.pending_bytes / 2**20
                s = "s" if self.pending_batches == 1 else ""
                return (
                    f"the pipeline is full: {plural(self.pending_batches, 'batch')} ({mib:,.1f} MiB) wait{s}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a batch's ledger entry says about its records besides counts.

    `batch_id` is the id of the entry this was read from; it is not part of the stored text.
    """

    batch_id: str = ""
    source: str
    source_key: str
    purpose: Purpose
    arrived: datetime
    formats: tuple[str, ...]
    zone: str

    def dump(self) -> str:
        return json.dumps(
            {
                "wire": WIRE_VERSION,
                "source": self.source,
                "source_key": self.source_key,
                "purpose": self.purpose.value,
                "arrived": self.arrived.isoformat(),
                "formats": self.formats,
                "zone": self.zone,
            },
            ensure_ascii=True,
        )

    @classmethod
    def load(cls, text: str | bytes, batch_id: str = "") -> "Meta":
        """Raises BadPayload, TooNew."""
        try:
            data = json.loads(text)
            not_newer(data["wire"])
            return cls(
                batch_id=batch_id,
                source=data["source"],
                source_key=data["source_key"],
                purpose=Purpose(data["purpose"]),
                arrived=datetime.fromisoformat(data["arrived"]),
                formats=tuple(data["formats"]),
                zone=data["zone"],
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise BadPayload(f"a batch's ledger entry is not readable: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to do one stage of one batch, until its deadline."""

    batch_id: str
    stage: Stage
    seq: str
    attempts: int
    exhausted: bool
    workload: str
    lines: int
    records: int
    rescore: bool
    backfill: bool
    meta: Meta
    error: str
    accepted_ms: int = 0  # Redis time


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A batch that could not be processed, as operators see it."""

    batch_id: str
    workload: str
    source: str
    first_line: int
    lines: int
    died_in: str
    reason: str
    died: datetime


def not_newer(wire: int) -> None:
    """Raises TooNew for what this build cannot read."""
    if wire > WIRE_VERSION:
        raise TooNew(
            f"a batch has wire version {wire}; this build reads up to {WIRE_VERSION}: it is left to newer workers"
        )
