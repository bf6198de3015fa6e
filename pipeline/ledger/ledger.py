"""The life of a batch. The ledger in Redis is the truth; a Celery message is only a wake-up.

    accept -> ingest -> [infer] -> [drain] -> [store] -> done          every arrow is a compare-and-set script
                 |         |          |          |
                 +---------+----------+----------+--> split (halves start at ingest) or dead, after bounded attempts

What always holds: accepted = stored + in flight + dead + discarded + skipped, in physical lines, per workload.
A worker must hold a claim (number + deadline on Redis time) to move a batch; an expired claim moves nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import redis

from pipeline.errors import BadInput, BadPayload, ClaimLost, CursorMoved, TooNew
from pipeline.ledger.batches import (
    BACKFILL_PART,
    HALF,
    UNFINISHED,
    Accepted,
    Claim,
    DeadLetter,
    Full,
    Meta,
    Stage,
    half_ids,
    not_newer,
)
from pipeline.ledger.renewal import Holding
from pipeline.logs import logger
from pipeline.records.batch import WIRE_VERSION, Batch, digest
from pipeline.records.payload import pack, unpack
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

if TYPE_CHECKING:
    import polars as pl

# The frame of a batch's records, and the formats that its headers have (sources/pushed.py).
Framing = Callable[["pl.DataFrame | Pushed", tuple[str, ...]], tuple["pl.DataFrame", tuple[str, ...]]]

# How long a batch of a newer build is left to that build's workers before it is offered to all again.
NEWER_PAUSE_S: Final = 2.0
DRIFT_KEEP_S: Final = 30 * 86_400
# A finished batch id is remembered for a week: no sender repeats a batch later than that.
KEEP_DONE_S: Final = 604_800
# What waits for the watcher: batches of minutes to hours, in less memory than it takes to notice that nobody watches.
MAX_OBSERVATIONS: Final = 10_000
MAX_OBSERVED_BYTES: Final = 64 << 20
# What may be used of Redis' memory when a batch is taken in: what waits grows as it is worked on.
MEMORY_PART: Final = 0.8
# Half a second drains a few batches on the slowest machine we tried; for the others a person has to do something.
RETRY_AFTER_S: Final = {"bytes": 0.5, "batches": 0.5, "memory": 0.5, "closed": 2.0, "dead": 5.0}
# Every refused try carries its payload to Redis and back for nothing, so whoever is refused again asks less often.
REFUSED_AGAIN: Final = 4


class _AcceptArgs(NamedTuple):
    """ARGV of ledger/accept.lua in its order; it says what each means."""

    batch_id: str
    payload: bytes
    content: str
    lines: int
    records: int
    workload: str
    meta: str
    stage: str
    max_bytes: int
    max_batches: int
    overdue_ms: int
    cursor_key: str
    cursor: str
    keep_s: int | str
    backfill: str
    max_dead_bytes: int
    max_bytes_backfill: int
    max_batches_backfill: int
    compare: str
    after: str
    memory_part: float


class Ledger:
    """All moves of a batch. One per process; safe for threads as redis-py's client is."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self._rescored_to = 0
        self._refused = 0  # tries in a row

    # ---- taking in -------------------------------------------------------------------------------

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
        """Take a batch in, moving its source's cursor in the same step. `skip`: only count its lines; `backfill`: it
        waits behind fresh ones, and leaves room for them. `after`: the cursor that the batch continues from, "" for
        none; None when nobody compares.

        Raises BadInput when the id is known with other content, CursorMoved when the cursor is not `after`,
        RedisUnavailable when Redis cannot take it.
        """
        k, s = self.keys, self.settings
        if HALF in batch.batch_id:
            raise BadInput(
                f"batch id {batch.batch_id!r} has a {HALF}, which marks parts of split batches; use another id"
            )
        bid = batch.batch_id
        keys = [
            k.batch(bid), k.payload(bid), k.due, k.counts, k.workloads, k.totals(batch.workload), k.cursors,
            k.closed, k.dead,
        ]  # fmt: skip
        max_bytes = s.intake.max_pending_mib * 2**20
        packed = pack(batch)
        args = _AcceptArgs(
            batch_id=bid,
            payload=packed.blob,
            content=packed.content,
            lines=packed.lines,
            records=packed.records,
            workload=batch.workload,
            meta=_meta(batch).dump(),
            stage=Stage.INGEST.value,
            max_bytes=max_bytes,
            max_batches=s.internal.max_pending_batches,
            overdue_ms=s.internal.overdue_ms,
            cursor_key=cursor_key,
            cursor=cursor,
            keep_s=KEEP_DONE_S if skip else "",
            backfill="1" if backfill else "",
            max_dead_bytes=s.intake.max_dead_mib * 2**20,
            max_bytes_backfill=int(max_bytes * BACKFILL_PART),
            max_batches_backfill=max(1, int(s.internal.max_pending_batches * BACKFILL_PART)),
            compare="" if after is None else "1",
            after=after or "",
            memory_part=MEMORY_PART,
        )
        answer = self.scripts.run("ledger/accept", keys, list(args))
        match _text(answer[0]):
            case "accepted":
                self._refused = 0
                return Accepted(batch_id=bid, pending_batches=int(answer[1]))
            case "skipped":
                return Accepted(batch_id=bid, skipped=True)
            case "duplicate":
                return Accepted(batch_id=bid, duplicate=True)
            case "full":
                reason = _text(answer[3])
                pause = RETRY_AFTER_S[reason] * min(2**self._refused, REFUSED_AGAIN)
                self._refused += 1
                return Full(
                    pending_bytes=int(answer[1]),
                    pending_batches=int(answer[2]),
                    reason=reason,
                    retry_after_s=pause,
                    refused=self._refused,
                )
            case "moved":
                raise CursorMoved(
                    f"{batch.source} goes on from another place than batch {bid}: Redis lost its last moments, or somebody "
                    "else reads the same",
                    _text(answer[1]),
                )
            case _:
                raise BadInput(f"batch id {bid!r} was accepted before with other content; use a new id")

    def refusal(self) -> Full | None:
        """What accept answers to any fresh batch now, None while it takes them in."""
        s = self.settings
        with answering():
            closed, counts = self.client.exists(self.keys.closed), self.counts()
            memory: Any = self.client.info("memory")
            dead = self.client.zcard(self.keys.dead)
        held, batches = counts.get("bytes", 0), counts.get("batches", 0)
        if closed:
            reason = "closed"
        elif dead and counts.get("dead_bytes", 0) >= s.intake.max_dead_mib * 2**20:
            reason = "dead"
        elif batches and memory["used_memory"] > MEMORY_PART * memory.get("maxmemory", 0) > 0:
            reason = "memory"
        elif batches and held >= s.intake.max_pending_mib * 2**20:
            reason = "bytes"
        elif batches >= s.internal.max_pending_batches:
            reason = "batches"
        else:
            return None
        return Full(
            pending_bytes=held, pending_batches=batches, reason=reason, retry_after_s=RETRY_AFTER_S[reason]
        )

    def close_door(self, why: str, *, for_s: float | None = None) -> None:
        """Take nothing new in from now on, `why` in words for operators; what is in is worked off. Stays until
        `open_door`; closing twice keeps the first reason and its time.

        `for_s`: it opens by itself after so long, unless `keep_door` puts that off; closing it for good ends that.
        """
        closed = json.dumps({"since_ms": self.now_ms(), "why": why}, ensure_ascii=True)
        if for_s is not None:
            self._ask(self.client.set, self.keys.closed, closed, nx=True, px=round(for_s * 1000))
        elif not self._ask(self.client.set, self.keys.closed, closed, nx=True) and (
            int(self._ask(self.client.pttl, self.keys.closed)) >= 0
        ):
            self._ask(self.client.set, self.keys.closed, closed)

    def keep_door(self, why: str, *, for_s: float) -> None:
        """Keep a door that was closed with these words closed for so long from now on; no other is touched."""
        if self.door() == why:
            self._ask(self.client.pexpire, self.keys.closed, round(for_s * 1000))

    def open_door(self) -> bool:
        """Take batches in again; False when the door was open."""
        return bool(self._ask(self.client.delete, self.keys.closed))

    def door(self) -> str | None:
        """Why nothing is taken in, None while the door is open."""
        closed = self._ask(self.client.get, self.keys.closed)
        if closed is None:
            return None
        try:
            return str(json.loads(closed)["why"])
        except (ValueError, KeyError, TypeError):
            return _text(closed)  # an operator's own words, set by hand

    def cursor(self, cursor_key: str) -> str | None:
        """Where the source goes on, or None when it was never read."""
        value = self._ask(self.client.hget, self.keys.cursors, cursor_key)
        return None if value is None else _text(value)

    def cursors(self, cursor_keys: Sequence[str]) -> list[str | None]:
        """`cursor` of several sources at once."""
        if not cursor_keys:
            return []
        values = self._ask(self.client.hmget, self.keys.cursors, list(cursor_keys))
        return [None if value is None else _text(value) for value in values]

    def forget_cursor(self, cursor_key: str) -> None:
        """Of a source that cannot be read again nobody needs to know where it ended."""
        self._ask(self.client.hdel, self.keys.cursors, cursor_key)

    # ---- working ---------------------------------------------------------------------------------

    def claim(self, batch_id: str, stage: Stage, owner: str, *, first: bool = False) -> Claim | str:
        """Claim a batch for a stage, or say in a word why not (finished, held, elsewhere, early, unknown, unreadable;
        newer: it was given back for a worker of the build that wrote it; tried: an attempt has failed, and only a `first`
        one was asked for)."""
        k, s = self.keys, self.settings
        answer = self.scripts.run(
            "ledger/claim",
            [k.batch(batch_id), k.due],
            [
                batch_id,
                stage.value,
                owner,
                s.internal.claim_ttl_ms,
                s.internal.max_attempts,
                "1" if first else "",
            ],
        )
        word = _text(answer[0])
        if word not in ("claimed", "exhausted"):
            return word
        entry = {_text(a): _text(b) for a, b in zip(answer[3::2], answer[4::2], strict=True)}
        try:
            meta = Meta.load(entry.get("meta", ""), batch_id)
            if stage is not Stage.INGEST:  # the others go on with what a worker before them has worked out
                not_newer(int(entry.get("work_wire") or 0))
        except TooNew as exc:
            pause = (
                0.0 if first else NEWER_PAUSE_S
            )  # who only wanted to take it along does not keep it from others
            self._release(batch_id, str(answer[1]), reason=str(exc), delay_s=pause, counted=False)
            return "newer"
        except BadPayload as exc:
            # Nobody will ever be able to work on it, so it must not come back for ever.
            self._bury_entry(batch_id, str(answer[1]), entry["workload"], str(exc))
            return "unreadable"
        return Claim(
            batch_id=batch_id,
            stage=stage,
            seq=str(answer[1]),
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
        self, claim: Claim, *, at_most_s: float, late: Callable[[list[Claim]], None] = lambda _: None
    ) -> Iterator[Holding]:
        """Renew the claim in the background while the body works, and those that are added to it, but not for ever:
        after `at_most_s` they are left to expire, and `late` is called with them (ledger/renewal.py)."""
        pause_s = self.settings.internal.claim_ttl_ms / 3000
        held = Holding([claim], self.renew_all, pause_s=pause_s, at_most_s=at_most_s, late=late)
        held.start()
        try:
            yield held
        finally:
            held.stop()

    def renew(self, claim: Claim) -> bool:
        """True while the claim is ours."""
        return self.renew_all([claim])[0]

    def renew_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Which of the claims are ours, in one round trip."""
        k, ttl_ms = self.keys, self.settings.internal.claim_ttl_ms
        calls: list[tuple[str, list[str], list[Any]]] = [
            ("ledger/renew", [k.batch(c.batch_id), k.due], [c.batch_id, c.seq, ttl_ms]) for c in claims
        ]
        if len(calls) == 1:
            return [bool(self.scripts.run(*calls[0]))]
        return [bool(answer) for answer in self.scripts.run_all(calls)]

    def check(self, claim: Claim) -> None:
        """Renew the claim, or raise ClaimLost: for the moment before something outside Redis is changed."""
        _held(self.renew(claim), claim)

    def advance(self, claim: Claim, to: Stage, work: "pl.DataFrame | None" = None) -> None:
        """Hand the batch to its next stage, with what was worked out so far. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        done = self.scripts.run(
            "ledger/advance",
            [k.batch(bid), k.due, k.counts, k.work(bid)],
            [
                bid, claim.seq, to.value, _packed(work), self.settings.internal.overdue_ms,
                WIRE_VERSION,
            ],
        )  # fmt: skip
        _held(done, claim)

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
        """The batch is in every sink. `outcomes` are line counters to add, `measured` what drift is told from, under
        the version it was answered with; `observation` is for the watcher, b"" for none. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        totals = [x for name, amount in outcomes.items() if amount for x in (name, amount)]
        drift = [x for name, amount in (measured or {}).items() if amount for x in (name, amount)]
        done = self.scripts.run(
            "ledger/commit",
            [
                k.batch(bid), k.due, k.counts, k.totals(claim.workload), k.payload(bid), k.work(bid), k.warming,
                k.drift(version), k.watching("observations"), k.watching(),
            ],
            [
                bid, claim.seq, KEEP_DONE_S, "1" if warming else "0", len(totals) // 2, DRIFT_KEEP_S,
                observation, MAX_OBSERVATIONS, MAX_OBSERVED_BYTES, *totals, *drift,
            ],
        )  # fmt: skip
        _held(done, claim)

    def release(self, claim: Claim, *, reason: str, delay_s: float, counted: bool) -> None:
        """Give the batch back to be tried again; `counted` when the batch itself was at fault."""
        self._release(claim.batch_id, claim.seq, reason=reason, delay_s=delay_s, counted=counted)

    def _release(self, batch_id: str, seq: str, *, reason: str, delay_s: float, counted: bool) -> None:
        self.scripts.run(
            "ledger/release",
            [self.keys.batch(batch_id), self.keys.due],
            [batch_id, seq, int(delay_s * 1000), reason[:500], "1" if counted else "0"],
        )

    def give_up(
        self,
        claim: Claim,
        reason: str,
        *,
        apart: Sequence[int] = (),
        framing: Framing = lambda records, formats: (_frame(records), formats),
    ) -> list[str]:
        """After the last attempt: split the batch, or bury it when it is one record or cannot be read.

        `apart`: rows that are known to be at fault; they are split off, and buried together when it is all of them.
        `framing` makes records of pushed lines, which are split between records only.
        Returns the ids of the two parts, [] when it was buried.
        """
        frame = None
        try:
            if not claim.rescore:
                frame, formats = framing(self.payload(claim.batch_id), claim.meta.formats)
                claim = replace(claim, meta=replace(claim.meta, formats=formats))
        except BadPayload as exc:
            reason = reason if str(exc) in reason else f"{reason}; {exc}"
        if frame is None or frame.height < 2 or len(apart) == frame.height:
            self._bury(claim, reason)
            return []
        if apart:
            import polars as pl

            numbered = frame.with_row_index("row")
            bad = pl.col("row").is_in(list(apart))
            return self._split(claim, (numbered.filter(~bad).drop("row"), numbered.filter(bad).drop("row")))
        middle = frame.height // 2
        return self._split(claim, (frame.head(middle), frame.tail(frame.height - middle)))

    def _bury(self, claim: Claim, reason: str) -> None:
        _held(self._bury_entry(claim.batch_id, claim.seq, claim.workload, reason), claim)

    def _bury_entry(self, batch_id: str, seq: str, workload: str, reason: str) -> int:
        k = self.keys
        keys = [k.batch(batch_id), k.due, k.counts, k.totals(workload), k.work(batch_id), k.dead]
        done = int(self.scripts.run("ledger/bury", keys, [batch_id, seq, reason[:500]]))
        if done:
            logger(batch=batch_id, workload=workload).error("batch.dead", reason=reason[:500])
        return done

    def _split(self, claim: Claim, halves: "tuple[pl.DataFrame, pl.DataFrame]") -> list[str]:
        k, s, bid = self.keys, self.settings, claim.batch_id
        ids = half_ids(bid)
        keys = [k.batch(bid), k.due, k.counts, k.payload(bid), k.work(bid)]
        args: list[Any] = [bid, claim.seq, KEEP_DONE_S, s.internal.overdue_ms, s.internal.max_attempts]
        for half_id, half in zip(ids, halves, strict=True):
            keys += [k.batch(half_id), k.payload(half_id)]
            args += [half_id, _packed(half), digest(half_id), int(half["lines"].sum()), half.height]
        args.append(claim.meta.dump())
        _held(self.scripts.run("ledger/split", keys, args), claim)
        records = [half.height for half in halves]
        logger(batch=bid).warning("batch.split", records=records, reason=claim.error)
        return ids

    def state(self, batch_id: str) -> str:
        """Where a batch is: a stage, done, discarded, dead or split; "" when it is unknown."""
        state, discarded = self._ask(self.client.hmget, self.keys.batch(batch_id), ["state", "discarded"])
        return "discarded" if discarded else _text(state or b"")

    def payload(self, batch_id: str) -> "pl.DataFrame | Pushed":
        """The records of an unfinished or dead batch, as they were accepted. Raises BadPayload, TooNew."""
        blob = self._ask(self.client.get, self.keys.payload(batch_id))
        if blob is None:
            raise BadPayload(f"the records of batch {batch_id} are not in Redis")
        records = unpack(blob, max_bytes=self._frame_bytes())
        if isinstance(records, PushedLines | PushedRecords):
            return records
        from pipeline.records.schema import RAW_SCHEMA

        missing = [name for name in RAW_SCHEMA if name not in records.columns]
        if missing:
            raise BadPayload(f"the records of batch {batch_id} have no column {missing[0]!r}")
        return records

    def work(self, batch_id: str) -> "pl.DataFrame":
        """What earlier stages worked out. Raises BadPayload."""
        from pipeline.records.schema import unpack_frame

        blob = self._ask(self.client.get, self.keys.work(batch_id))
        if blob is None:
            raise BadPayload(f"the work of batch {batch_id} is not in Redis")
        return unpack_frame(blob, max_bytes=self._frame_bytes())

    def _frame_bytes(self) -> int:
        """What a batch may unpack to: its text twice (raw and message), its columns, and room for larger settings elsewhere."""
        return max(64 << 20, self.settings.internal.batch_kib << 15)

    # ---- looking after ---------------------------------------------------------------------------

    def overdue(self, limit: int = 1_000, *, until_ms: int | None = None) -> list[tuple[str, Stage]]:
        """Unfinished batches whose time has come, now or by `until_ms`: never taken, given back, or with an expired
        claim."""
        until = self.now_ms() if until_ms is None else until_ms
        ids = [
            _text(x)
            for x in self._ask(self.client.zrangebyscore, self.keys.due, "-inf", until, start=0, num=limit)
        ]
        if not ids:
            return []
        pipe = self.client.pipeline(transaction=False)
        for batch_id in ids:
            pipe.hget(self.keys.batch(batch_id), "state")
        states = self._ask(pipe.execute)
        found, others = [], []
        for batch_id, state in zip(ids, states, strict=True):
            if state is not None and _text(state) in UNFINISHED:
                found.append((batch_id, Stage(_text(state))))
            # Compared again there: an operator or a new model may have put it back to work meanwhile.
            elif not self.scripts.run("ledger/tidy", [self.keys.batch(batch_id), self.keys.due], [batch_id]):
                others.append(batch_id)
        self.postpone(others)
        return found

    def backfills(self, batch_ids: Sequence[str]) -> set[str]:
        """Those of these batches that wait behind fresh ones."""
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.hget(self.keys.batch(batch_id), "backfill")
        found = self._ask(pipe.execute)
        return {batch_id for batch_id, value in zip(batch_ids, found, strict=True) if value == b"1"}

    def owners(self, batch_ids: Sequence[str]) -> dict[str, str]:
        """The workloads of those of these batches that are known."""
        if not batch_ids:
            return {}
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.hget(self.keys.batch(batch_id), "workload")
        found = self._ask(pipe.execute)
        return {
            batch_id: _text(workload)
            for batch_id, workload in zip(batch_ids, found, strict=True)
            if workload is not None
        }

    def postpone(self, batch_ids: Sequence[str]) -> None:
        """Do not report these as overdue again before `overdue_ms`."""
        if batch_ids:
            at = self.now_ms() + self.settings.internal.overdue_ms
            self._ask(self.client.zadd, self.keys.due, dict.fromkeys(batch_ids, at), xx=True)

    def start_rescoring(self, limit: int, *, has_model: Callable[[str], bool]) -> list[str]:
        """Send batches that were stored while warming, and whose workload has a model now, through the path again;
        returns their ids."""
        # Where only some workloads have a model, the others must not hide theirs: so more are looked at than sent, and
        # where none of those was ready, the next call looks further on.
        first, many = self._rescored_to, 10 * limit
        ids = [_text(x) for x in self._ask(self.client.zrange, self.keys.warming, first, first + many - 1)]
        owners = self.owners(ids)
        ready = [i for i in ids if i not in owners or has_model(owners[i])]
        self._rescored_to = first + many if not ready and len(ids) == many else 0
        k = self.keys
        return [
            batch_id
            for batch_id in ready[:limit]
            if self.scripts.run(
                "ledger/rescore",
                [k.batch(batch_id), k.due, k.counts, k.warming],
                [batch_id, self.settings.internal.overdue_ms],
            )
        ]

    def pending(self) -> tuple[int, int]:
        """(batches in flight, batches that wait for a model) at one moment: a batch moves from one to the other."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hget(self.keys.counts, "batches")
        pipe.zcard(self.keys.warming)
        batches, warming = self._ask(pipe.execute)
        return int(batches or 0), int(warming)

    def warming(self) -> int:
        """Batches that wait for a model."""
        return int(self._ask(self.client.zcard, self.keys.warming))

    def unseen(self) -> int:
        """Stored batches that the watcher has not looked at, and rows that it found and no sink has."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.llen(self.keys.watching("observations"))
            pipe.llen(self.keys.watching("outbox"))
            return sum(map(int, pipe.execute()))

    def watching(self) -> dict[str, float]:
        """How the watcher gets on: open sessions and incidents, observations that wait, those that were dropped at the
        limit, and seconds since its last look while there was anything to look at."""
        k = self.keys
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.hgetall(k.watching())
            pipe.llen(k.watching("observations"))
            pipe.hlen(k.watching("sessions"))
            numbers, waits, sessions = pipe.execute()
        known = _ints(numbers)
        now = self.now_ms()
        return {
            "sessions": sessions,
            "incidents": known.get("incidents", 0),
            "observations": waits,
            "dropped": known.get("dropped", 0),
            "age_s": max(0, now - known.get("round_ms", now)) / 1000,
        }

    def counts(self) -> dict[str, int]:
        """batches, bytes and stage:<name> in flight."""
        return _ints(self._ask(self.client.hgetall, self.keys.counts))

    def totals(self) -> dict[str, dict[str, int]]:
        """Line counters by workload."""
        names = sorted(_text(x) for x in self._ask(self.client.smembers, self.keys.workloads))
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self.keys.totals(name))
        return dict(zip(names, map(_ints, self._ask(pipe.execute)), strict=True))

    def now_ms(self) -> int:
        """Redis time in milliseconds; the only clock of the ledger."""
        seconds, micros = self._ask(self.client.time)
        return int(seconds) * 1000 + int(micros) // 1000

    # ---- dead letters ----------------------------------------------------------------------------

    def dead(self, limit: int = 1_000) -> list[DeadLetter]:
        """The newest dead letters first."""
        letters = []
        for raw_id in self._ask(self.client.zrevrange, self.keys.dead, 0, limit - 1):
            letter = self.dead_letter(_text(raw_id))
            if letter is not None:
                letters.append(letter)
        return letters

    def dead_letter(self, batch_id: str) -> DeadLetter | None:
        """One dead letter, None when there is none of that id."""
        entry = text_map(self._ask(self.client.hgetall, self.keys.batch(batch_id)))
        if entry.get("state") != "dead":
            return None
        try:
            records = self.payload(batch_id)
            if isinstance(records, PushedLines | PushedRecords):
                first_line = 1
            else:
                first_line = int(records["line"].min() or 0)  # type: ignore[arg-type] # of numbers
        except (BadPayload, TooNew):
            first_line = 0
        try:
            source = Meta.load(entry.get("meta", "")).source
        except (BadPayload, TooNew):
            source = "?"
        return DeadLetter(
            batch_id=batch_id,
            workload=entry["workload"],
            source=source,
            first_line=first_line,
            lines=int(entry["lines"]),
            died_in=entry.get("died_in", ""),
            reason=entry.get("error", ""),
            died=datetime.fromtimestamp(int(entry["dead_ms"]) / 1000, UTC),
        )

    def retry(self, batch_id: str) -> bool:
        """Put a dead letter back to work; False when there is none of that id."""
        k, workload = self.keys, self._workload(batch_id)
        keys = [k.batch(batch_id), k.due, k.counts, k.totals(workload), k.dead]
        return bool(self.scripts.run("ledger/retry", keys, [batch_id, self.settings.internal.overdue_ms]))

    def discard(self, batch_id: str) -> bool:
        """Forget a dead letter; its lines stay counted as discarded. False when there is none of that id."""
        k, workload = self.keys, self._workload(batch_id)
        keys = [k.batch(batch_id), k.payload(batch_id), k.totals(workload), k.dead, k.counts]
        return bool(self.scripts.run("ledger/discard", keys, [batch_id, KEEP_DONE_S]))

    def _workload(self, batch_id: str) -> str:
        return _text(self._ask(self.client.hget, self.keys.batch(batch_id), "workload") or b"")

    def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain Redis command, with redis-py's errors turned into ours."""
        with answering():
            return call(*args, **kwargs)


def _meta(batch: Batch) -> Meta:
    return Meta(
        source=batch.source,
        source_key=batch.source_key,
        purpose=batch.purpose,
        arrived=batch.arrived,
        formats=batch.formats,
        zone=batch.zone,
    )


def _packed(frame: "pl.DataFrame | None") -> bytes:
    from pipeline.records.schema import pack_frame

    return b"" if frame is None else pack_frame(frame)


def _frame(records: "pl.DataFrame | Pushed") -> "pl.DataFrame":
    if isinstance(records, PushedLines | PushedRecords):
        raise TypeError("pushed records need a framing; give one to give_up()")
    return records


def _held(answer: Any, claim: Claim) -> None:
    if int(answer) != 1:
        raise ClaimLost(
            f"batch {claim.batch_id} is no longer ours in stage {claim.stage}; its new owner goes on"
        )


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _ints(flat: Mapping[bytes, bytes]) -> dict[str, int]:
    return {_text(name): int(value) for name, value in flat.items()}
