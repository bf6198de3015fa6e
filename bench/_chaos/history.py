"""The history of a chaos run: one JSON object a line for everything that was done, in the order in which it
was known.

The writer flushes every line, so that a history outlives whoever wrote it; a reader leaves out a last line
that was cut."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self


class History:
    """Notes operations from any thread. `t` is the time in s since the history was opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def note(self, op: str, **facts: object) -> None:
        """Append one operation. Facts must be JSON; after `close` it is left out, for threads that end
        late."""
        text = json.dumps(facts, separators=(",", ":"))[1:-1]
        with self._lock:
            if self._file.closed:
                return
            head = f'{{"t":{self.now():.3f},"op":{json.dumps(op)}'
            self._file.write(f"{head},{text}}}\n" if text else f"{head}}}\n")
            self._file.flush()

    def now(self) -> float:
        """Seconds since the history was opened."""
        return time.monotonic() - self._start

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read(path: Path) -> Iterator[dict[str, Any]]:
        """Every operation in order. Raises ValueError for a line that is broken and not the last."""
        broken = ""
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if broken:
                    raise ValueError(broken)
                try:
                    yield json.loads(line)
                except ValueError:
                    broken = f"line {number} of {path} is no operation of a history: {line[:80]!r}"
