"""Reads the pieces of one slot of a backfill and sends their lines as class backfill.

A batch and the cursor of its text are accepted in one step. So the reader after a killed one goes on where
that one stopped, and nothing is lost or doubled."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from celery.worker import state as worker_state

from pipeline.errors import (
    BadInput,
    BadPayload,
    CursorMoved,
    ObjectChanged,
    RedisUnavailable,
    StoreUnavailable,
)
from pipeline.logs import logger
from pipeline.producer import Producer, workload_of_file
from pipeline.records.batch import digest
from pipeline.records.delivery import Accepted, Full
from pipeline.redis.leases import HeldLease
from pipeline.sources.backfill.archive import Archive
from pipeline.sources.backfill.pieces import BackfillPlan, Piece
from pipeline.sources.backfill.plans import EndPieceArgs, PieceReading, Plans, Taken
from pipeline.sources.backfill.reading import Borders, read_piece
from pipeline.sources.chunks import Chunk, Cursor, Limits
from pipeline.sources.files import TextReading
from pipeline.sources.packed.archives import Source

# Readers of a piece that ended before a line of it was accepted: the next death is its own fault.
MOST_TRIES: Final = 4
REPORT_S: Final = 1.0
AWAY_S: Final = 1.0  # Redis did not answer
NAP_S: Final = 0.25  # within a pause, after which a lost lease is noticed


class Stopped(Exception):
    """The reader has to let go: it lost its lease, its process ends, or the plan was cancelled."""


class _Refused(Exception):
    """The ledger does not take a batch of this piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSlot:
    """The right to read one piece at a time."""

    plan: BackfillPlan
    name: str
    holding: HeldLease


