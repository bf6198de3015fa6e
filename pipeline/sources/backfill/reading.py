"""The texts of a piece, each from its cursor on, in chunks whose bounds depend on the content alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources.backfill.archive import Archive, opened
from pipeline.sources.backfill.borders import ReadAt, blocks, border
from pipeline.sources.backfill.pieces import Piece
from pipeline.sources.chunks import Assembly, Chunk, Cursor, Limits
from pipeline.sources.files import TextReading, read_object
from pipeline.sources.lines import sample
from pipeline.sources.packed.archives import Source
from pipeline.sources.packed.unpacking import Note

RANGE_BYTES: Final = 4 * 2**20

# The stored cursor of a text of this piece; None where it was never read.
Begin = Callable[[Source], Cursor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Borders of the pieces of an archive. `known` and `fix` are of all readers: `fix` answers what stands
    there now, which is the first answer."""

    piece_bytes: int
    known: Callable[[Piece, int], str | None]
    fix: Callable[[Piece, int, str], str]

    def range_of(self, piece: Piece, read: ReadAt, choice: FormatChoice) -> tuple[int, int]:
        """Begin and end of a piece; equal where no record begins in it."""
        return self._at(piece, piece.begin, read, choice), self._at(piece, piece.end, read, choice)

    def _at(self, piece: Piece, offset: int, read: ReadAt, choice: FormatChoice) -> int:
        while 0 < offset < piece.size:
            answer = self.known(piece, offset)
            limit = min(piece.size, offset + self.piece_bytes)
            if answer is None:
                found = border(read, offset, limit, choice)
                answer = self.fix(piece, offset, "" if found is None else str(found))
            if answer:
                return int(answer)
            offset = limit  # a line goes on through the whole piece
        return min(offset, piece.size)


def read_piece(
    archive: Archive, piece: Piece, begin: Begin, *, borders: Borders, limits: Limits, note: Note
) -> Iterator[TextReading]:
    """The texts of a piece; each is to be read before the next one is asked for.

    Raises BadInput for what is no text log, ObjectChanged, StoreUnavailable. Damage becomes a note.
    """
    if not piece.whole:
        yield _range(archive, piece, begin, borders, limits)
        return
    shown = archive.shown(piece.name)
    with opened(archive, piece.object) as file:
        yield from read_object(
            file,
            shown,
            identity=piece.identity,
            note=note,
            begin=begin,
            **limits,
        )


def _range(archive: Archive, piece: Piece, begin: Begin, borders: Borders, limits: Limits) -> TextReading:
    def read(offset: int, size: int) -> bytes:
        return archive.read(piece.object, offset, size)

    first, last = borders.range_of(piece, read, limits.get("choice", DETECTED))
    source = Source(path=Path(archive.shown(piece.name)))
    place = begin(source)
    if place is None or not first <= place.offset <= last:
        place = Cursor(path=piece.name, identity=piece.identity, offset=first)
    assembly = Assembly(place, **limits)
    return TextReading(source=source, place=place, chunks=_chunks(read, assembly, place, first, last))


def _chunks(read: ReadAt, assembly: Assembly, place: Cursor, first: int, last: int) -> Iterator[Chunk]:
    if place.offset >= last:
        return
    if place.offset:
        sample(blocks(read), assembly.framer)
    at = place.offset
    while at < last:
        block = read(at, min(RANGE_BYTES, last - at))
        if not block:  # the identity is the same, so it is as long as it was
            break
        at += len(block)
        yield from assembly.push(block, at - first)
    yield from assembly.finish(last - first)
