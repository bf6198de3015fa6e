"""The sender of `logweir send`: waits while the pipeline is full or Redis away, sends again what Redis has
lost, and says now and then how far it is."""

import contextlib
import time
from collections.abc import Callable
from typing import Final, TypeVar

from rich.console import Console

from pipeline.commands.common import remark
from pipeline.commands.recognition import TimeNotes
from pipeline.commands.send.resend_buffer import ResendBuffer, SentChunk
from pipeline.commands.send.tracking import LOOK_AT_ONCE, BatchTracking
from pipeline.errors import BadPayload, CursorMoved, RedisUnavailable
from pipeline.ledger.intake import CursorStep
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.records.delivery import Accepted, Full
from pipeline.settings import Settings
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.units import plural

SAY_EVERY_S: Final = 2.0
REMIND_S: Final = 60.0
REDIS_RETRY_S: Final = 1.0
WAIT_S: Final = 0.1
WATCHED_S: Final = 10.0  # without progress of the watcher; its rounds take a second
LOOK_S: Final = 0.25  # between two looks at followed files while a chunk waits
CONFIRM_S: Final = 1.0  # one question a second while a followed file is silent

T = TypeVar("T")


class Sender:
    """Sends chunks one after another."""

    def __init__(
        self,
        producer: Producer,
        settings: Settings,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        tracking: BatchTracking | None = None,
        *,
        backfill: bool | None = None,
        purpose: Purpose = Purpose.SCORE,
        choice: FormatChoice = DETECTED,
    ) -> None:
        self.producer = producer
        self.settings = settings
        self.console = console
        self.clock = clock
        self.tracking = tracking
        self.backfill = backfill
        self.purpose = purpose
        self.choice = choice
        self.lines = self.batches = self.duplicates = 0
        self.gone = False  # something that nobody can send again
        self.while_waiting: Callable[[], None] = lambda: None
        self.kept = ResendBuffer(clock)
        self.pace = FlushPolicy()  # a command that waits for lines reads one source
        self.stands: dict[str, str] = {}  # where the ledger's cursors stand, as far as we know
        self.full: Full | None = None  # what we wait for since `full_since`, last said at `full_said`
        self.full_since = 0.0
        self.full_said: float | None = None
        self.times, self.noted = TimeNotes(zone=settings.intake.time_zone), set[str]()
        self.told = (0, 0)
        self.began = self.said = self.confirmed = clock()

    def send(self, chunk: Chunk, *, workload: str, source: str, key: str, cursor_key: str) -> None:
        """Sends a chunk and waits until it is accepted, also while Redis is away or full.

        Chunks that a restarted Redis has lost are sent again first. Raises CursorMoved when the resend buffer
        holds them no more, or another sender reads the same.
        """
        while True:
            sent = SentChunk(
                chunk=chunk,
                workload=workload,
                source=source,
                source_key=key,
                cursor_key=cursor_key,
                after=self.stands[cursor_key],
            )
            try:
                answer = self._accepted(sent)
                break
            except CursorMoved as moved:
                self._resend(cursor_key, moved)
        self.kept.add(sent)
        self.times.see(source, chunk)
        self.batches += 1
        self.duplicates += answer.duplicate
        self.lines += 0 if answer.duplicate else int(chunk.records["lines"].sum())
        if self.tracking is not None:
            self.tracking.open.append(answer.batch_id)
            if self.batches % LOOK_AT_ONCE == 0:  # ended batches need no tracking
                with contextlib.suppress(RedisUnavailable):
                    self.tracking.look()
        self.say()

    def _accepted(self, sent: SentChunk) -> Accepted:
        while True:
            try:
                answer = self.producer.send_chunk(
                    sent.chunk,
                    workload=sent.workload,
                    source=sent.source,
                    source_key=sent.source_key,
                    cursor_key=sent.cursor_key,
                    purpose=self.purpose,
                    after=sent.after,
                    backfill=self.backfill,
                )
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)
                continue
            self.pace.answered(answer.pending_batches)
            if isinstance(answer, Full):
                self._held_up(answer)
                continue
            self._goes_on()
            self.stands[sent.cursor_key] = sent.chunk.cursor.pack()
            return answer

    def _held_up(self, full: Full) -> None:
        """Waits until the next try and rarely repeats its message: a drained pipeline may take hours."""
        now = self.clock()
        if self.full is None or self.full.reason != full.reason:
            self.full, self.full_since, self.full_said = full, now, None
        first = self.full_said is None
        if now - (self.full_said or self.full_since) >= (SAY_EVERY_S if first else REMIND_S):
            self.full_said = self.said = now
            self.console.print(f"waiting: {full}", markup=False, soft_wrap=True)
        self._pause(full.retry_after_s)

    def _goes_on(self) -> None:
        if self.full is not None and self.full_said is not None:
            waited = self.clock() - self.full_since
            self.console.print(f"going on after {waited:,.0f} s", markup=False)
        self.full = None

    def _resend(self, cursor_key: str, moved: CursorMoved) -> None:
        """Resends lost chunks unchanged, so that ids stay. Raises CursorMoved if the chunks are not in
        memory."""
        while lost := self.kept.since(cursor_key, moved.cursor):
            try:
                for sent in lost:
                    self._accepted(sent)
                return
            except CursorMoved as further:
                moved = further
        raise moved

    def begin(self, cursor_key: str) -> Cursor | None:
        """Where the ledger says that the source goes on; None for the beginning."""
        stored = self._ask(lambda: self.producer.ledger.intake.cursor(cursor_key))
        self.stands[cursor_key] = stored or ""
        try:
            return Cursor.unpack(stored) if stored else None
        except BadPayload:
            return None  # from the beginning: what was accepted before is recognised by its batch ids

    def pass_over(self, why: str, cursor: Cursor, cursor_key: str) -> None:
        """Says that lines of a source cannot be found, counts that, and moves the cursor behind them. Raises
        CursorMoved when the cursor has moved."""
        self.gone = True
        self.console.print(why, style="red", markup=False, soft_wrap=True)
        step = CursorStep(key=cursor_key, cursor=cursor.pack(), after=self.stands[cursor_key])
        stands = self._ask(lambda: self.producer.ledger.intake.move_cursor(step, lost=1))
        if stands != step.cursor:
            raise CursorMoved(f"{cursor_key} was read to another place", stands)
        self.stands[cursor_key] = stands

    def confirm(self, cursor_key: str) -> None:
        """See that Redis still has what it took, or send it again. Raises CursorMoved as `send` does."""
        stored = self._ask(lambda: self.producer.ledger.intake.cursor(cursor_key)) or ""
        self.confirmed = self.clock()
        if stored != self.stands[cursor_key]:
            self._resend(cursor_key, CursorMoved(f"{cursor_key} was read to another place", stored))

    def confirm_at_times(self, cursor_key: str) -> None:
        """While nothing new comes nobody else would notice."""
        if self.clock() - self.confirmed >= CONFIRM_S:
            self.confirm(cursor_key)

    def confirm_all(self) -> None:
        """Confirms every source of this command; the next command resends chunks that are not in memory."""
        stored = self.producer.ledger.intake.cursors(list(self.stands))
        for (cursor_key, stands), now in zip(list(self.stands.items()), stored, strict=True):
            if stands != (now or ""):
                with contextlib.suppress(CursorMoved):
                    self.confirm(cursor_key)

    def forget(self, cursor_key: str) -> None:
        self._ask(lambda: self.producer.ledger.intake.forget_cursor(cursor_key))
        del self.stands[cursor_key]

    def saving_the_rest(self, step: Callable[[], None], source: str, cursor_key: str) -> None:
        """Do it; where Redis lost more of a pipe than is kept here, name it, send what is kept, and go on."""
        lost: CursorMoved | None = None
        while True:
            try:
                if lost is not None:
                    self._resend(cursor_key, lost)
                return step()
            except CursorMoved as moved:
                first = self.kept.restart(cursor_key, moved.cursor)
                end = self.stands[cursor_key] if first is None else first.after
                self._lost(source, _line_of(moved.cursor) + 1, _line_of(end))
                self.stands[cursor_key] = moved.cursor
                lost = None if first is None else moved

    def _lost(self, source: str, first: int, last: int) -> None:
        self.gone = True
        self.console.print(
            f"Redis lost lines {first:,} to {last:,} of {source}, which are not kept here any more; send "
            "them again",
            style="red",
            markup=False,
            soft_wrap=True,
        )

    def _ask(self, question: Callable[[], T]) -> T:
        while True:
            try:
                return question()
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)

    def note_times(self) -> None:
        """Prints the notes on the times that were sent, each once."""
        for note in self.times.notes():
            if note not in self.noted:
                self.noted.add(note)
                remark(self.console, note)

    def say(self, *, final: bool = False) -> None:
        """How much was sent, every few seconds and at the end."""
        now = self.clock()
        reported = (self.lines, self.duplicates)
        if not final and (now - self.said < SAY_EVERY_S or reported == self.told):
            return
        self.said, self.told = now, reported
        rate = self.lines / max(0.001, now - self.began)
        verb = "was" if self.duplicates == 1 else "were"
        duplicates = f", {plural(self.duplicates, 'batch')} {verb} there already" if self.duplicates else ""
        self.console.print(
            f"{plural(self.lines, 'line')} accepted ({rate:,.0f} lines/s){duplicates}", markup=False
        )

    def wait_stored(self, tracking: BatchTracking) -> None:
        """Until every batch of this command has ended; one that waits for a model is stored, too."""
        while True:
            try:
                self.confirm_all()
                if tracking.look():
                    break
                why = tracking.waits()
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)
                continue
            self._wait(why, WAIT_S)
        behind = self._watched(tracking) if self.batches else 0
        sentence = tracking.unstored()
        if not sentence and behind:
            sentence = (
                f"everything accepted is stored; {plural(behind, 'batch')} {'is' if behind == 1 else 'are'} "
                "still looked at for sessions, rates and incidents"
            )
        if not self.batches:
            sentence = "this command sent nothing new, so there is nothing to wait for"
        self.console.print(sentence or "everything accepted is stored", markup=False, soft_wrap=True)

    def _watched(self, tracking: BatchTracking) -> int:
        """Waits while the watcher looks at the stored batches; the number that it has not looked at.

        Without a watcher, or with one that takes none for WATCHED_S, it gives up: the lines are stored.
        """
        moved, before = self.clock(), -1
        while True:
            try:
                behind = tracking.unwatched()
            except RedisUnavailable as exc:
                self._wait(f"waiting: {exc}", REDIS_RETRY_S)
                continue
            if behind != before:
                moved, before = self.clock(), behind
            if not behind or self.clock() - moved > WATCHED_S:
                return behind
            self._wait(
                f"{plural(behind, 'stored batch')} {'is' if behind == 1 else 'are'} not looked at yet "
                "for sessions, rates and incidents",
                WAIT_S,
            )

    def _wait(self, why: str, seconds: float) -> None:
        if self.clock() - self.said >= SAY_EVERY_S:
            self.said = self.clock()
            self.console.print(why, markup=False)
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        while seconds > 0:
            self.while_waiting()
            time.sleep(min(seconds, LOOK_S))
            seconds -= LOOK_S


def _line_of(cursor: str) -> int:
    return Cursor.unpack(cursor).line if cursor else 0
