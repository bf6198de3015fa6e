"""The life of a batch. The ledger in Redis is the truth; a Celery message is only a wake-up.

    accept -> ingest -> [infer] -> [drain] -> [store] -> done          every arrow is a compare-and-set script
                 |         |          |          |
                 +---------+----------+----------+--> split (halves start at ingest) or dead, after bounded attempts

What always holds: accepted = stored + in flight + dead + discarded + skipped, in physical lines, per workload.
A worker must hold a claim (number + deadline on Redis time) to move a batch; an expired claim moves nothing.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import polars as pl
import redis

from pipeline.errors import BadInput, BadPayload, ClaimLost, RedisUnavailable
from pipeline.keyspace import Keys, Scripts, answering, text_map
from pipeline.observe import logger
from pipeline.records import RAW_SCHEMA, WIRE_VERSION, Batch, Purpose, digest, pack_frame, unpack_frame
from pipeline.settings import Settings


def half_ids(batch_id: str) -> list[str]:
    """The ids of the two halves of a split batch: `x~0`, `x~1`; of such a half `x~00`, `x~01`."""
    return [f"{batch_id}{'' if HALF in batch_id else HALF}{side}" for side in ("0", "1")]


class Stage(StrEnum):
    """Where an unfinished batch waits; also the first part of its queue's name."""

    INGEST = "ingest"
    INFER = "infer"
    DRAIN = "drain"
    STORE = "store"


UNFINISHED: Final = tuple(Stage)
# Stands in the ids of halves and in no other, so that a half never takes the place of somebody's batch.
HALF: Final = "~"
DRIFT_KEEP_S: Final = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The batch is in. `duplicate`: its id had been accepted before, nothing was added. `skipped`: its workload is
    not watched, so it was only counted (setting `unwatched`)."""

    batch_id: str
    duplicate: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Too much is waiting; the batch was not taken. Try again after `retry_after_s`."""

    pending_bytes: int
    pending_batches: int
    retry_after_s: float


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
        """Raises BadPayload."""
        try:
            data = json.loads(text)
            if data["wire"] > WIRE_VERSION:
                raise BadPayload(
                    f"a batch has wire version {data['wire']}; this build reads up to {WIRE_VERSION}"
                )
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
    meta: Meta
    error: str


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


