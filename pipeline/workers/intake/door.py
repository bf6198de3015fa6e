"""The door of the intake: the requests of a moment are taken in by one script, and answered after it.

A batch costs the pipeline the same whatever is in it, so requests gather in a window. One commit runs at a
time; the next window gathers meanwhile. A request is taken in whole or not at all. A process
that dies between script and answer has taken the request in, and its identity tells the retry.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.producer import Producer
from pipeline.records.batch import Batch
from pipeline.records.delivery import NO_IDENTITY, Accepted, Full, Known, RequestIdentity
from pipeline.records.pushed import PushedRecords
from pipeline.service.senders import SenderCounts, SentBy
from pipeline.sources.protocols.contract import Decoded
from pipeline.upkeep import start_task
from pipeline.workers.intake.batches import (
    CountedRecords,
    lines_and_bytes,
    take_rows,
    window_batches,
    with_usable_names,
)
from pipeline.workers.intake.taking import IDLE_S, Turns

# Between two commits, unless a window is full sooner. A batch costs stage ingest 22 ms however small it is: a
# tenth of a core at WINDOW_S. A sender that waits for each answer sends once in a window. So the window is
# short where it is well filled, and grows with the batches that wait in the pipeline.
SHORT_S: Final = 0.05
WINDOW_S: Final = 0.25
FILLED: Final = 1_000  # records of a window whose lines cost as much as their batch
WAITING_FEW: Final = 8  # batches in the pipeline that lengthen the window by SHORT_S
WINDOW_BYTES: Final = 2 << 20
HELD_BYTES: Final = 64 << 20  # undecided requests of this process
PATIENCE_S: Final = 2.0  # for room, inside the request: it spares most senders a retry
RETRY_S: Final = 0.25
# No room comes within PATIENCE_S where a person has to act.
AT_ONCE: Final = frozenset({"closed", "dead"})


class IdentityConflict(BadInput):
    """A declared key that was used for another body."""


T = TypeVar("T")


class Reply(Protocol):
    """Where the answer to a request goes: a future, or what writes it at once."""

    def done(self) -> bool:
        """Whether nobody waits for it any more."""

    def set_result(self, answer: Accepted | Full, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """A request until it is decided."""

    records: PushedRecords
    identity: RequestIdentity
    lines: int
    size: int
    backfill: bool
    since: float
    answer: "_Counted"

    def decide(self, answer: Accepted | Full) -> None:
        if not self.answer.done():  # its sender may have gone
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False, kw_only=True)
class _Counted:
    """The end of a request: it leaves the memory of the door, is counted, and its sender is told."""

    door: "Door"
    sender: SentBy
    records: PushedRecords
    lines: int
    size: int
    held: int  # bytes of it in `Door.held`
    since: float
    reply: Reply

    def done(self) -> bool:
        return self.reply.done()

    def set_result(self, answer: Accepted | Full) -> None:
        self.count(_outcome(answer))
        self.reply.set_result(answer)

    def set_exception(self, error: Exception) -> None:
        self.count(_outcome(error))
        self.reply.set_exception(error)

    def count(self, outcome: str) -> None:
        """Once for each request."""
        self.door.held -= self.held
        duplicate = outcome == "duplicate"
        in_now = duplicate or outcome == "accepted"
        lines = self.lines if in_now and self.records.height else 0
        seconds = asyncio.get_running_loop().time() - self.since
        metrics.request_ended(self.sender.protocol, outcome, lines, self.size, seconds)
        self.door.senders.heard(
            self.sender, lines=0 if duplicate else lines, refused=not in_now, duplicate=duplicate
        )


def _outcome(end: Accepted | Full | Exception) -> str:
    """How a request ended, as the counters name it."""
    match end:
        case Full():
            return "full"
        case Accepted():
            return "duplicate" if end.duplicate else "accepted"
        case IdentityConflict():
            return "conflict"
        case RedisUnavailable():
            return "away"
        case _:
            return "failed"


class Door:
    """Takes decoded requests in. Belongs to the event loop that calls `take`."""

    def __init__(self, producer: Producer, senders: SenderCounts | None = None) -> None:
        self.producer = producer
        self.senders = senders or SenderCounts()
        self.held = 0  # bytes of undecided requests
        self.turns = Turns(self._due)
        self._window: _Window | None = None

    async def take(
        self,
        decoded: Decoded,
        *,
        identity: RequestIdentity = NO_IDENTITY,
        sender: SentBy,
        since: float | None = None,
    ) -> Accepted | Full:
        """`identity`: of identity.py. If each record has one, records that are in already are left out.
        `since`: when the request came, None for now.

        Accepted: every record is stored exactly once, whatever happens from here on. Full: nothing was
        taken.

        Raises Undecodable for records that are no text, IdentityConflict, and RedisUnavailable when it is
        unknown whether the request is in."""
        reply: asyncio.Future[Accepted | Full] = asyncio.get_running_loop().create_future()
        counted = self.put(decoded, identity=identity, sender=sender, since=since, reply=reply)
        try:
            return await reply
        finally:
            if reply.cancelled():
                counted.count("failed")

    def put(
        self,
        decoded: Decoded,
        *,
        identity: RequestIdentity,
        sender: SentBy,
        since: float | None,
        reply: Reply,
    ) -> _Counted:
        """As `take`. Its answer or its error goes to `reply`, perhaps before this returns; Undecodable is
        raised."""
        records = with_usable_names(decoded.records)
        lines, size = lines_and_bytes(records)
        began = asyncio.get_running_loop().time() if since is None else since
        counted = _Counted(
            door=self,
            sender=sender,
            records=records,
            lines=lines,
            size=size,
            held=0,
            since=began,
            reply=reply,
        )
        if not records.height:
            counted.set_result(Accepted(batch_id=""))
        elif self.held and self.held + size > HELD_BYTES:
            counted.set_result(
                Full(pending_bytes=self.held, pending_batches=0, reason="process", retry_after_s=RETRY_S)
            )
        else:
            counted.held = size
            self.held += size
            if self._window is None:
                self._window = _Window(self.producer, self.turns)
            self._window.add(
                _Waiting(
                    records=records,
                    identity=identity,
                    lines=lines,
                    size=size,
                    backfill=self.producer.is_past(records.latest),
                    since=began,
                    answer=counted,
                )
            )
        return counted

    def _due(self) -> float:
        return self._window.due if self._window else 0.0

    def hurry(self) -> None:
        """Gathers no longer and has no patience: the process is about to end."""
        self.turns.close()
        if self._window is not None:
            self._window.hurry()

    async def close(self) -> None:
        """Decides what waits. No request may come after it."""
        self.hurry()
        if self._window is not None:
            await self._window.close()


@dataclass(slots=True, eq=False)
class _Window:
    """The requests that gather, and the task that commits them."""

    producer: Producer
    turns: Turns
    waiting: "deque[_Waiting]" = field(default_factory=deque)
    committed: float = float("-inf")  # when the last commit began
    pause_s: float = SHORT_S  # from then on to the next one
    closing: bool = False
    # Of its own: requests that are decoded must not hold up a commit.
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="intake-commit")
    )
    _records: int = 0  # of the requests that wait, and their bytes
    _bytes: int = 0
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    @property
    def due(self) -> float:
        """When the next commit may begin."""
        return self.committed + self.pause_s

    def add(self, request: _Waiting) -> None:
        if self._task is None or self._task.done():
            self._task = start_task("intake-window", self._run())
        self.waiting.append(request)
        self._records += request.records.height
        self._bytes += request.size
        self._some.set()
        self._look()

    def hurry(self) -> None:
        self.closing = True
        self._some.set()
        self._enough.set()

    async def close(self) -> None:
        if self._task is not None:
            await self._task
        self.thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def _look(self) -> None:
        if self._records >= self.producer.settings.internal.batch_records or self._bytes >= WINDOW_BYTES:
            self._enough.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not (self.closing and not self.waiting):
            await self._some.wait()
            if self.waiting and not self.closing:
                due = max(self.waiting[0].since + IDLE_S, self.due)
                if due > loop.time():
                    await _either(self._enough, due - loop.time())
            if self.turns.release():
                await asyncio.sleep(0)  # they come to this window
            unit = self._cut()
            if unit:
                before, self.committed = self.committed, loop.time()
                try:
                    if not await self._commit(unit):
                        self.committed = before
                except Exception as exc:  # noqa: BLE001 - a dead window would never answer nor give memory back
                    logger().exception("intake.failed")
                    for request in unit:
                        request.fail(exc)
            self._enough.clear()
            self._records = sum(request.records.height for request in self.waiting)
            self._bytes = sum(request.size for request in self.waiting)
            self._look()
            if not self.waiting and not self.closing:
                self._some.clear()

    def _cut(self) -> list[_Waiting]:
        """The next unit: requests of one class, and none whose identity it has already."""
        unit: list[_Waiting] = []
        later: list[_Waiting] = []
        names: set[str | bytes] = set()
        records = size = 0
        limit = self.producer.settings.internal.batch_records
        while self.waiting and records < limit and size < WINDOW_BYTES:
            request = self.waiting.popleft()
            if request.answer.done():
                continue
            identity = request.identity
            names_of_request = identity.records or ((identity.name,) if identity.name else ())
            if (unit and request.backfill != unit[0].backfill) or not names.isdisjoint(names_of_request):
                later.append(request)
                continue
            names.update(names_of_request)
            unit.append(request)
            records += request.records.height
            size += request.size
        self.waiting.extendleft(reversed(later))
        return unit

    async def _commit(self, unit: list[_Waiting]) -> bool:
        """Decides every request of the unit, or puts it back while there may be room soon. False where all of
        it was in already, which costs the pipeline nothing."""
        while unit:
            try:
                answer = await self._accepted(unit)
                if isinstance(answer, Full):
                    await self._wait_for_room(unit, answer)
                    return True
            except RedisUnavailable as exc:
                for request in unit:
                    request.fail(exc)
                return True
            except Exception as exc:  # noqa: BLE001 - logged there; one must not spoil the others
                await self._one_by_one(unit, exc)
                return True
            match answer:
                case Known():
                    unit = _without_known(unit, answer)
                case Accepted():
                    by_backlog = SHORT_S * (1 + answer.pending_batches / WAITING_FEW)
                    by_records = WINDOW_S * (1 - sum(r.records.height for r in unit) / FILLED)
                    self.pause_s = min(WINDOW_S, max(by_backlog, by_records))
                    for request in unit:
                        request.decide(answer)
                    return True
        return False

    async def _accepted(self, unit: Sequence[_Waiting]) -> Accepted | Full | Known:
        """Tries the same batches again where the answer of Redis was lost."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        identities = [request.identity for request in unit]
        batches: list[Batch] = []

        def accept() -> Accepted | Full | Known:
            if not batches:
                batches.extend(self._batches(unit))
            return self.producer.accept_all(batches, identities, backfill=unit[0].backfill)

        while True:
            try:
                answer = await self._in_thread(accept)
            except RedisUnavailable:
                if self.closing or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                # "Repeated" only says that an earlier try of this unit came through.
                return replace(answer, duplicate=False) if isinstance(answer, Accepted) else answer

    def _batches(self, unit: Sequence[_Waiting]) -> list[Batch]:
        s = self.producer.settings
        return window_batches(
            [CountedRecords(request.records, request.lines, request.size) for request in unit],
            arrived=self.producer.clock(),
            zone=s.intake.time_zone,
            max_records=s.internal.batch_records,
            max_bytes=s.internal.batch_kib * 4096,
            alone=self.producer.skips,
        )

    async def _one_by_one(self, unit: Sequence[_Waiting], exc: Exception) -> None:
        """One request must not spoil the others of its window."""
        if len(unit) == 1:
            logger().exception("intake.failed", exc_info=exc)
            unit[0].fail(exc)
            return
        for request in unit:
            await self._commit([request])

    async def _wait_for_room(self, unit: Sequence[_Waiting], answer: Full) -> None:
        """Answers those that have waited long enough. Puts the others back, first in line."""
        loop = asyncio.get_running_loop()
        room = answer.reason not in AT_ONCE and not self.closing
        full: Full | None = answer
        while full is not None:
            for request in unit:
                if not room or loop.time() - request.since >= PATIENCE_S:
                    request.decide(full)
            unit = [request for request in unit if not request.answer.done()]
            if not unit:
                return
            await asyncio.sleep(RETRY_S)
            try:
                full = await self._in_thread(self.producer.ledger.intake.full)
            except RedisUnavailable:
                full = answer
        self.waiting.extendleft(reversed(unit))


def _without_known(unit: Sequence[_Waiting], known: Known) -> list[_Waiting]:
    """The requests, or their records, that are not in yet."""
    duplicates, conflicts, records = set(known.duplicates), set(known.conflicts), set(known.records)
    remaining: list[_Waiting] = []
    begin = 0
    for number, request in enumerate(unit):
        names = request.identity.records
        fresh = [row for row in range(len(names)) if begin + row not in records]
        begin += len(names)
        if number in conflicts:
            request.fail(
                IdentityConflict(
                    "this key was used for another body before; give every request a key of its own"
                )
            )
        elif number in duplicates or (names and not fresh):
            request.decide(Accepted(batch_id="", duplicate=True))
        else:
            if len(fresh) < len(names):
                request.records = take_rows(request.records, fresh)
                request.lines = request.records.lines
                request.identity = RequestIdentity(records=tuple(names[row] for row in fresh))
            remaining.append(request)
    return remaining


async def _either(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event or the time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
