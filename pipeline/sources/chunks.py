"""Cursors in a source, and chunks of records."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Annotated, Any, Final, TypedDict

import msgspec
import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.records.wire import Codec
from pipeline.sources import formats
from pipeline.sources.elements import ElementKind, Elements
from pipeline.sources.flush_policy import Due, FlushPolicy
from pipeline.sources.formats_delimited import past_headers, with_layout
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter

MAX_RECORDS: Final = 10_000  # as `batch_records` and `batch_kib` are shipped
MAX_BYTES: Final = 2048 * 1024


class Limits(TypedDict, total=False):
    """Of the chunks of a source, and how its records are recognised."""

    max_records: int
    max_bytes: int
    choice: FormatChoice


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlace:
    """A place in one text; all records before it were handed over.

    `offset` counts bytes of the unpacked text, `line` the physical lines begun before it. `inside`: the
    offset is within a line too long for one record. `identity` tells files of one name apart, and `tail`, a
    digest of the text before the offset, tells their copies apart where it is known. `layout`: that of a
    table here, if a header in its middle has changed it."""

    identity: str
    offset: Count = 0
    line: Count = 0
    inside: bool = False
    tail: str = ""
    layout: str = ""

    def own(self) -> dict[str, Any]:
        """The fields of the place alone, without those of a cursor."""
        return {name: getattr(self, name) for name in _OF_PLACE}


_OF_PLACE: Final = tuple(field.name for field in fields(TextPlace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor(TextPlace):
    """A place in a source. A followed name may have several files, which were rotated one after another:
    those that are not read out yet are `older` and `newer` than the one of this place.

    `read_out`: the end of the one that was read out last. `changed`: when the file of the name was last
    written to before this cursor, in ns since 1970; 0 if unknown. `target`: where the path led to, for a
    link."""

    path: str
    target: str = ""
    older: tuple[TextPlace, ...] = ()
    newer: tuple[TextPlace, ...] = ()
    read_out: TextPlace | None = None
    changed: Count = 0

    @property
    def places(self) -> tuple[TextPlace, ...]:
        """All files of the name, oldest first."""
        return (*self.older, self, *self.newer)

    def centred(self, n: int) -> "Cursor":
        """The same cursor, told from its n-th place."""
        places = [TextPlace(**place.own()) for place in self.places]
        return Cursor(
            path=self.path,
            target=self.target,
            older=tuple(places[:n]),
            newer=tuple(places[n + 1 :]),
            read_out=self.read_out,
            changed=self.changed,
            **places[n].own(),
        )

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
    """Unparsed records, the offset where they begin, and the place behind them. `position` counts consumed
    bytes of the packed file."""

    records: pl.DataFrame  # RAW_SCHEMA
    formats: tuple[str, ...]
    start: int
    cursor: Cursor
    position: int

    def latest(self, *, arrived: datetime, zone: str) -> datetime:
        """The time of the last record."""
        names = with_layout(self.formats, self.cursor.layout)
        last = formats.parse(self.records.tail(1), names, arrived=arrived, zone=zone)
        found: datetime = last["timestamp"].item()
        return found


def _whole(ends: "np.ndarray[tuple[int], np.dtype[np.int64]]", n: int) -> int:
    """The most records up to n behind which a chunk may end (two_streams.py), else the fewest."""
    places = np.flatnonzero(ends) + 1
    before = int(np.searchsorted(places, n, side="right"))
    return int(places[max(0, before - 1)]) if places.size else len(ends)


class Assembly:
    """Bytes to chunks: cuts lines, joins records, cuts chunks at the limits.

    The ends of chunks depend on the text alone, not on the blocks, unless `flush` or `release` was called.
    With `documents` a source that begins like a document of many records is cut into those (elements.py).
    `kind` is the kind of document that the source began with, for a start within it. Followed files are read
    as lines, because an element that is being written has no end yet.
    """

    def __init__(
        self,
        start: Cursor,
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        documents: bool = False,
        kind: ElementKind | None = None,
        choice: FormatChoice = DETECTED,
    ) -> None:
        self._place = start
        self._elements: Elements | None = None
        if documents and (kind is not None or not start.offset):
            self._elements = Elements(offset=start.offset, line=start.line, inside=start.inside, kind=kind)
        self._formats: tuple[str, ...] = ()  # of elements, when lines follow them
        # a line that the cursor is inside of has its number already
        first_line = start.line + 1
        self._cutter = LineCutter(offset=start.offset, inside=start.inside)
        self._choice = choice
        self.framer = Framer(first_line=first_line, choice=choice)
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
        self._feed(self._split(block))
        yield from self._full(position)

    def _feed(self, block: bytes) -> None:
        lines = self._cutter.push(block)
        if lines.height:
            self.unsent = True
            self._hold(self.framer.feed_frame(lines))

    def _split(self, block: bytes, *, final: bool = False) -> bytes:
        """Takes the elements off; returns bytes that are lines."""
        elements = self._elements
        if elements is None:
            return block
        self._hold_elements(elements.push(block, final=final))
        if elements.rest is None:
            self.unsent = True
            if not final:
                return b""
        self._elements = None
        if elements.offset > self._place.offset or self._pending:
            self._cutter = LineCutter(offset=elements.offset, inside=elements.inside)
            self.framer.look(pl.Series("raw", [], dtype=pl.String), final=True)
            self._formats = self.framer.formats
            self.framer = Framer(first_line=elements.line + 1, choice=self._choice)
        return elements.rest or b""

    def _hold_elements(self, records: pl.DataFrame) -> None:
        self.framer.look(records["raw"])
        self._hold(records)

    def flush(self, position: int) -> Iterator[Chunk]:
        """All whole lines, also those of the open record; whole elements."""
        if self._elements is not None:
            self._hold_elements(self._elements.flush())
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
        self._feed(self._split(b"", final=True))
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
            n = _whole(pending["end"].to_numpy(), max(1, min(self._max_records, fits)))
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
        if not pending:
            return
        records = pl.concat(pending)
        n = int(np.flatnonzero(np.append(1, records["end"].to_numpy()))[-1])
        self._hold(records[n:])
        if n:
            yield self._chunk(records[:n], position)

    def _chunk(self, records: pl.DataFrame, position: int) -> Chunk:
        start, end = self._place.offset, int(records["end"][-1])
        line = self._place.line + int(records["lines"].sum())
        detected = tuple(dict.fromkeys((*self._formats, *self.framer.formats)))
        names = with_layout(detected, self._place.layout)
        records, layout = past_headers(records.drop("end"), names)
        layout = "" if layout in detected else layout
        self._place = replace(self._place, offset=abs(end), line=line, inside=end < 0, tail="", layout=layout)
        return Chunk(
            records=records.rechunk(),
            formats=names,
            start=start,
            cursor=self._place,
            position=position,
        )
