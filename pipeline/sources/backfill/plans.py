"""The plans of backfills in Redis: which pieces are open, in whose hand, ended or failed.

    open --take--> in the hand of a slot --finish--> done | skipped (no text log) | failed (changed, gone)
                       ^        | back (cannot be read now)
                       |        v
                  dead reader: the next holder of the slot's lease goes on with the piece

A plan is a work list. Exactly once comes from the cursors and batch ids of the pieces, which outlive it. A
slot is the right to read one piece at a time, under a lease; `parallel` is the number of slots."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec
import redis

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.leases import Lease, Leases
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings
from pipeline.sources.backfill.archive import ArchiveObject
from pipeline.sources.backfill.pieces import PIECE, PLAN, BackfillPlan, Piece, turn_of

KEEP_S: Final = 30 * 86_400  # a plan that has ended
MAX_PARALLEL: Final = 64
MOST_NOTES: Final = 200
TROUBLE_S: Final = 20
ADDED_AT_ONCE: Final = 200  # objects in one script
# All parts of a plan; finish.lua lets them expire.
PARTS: Final = (
    "state", "pieces", "open", "hands", "tries", "failed", "notes", "reading", "objects", "borders",
)  # fmt: skip


class AddedPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece in AddArgs."""

    piece_id: str
    rank: float
    bytes: int
    text: str


class AddedObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object in AddArgs."""

    name: str
    identity: str
    pieces: list[AddedPiece]


class AddArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Adds objects (add.lua)."""

    objects: list[AddedObject]


class TakePieceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Takes a piece (take.lua)."""

    holder: str
    token: str
    slot: str


class EndPieceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Ends the reading of a piece (finish.lua)."""

    piece_id: str = ""
    slot: str = ""
    holder: str = ""
    token: str = ""
    fate: str = "done"  # done, skipped, failed, back
    untried: bool = False  # for back: it was not the fault of the piece
    lines: int = 0
    bytes: int = 0
    failure: str = ""  # JSON, for failed
    notes: Sequence[str] = ()
    most_notes: int = MOST_NOTES
    keep_s: int = KEEP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A piece in the hand of a reader. `tries`: how often it was taken since a line of it was accepted."""

    piece_id: str
    piece: Piece
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A piece that cannot be read, and why."""

    name: str
    why: str
    lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReading:
    """A piece that is being read. `waits`: why it does not go on now, "" while it does."""

    name: str
    reader: str
    lines: int
    bytes: int
    waits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillView:
    """Where a backfill stands. `lines` are accepted, `bytes_read` of `bytes` are read."""

    name: str
    place: str
    state: str  # planning, reading, complete, cancelled
    created_ms: int
    parallel: int
    objects: int
    pieces: int
    done: int
    skipped: int
    failed: int
    bytes: int
    bytes_read: int
    lines: int
    readers: int
    waits: str = ""
    reading: list[PieceReading] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.state in ("complete", "cancelled")


