"""A hint to every worker that a new model is live. Missing it costs nothing; each compares by itself."""

import contextlib
import os
import select
from typing import Any, Final

from celery.worker.control import control_command

from pipeline.messages.reload import COMMAND


class Hint:
    """An event that crosses a fork: the broadcast sets it, the reloader waits for it, perhaps in a pool's
    child.

    It is a pipe, opened before the fork: a killed child can leave no lock behind.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None

    def open(self) -> None:
        """From now on, here and in processes forked from here, setting it ends the wait."""
        if self._ends is None:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)

    def set(self) -> None:
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):  # it is full of hints that nobody has taken yet
                os.write(self._ends[1], b"!")

    def wait(self, timeout_s: float) -> bool:
        """True when it was set, which is forgotten then; False after `timeout_s`."""
        self.open()
        assert self._ends is not None  # noqa: S101 - it was opened
        if not select.select([self._ends[0]], [], [], timeout_s)[0]:
            return False
        try:
            os.read(self._ends[0], 4096)
        except BlockingIOError:
            return False  # another process took it
        return True


HINT: Final = Hint()


@control_command(name=COMMAND)  # type: ignore[untyped-decorator] # celery publishes no types
def _reload(_state: Any) -> dict[str, str]:
    HINT.set()
    return {"ok": "the next batch compares versions"}
