"""The life of a batch. The ledger in Redis is the truth; a Celery message is only a wake-up.

    accept -> ingest -> [infer] -> [drain] -> [store] -> done          every arrow is a compare-and-set script
                 |         |          |          |
                 +---------+----------+----------+--> bisection (halves start at ingest) or dead letter

Invariant: accepted = stored + in flight + dead + discarded + skipped, in physical lines, per workload. Only
the holder of a claim (a number and a deadline on Redis time) moves a batch; an expired claim moves nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import redis

from pipeline.errors import BadPayload, ClaimLost, TooNew
from pipeline.ledger.arguments import (
    AdvanceArgs,
    BatchPart,
    BisectArgs,
    ClaimArgs,
    CommitArgs,
    DeadLetterArgs,
    ReleaseArgs,
    RenewArgs,
    SeparateArgs,
    SeparatePart,
    WorkloadCounts,
)
from pipeline.ledger.backlog import Backlog
from pipeline.ledger.dead_letters import DeadLetters, first_line
from pipeline.ledger.intake import Intake
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.ledger.store import LedgerStore, text
from pipeline.logs import logger
from pipeline.records.batch import WIRE_VERSION, digest
from pipeline.records.delivery import KEEP_DONE_S, Claim, Meta, Stage, WorkloadEnd, half_ids, not_newer
from pipeline.records.payload import pack_pushed, unpack
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.redis.arguments import named_arguments
from pipeline.settings import Settings
from pipeline.units import listed

if TYPE_CHECKING:
    import polars as pl

# Turns the records of a batch into a frame, and names the formats of their headers (sources/pushed.py).
Framing = Callable[["pl.DataFrame | Pushed", tuple[str, ...]], tuple["pl.DataFrame", tuple[str, ...]]]

# Pause before a batch of a newer build is offered to all workers again; that build's workers claim it
# meanwhile.
NEWER_PAUSE_S: Final = 2.0
DRIFT_KEEP_S: Final = 30 * 86_400
# Observations that wait for the watcher: those of minutes to hours, in little memory.
MAX_OBSERVATIONS: Final = 10_000
MAX_OBSERVED_BYTES: Final = 64 << 20
MAX_REASON: Final = 500  # characters of a failure's reason that an entry keeps


class ClaimRefused(StrEnum):
    """Why a batch was not claimed."""

    UNKNOWN = "unknown"  # no entry of this id
    FINISHED = "finished"  # done, dead or split
    ELSEWHERE = "elsewhere"  # in another stage
    HELD = "held"  # by another worker
    EARLY = "early"  # in its pause after a failure
    TRIED = "tried"  # an attempt has failed, and only a first attempt was asked for
    NEWER = "newer"  # of a newer build; released for its workers
    UNREADABLE = "unreadable"  # became a dead letter


class Ledger:
    """All moves of a claimed batch; `intake`, `backlog` and `dead_letters` hold the others. One per
    process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.store = LedgerStore(client, settings)
        self.client, self.settings = client, settings
        self.keys, self.scripts = self.store.keys, self.store.scripts
        self.intake = Intake(self.store)
        self.backlog = Backlog(self.store)
        self.dead_letters = DeadLetters(self.store)

    def claim(self, batch_id: str, stage: Stage, owner: str, *, first: bool = False) -> Claim | ClaimRefused:
        """Claims a batch for a stage, or says why not. `first`: only for its first attempt."""
        k, s = self.keys, self.settings.internal
        args = ClaimArgs(
            batch_id=batch_id,
            stage=stage,
            owner=owner,
            ttl_ms=s.claim_ttl_ms,
            max_attempts=s.max_attempts,
            first=first,
        )
        answer = self.scripts.run(
            "ledger/claim", [k.batch(batch_id), k.due, k.in_flight], [named_arguments(args)]
        )
        word = text(answer[0])
        if word not in ("claimed", "exhausted"):
            return ClaimRefused(word)
        entry = {text(a): text(b) for a, b in zip(answer[3::2], answer[4::2], strict=True)}
        seq = text(answer[1])
        try:
            meta = Meta.load(entry.get("meta", ""), batch_id)
            if stage is not Stage.INGEST:  # later stages read the work of earlier workers
                not_newer(int(entry.get("work_wire") or 0))
        except TooNew as exc:
            # A worker that only wanted to take the batch along does not keep it from others.
            pause_s = 0.0 if first else NEWER_PAUSE_S
            self._release(batch_id, seq, reason=str(exc), delay_s=pause_s, counted=False)
            return ClaimRefused.NEWER
        except BadPayload as exc:
            # No worker can ever process it, so it must not come back for ever.
            self._entry_to_dead_letters(batch_id, seq, str(exc))
            return ClaimRefused.UNREADABLE
        return Claim(
            batch_id=batch_id,
            stage=stage,
            seq=seq,
            attempts=int(answer[2]),
            exhausted=word == "exhausted",
            workload=entry["workload"],
            lines=int(entry["lines"]),
            records=int(entry["records"]),
            rescore=entry.get("kind") == "rescore",
            backfill=entry.get("backfill") == "1",
            meta=meta,
            error=entry.get("error", ""),
            accepted_ms=int(entry.get("accepted_ms") or 0),
        )

    @contextmanager
    def holding(
        self, claim: Claim, *, limit_s: float, on_timeout: Callable[[list[Claim]], None] = lambda _: None
    ) -> Iterator[ClaimRenewal]:
        """Renews the claim, and claims that the body adds, in the background while the body works.

        After `limit_s` renewal stops and `on_timeout` is called with the claims, which then expire.
        """
        pause_s = self.settings.internal.claim_ttl_ms / 3000
        renewal = ClaimRenewal(
            [claim], self.renew_all, pause_s=pause_s, limit_s=limit_s, on_timeout=on_timeout
        )
        renewal.start()
        try:
            yield renewal
        finally:
            renewal.stop()

    def renew(self, claim: Claim) -> bool:
        """True while the claim is ours."""
        return self.renew_all([claim])[0]

    def renew_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Which of the claims are ours, in one round trip."""
        k, ttl_ms = self.keys, self.settings.internal.claim_ttl_ms
        calls: list[tuple[str, list[str], list[Any]]] = [
            (
                "ledger/renew",
                [k.batch(c.batch_id), k.due],
                [named_arguments(RenewArgs(batch_id=c.batch_id, seq=c.seq, ttl_ms=ttl_ms))],
            )
            for c in claims
        ]
        if len(calls) == 1:
            return [bool(self.scripts.run(*calls[0]))]
        return [bool(answer) for answer in self.scripts.run_all(calls)]

    def check(self, claim: Claim) -> None:
        """Renews the claim before a change outside Redis. Raises ClaimLost."""
        _must_hold(self.renew(claim), claim)

    def advance(self, claim: Claim, to: Stage, work: "pl.DataFrame | None" = None) -> None:
        """Hands the batch to its next stage, with the work of this one. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        args = AdvanceArgs(
            batch_id=bid,
            seq=claim.seq,
            stage=to,
            overdue_ms=self.settings.internal.overdue_ms,
            work_wire=WIRE_VERSION,
        )
        keys = [k.batch(bid), k.due, k.counts, k.work(bid)]
        _must_hold(self.scripts.run("ledger/advance", keys, [named_arguments(args), _packed(work)]), claim)

    def commit(
        self,
        claim: Claim,
        *,
        warming: bool,
        outcomes: Mapping[str, int],
        version: str = "",
        measured: Mapping[str, int] | None = None,
        observation: bytes = b"",
    ) -> None:
        """Ends a batch of one workload that is in every sink; see WorkloadEnd. Raises ClaimLost."""
        end = WorkloadEnd(
            workload=claim.workload,
            lines=claim.lines,
            records=claim.records,
            outcomes=outcomes,
            version=version,
            measured=measured or {},
            observation=observation,
        )
        self.commit_all(claim, [end], warming=warming)

    def commit_all(self, claim: Claim, ends: Sequence[WorkloadEnd], *, warming: bool) -> None:
        """Ends a batch that is in every sink, with the counts of each of its workloads. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        drift: dict[str, Counter[str]] = {}
        for end in ends:
            if any(end.measured.values()):
                drift.setdefault(end.version, Counter()).update(end.measured)
        args = CommitArgs(
            batch_id=bid,
            seq=claim.seq,
            keep_s=KEEP_DONE_S,
            warming=warming,
            workloads=[
                WorkloadCounts(lines=end.lines, records=end.records, totals=_in_turn(end.outcomes))
                for end in ends
            ],
            drift=[_in_turn(counted) for counted in drift.values()],
            drift_keep_s=DRIFT_KEEP_S,
            max_observations=MAX_OBSERVATIONS,
            max_observed_bytes=MAX_OBSERVED_BYTES,
        )
        keys = [k.batch(bid), k.due, k.counts, k.payload(bid), k.work(bid), k.warming]
        keys += [
            k.watching("observations"),
            k.watching(),
            k.in_flight,
            *(k.totals(end.workload) for end in ends),
        ]
        keys += [k.drift(version) for version in drift]
        observations = [end.observation for end in ends if end.observation]
        _must_hold(self.scripts.run("ledger/commit", keys, [named_arguments(args), *observations]), claim)

    def separate(
        self, claim: Claim, parts: Mapping[str, PushedRecords], remaining: PushedRecords | None
    ) -> dict[str, str]:
        """Takes records out of a batch of several workloads: the new batches and their workloads.

        `parts`: the records of each new batch by workload. `remaining`: those that stay, None where none
        does: then the batch has ended. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        # A record leaves its batch once, so its place makes an id that no other part has.
        ids = {f"{bid}.{(records.places or [1])[0]}": workload for workload, records in parts.items()}
        # Without the claim it may be another payload or none, and the script changes nothing.
        payloads = [pack_pushed(records) for records in parts.values()]
        stays = b"" if remaining is None else pack_pushed(remaining)
        args = SeparateArgs(
            batch_id=bid,
            seq=claim.seq,
            keep_s=KEEP_DONE_S,
            overdue_ms=self.settings.internal.overdue_ms,
            lines=0 if remaining is None else remaining.lines,
            records=0 if remaining is None else remaining.height,
            parts=[
                SeparatePart(
                    batch_id=part_id,
                    content=digest(part_id),
                    lines=records.lines,
                    records=records.height,
                    workload=workload,
                )
                for part_id, (workload, records) in zip(ids, parts.items(), strict=True)
            ],
        )
        keys = [k.batch(bid), k.due, k.counts, k.payload(bid), k.in_flight]
        keys += [key for part_id in ids for key in (k.batch(part_id), k.payload(part_id))]
        _must_hold(
            self.scripts.run("ledger/separate", keys, [named_arguments(args), stays, *payloads]), claim
        )
        return ids

    def release(self, claim: Claim, *, reason: str, delay_s: float, counted: bool) -> None:
        """Gives the batch back for another attempt; `counted` when the batch itself was at fault."""
        self._release(claim.batch_id, claim.seq, reason=reason, delay_s=delay_s, counted=counted)

    def _release(self, batch_id: str, seq: str, *, reason: str, delay_s: float, counted: bool) -> None:
        args = ReleaseArgs(
            batch_id=batch_id,
            seq=seq,
            delay_ms=int(delay_s * 1000),
            reason=reason[:MAX_REASON],
            counted=counted,
        )
        keys = [self.keys.batch(batch_id), self.keys.due]
        self.scripts.run("ledger/release", keys, [named_arguments(args)])

    def give_up(
        self,
        claim: Claim,
        reason: str,
        *,
        apart: Sequence[int] = (),
        framing: Framing = lambda records, formats: (_frame(records), formats),
    ) -> list[str]:
        """After the last attempt: bisects the batch, or makes it a dead letter if it is one record or
        unreadable.

        `apart`: rows known to be at fault; they become one half, or a dead letter when they are all rows.
        `framing` makes records of pushed lines, because a batch is split between records only. Returns the
        ids of the two halves, [] for a dead letter. Raises ClaimLost."""
        frame = None
        try:
            if not claim.rescore:
                frame, formats = framing(self.payload(claim.batch_id), claim.meta.formats)
                claim = replace(claim, meta=replace(claim.meta, formats=formats))
        except BadPayload as exc:
            reason = reason if str(exc) in reason else f"{reason}; {exc}"
        # The halves of a batch have one workload. Who can tell its workloads apart separates them first.
        if frame is None or frame.height < 2 or len(apart) == frame.height or claim.several:
            self.dead_letter(claim, reason)
            return []
        if apart:
            import polars as pl

            numbered = frame.with_row_index("row")
            bad = pl.col("row").is_in(list(apart))
            return self._bisect(claim, (numbered.filter(~bad).drop("row"), numbered.filter(bad).drop("row")))
        middle = frame.height // 2
        return self._bisect(claim, (frame.head(middle), frame.tail(frame.height - middle)))

    def dead_letter(self, claim: Claim, reason: str) -> None:
        """Makes the batch a dead letter. Raises ClaimLost."""
        _must_hold(self._entry_to_dead_letters(claim.batch_id, claim.seq, reason), claim)

    def _entry_to_dead_letters(self, batch_id: str, seq: str, reason: str) -> int:
        k, shares = self.keys, self.store.shares(batch_id)
        keys = [k.batch(batch_id), k.due, k.counts, k.work(batch_id), k.dead, k.in_flight]
        keys += map(k.totals, shares)
        try:
            line = first_line(self.payload(batch_id))
        except (BadPayload, TooNew):
            line = 0
        args = DeadLetterArgs(
            batch_id=batch_id,
            seq=seq,
            reason=reason[:MAX_REASON],
            first_line=line,
            shares=list(shares.values()),
        )
        answer = int(self.scripts.run("ledger/dead_letter", keys, [named_arguments(args)]))
        if answer:
            logger(batch=batch_id, workload=listed(sorted(shares))).error(
                "batch.dead", reason=reason[:MAX_REASON]
            )
        return answer

    def _bisect(self, claim: Claim, halves: "tuple[pl.DataFrame, pl.DataFrame]") -> list[str]:
        k, s, bid = self.keys, self.settings.internal, claim.batch_id
        ids = half_ids(bid)
        args = BisectArgs(
            batch_id=bid,
            seq=claim.seq,
            keep_s=KEEP_DONE_S,
            overdue_ms=s.overdue_ms,
            max_attempts=s.max_attempts,
            meta=claim.meta.dump(),
            halves=[
                BatchPart(
                    batch_id=half_id,
                    content=digest(half_id),
                    lines=int(half["lines"].sum()),
                    records=half.height,
                )
                for half_id, half in zip(ids, halves, strict=True)
            ],
        )
        keys = [k.batch(bid), k.due, k.counts, k.payload(bid), k.work(bid), k.in_flight]
        keys += [key for half_id in ids for key in (k.batch(half_id), k.payload(half_id))]
        payloads = [_packed(half) for half in halves]
        _must_hold(self.scripts.run("ledger/bisect", keys, [named_arguments(args), *payloads]), claim)
        records = [half.height for half in halves]
        logger(batch=bid).warning("batch.split", records=records, reason=claim.error)
        return ids

    def state(self, batch_id: str) -> str:
        """A stage, or done, discarded, dead or split; "" for an unknown batch."""
        key = self.keys.batch(batch_id)
        state, discarded = self.store.ask(self.client.hmget, key, ["state", "discarded"])
        return "discarded" if discarded else text(state or b"")

    def payload(self, batch_id: str) -> "pl.DataFrame | Pushed":
        """The records of an unfinished or dead batch, as they were accepted. Raises BadPayload, TooNew."""
        return self._unpacked(batch_id, self.store.ask(self.client.get, self.keys.payload(batch_id)))

    def payloads(self, batch_ids: Sequence[str]) -> "Iterator[pl.DataFrame | Pushed]":
        """`payload` of each, read in one round trip and unpacked as the caller asks for it."""
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.get(self.keys.payload(batch_id))
        blobs = self.store.ask(pipe.execute) if batch_ids else []
        for batch_id, blob in zip(batch_ids, blobs, strict=True):
            yield self._unpacked(batch_id, blob)

    def _unpacked(self, batch_id: str, blob: bytes | None) -> "pl.DataFrame | Pushed":
        if blob is None:
            raise BadPayload(f"the records of batch {batch_id} are not in Redis")
        records = unpack(blob, max_bytes=self._max_frame_bytes())
        if isinstance(records, PushedLines | PushedRecords):
            return records
        from pipeline.records.schema import RAW_SCHEMA

        missing = [name for name in RAW_SCHEMA if name not in records.columns]
        if missing:
            raise BadPayload(f"the records of batch {batch_id} have no column {missing[0]!r}")
        return records

    def work(self, batch_id: str) -> "pl.DataFrame":
        """The work of earlier stages. Raises BadPayload."""
        from pipeline.records.schema import unpack_frame

        blob = self.store.ask(self.client.get, self.keys.work(batch_id))
        if blob is None:
            raise BadPayload(f"the work of batch {batch_id} is not in Redis")
        return unpack_frame(blob, max_bytes=self._max_frame_bytes())

    def _max_frame_bytes(self) -> int:
        """The size a batch may unpack to: its text twice, its columns, and room for larger settings
        elsewhere."""
        return max(64 << 20, self.settings.internal.batch_kib << 15)


def _in_turn(counted: Mapping[str, int]) -> list[str | int]:
    """Names and amounts in turn, without those of nothing."""
    return [x for name, amount in counted.items() if amount for x in (name, amount)]


def _packed(frame: "pl.DataFrame | None") -> bytes:
    from pipeline.records.schema import pack_frame

    return b"" if frame is None else pack_frame(frame)


def _frame(records: "pl.DataFrame | Pushed") -> "pl.DataFrame":
    if isinstance(records, PushedLines | PushedRecords):
        raise TypeError("pushed records need a framing; give one to give_up()")
    return records


def _must_hold(answer: Any, claim: Claim) -> None:
    if int(answer) != 1:
        raise ClaimLost(
            f"batch {claim.batch_id} is no longer ours in stage {claim.stage}; its new owner goes on"
        )
