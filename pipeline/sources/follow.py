"""Following a growing file by name, as `tail -F` does: through rotation by rename and by truncation."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import BadInput
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources.bytestreams import is_rewritten
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS, Assembly, Chunk, Cursor
from pipeline.sources.files import (
    BLOCK_BYTES,
    HEAD_BYTES,
    IDENTITY_BYTES,
    identify,
    is_same,
    look_at_beginning,
    open_file,
    resume_at,
)
from pipeline.sources.flush_policy import FlushPolicy


def follow(
    path: Path,
    *,
    start: Cursor | None = None,
    stop: Callable[[], bool],
    from_start: bool,
    poll_s: float = 0.25,
    pace: FlushPolicy | None = None,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    sleep: Callable[[float], None] = time.sleep,
    choice: FormatChoice = DETECTED,
) -> Iterator[Chunk | None]:
    """Chunks by the flush policy `pace` until `stop()`; None after each poll without new bytes.

    The file may be missing for a while. A renamed file is read to its end, then its successor from the start.
    A truncated or rewritten file is read from the start. A last line without newline waits for its newline or
    for rotation; at `stop` that line stays unread behind the cursor.

    If `start` does not belong to the file, `from_start` chooses between its beginning and its present end. A
    file that appears later is read from its beginning. Raises BadInput for compressed files."""
    tail = _Tail(path, max_records=max_records, max_bytes=max_bytes, choice=choice)
    pace = pace or FlushPolicy()
    first = True
    try:
        while not stop():
            if not tail.is_open:
                tail.open(start if first else None, from_start=from_start or not first)
                first = False
            moved = False
            for chunk in tail.advance():
                moved = True
                if chunk is not None:
                    yield chunk
                    pace.handed_over()
            if moved:
                pace.came(half_line=tail.half_line)
            if tail.behind:  # more bytes wait: they fill chunks without flushes
                continue
            for chunk in tail.due(pace):
                yield chunk
                pace.handed_over()
            if not moved:
                yield from tail.rotate()
                yield None
            sleep(pace.poll_s(poll_s))
        yield from tail.flush()
    finally:
        tail.close()


class _Tail:
    """The open file of a name, and the read position."""

    def __init__(self, path: Path, *, max_records: int, max_bytes: int, choice: FormatChoice) -> None:
        self._path = path
        self._assemble = partial(Assembly, max_records=max_records, max_bytes=max_bytes, choice=choice)
        self._file: BinaryIO | None = None
        self._assembly: Assembly | None = None
        self._at = 0
        self.behind = False  # the last read was a whole block
        self.half_line = False  # the last byte read is no newline

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, start: Cursor | None, *, from_start: bool) -> None:
        """Opens the file if it exists."""
        if not self._path.exists():
            return
        if self._path.is_dir():
            raise BadInput(f"{self._path} is a directory; follow one file in it")
        self._file = open_file(self._path)
        if is_rewritten(os.pread(self._file.fileno(), HEAD_BYTES, 0)):
            raise BadInput(
                f"{self._path} is compressed or UTF-16 and cannot be followed; read it without --follow"
            )
        place = resume_at(self._path, self._file, start)
        if not place.offset and not from_start:
            place = _end_of(self._file, place)
        self._begin(place)

    def _begin(self, place: Cursor) -> None:
        assert self._file is not None  # noqa: S101 - only called while open
        self._assembly = self._assemble(place)
        if place.offset:
            look_at_beginning(self._path, self._assembly.framer, final=False)
        self._at = place.offset
        self._file.seek(place.offset)

    def advance(self) -> Iterator[Chunk | None]:
        """Reads one block: its chunks, and one None after any bytes."""
        self.behind = False
        if self._file is None or self._assembly is None:
            return
        block = self._file.read(BLOCK_BYTES)
        if not block:
            return
        self.behind, self.half_line = len(block) == BLOCK_BYTES, not block.endswith(b"\n")
        if not is_same(self._assembly.cursor.identity, self._file):
            # rewritten, and already longer than the read position: the block does not continue the old text
            yield from self._start_over()
            yield None
            return
        if self._at < IDENTITY_BYTES:  # the identity covers the first bytes and grows with them
            self._assembly.identify(identify(self._file))
        self._at += len(block)
        yield None
        yield from self._assembly.push(block, self._at)

    def due(self, pace: FlushPolicy) -> Iterator[Chunk]:
        """The chunks that the flush policy asks for."""
        if self._assembly is None:
            # The next file starts with a fresh age.
            pace.due(unsent=False, settled=True)
            return
        yield from self._assembly.due(pace, self._at)

    def flush(self) -> Iterator[Chunk]:
        if self._assembly is not None:
            yield from self._assembly.flush(self._at)

    def rotate(self) -> Iterator[Chunk]:
        """At the end of the file: follows a rename or a truncation."""
        if self._file is None or self._assembly is None:
            return
        opened = os.fstat(self._file.fileno())
        if opened.st_size < self._at or not is_same(self._assembly.cursor.identity, self._file):
            yield from self._start_over()
            return
        try:
            named = self._path.stat()
        except OSError:  # renamed without a successor: writes to the old file still count
            return
        if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino):
            return
        # the writer may have added lines between our last read and its rename
        while block := self._file.read(BLOCK_BYTES):
            self._at += len(block)
            yield from self._assembly.push(block, self._at)
        yield from self._assembly.finish(self._at)
        self.close()

    def _start_over(self) -> Iterator[Chunk]:
        assert self._file is not None and self._assembly is not None  # noqa: S101 - only called while open
        yield from self._assembly.finish(self._at)
        self._begin(Cursor(path=str(self._path), identity=identify(self._file)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._assembly = None


def _end_of(file: BinaryIO, place: Cursor) -> Cursor:
    """The place behind the last newline. Record ids contain line numbers, so lines are counted."""
    offset = line = read = 0
    while block := file.read(BLOCK_BYTES):
        if newlines := block.count(b"\n"):
            line += newlines
            offset = read + block.rfind(b"\n") + 1
        read += len(block)
    return replace(place, offset=offset, line=line)
