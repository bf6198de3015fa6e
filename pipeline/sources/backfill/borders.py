"""Borders between the pieces of a text: where the first record at or behind an offset begins.

A border depends on the bytes of the object alone. The piece before it ends there and the piece behind it
begins there, so every line is in exactly one piece and no stack trace is cut. Readers agree by writing the
first answer to Redis (plans.py)."""

from collections.abc import Callable
from typing import Final

from pipeline.records.declared import FormatChoice
from pipeline.sources.bytestreams import LOOK_BYTES, is_plain
from pipeline.sources.elements import element_kind
from pipeline.sources.formats_delimited import is_layout
from pipeline.sources.framing import MAX_RECORD_BYTES, Framer
from pipeline.sources.lines import LineCutter

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


def sample(read: ReadAt, framer: Framer) -> None:
    """Gives the framer the beginning of the text as its sample."""
    cutter, at = LineCutter(), 0
    while not framer.settled:
        block = read(at, BLOCK_BYTES)
        if not block:
            framer.look(cutter.finish()["raw"], final=True)
            return
        framer.look(cutter.push(block)["raw"])
        at += len(block)


def border(read: ReadAt, offset: int, limit: int, choice: FormatChoice) -> int | None:
    """Where the first record at or behind `offset` begins, before `limit`; None where none does.

    A line longer than a record is never cut, so an offset within it has no border before its end.
    """
    start = _line_start(read, max(0, offset - BEFORE), limit)
    if start is None or start >= offset:
        return start
    framer, cutter = Framer(choice=choice), LineCutter(offset=start)
    sample(read, framer)
    at = start
    while at < limit + BEFORE:  # a record is known to end when the first line of the next one is read
        block = read(at, BLOCK_BYTES)
        if not block:
            return None
        at += len(block)
        rows = cutter.push(block)
        if not rows.height:
            continue
        for end in framer.feed_frame(rows)["end"].to_list():
            if end >= offset:  # negative within a long line
                return end if end < limit else None
    return None


def _line_start(read: ReadAt, offset: int, limit: int) -> int | None:
    """The first line that begins at or behind `offset`, before `limit`."""
    if not offset:
        return 0
    at = offset - 1
    while at < limit:
        block = read(at, BLOCK_BYTES)
        found = block.find(b"\n")
        if found >= 0:
            start = at + found + 1
            return start if start < limit else None
        if not block:
            return None
        at += len(block)
    return None
