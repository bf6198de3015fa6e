"""Exit codes of worker processes, as those of the command: an error of ours is one sentence, no traceback."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pipeline.errors import BadInput, LogweirError
from pipeline.imports import end_uncollected


class ReaderLeft(BrokenPipeError):
    """Nobody reads standard output any more (`| head`). `code`: the exit code of the answer that was cut
    off."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def exit_code(main: Callable[[list[str]], int]) -> int:
    """Run `main` on the arguments of this process; 2 for what a user has to mend, 1 for our other errors."""
    end_uncollected()
    try:
        return main(sys.argv[1:])
    except LogweirError as exc:
        sys.stderr.write(f"logweir: {exc}\n")
        return 2 if isinstance(exc, BadInput) else 1


_MAY_BE_LEFT: Final[list[threading.Thread]] = []


def may_be_left(thread: threading.Thread) -> None:
    """Says that this daemon thread may be in native code (torch, Polars) when its process ends: `leave`."""
    _MAY_BE_LEFT.append(thread)


def leave(code: int) -> None:
    """End this process with `code` at once if a thread of `may_be_left` still works; else return.

    When Python shuts down it ends each daemon thread that comes back from native code. C++ and Rust below it
    then abort the process, and SIGABRT takes the place of the exit code. Functions of `atexit` do not run."""
    if not any(thread.is_alive() for thread in _MAY_BE_LEFT):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    os._exit(code)
