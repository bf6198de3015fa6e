"""One of the files of a followed name: how far it is read, and its records in the making."""

import os
from collections.abc import Callable, Iterator
from typing import Final

from pipeline.records.batch import digest
from pipeline.sources.chunks import Assembly, Chunk, Cursor, TextPlace
from pipeline.sources.files import BLOCK_BYTES, IDENTITY_BYTES, is_same
from pipeline.sources.flush_policy import FlushPolicy
from pipeline.sources.rotations.rotated import TAIL_BYTES, Inode, OpenText

MUCH_BYTES: Final = 65_536


class FollowedFile:
    """An open file that is read to its end again and again. Chunks have places of this file alone.

    Raises BadInput where a packed file is damaged."""

    def __init__(
        self, text: OpenText, place: Cursor, assemble: Callable[[Cursor], Assembly], pace: FlushPolicy
    ) -> None:
        """`text` holds what was read before the place."""
        self.text = text
        self.pace = pace
        self._assembly = assemble(place)
        if place.offset:
            text.sample(self._assembly.framer)
        self._at = place.offset
        self._tail = text.tail(place.offset) or b""
        self._copied = not is_same(place.identity, text.file)  # it goes on in a copy
        self._tail_at = (place.offset, place.tail)
        text.seek(place.offset)
        self.moved = self.behind = False  # the last read gave something, and was a whole block
        self._ended = False
        self._size = 0  # at the last look
        self.quiet_since = pace.clock()
        self.over = False  # emptied, and what it had is nowhere else

    @property
    def inode(self) -> Inode | None:
        """Of the file that is read; None where there is none any more."""
        return None if self.over else self.text.inode

    @property
    def is_final(self) -> bool:
        """True where nothing new can be written."""
        return self.over or self.text.packed

    @property
    def is_read(self) -> bool:
        """True where there is nothing behind what was read, at this moment."""
        if self.is_final:
            return self.over or self._ended
        return os.fstat(self.text.file.fileno()).st_size == self._at

    @property
    def place(self) -> TextPlace:
        """Behind the last chunk."""
        cursor = self._assembly.cursor
        if cursor.offset != self._tail_at[0]:
            self._tail_at = (cursor.offset, self._digest_before(cursor.offset))
        return TextPlace(
            identity=cursor.identity,
            offset=cursor.offset,
            line=cursor.line,
            inside=cursor.inside,
            tail=self._tail_at[1],
        )

    def _digest_before(self, offset: int) -> str:
        if self.is_final or not offset:
            return ""
        before = self.text.tail(offset)
        return digest(before) if before and self.look() else ""

    def advance(self) -> Iterator[Chunk]:
        """Reads one block; its chunks. `moved` says whether there was one."""
        self.behind = self.moved = False
        if self.over:
            return
        block = self.text.read()
        self._ended = not block
        if not block or not self.look():  # what was read of the new text is read again from its beginning
            return
        self.moved, self.behind = True, len(block) == BLOCK_BYTES
        if self._at < IDENTITY_BYTES and not self.text.packed and not self._copied:
            self._assembly.identify(self.text.identity)  # it covers the first bytes and grows with them
        self._at += len(block)
        self._tail = (self._tail + block)[-TAIL_BYTES:]
        self.quiet_since = self.pace.clock()
        yield from self._handed_over(self._assembly.push(block, self._at))
        self.pace.came(half_line=not block.endswith(b"\n"))

    def due(self) -> Iterator[Chunk]:
        """The chunks that the flush policy asks for."""
        yield from self._handed_over(self._assembly.due(self.pace, self._at))

    def release(self) -> Iterator[Chunk]:
        """The records that are finished."""
        yield from self._handed_over(self._assembly.release(self._at))

    def flush(self) -> Iterator[Chunk]:
        """All whole lines."""
        yield from self._assembly.flush(self._at)

    def finish(self) -> Iterator[Chunk]:
        """All that was read; a last line without newline is a line."""
        yield from self._assembly.finish(self._at)

    def _handed_over(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            yield chunk
            self.pace.handed_over()

    @property
    def has_much(self) -> bool:
        """True where the next block may fill a chunk."""
        if self.is_final:
            return not self.is_read
        return os.fstat(self.text.file.fileno()).st_size - self._at > MUCH_BYTES

    @property
    def is_unread(self) -> bool:
        return not self._at

    def look(self) -> bool:
        """False where the file does not have any more what it had at the last look, or what was read of
        it."""
        if self.is_final:
            return True
        size, before = os.fstat(self.text.file.fileno()).st_size, self._size
        if size < max(before, self._at) or not self._is_continued():
            return False
        self._size = size
        if not self._at and not self._copied:
            self._assembly.identify(self.text.identity)
        return True

    def _is_continued(self) -> bool:
        if not self._at:
            return self._copied or is_same(self._assembly.cursor.identity, self.text.file)
        size = len(self._tail)
        return os.pread(self.text.file.fileno(), size, self._at - size) == self._tail

    def is_copied_to(self, text: OpenText) -> bool:
        """True for a copy of what was read."""
        return text.is_copy_of(
            TextPlace(
                identity=self._assembly.cursor.identity,
                offset=self._at,
                tail=digest(self._tail) if self._tail else "",
            )
        )

    def go_on_in(self, text: OpenText) -> None:
        """Reads on in a copy of what was read."""
        text.seek(self._at)
        self.text.close()
        self.text, self._copied, self._ended = text, True, False

    def end(self) -> None:
        """Nothing more can be read."""
        self.over = True
        self.text.close()
