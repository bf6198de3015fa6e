"""The arguments of ledger/*.lua by name."""

import msgspec

from pipeline.records.delivery import Stage


class ShareArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of one workload in a new batch."""

    workload: str
    lines: int
    records: int


class GateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The stage of new batches, and the limits of back-pressure (accept.lua, accept_many.lua)."""

    stage: Stage
    max_bytes: int
    max_batches: int
    max_dead_bytes: int
    memory_part: float
    overdue_ms: int
    backfill: bool


class AcceptArgs(GateArgs, frozen=True, kw_only=True):
    """Takes a batch in (accept.lua)."""

    batch_id: str
    content: str  # hash of the payload
    lines: int  # physical lines
    records: int
    workload: str
    shares: list[ShareArgs]
    meta: str  # JSON
    skip_keep_s: int | None  # None: process the batch; else only count its lines, and remember the id so long
    cursor_key: str
    cursor: str | None  # None: the source has no cursor
    after: str | None  # the cursor that the batch continues from; None: not compared


class NewRequestArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose records are among the batches of accept_many.lua."""

    name: str  # "": it cannot be told from another request, or its records have a name each
    body: str  # digest of the body that a declared identity is bound to


class NewBatchArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of accept_many.lua."""

    batch_id: str
    content: str
    lines: int
    records: int
    workload: str
    shares: list[ShareArgs]
    meta: str
    skip: bool  # only count its lines
    dead: str  # why it cannot be read: a dead letter from the start; "" for all others
    first_line: int  # of a dead letter, in its source


class MoveCursorArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Moves a cursor without batches (move_cursor.lua)."""

    cursor_key: str
    cursor: str
    after: str  # where the cursor stands, "" for none
    lost: int  # records in between that were removed before they were read


class AcceptManyArgs(GateArgs, frozen=True, kw_only=True):
    """Takes the batches of several requests or of a source in (accept_many.lua)."""

    batches: list[NewBatchArgs]
    requests: list[NewRequestArgs]
    slot_ms: int  # identities are remembered for at least so long
    slot_identities: int  # at most
    skip_keep_s: int
    cursor_key: str
    cursor: str | None  # None: the batches are those of requests
    after: str


class ClaimArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Claims a batch (claim.lua)."""

    batch_id: str
    stage: Stage
    owner: str
    ttl_ms: int
    max_attempts: int
    first: bool  # only for a first attempt


class RenewArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a claim (renew.lua)."""

    batch_id: str
    seq: str
    ttl_ms: int


class AdvanceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Moves a batch to its next stage (advance.lua)."""

    batch_id: str
    seq: str
    stage: Stage  # the next one
    overdue_ms: int
    work_wire: int  # wire version of the work


class ReleaseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Gives a claim back (release.lua)."""

    batch_id: str
    seq: str
    delay_ms: int
    reason: str
    counted: bool  # the attempt was the batch's fault


class DeadLetterArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a batch a dead letter (dead_letter.lua)."""

    batch_id: str
    seq: str
    reason: str
    first_line: int
    shares: list[int]  # lines of each workload


class WorkloadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One workload of a batch that ends (commit.lua)."""

    lines: int
    records: int
    totals: list[str | int]  # names and amounts in turn


class CommitArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a batch (commit.lua)."""

    batch_id: str
    seq: str
    keep_s: int
    warming: bool  # stored without a verdict
    workloads: list["WorkloadCounts"]
    drift: list[list[str | int]]  # of each version names and amounts in turn
    drift_keep_s: int
    max_observations: int
    max_observed_bytes: int


class BatchPart(msgspec.Struct, frozen=True, kw_only=True):
    """A new batch of records of another one: a half (bisect.lua)."""

    batch_id: str
    content: str
    lines: int
    records: int


class BisectArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Replaces a batch by its halves (bisect.lua)."""

    batch_id: str
    seq: str
    keep_s: int
    overdue_ms: int
    max_attempts: int
    meta: str
    halves: list[BatchPart]


class SeparatePart(BatchPart, frozen=True, kw_only=True):
    """As BatchPart, of one workload (separate.lua)."""

    workload: str


class SeparateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Takes records out of a batch of several workloads (separate.lua)."""

    batch_id: str
    seq: str
    keep_s: int
    overdue_ms: int
    lines: int  # of the other records
    records: int
    parts: list[SeparatePart]