class SlotReader:
    """The reader of one slot."""

    def __init__(
        self,
        plans: Plans,
        producer: Producer,
        archive: Archive,
        slot: ReaderSlot,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plans, self.producer, self.archive, self.slot = plans, producer, archive, slot
        self.clock = clock
        self.reader = socket.gethostname()
        self.log = logger(backfill=slot.plan.name, slot=slot.name)
        self._reported = 0.0
        self._lines = self._bytes = 0  # of the piece in hand
        self._waits = ""
        self._notes: list[str] = []

    def work(self, *, within_s: float) -> bool:
        """Reads pieces for about so long; True where more may be left. Raises StoreUnavailable, Stopped."""
        plan, lease, end = self.slot.plan, self.slot.holding.lease, self.clock() + within_s
        while claim := self.plans.take(plan.name, self.slot.name, lease):
            fate = self._fate(claim)
            if fate is not None:
                self.plans.finish(plan.name, lease, fate)
                self.log.info("piece.ended", object=claim.piece.name, fate=fate.fate, lines=fate.lines)
            if self.clock() > end:
                return True
        return False

    def _fate(self, claim: Taken) -> EndPieceArgs | None:
        """Reads a piece; how it ended, None where it has to be taken again. Raises Stopped."""
        self._lines = self._bytes = 0
        self._notes, self._waits = [], ""
        shown = self.archive.shown(claim.piece.name)
        if claim.tries > MOST_TRIES:
            why = f"readers ended here without a line more, {claim.tries - 1} in a row; look at their logs"
            return self._failed(claim, f"{shown}: {why}")
        try:
            self._read(claim)
        except CursorMoved:  # Redis lost its last moments: read on from where the cursor stands
            return None
        except ObjectChanged as exc:
            self._refuse_other_archive(claim, str(exc))
            return self._failed(claim, str(exc))
        except _Refused as exc:
            return self._failed(claim, str(exc))
        except BadInput as exc:
            self._notes.append(str(exc))
            return self._ended(claim, "skipped")
        except StoreUnavailable as exc:
            return self._away(claim, str(exc))
        return self._ended(claim, "done")

    def _refuse_other_archive(self, claim: Taken, why: str) -> None:
        """Gives the piece back and raises StoreUnavailable when all of the archive is away from this machine,
        which is no fault of the object."""
        try:
            self.archive.check(self.slot.plan.root)
        except (StoreUnavailable, BadInput) as exc:
            args = EndPieceArgs(piece_id=claim.piece_id, slot=self.slot.name, fate="back", untried=True)
            self.plans.finish(self.slot.plan.name, self.slot.holding.lease, args)
            raise StoreUnavailable(
                f"{exc} ({why})" if isinstance(exc, StoreUnavailable) else str(exc)
            ) from exc

    def _away(self, claim: Taken, why: str) -> EndPieceArgs:
        """An object that cannot be read now goes back. Raises StoreUnavailable."""
        self._refuse_other_archive(claim, why)
        if claim.tries >= MOST_TRIES:
            return self._failed(claim, why)
        self._pause(AWAY_S * claim.tries)
        return EndPieceArgs(piece_id=claim.piece_id, slot=self.slot.name, fate="back")

    def _ended(self, claim: Taken, fate: str) -> EndPieceArgs:
        return EndPieceArgs(
            piece_id=claim.piece_id,
            slot=self.slot.name,
            fate=fate,
            lines=self._lines,
            bytes=claim.piece.bytes,
            notes=[_short(note) for note in dict.fromkeys(self._notes)],
        )

    def _failed(self, claim: Taken, why: str) -> EndPieceArgs:
        self.log.warning("piece.failed", object=claim.piece.name, why=why)
        return self.plans.failed(claim, self.slot.name, _short(why), lines=self._lines)

    # ---- lines -----------------------------------------------------------------------------------

    def _read(self, claim: Taken) -> None:
        piece, plan, settings = claim.piece, self.slot.plan, self.producer.settings
        borders = Borders(
            piece_bytes=plan.piece_bytes,
            known=lambda one, offset: self.plans.border(plan.name, one, offset),
            fix=lambda one, offset, found: self.plans.fix_border(plan.name, one, offset, found),
        )
        limits = Limits(
            max_records=settings.internal.batch_records,
            max_bytes=settings.internal.batch_kib * 1024,
            choice=plan.choice,
        )
        self._report(piece, again=True)
        readings = read_piece(
            self.archive,
            piece,
            lambda source: self._begin(piece, source),
            borders=borders,
            limits=limits,
            note=self._notes.append,
        )
        new = False
        for reading in readings:
            before = self._lines
            self._lines = before + reading.place.line
            stands = self._stored(piece, reading.source)
            for chunk in reading.chunks:
                self._send(piece, reading, chunk, stands)
                if not new:
                    new = True
                    self.plans.progressed(plan.name, claim.piece_id)
                stands = chunk.cursor.pack()
                self._lines, self._bytes = before + chunk.cursor.line, min(chunk.position, piece.bytes)

    def _send(self, piece: Piece, reading: TextReading, chunk: Chunk, after: str) -> Accepted:
        """Sends a chunk, and waits while the pipeline is full or Redis away."""
        source = reading.source
        workload = self._workload(piece, source)
        while True:
            self._report(piece)
            try:
                answer = self.producer.send_chunk(
                    chunk,
                    workload=workload,
                    source=self._shown(piece, source),
                    source_key=self._key("object", piece, source),
                    cursor_key=self._key("cursor", piece, source),
                    after=after,
                    backfill=True,
                )
            except BadInput as exc:
                raise _Refused(f"{self.archive.shown(piece.name)}: {exc}") from exc
            except RedisUnavailable:
                self._pause(AWAY_S)
                continue
            if isinstance(answer, Full):
                self._waits = str(answer)
                self._pause(answer.retry_after_s)
                continue
            self._waits = ""
            return answer

    def _begin(self, piece: Piece, source: Source) -> Cursor | None:
        stored = self._stored(piece, source)
        try:
            return Cursor.unpack(stored) if stored else None
        except BadPayload:
            return None  # from the beginning: what was accepted before is recognised by its batch ids

    def _stored(self, piece: Piece, source: Source) -> str:
        return self.producer.ledger.intake.cursor(self._key("cursor", piece, source)) or ""

    def _key(self, noun: str, piece: Piece, source: Source) -> str:
        """The same whatever plan the piece is of: an object is read once for a workload."""
        shown, workload = self.archive.shown(piece.name), self._workload(piece, source)
        member = ("member", source.member) if source.member else ()
        part = f"{piece.begin:x}-{piece.end:x}"
        return digest("backfill", noun, shown, piece.identity, part, workload, *member)

    def _workload(self, piece: Piece, source: Source) -> str:
        named = source.named if source.member else Path(self.archive.shown(piece.name))
        return self.slot.plan.workload or workload_of_file(named)

    def _shown(self, piece: Piece, source: Source) -> str:
        """The source of lines: a later range of an object counts its lines from its own beginning."""
        shown = self.archive.shown(piece.name)
        if source.member:
            return f"{shown}:{source.member}"
        return f"{shown}@{piece.begin}" if piece.begin else shown

    # ---- the loop's edge -------------------------------------------------------------------------

    def _report(self, piece: Piece, *, again: bool = False) -> None:
        """Says now and then how far the reader is. Raises Stopped."""
        self._stop_if_asked()
        if not again and self.clock() - self._reported < REPORT_S:
            return
        self._reported = self.clock()
        reading = PieceReading(
            name=piece.name, reader=self.reader, lines=self._lines, bytes=self._bytes, waits=self._waits
        )
        try:
            if not self.plans.report(self.slot.plan.name, self.slot.name, reading):
                raise Stopped
        except RedisUnavailable:
            self._pause(AWAY_S)

    def _stop_if_asked(self) -> None:
        # Celery's request to stop is an exit code, of which 0 is the usual one.
        told_to_stop = worker_state.should_stop is not None and worker_state.should_stop is not False
        if told_to_stop or self.slot.holding.lost.is_set():
            raise Stopped

    def _pause(self, seconds: float) -> None:
        """Raises Stopped."""
        end = self.clock() + seconds
        while (rest := end - self.clock()) > 0:
            self._stop_if_asked()
            time.sleep(min(NAP_S, rest))


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= 500 else sentence[:499] + "…"
