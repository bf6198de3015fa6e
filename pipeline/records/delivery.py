"""Values about a batch that rooms share: stages, answers of intake, claims, dead letters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.errors import BadPayload, TooNew
from pipeline.records.batch import SEVERAL, WIRE_VERSION, Batch, Purpose

# Marks the ids of halves, and is refused in other ids: a half never replaces a batch of a sender.
HALF: Final = "~"
# Share of max_pending_* that backfill may fill; fresh batches get in beside it.
BACKFILL_PART: Final = 0.8
IDENTITY_BYTES: Final = 16  # of a record
# A finished batch id is remembered for a week: no sender repeats a batch later than that.
KEEP_DONE_S: Final = 604_800


class Stage(StrEnum):
    """The stage that an unfinished batch waits for; also the first part of the name of its queue."""

    INGEST = "ingest"
    INFER = "infer"
    DRAIN = "drain"
    STORE = "store"


UNFINISHED: Final = tuple(Stage)


def half_ids(batch_id: str) -> list[str]:
    """The ids of the two halves of a batch: `x~0` and `x~1`; of the half `x~0`: `x~00` and `x~01`."""
    return [f"{batch_id}{'' if HALF in batch_id else HALF}{side}" for side in ("0", "1")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The batch is in.

    `duplicate`: the id had been accepted before, and nothing was added. `skipped`: the workload is not
    watched, so its lines were only counted (setting `unwatched`). `pending_batches`: batches in flight then,
    with this one."""

    batch_id: str
    duplicate: bool = False
    skipped: bool = False
    pending_batches: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Some of the requests or records are in already, so nothing was taken. Try again without them.

    `duplicates`: indices of the requests. `conflicts`: of those whose declared identity was in with another
    body. `records`: indices among the records of all requests that have an identity each."""

    duplicates: tuple[int, ...] = ()
    conflicts: tuple[int, ...] = ()
    records: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """The name by which a request to the intake is told from others, or the names of its records.

    `name`: "" for a request that cannot be told from another one. `body`: the digest that a declared name is
    bound to; the same name with another body is a conflict. `records`: IDENTITY_BYTES of each record, where a
    sender may repeat it with others; then `name` is ""."""

    name: str = ""
    body: str = ""
    records: tuple[bytes, ...] = ()


NO_IDENTITY: Final = RequestIdentity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The batch was not taken. Try again after `retry_after_s`.

    `reason`: "bytes" or "batches" when too much waits. "memory" when Redis has used four fifths of its
    memory, "dead" when dead letters fill their room. "closed" when an operator drains the pipeline, "process"
    when the process that receives holds too many requests."""

    pending_bytes: int
    pending_batches: int
    retry_after_s: float
    reason: str = "batches"
    refused: int = 1  # how many tries of this process in a row

    def __str__(self) -> str:
        match self.reason:
            case "closed":
                return (
                    "the pipeline is being drained and takes nothing in; "
                    "`logweir drain --undo` opens it again"
                )
            case "memory":
                return (
                    f"Redis has used four fifths of its memory while {self.pending_batches:,} batches wait; "
                    "give it more (redis_max_mib, maxmemory)"
                )
            case "dead":
                return (
                    "dead letters fill their room (max_dead_mib); `logweir dead list` shows them, "
                    "retry or discard some"
                )
            case "process":
                mib = self.pending_bytes / 2**20
                return f"this process has {mib:,.1f} MiB of requests in hand; send again in a moment"
            case _:
                mib = self.pending_bytes / 2**20
                batches = "1 batch" if self.pending_batches == 1 else f"{self.pending_batches:,} batches"
                verb = "waits" if self.pending_batches == 1 else "wait"
                return f"the pipeline is full: {batches} ({mib:,.1f} MiB) {verb}"


class _Versioned(msgspec.Struct):
    wire: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The description of a batch's records in its ledger entry.

    `batch_id` is the id of that entry; it is not part of the stored text.
    """

    batch_id: str = ""
    source: str
    source_key: str
    purpose: Purpose
    arrived: datetime
    formats: tuple[str, ...]
    zone: str

    @classmethod
    def of(cls, batch: Batch) -> "Meta":
        """The description of a batch that is sent."""
        names = [name for name in cls.__dataclass_fields__ if name != "batch_id"]
        return cls(**{name: getattr(batch, name) for name in names})

    def dump(self) -> str:
        """JSON with the wire version of the batch's payload."""
        fields = msgspec.to_builtins(self)
        del fields["batch_id"]
        return msgspec.json.encode({"wire": WIRE_VERSION, **fields}).decode()

    @classmethod
    def load(cls, text: str | bytes, batch_id: str = "") -> "Meta":
        """The inverse of `dump`. Raises BadPayload, TooNew."""
        try:
            not_newer(msgspec.json.decode(text, type=_Versioned).wire)
            return replace(msgspec.json.decode(text, type=cls), batch_id=batch_id)
        except (msgspec.DecodeError, ValueError, RecursionError) as exc:
            raise BadPayload(f"a batch's ledger entry is not readable: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to process one stage of one batch until a deadline. `seq`: the fencing number of the
    claim."""

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

    @property
    def several(self) -> bool:
        """The records name their workloads."""
        return self.workload == SEVERAL

    def part(self, workload: str, *, lines: int, records: int, meta: Meta) -> "Claim":
        """This claim as one on the records of one workload, which `meta` describes."""
        return replace(self, workload=workload, lines=lines, records=records, meta=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadEnd:
    """One workload in the commit of a batch.

    `outcomes`: line counters to add. `measured`: drift counters to add under model `version`.
    `observation`: a message to the watcher, b"" for none."""

    workload: str
    lines: int
    records: int
    outcomes: Mapping[str, int]
    version: str = ""
    measured: Mapping[str, int] = field(default_factory=dict)
    observation: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A batch that could not be processed, for operators."""

    batch_id: str
    workload: str
    source: str
    first_line: int
    lines: int
    died_in: str
    reason: str
    died: datetime


def not_newer(wire: int) -> None:
    """Raises TooNew for a wire version that this build cannot read."""
    if wire > WIRE_VERSION:
        raise TooNew(
            f"a batch has wire version {wire}; this build reads up to {WIRE_VERSION}: it is left to newer "
            "workers"
        )
