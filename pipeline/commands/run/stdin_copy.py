"""Standard input as a file, because a run checks its input and reads it twice.

A stream that does not end is named after PATIENCE_S, and the copy is bounded: the run goes on with what fits.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.commands.common import err, standard_input
from pipeline.sources.files import Copied
from pipeline.upkeep import start_timer

STDIN: Final = "stdin"  # as `logweir send -` calls it
COPY_BLOCK: Final = 1 << 20
PATIENCE_S: Final = 2.0
# Of the copy, if half of the free space of its folder is not less.
MOST_BYTES: Final = 2 << 30
ENDLESS: Final = (
    "reading standard input until it ends; for a stream that does not end: logweir up, then logweir send -"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The files of a run. `stdin`: the one that is a copy of standard input."""

    files: tuple[str, ...]
    stdin: Copied | None = None
    notes: tuple[str, ...] = ()


@contextmanager
def stdin_as_file(names: list[str], *, most_bytes: int = MOST_BYTES) -> Iterator[Given]:
    """The names with the path of a copy in place of `-`. The copy goes at the end."""
    if "-" not in names:
        yield Given(files=tuple(names))
        return
    stream = standard_input()
    with tempfile.TemporaryDirectory(prefix="logweir-") as folder:
        path = Path(folder) / STDIN
        limit = min(most_bytes, shutil.disk_usage(folder).free // 2)
        timer = start_timer(PATIENCE_S, "stdin-notice", _say_that_it_reads)
        try:
            with path.open("wb") as copy:
                complete = _copied(stream, copy, limit)
        finally:
            timer.cancel()
        yield Given(
            files=tuple(str(path) if name == "-" else name for name in names),
            stdin=Copied(path=path, name=STDIN),
            notes=() if complete else (_note(path.stat().st_size),),
        )


def _copied(stream: BinaryIO, copy: BinaryIO, limit: int) -> bool:
    """Copies to the end of the stream, or as many lines as the limit has room for; False then."""
    size, at_line = 0, True
    # `read1` returns the bytes that are there, so the limit holds a slow stream too.
    read = getattr(stream, "read1", stream.read)
    while block := read(COPY_BLOCK):
        if size + len(block) > limit:
            block = block[: limit - size]
            # A cut-off line is left out, unless it began in an earlier block.
            copy.write(block[: block.rfind(b"\n") + 1] or (b"" if at_line else block))
            _leave(stream)
            return False
        copy.write(block)
        size += len(block)
        at_line = block.endswith(b"\n")
    return True


def _leave(stream: BinaryIO) -> None:
    """Closes our end of the pipe, so that its writer ends instead of waiting for us."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def _say_that_it_reads() -> None:
    with contextlib.suppress(OSError, ValueError):  # its reader has gone, or the command has ended
        err().print(ENDLESS, markup=False, soft_wrap=True)


def _note(size: int) -> str:
    return (
        f"standard input did not end: its first {size:,} bytes were judged, which is as much as may be "
        "copied; for a stream: logweir up, then logweir send -"
    )
