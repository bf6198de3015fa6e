"""Cursors in a source, and chunks of records."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final

import msgspec
import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.sources import formats
from pipeline.sources.flush_policy import Due, FlushPolicy
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter

MAX_RECORDS: Final = 10_000  # as `batch_records` and `batch_kib` are shipped
MAX_BYTES: Final = 2048 * 1024
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in a source; all records before it were handed over.

    `offset` counts bytes of the unpacked text, `line` the physical lines begun before it. `inside`: the
    offset is within a line too long for one record. `identity` tells files of one name apart."""

    path: str
    identity: str
    offset: Count = 0
    line: Count = 0
    inside: bool = False

    def pack(self) -> str:
        """JSON."""
        return _CODEC.to_json(self)

    @classmethod
    def unpack(cls, text: str) -> "Cursor":
        """Raises BadPayload for other text and for a newer version."""
        return _CODEC.from_json(text)


_CODEC: Final = Codec(Cursor, version=1, what="a cursor", newer=BadPayload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Unparsed records and the place behind them. `position` counts consumed bytes of the packed file."""

    records: pl.DataFrame  # RAW_SCHEMA
    formats: tuple[str, ...]
    cursor: Cursor
    position: int

    def latest(self, *, arrived: datetime, zone: str) -> datetime | None:
        """The time of the last record, None without one."""
        last = formats.parse(self.records.tail(1), self.formats, arrived=arrived, zone=zone)
        moment = last["timestamp"].max()
        return moment if isinstance(moment, datetime) else None


class Assembly:
    """Bytes to chunks: cuts lines, joins records, cuts chunks at the limits.

    The ends of chunks depend on the text alone, not on the blocks, unless `flush` or `release` was called.
    """

    def __init__(self, start: Cursor, *, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._place = start
        # a line that the cursor is inside of has its number already
        first_line = start.line + 1
        self._cutter = LineCutter(offset=start.offset, inside=start.inside)
        self.framer = Framer(first_line=first_line)
        self._max_records, self._max_bytes = max_records, max_bytes
        self._pending: list[pl.DataFrame] = []
        self._pending_records = self._pending_bytes = 0
        self.unsent = False  # some whole line is in no chunk

    @property
    def cursor(self) -> Cursor:
        """Behind the last chunk."""
        return self._place

    def identify(self, identity: str) -> None:
        """Sets the identity of further cursors."""
        self._place = replace(self._place, identity=identity)

    def push(self, block: bytes, position: int) -> Iterator[Chunk]:
        """The chunks that this block fills."""
        lines = self._cutter.push(block)
        if lines.height:
            self.unsent = True
            self._hold(self.framer.feed_frame(lines))
        yield from self._full(position)

    def flush(self, position: int) -> Iterator[Chunk]:
        """All whole lines, also those of the open record."""
        self._hold(self.framer.flush_frame())
        yield from self._full(position)
        yield from self._remaining(position)

    def release(self, position: int) -> Iterator[Chunk]:
        """The finished records. The last record stays open, unless the formats are unknown."""
        if not self.framer.settled:
            yield from self.flush(position)
        else:
            yield from self._remaining(position, unsent=True)

    def due(self, pace: FlushPolicy, position: int) -> Iterator[Chunk]:
        """The chunks that the flush policy asks for."""
        match pace.due(unsent=self.unsent, settled=self.framer.settled):
            case Due.EVERYTHING:
                yield from self.flush(position)
            case Due.FINISHED:
                yield from self.release(position)

    def finish(self, position: int) -> Iterator[Chunk]:
        """All records at the end of the source; a last line without newline is a line.

        If the source grows later, its cursor marks the new bytes as the continuation of that line.
        """
        lines = self._cutter.finish()
        if lines.height:
            lines = lines.with_columns(-pl.col("end").abs())
            self._hold(self.framer.feed_frame(lines))
        yield from self.flush(position)

    def _hold(self, records: pl.DataFrame) -> None:
        if records.height:
            self._pending.append(records)
            self._pending_records += records.height
            self._pending_bytes += int(records["raw"].str.len_bytes().sum())

    def _full(self, position: int) -> Iterator[Chunk]:
        # strictly more: a full chunk is cut with the next record, or at the end
        while self._pending_records > self._max_records or self._pending_bytes > self._max_bytes:
            pending = pl.concat(self._pending)
            sizes = pending["raw"].str.len_bytes().cum_sum().to_numpy()
            fits = int(np.searchsorted(sizes, self._max_bytes, side="right"))
            n = max(1, min(self._max_records, fits))
            if n >= pending.height:
                return
            self._pending = [pending[n:]]
            self._pending_records -= n
            self._pending_bytes -= int(sizes[n - 1])
            yield self._chunk(pending[:n], position)

    def _remaining(self, position: int, *, unsent: bool = False) -> Iterator[Chunk]:
        pending, self._pending = self._pending, []
        self._pending_records = self._pending_bytes = 0
        self.unsent = unsent
        if pending:
            yield self._chunk(pl.concat(pending), position)

    def _chunk(self, records: pl.DataFrame, position: int) -> Chunk:
        line, lines, end = records.select("line", "lines", "end").row(-1)
        self._place = replace(self._place, offset=abs(end), line=line + max(lines, 1) - 1, inside=end < 0)
        return Chunk(
            records=records.drop("end").rechunk(),
            formats=self.framer.formats,
            cursor=self._place,
            position=position,
        )