class Plans:
    """Makes plans, hands out pieces, and tells how far they are. Methods raise RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.leases = Leases(client, settings)

    def key(self, name: str, part: str) -> str:
        return self.keys.backfill(name, part)

    # ---- planning --------------------------------------------------------------------------------

    def begin(self, plan: BackfillPlan, *, parallel: int) -> None:
        """Makes the plan, or goes on with the one of this name."""
        state = self.key(plan.name, "state")
        with answering():
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(state, "plan", PLAN.to_json(plan))
            pipe.hsetnx(state, "created_ms", str(now_ms(self.client)))
            pipe.hset(state, mapping={"state": "active", "planned": 0, "parallel": parallel})
            pipe.hdel(state, "ended_ms")
            for part in PARTS:
                pipe.persist(self.key(plan.name, part))
            pipe.zadd(self.keys.backfills, {plan.name: now_ms(self.client)})
            pipe.execute()

    def plan(self, name: str) -> BackfillPlan | None:
        """The plan of this name, None where there is none. Raises BadPayload, TooNew."""
        with answering():
            raw: Any = self.client.hget(self.key(name, "state"), "plan")
        return None if raw is None else PLAN.from_json(raw)

    def add(self, name: str, objects: Iterable[tuple[ArchiveObject, Sequence[Piece]]]) -> Iterator[str]:
        """Adds objects with their pieces; a word for each, as add.lua says."""
        waiting: list[AddedObject] = []
        for one, pieces in objects:
            added = [
                AddedPiece(piece_id=p.piece_id, rank=turn_of(p), bytes=p.bytes, text=PIECE.to_json(p))
                for p in pieces
            ]
            waiting.append(AddedObject(name=one.name, identity=one.identity, pieces=added))
            if len(waiting) >= ADDED_AT_ONCE:
                yield from self._add(name, waiting)
                waiting = []
        if waiting:
            yield from self._add(name, waiting)

    def _add(self, name: str, objects: list[AddedObject]) -> list[str]:
        keys = [self.key(name, part) for part in ("state", "objects", "pieces", "open", "failed")]
        words = self.scripts.run("backfill/add", keys, [named_arguments(AddArgs(objects=objects))])
        return [word.decode() for word in words]

    def planned(self, name: str) -> None:
        """Every object was added."""
        with answering():
            self.client.hset(self.key(name, "state"), "planned", "1")
        self._finish(name, "", EndPieceArgs())

    def cancel(self, name: str) -> None:
        """Readers stop at their next chunk; the plan is kept for `KEEP_S`. Raises BadInput without one."""
        if self.plan(name) is None:
            raise BadInput(f"there is no backfill {name!r}; `logweir backfill --list` shows their names")
        with answering():
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(self.key(name, "state"), "state", "cancelled")
            for part in PARTS:
                pipe.expire(self.key(name, part), KEEP_S)
            pipe.execute()

    # ---- readers ---------------------------------------------------------------------------------

    def resource(self, name: str, slot: str) -> str:
        """The name of the lease of a slot."""
        return f"backfill.{name}.{slot}"

    def free_slots(self, name: str) -> list[str]:
        """The slots that have something to read and that no reader holds."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.hmget(self.key(name, "state"), "state", "parallel")
            pipe.hkeys(self.key(name, "hands"))
            pipe.zcard(self.key(name, "open"))
            (state, parallel), hands, open_pieces = pipe.execute()
        if state != b"active":
            return []
        busy = [slot.decode() for slot in hands]
        others = [slot for slot in map(str, range(int(parallel or 1))) if slot not in busy]
        wanted = [slot for slot in busy if not self._is_held(name, slot)]
        for slot in others:
            if open_pieces <= 0:
                break
            if not self._is_held(name, slot):
                wanted.append(slot)
            open_pieces -= 1
        return wanted

    def _is_held(self, name: str, slot: str) -> bool:
        return self.leases.holder_of(self.resource(name, slot)) is not None

    def active(self) -> list[str]:
        """The names of plans that have not ended."""
        with answering():
            names: Any = self.client.zrange(self.keys.backfills, 0, -1)
            pipe = self.client.pipeline(transaction=False)
            for name in names:
                pipe.hmget(self.key(name.decode(), "state"), "state", "ended_ms")
            states = pipe.execute()
        return [
            name.decode()
            for name, (state, ended) in zip(names, states, strict=True)
            if state == b"active" and not ended
        ]

    def names(self) -> list[str]:
        """All plans, newest first; those that have expired are forgotten."""
        with answering():
            names: Any = self.client.zrevrange(self.keys.backfills, 0, -1)
            found = [raw.decode() for raw in names]
            pipe = self.client.pipeline(transaction=False)
            for name in found:
                pipe.exists(self.key(name, "state"))
            there = pipe.execute()
            missing = [name for name, exists in zip(found, there, strict=True) if not exists]
            if missing:
                self.client.zrem(self.keys.backfills, *missing)
        return [name for name in found if name not in missing]

    def take(self, name: str, slot: str, lease: Lease) -> Taken | None:
        """The next piece of this slot; None when nothing is left, the plan is cancelled or the lease lost."""
        parts = ("state", "pieces", "open", "hands", "tries")
        keys = [self.keys.lease(lease.resource), *(self.key(name, part) for part in parts)]
        args = TakePieceArgs(holder=lease.holder, token=str(lease.token), slot=slot)
        answer = self.scripts.run("backfill/take", keys, [named_arguments(args)])
        if answer[0] != b"piece":
            return None
        piece_id = answer[1].decode()
        return Taken(piece_id=piece_id, piece=PIECE.from_json(answer[2]), tries=int(answer[3]))

    def finish(self, name: str, lease: Lease, args: EndPieceArgs) -> None:
        """Ends the reading of a piece; nothing happens after the lease was lost."""
        named = msgspec.structs.replace(args, holder=lease.holder, token=str(lease.token))
        self._finish(name, lease.resource, named)
        if args.fate != "back":
            with answering():  # a slot's lease key needs no life beyond the plan's
                self.client.expire(self.keys.lease(lease.resource), KEEP_S)

    def _finish(self, name: str, resource: str, args: EndPieceArgs) -> None:
        keys = [self.keys.lease(resource or self.resource(name, "")), *(self.key(name, p) for p in PARTS)]
        self.scripts.run("backfill/finish", keys, [named_arguments(args)])

    def failed(self, claim: Taken, slot: str, why: str, *, lines: int) -> EndPieceArgs:
        """The end of a piece that cannot be read; its object may be added again."""
        failure = Failure(name=claim.piece.name, why=why, lines=lines)
        return EndPieceArgs(
            piece_id=claim.piece_id, slot=slot, fate="failed", failure=json.dumps(asdict(failure))
        )

    def progressed(self, name: str, piece_id: str) -> None:
        """A line of the piece was accepted since it was taken."""
        with answering():
            self.client.hdel(self.key(name, "tries"), piece_id)

    def report(self, name: str, slot: str, reading: PieceReading) -> bool:
        """How far a reader is, for people; False when the plan was cancelled."""
        with answering():
            self.client.hset(self.key(name, "reading"), slot, json.dumps(asdict(reading)))
        return self._field(name, "state") == "active"

    def complain(self, name: str, why: str) -> None:
        """Why a reader cannot begin; shown for TROUBLE_S."""
        with answering():
            self.client.set(self.key(name, "trouble"), why, ex=TROUBLE_S)

    def border(self, name: str, piece: Piece, offset: int) -> str | None:
        """The border that a reader has found at this offset; None before the first did."""
        with answering():
            raw: Any = self.client.hget(self.key(name, "borders"), _border_field(piece, offset))
        return None if raw is None else str(raw.decode())

    def fix_border(self, name: str, piece: Piece, offset: int, found: str) -> str:
        """Writes a border unless there is one; the answer is the one that stands."""
        with answering():
            self.client.hsetnx(self.key(name, "borders"), _border_field(piece, offset), found)
        return self.border(name, piece, offset) or found

    # ---- people ----------------------------------------------------------------------------------

    def view(self, name: str) -> BackfillView | None:
        """Where a backfill stands; None without one."""
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.hgetall(self.key(name, "state"))
            pipe.hgetall(self.key(name, "reading"))
            pipe.hgetall(self.key(name, "failed"))
            pipe.lrange(self.key(name, "notes"), 0, -1)
            pipe.get(self.key(name, "trouble"))
            pipe.hlen(self.key(name, "objects"))
            state, reading, failed, notes, trouble, objects = pipe.execute()
        fields = text_map(state)
        if "plan" not in fields:
            return None
        plan = PLAN.from_json(fields["plan"])
        failures = [Failure(**json.loads(text)) for text in failed.values()]
        by_slot = {slot.decode(): PieceReading(**json.loads(text)) for slot, text in reading.items()}
        now_read = list(by_slot.values())
        # A reader that died waits for nothing any more.
        alive = [one for slot, one in by_slot.items() if self._is_held(name, slot)]
        numbers = {n: int(fields.get(n, 0)) for n in ("pieces", "done", "skipped", "bytes", "lines")}
        waits = next((one.waits for one in alive if one.waits), "")
        return BackfillView(
            name=name,
            place=plan.place,
            state=_state(fields),
            created_ms=int(fields.get("created_ms", 0)),
            parallel=int(fields.get("parallel", 1)),
            objects=int(objects),
            failed=len(failures),
            bytes_read=int(fields.get("bytes_ended", 0)) + sum(r.bytes for r in now_read),
            readers=len(alive),
            waits=waits or (trouble.decode("utf-8", "replace") if trouble else ""),
            reading=now_read,
            failures=failures,
            notes=[note.decode("utf-8", "replace") for note in notes],
            **(
                numbers
                | {
                    "lines": numbers["lines"]
                    + sum(r.lines for r in now_read)
                    + sum(f.lines for f in failures)
                }
            ),
        )

    def _field(self, name: str, wanted: str) -> str:
        with answering():
            raw: Any = self.client.hget(self.key(name, "state"), wanted)
        return "" if raw is None else str(raw.decode())


def _state(fields: dict[str, str]) -> str:
    if fields.get("state") == "cancelled":
        return "cancelled"
    if fields.get("ended_ms"):
        return "complete"
    return "reading" if fields.get("planned") == "1" else "planning"


def _border_field(piece: Piece, offset: int) -> str:
    return digest("border", piece.name, piece.identity, f"{offset:x}")
