"""Intake: takes batches in, moves source cursors with them, and applies back-pressure."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from pipeline.errors import BadInput, CursorMoved
from pipeline.ledger.arguments import (
    AcceptArgs,
    AcceptManyArgs,
    MoveCursorArgs,
    NewBatchArgs,
    NewRequestArgs,
    ShareArgs,
)
from pipeline.ledger.dead_letters import first_line
from pipeline.ledger.store import LedgerStore, text
from pipeline.records.batch import SEVERAL, Batch
from pipeline.records.delivery import (
    BACKFILL_PART,
    HALF,
    KEEP_DONE_S,
    Accepted,
    Full,
    Known,
    Meta,
    RequestIdentity,
    Stage,
)
from pipeline.records.payload import Packed, pack
from pipeline.records.pushed import PushedRecords
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering

# Share of Redis' memory that may be in use when a batch is taken in: waiting batches grow while they are
# worked on.
MEMORY_PART: Final = 0.8
# Half a second drains a few batches on the slowest machine we tried. The other reasons need a person.
RETRY_AFTER_S: Final = {"bytes": 0.5, "batches": 0.5, "memory": 0.5, "closed": 2.0, "dead": 5.0}
# A refused try carries its payload to Redis in vain, so the pause doubles up to this factor.
MAX_BACKOFF: Final = 4
# Shippers repeat a request within minutes. The number bounds Redis, which has two slots: 7 MiB a slot of
# records, 17 of declared requests (Valkey 9).
IDENTITY_SLOT_MS: Final = 600_000
MAX_IDENTITIES: Final = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorStep:
    """The cursor of a source moves from `after` ("": there is none yet) to `cursor`."""

    key: str
    cursor: str
    after: str


class Intake:
    """The intake gate, the one door of all batches."""

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
        self.client, self.keys = store.client, store.keys
        self._refused = 0  # tries in a row

    def accept(
        self,
        batch: Batch,
        *,
        cursor_key: str = "",
        cursor: str = "",
        skip: bool = False,
        backfill: bool = False,
        after: str | None = None,
    ) -> Accepted | Full:
        """Takes a batch in and moves the cursor of its source in the same step. Idempotent by batch id and
        content.

        `skip`: only counts the lines. `backfill`: the batch waits behind fresh ones and leaves room for them.
        `after`: the cursor that the batch continues from, "" for none; None: not compared.

        Raises BadInput when the id is known with other content, and CursorMoved when the cursor is not
        `after`. Raises RedisUnavailable when Redis cannot take the batch, or when fewer than
        `redis_replicas_ack` replicas have a push. Sent again under its id, the batch is then a duplicate, or
        new to another master.
        """
        k, bid = self.keys, batch.batch_id
        if HALF in bid:
            raise BadInput(
                f"batch id {bid!r} has a {HALF}, which marks parts of split batches; use another id"
            )
        packed = pack(batch)
        args = AcceptArgs(
            batch_id=bid,
            content=packed.content,
            lines=packed.lines,
            records=packed.records,
            workload=batch.workload,
            shares=_shares(batch, packed),
            meta=Meta.of(batch).dump(),
            **self._limits(backfill=backfill),
            skip_keep_s=KEEP_DONE_S if skip else None,
            cursor_key=cursor_key,
            cursor=cursor or None,
            after=after,
        )
        batch_keys = [k.batch(bid), k.payload(bid), k.due, k.counts, k.workloads, k.totals(batch.workload)]
        answer = self.store.scripts.run_acknowledged(
            "ledger/accept",
            [*batch_keys, k.cursors, k.closed, k.dead, k.in_flight],
            [named_arguments(args), packed.blob],
            # A source with a cursor sends again what a new master lacks.
            replicas=0 if cursor_key else self.store.settings.redis.replicas_ack,
            mark=k.acknowledged,
        )
        match text(answer[0]):
            case "accepted":
                self._refused = 0
                return Accepted(batch_id=bid, pending_batches=int(answer[1]))
            case "skipped":
                return Accepted(batch_id=bid, skipped=True)
            case "duplicate":
                return Accepted(batch_id=bid, duplicate=True)
            case "full":
                return self._full(int(answer[1]), int(answer[2]), text(answer[3]))
            case "moved":
                raise _moved(batch, text(answer[1]))
            case _:
                raise BadInput(f"batch id {bid!r} was accepted before with other content; use a new id")

    def accept_all(
        self,
        batches: Sequence[Batch],
        requests: Sequence[RequestIdentity],
        *,
        skip: Collection[str] = (),
        dead: Mapping[str, str] | None = None,
        backfill: bool = False,
        step: CursorStep | None = None,
    ) -> Accepted | Full | Known:
        """Takes the batches of several requests in, all or none, and remembers the requests. Idempotent by
        the ids and contents of the batches, and by request.

        `skip`: ids of batches whose lines are only counted. `dead`: why batches cannot be read, by id; they
        are dead letters at once. `step`: the cursor moves with the batches; raises CursorMoved where it
        stands elsewhere. Raises RedisUnavailable as `accept` does: accept the same batches again, and they
        are in once. Needs Zstandard, which the extras `intake` and `worker` bring."""
        k = self.keys
        packed = [pack(batch, zstd=True) for batch in batches]
        shares = [_shares(batch, one) for batch, one in zip(batches, packed, strict=True)]
        args = AcceptManyArgs(
            batches=[
                NewBatchArgs(
                    batch_id=batch.batch_id,
                    content=one.content,
                    lines=one.lines,
                    records=one.records,
                    workload=batch.workload,
                    shares=parts,
                    meta=Meta.of(batch).dump(),
                    skip=batch.batch_id in skip,
                    dead=(dead or {}).get(batch.batch_id, ""),
                    first_line=first_line(batch.records) if batch.batch_id in (dead or {}) else 0,
                )
                for batch, one, parts in zip(batches, packed, shares, strict=True)
            ],
            requests=[NewRequestArgs(name=request.name, body=request.body) for request in requests],
            slot_ms=IDENTITY_SLOT_MS,
            slot_identities=MAX_IDENTITIES,
            **self._limits(backfill=backfill),
            skip_keep_s=KEEP_DONE_S,
            cursor_key=step.key if step else "",
            cursor=step.cursor if step else None,
            after=step.after if step else "",
        )
        keys = [k.due, k.counts, k.workloads, k.closed, k.dead, k.intake("young"), k.intake("old")]
        keys += [k.intake_records("young"), k.intake_records("old"), k.cursors, k.in_flight]
        for batch, parts in zip(batches, shares, strict=True):
            keys += [k.batch(batch.batch_id), k.payload(batch.batch_id)]
            keys += [k.totals(part.workload) for part in parts]
        answer = self.store.scripts.run_acknowledged(
            "ledger/accept_many",
            keys,
            [
                named_arguments(args),
                b"".join(chain.from_iterable(request.records for request in requests)),
                *(one.blob for one in packed),
            ],
            replicas=0 if step else self.store.settings.redis.replicas_ack,
            mark=k.acknowledged,
        )
        match text(answer[0]):
            case "known":
                return Known(
                    duplicates=tuple(answer[1]), conflicts=tuple(answer[2]), records=tuple(answer[3])
                )
            case "full":
                return self._full(int(answer[1]), int(answer[2]), text(answer[3]))
            case "moved":
                raise _moved(batches[0], text(answer[1]))
            case "repeated":
                return Accepted(batch_id=batches[0].batch_id, duplicate=True)
            case _:
                self._refused = 0
                return Accepted(batch_id=batches[0].batch_id, pending_batches=int(answer[1]))

    def _limits(self, *, backfill: bool) -> dict[str, Any]:
        """The limits that both scripts compare with. Backfill leaves room for fresh batches."""
        s = self.store.settings
        part = BACKFILL_PART if backfill else 1.0
        return {
            "stage": Stage.INGEST,
            "max_bytes": int(s.intake.max_pending_mib * 2**20 * part),
            "max_batches": max(1, int(s.internal.max_pending_batches * part)),
            "max_dead_bytes": s.intake.max_dead_mib * 2**20,
            "memory_part": MEMORY_PART,
            "overdue_ms": s.internal.overdue_ms,
            "backfill": backfill,
        }

    def _full(self, pending_bytes: int, pending_batches: int, reason: str) -> Full:
        pause = RETRY_AFTER_S[reason] * min(2**self._refused, MAX_BACKOFF)
        self._refused += 1
        return Full(
            pending_bytes=pending_bytes,
            pending_batches=pending_batches,
            reason=reason,
            retry_after_s=pause,
            refused=self._refused,
        )

    def full(self) -> Full | None:
        """The answer of `accept` to any fresh batch now, None while batches are taken in."""
        s = self.store.settings
        with answering():
            closed, counts = self.client.exists(self.keys.closed), self._counts()
            memory: Any = self.client.info("memory")
            dead = self.client.zcard(self.keys.dead)
        pending, batches = counts.get("bytes", 0), counts.get("batches", 0)
        if closed:
            reason = "closed"
        elif dead and counts.get("dead_bytes", 0) >= s.intake.max_dead_mib * 2**20:
            reason = "dead"
        elif batches and memory["used_memory"] > MEMORY_PART * memory.get("maxmemory", 0) > 0:
            reason = "memory"
        elif batches and pending >= s.intake.max_pending_mib * 2**20:
            reason = "bytes"
        elif batches >= s.internal.max_pending_batches:
            reason = "batches"
        else:
            return None
        pause = RETRY_AFTER_S[reason]
        return Full(pending_bytes=pending, pending_batches=batches, reason=reason, retry_after_s=pause)

    def _counts(self) -> dict[str, int]:
        flat: Any = self.client.hgetall(self.keys.counts)
        return {text(name): int(value) for name, value in flat.items()}

    # ---- the gate --------------------------------------------------------------------------------

    def pause(self, why: str, *, for_s: float | None = None) -> None:
        """Takes no new batch in until `resume`; accepted batches are worked off. `why`: a sentence for
        operators.

        A second call keeps the first reason and time. `for_s`: the gate opens by itself after so long unless
        `stay_paused` extends the time; a later call without `for_s` makes the pause permanent.
        """
        closed = json.dumps({"since_ms": self.store.now_ms(), "why": why}, ensure_ascii=True)
        if for_s is not None:
            self.store.ask(self.client.set, self.keys.closed, closed, nx=True, px=round(for_s * 1000))
        elif not self.store.ask(self.client.set, self.keys.closed, closed, nx=True) and (
            # -1: it lasts until `resume`. Any other pause ends, or has just ended.
            int(self.store.ask(self.client.pttl, self.keys.closed)) != -1
        ):
            self.store.ask(self.client.set, self.keys.closed, closed)

    def stay_paused(self, why: str, *, for_s: float) -> None:
        """Extends a pause that was made with the same reason; no other pause changes."""
        if self.paused_because() == why:
            self.store.ask(self.client.pexpire, self.keys.closed, round(for_s * 1000))

    def resume(self) -> bool:
        """Takes batches in again; False when intake was not paused."""
        return bool(self.store.ask(self.client.delete, self.keys.closed))

    def paused_because(self) -> str | None:
        """The reason of the pause, None while the gate is open."""
        closed = self.store.ask(self.client.get, self.keys.closed)
        if closed is None:
            return None
        try:
            return str(json.loads(closed)["why"])
        except (ValueError, KeyError, TypeError):
            return text(closed)  # an operator's own words, set by hand

    # ---- cursors ---------------------------------------------------------------------------------

    def cursor(self, cursor_key: str) -> str | None:
        """The position where the source continues, None when it was never read."""
        return self.cursors([cursor_key])[0]

    def cursors(self, cursor_keys: Sequence[str]) -> list[str | None]:
        """`cursor` of several sources in one round trip."""
        if not cursor_keys:
            return []
        values = self.store.ask(self.client.hmget, self.keys.cursors, list(cursor_keys))
        return [None if value is None else text(value) for value in values]

    def move_cursor(self, step: CursorStep, *, lost: int = 0) -> str:
        """Moves a cursor where there is nothing to take in, if it stands at `step.after`. `lost` counts
        records that are skipped for good. Answers where the cursor stands now."""
        args = MoveCursorArgs(cursor_key=step.key, cursor=step.cursor, after=step.after, lost=lost)
        keys = [self.keys.cursors, self.keys.counts]
        return text(self.store.scripts.run("ledger/move_cursor", keys, [named_arguments(args)]))

    def forget_cursor(self, cursor_key: str) -> None:
        """Forgets the position of a source that cannot be read again, such as a pipe."""
        self.store.ask(self.client.hdel, self.keys.cursors, cursor_key)


def _moved(batch: Batch, cursor: str) -> CursorMoved:
    return CursorMoved(
        f"{batch.source} goes on from another place than batch {batch.batch_id}: Redis lost its last "
        "moments, or somebody else reads the same",
        cursor,
    )


def _shares(batch: Batch, packed: Packed) -> list[ShareArgs]:
    """The lines of each workload of a batch."""
    records = batch.records
    if batch.workload != SEVERAL or not isinstance(records, PushedRecords):
        return [ShareArgs(workload=batch.workload, lines=packed.lines, records=packed.records)]
    lines = [text.count("\n") + 1 for text in records.texts]
    return [
        ShareArgs(workload=workload, lines=sum(lines[row] for row in rows), records=len(rows))
        for workload, rows in records.rows_by_workload().items()
    ]
