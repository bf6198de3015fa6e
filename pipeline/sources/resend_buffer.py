"""What a source handed over lately, kept to hand over again.

A Redis that loses its last moments (power cut, `appendfsync everysec`) goes back with cursor and ledger together. Whoever
still runs then sends the same batches again, cut as before, which a pipe could not do otherwise and a rotated file neither.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pipeline.sources.chunks import Chunk

# Redis syncs every second and lets a slow disk lag by one more; a minute covers a disk that hangs.
KEEP_S: Final = 60.0
KEEP_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChunk:
    """A chunk as it was sent, and the cursor it continued from."""

    chunk: Chunk
    start: int
    workload: str
    source: str
    source_key: str
    cursor_key: str
    after: str


class ResendBuffer:
    """The newest accepted chunks, within KEEP_S and KEEP_BYTES."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: deque[tuple[float, int, SentChunk]] = deque()
        self._bytes = 0

    def add(self, sent: SentChunk) -> None:
        """Keep it; what is too old or too much goes."""
        now, size = self._clock(), int(sent.chunk.records.estimated_size())
        self._sent.append((now, size, sent))
        self._bytes += size
        while self._sent and (self._bytes > KEEP_BYTES or self._sent[0][0] < now - KEEP_S):
            self._bytes -= self._sent.popleft()[1]

    def since(self, cursor_key: str, cursor: str) -> list[SentChunk]:
        """Everything of a source that was sent from this cursor on, in order; [] when that is not kept any more."""
        own = [sent for _, _, sent in self._sent if sent.cursor_key == cursor_key]
        at = next((n for n in reversed(range(len(own))) if own[n].after == cursor), len(own))
        return own[at:]

    def restart(self, cursor_key: str, cursor: str) -> SentChunk | None:
        """Let what is kept of a source continue from this cursor: what was between is lost. Returns the first as it was,
        None when nothing is kept."""
        for n, (at, size, sent) in enumerate(self._sent):
            if sent.cursor_key == cursor_key:
                self._sent[n] = (at, size, replace(sent, after=cursor))
                return sent
        return None
