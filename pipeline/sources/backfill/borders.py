"""Borders between the pieces of a text: where the first record at or behind an offset begins.

A border depends on the bytes of the object alone. The piece before it ends there and the piece behind it
begins there, so every line is in exactly one piece and no stack trace is cut. Readers agree by writing the
first answer to Redis (plans.py)."""

from collections.abc import Callable, Iterator
from typing import Final

from pipeline.records.declared import FormatChoice
from pipeline.sources.elements import element_kind
from pipeline.sources.formats_delimited import is_layout
from pipeline.sources.framing import MAX_RECORD_BYTES, Framer
from pipeline.sources.lines import LineCutter, sample
from pipeline.sources.packed.bytestreams import LOOK_BYTES, is_plain

# Bytes of a text by offset and size, b"" behind its end.
ReadAt = Callable[[int, int], bytes]
# A record is at most MAX_RECORD_BYTES, so a framer that begins so far before an offset meets a head on its
# way.
BEFORE: Final = 2 * MAX_RECORD_BYTES
BLOCK_BYTES: Final = 256 * 1024


def may_cut(first: bytes, choice: FormatChoice) -> bool:
    """Whether a text that begins so may be cut at records.

    Packed files and UTF-16 have no offsets of their own. Documents and tables tell their records from the
    beginning: a quoted value may hold line ends.
    """
    if not is_plain(first[:LOOK_BYTES]) or b"\n" not in first or element_kind(first) is not None:
        return False
    framer = Framer(choice=choice)
    framer.look(LineCutter().push(first)["raw"], final=True)
    return not any(map(is_layout, framer.formats))


def blocks(read: ReadAt, at: int = 0) -> Iterator[bytes]:
    """The blocks of a text from an offset on."""
    while block := read(at, BLOCK_BYTES):
        yield block
        at += len(block)


def border(read: ReadAt, offset: int, limit: int, choice: FormatChoice) -> int | None:
    """Where the first record at or behind `offset` begins, before `limit`; None where none does.

    A line longer than a record is never cut, so an offset within it has no border before its end.
    """
    start = _line_start(read, max(0, offset - BEFORE), limit)
    if start is None or start >= offset:
        return start
    framer, cutter = Framer(choice=choice), LineCutter(offset=start)
    sample(blocks(read), framer)
    for block in blocks(read, start):
        rows = cutter.push(block)
        for end in framer.feed_frame(rows)["end"].to_list() if rows.height else ():
            if end >= offset:  # negative within a long line
                return end if end < limit else None
        start += len(block)
        if start >= limit + BEFORE:  # a record is known to end when the first line of the next one is read
            break
    return None


def _line_start(read: ReadAt, offset: int, limit: int) -> int | None:
    """The first line that begins at or behind `offset`, before `limit`."""
    if not offset:
        return 0
    at = offset - 1
    for block in blocks(read, at):
        found = block.find(b"\n")
        if found >= 0:
            start = at + found + 1
            return start if start < limit else None
        at += len(block)
        if at >= limit:
            break
    return None