class Ledger:
    """All moves of a batch. One per process; safe for threads as redis-py's client is."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(client)
        self._rescored_to = 0

    # ---- taking in -------------------------------------------------------------------------------

    def accept(
        self, batch: Batch, *, cursor_key: str = "", cursor: str = "", skip: bool = False
    ) -> Accepted | Full:
        """Take a batch in, moving its source's cursor in the same step. `skip`: only count its lines.

        Raises BadInput when the id is known with other content, RedisUnavailable when Redis cannot take it.
        """
        k, s = self.keys, self.settings
        if HALF in batch.batch_id:
            raise BadInput(
                f"batch id {batch.batch_id!r} has a {HALF}, which marks parts of split batches; use another id"
            )
        payload = pack_frame(batch.records)
        content = _content(batch)
        meta = Meta(
            source=batch.source,
            source_key=batch.source_key,
            purpose=batch.purpose,
            arrived=batch.arrived,
            formats=batch.formats,
            zone=batch.zone,
        )
        bid = batch.batch_id
        answer = self.scripts.run(
            "accept",
            [k.batch(bid), k.payload(bid), k.due, k.counts, k.workloads, k.totals(batch.workload), k.cursors],
            [
                bid, payload, content, batch.physical_lines, batch.records.height, batch.workload, meta.dump(),
                Stage.INGEST.value, s.max_pending_mib * 2**20, s.max_pending_batches, s.overdue_ms,
                cursor_key, cursor, s.keep_done_s if skip else "",
            ],
        )  # fmt: skip
        match _text(answer[0]):
            case "accepted":
                return Accepted(batch_id=bid)
            case "skipped":
                return Accepted(batch_id=bid, skipped=True)
            case "duplicate":
                return Accepted(batch_id=bid, duplicate=True)
            case "full":
                # Half a second drains a few batches on the slowest machine we tried.
                return Full(pending_bytes=int(answer[1]), pending_batches=int(answer[2]), retry_after_s=0.5)
            case _:
                raise BadInput(f"batch id {bid!r} was accepted before with other content; use a new id")

    def cursor(self, cursor_key: str) -> str | None:
        """Where the source goes on, or None when it was never read."""
        value = self._ask(self.client.hget, self.keys.cursors, cursor_key)
        return None if value is None else _text(value)

    # ---- working ---------------------------------------------------------------------------------

    def claim(self, batch_id: str, stage: Stage, owner: str) -> Claim | str:
        """Claim a batch for a stage, or say in a word why not (finished, held, elsewhere, early, unknown)."""
        k, s = self.keys, self.settings
        answer = self.scripts.run(
            "claim",
            [k.batch(batch_id), k.due],
            [batch_id, stage.value, owner, s.claim_ttl_ms, s.max_attempts],
        )
        word = _text(answer[0])
        if word not in ("claimed", "exhausted"):
            return word
        entry = {_text(a): _text(b) for a, b in zip(answer[3::2], answer[4::2], strict=True)}
        try:
            meta = Meta.load(entry.get("meta", ""), batch_id)
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
            meta=meta,
            error=entry.get("error", ""),
        )

    @contextmanager
    def holding(self, claim: Claim, *, at_most_s: float) -> Iterator[Callable[[], bool]]:
        """Renew the claim in the background while the body works, but not for ever: a step that never ends loses it.

        Yields a function that says whether the claim was still ours at the last renewal. A body that ignores
        it does no harm: advance and commit compare the claim again.
        """
        stop, state = threading.Event(), {"held": True}

        def beat() -> None:
            last = time.monotonic() + at_most_s
            while time.monotonic() < last and not stop.wait(self.settings.claim_ttl_ms / 3000):
                try:
                    state["held"] = self.renew(claim)
                except RedisUnavailable:
                    continue  # the deadline decides; Redis may be back before it
                if not state["held"]:
                    return

        thread = threading.Thread(target=beat, name=f"claim-{claim.batch_id}", daemon=True)
        thread.start()
        try:
            yield lambda: state["held"]
        finally:
            stop.set()
            thread.join()

    def renew(self, claim: Claim) -> bool:
        """True while the claim is ours."""
        return bool(
            self.scripts.run(
                "renew",
                [self.keys.batch(claim.batch_id), self.keys.due],
                [claim.batch_id, claim.seq, self.settings.claim_ttl_ms],
            )
        )

    def check(self, claim: Claim) -> None:
        """Renew the claim, or raise ClaimLost: for the moment before something outside Redis is changed."""
        _held(self.renew(claim), claim)

    def advance(self, claim: Claim, to: Stage, work: pl.DataFrame | None = None) -> None:
        """Hand the batch to its next stage, with what was worked out so far. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        done = self.scripts.run(
            "advance",
            [k.batch(bid), k.due, k.counts, k.work(bid)],
            [bid, claim.seq, to.value, b"" if work is None else pack_frame(work), self.settings.overdue_ms],
        )
        _held(done, claim)

    def commit(
        self,
        claim: Claim,
        *,
        warming: bool,
        outcomes: Mapping[str, int],
        version: str = "",
        measured: Mapping[str, int] | None = None,
    ) -> None:
        """The batch is in every sink. `outcomes` are line counters to add, `measured` what drift is told from, under
        the version it was answered with. Raises ClaimLost."""
        k, bid = self.keys, claim.batch_id
        totals = [x for name, amount in outcomes.items() if amount for x in (name, amount)]
        drift = [x for name, amount in (measured or {}).items() if amount for x in (name, amount)]
        done = self.scripts.run(
            "commit",
            [
                k.batch(bid), k.due, k.counts, k.totals(claim.workload), k.payload(bid), k.work(bid), k.warming,
                k.drift(version),
            ],
            [
                bid, claim.seq, self.settings.keep_done_s, "1" if warming else "0", len(totals) // 2, DRIFT_KEEP_S,
                *totals, *drift,
            ],
        )  # fmt: skip
        _held(done, claim)

    def release(self, claim: Claim, *, reason: str, delay_s: float, counted: bool) -> None:
        """Give the batch back to be tried again; `counted` when the batch itself was at fault."""
        self.scripts.run(
            "release",
            [self.keys.batch(claim.batch_id), self.keys.due],
            [claim.batch_id, claim.seq, int(delay_s * 1000), reason[:500], "1" if counted else "0"],
        )

    def give_up(self, claim: Claim, reason: str, *, apart: Sequence[int] = ()) -> list[str]:
        """After the last attempt: split the batch, or bury it when it is one record or cannot be read.

        `apart`: rows that are known to be at fault; they are split off, and buried together when it is all of them.
        Returns the ids of the two parts, [] when it was buried.
        """
        try:
            frame = None if claim.rescore else self.payload(claim.batch_id)
        except BadPayload as exc:
            frame, reason = None, f"{reason}; {exc}"
        if frame is None or frame.height < 2 or len(apart) == frame.height:
            self._bury(claim, reason)
            return []
        if apart:
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
        done = int(self.scripts.run("bury", keys, [batch_id, seq, reason[:500]]))
        if done:
            logger(batch=batch_id, workload=workload).error("batch.dead", reason=reason[:500])
        return done

    def _split(self, claim: Claim, halves: tuple[pl.DataFrame, pl.DataFrame]) -> list[str]:
        k, s, bid = self.keys, self.settings, claim.batch_id
        ids = half_ids(bid)
        keys = [k.batch(bid), k.due, k.counts, k.payload(bid), k.work(bid)]
        args: list[Any] = [bid, claim.seq, s.keep_done_s, s.overdue_ms, s.max_attempts]
        for half_id, half in zip(ids, halves, strict=True):
            keys += [k.batch(half_id), k.payload(half_id)]
            args += [half_id, pack_frame(half), digest(half_id), int(half["lines"].sum()), half.height]
        _held(self.scripts.run("split", keys, args), claim)
        records = [half.height for half in halves]
        logger(batch=bid).warning("batch.split", records=records, reason=claim.error)
        return ids

    def state(self, batch_id: str) -> str:
        """Where a batch is: a stage, done, dead or split; "" when it is unknown."""
        return _text(self._ask(self.client.hget, self.keys.batch(batch_id), "state") or b"")

    def payload(self, batch_id: str) -> pl.DataFrame:
        """The records of an unfinished or dead batch, RAW_SCHEMA. Raises BadPayload."""
        blob = self._ask(self.client.get, self.keys.payload(batch_id))
        if blob is None:
            raise BadPayload(f"the records of batch {batch_id} are not in Redis")
        frame = unpack_frame(blob)
        missing = [name for name in RAW_SCHEMA if name not in frame.columns]
        if missing:
            raise BadPayload(f"the records of batch {batch_id} have no column {missing[0]!r}")
        return frame

    def work(self, batch_id: str) -> pl.DataFrame:
        """What earlier stages worked out. Raises BadPayload."""
        blob = self._ask(self.client.get, self.keys.work(batch_id))
        if blob is None:
            raise BadPayload(f"the work of batch {batch_id} is not in Redis")
        return unpack_frame(blob)

    # ---- looking after ---------------------------------------------------------------------------

    def overdue(self, limit: int = 1_000) -> list[tuple[str, Stage]]:
        """Unfinished batches whose time has come: never taken, given back, or with an expired claim."""
        now = self.now_ms()
        ids = [
            _text(x)
            for x in self._ask(self.client.zrangebyscore, self.keys.due, "-inf", now, start=0, num=limit)
        ]
        if not ids:
            return []
        pipe = self.client.pipeline(transaction=False)
        for batch_id in ids:
            pipe.hget(self.keys.batch(batch_id), "state")
        states = self._ask(pipe.execute)
        found = []
        for batch_id, state in zip(ids, states, strict=True):
            if state is not None and _text(state) in UNFINISHED:
                found.append((batch_id, Stage(_text(state))))
            else:
                self._ask(self.client.zrem, self.keys.due, batch_id)
        return found

    def postpone(self, batch_ids: Sequence[str]) -> None:
        """Do not report these as overdue again before `overdue_ms`."""
        if batch_ids:
            at = self.now_ms() + self.settings.overdue_ms
            self._ask(self.client.zadd, self.keys.due, dict.fromkeys(batch_ids, at), xx=True)

    def start_rescoring(self, limit: int, *, has_model: Callable[[str], bool]) -> list[str]:
        """Send batches that were stored while warming, and whose workload has a model now, through the path again;
        returns their ids."""
        # Where only some workloads have a model, the others must not hide theirs: so more are looked at than sent, and
        # where none of those was ready, the next call looks further on.
        first, many = self._rescored_to, 10 * limit
        ids = [_text(x) for x in self._ask(self.client.zrange, self.keys.warming, first, first + many - 1)]
        pipe = self.client.pipeline(transaction=False)
        for batch_id in ids:
            pipe.hget(self.keys.batch(batch_id), "workload")
        owners = self._ask(pipe.execute)
        ready = [i for i, owner in zip(ids, owners, strict=True) if owner is None or has_model(_text(owner))]
        self._rescored_to = first + many if not ready and len(ids) == many else 0
        k = self.keys
        return [
            batch_id
            for batch_id in ready[:limit]
            if self.scripts.run(
                "rescore",
                [k.batch(batch_id), k.due, k.counts, k.warming],
                [batch_id, self.settings.overdue_ms],
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
            first_line = int(self.payload(batch_id)["line"].min() or 0)  # type: ignore[arg-type]
        except BadPayload:
            first_line = 0
        try:
            source = Meta.load(entry.get("meta", "")).source
        except BadPayload:
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
        return bool(self.scripts.run("retry", keys, [batch_id, self.settings.overdue_ms]))

    def discard(self, batch_id: str) -> bool:
        """Forget a dead letter; its lines stay counted as discarded. False when there is none of that id."""
        k, workload = self.keys, self._workload(batch_id)
        keys = [k.batch(batch_id), k.payload(batch_id), k.totals(workload), k.dead]
        return bool(self.scripts.run("discard", keys, [batch_id, self.settings.keep_done_s]))

    def _workload(self, batch_id: str) -> str:
        return _text(self._ask(self.client.hget, self.keys.batch(batch_id), "workload") or b"")

    def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain Redis command, with redis-py's errors turned into ours."""
        with answering():
            return call(*args, **kwargs)


def _content(batch: Batch) -> str:
    """What makes a batch the same batch: whose it is and its records.

    Hashed by value: another Polars may write the same records as other Arrow bytes. Raw lines fill three columns.
    """
    filled = [name for name in RAW_SCHEMA if batch.records[name].null_count() < batch.records.height]
    columns = [map(str, batch.records[name].to_list()) for name in filled]
    return digest(batch.workload, *filled, *itertools.chain.from_iterable(columns))


def _held(answer: Any, claim: Claim) -> None:
    if int(answer) != 1:
        raise ClaimLost(
            f"batch {claim.batch_id} is no longer ours in stage {claim.stage}; its new owner goes on"
        )


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _ints(flat: Mapping[bytes, bytes]) -> dict[str, int]:
    return {_text(name): int(value) for name, value in flat.items()}
