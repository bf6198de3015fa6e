"""The resend buffer: recently accepted chunks, which a sender sends again after Redis lost its last writes.

After a power cut (`appendfsync everysec`) cursor and ledger go back together. A running sender then repeats
the same batches, cut as before. A pipe or a rotated file could not be read again."""

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
        """Adds a chunk; drops old and excess chunks."""
        now, size = self._clock(), int(sent.chunk.records.estimated_size())
        self._sent.append((now, size, sent))
        self._bytes += size
        while self._sent and (self._bytes > KEEP_BYTES or self._sent[0][0] < now - KEEP_S):
            self._bytes -= self._sent.popleft()[1]

    def since(self, cursor_key: str, cursor: str) -> list[SentChunk]:
        """The chunks of a source from this cursor on, in order; [] if the buffer lacks the first."""
        of_source = [sent for _, _, sent in self._sent if sent.cursor_key == cursor_key]
        at = next(
            (n for n in reversed(range(len(of_source))) if of_source[n].after == cursor), len(of_source)
        )
        return of_source[at:]

    def restart(self, cursor_key: str, cursor: str) -> SentChunk | None:
        """The oldest buffered chunk of the source continues from this cursor; lines between are lost.

        Returns that chunk as it was, None for an empty buffer.
        """
        for n, (at, size, sent) in enumerate(self._sent):
            if sent.cursor_key == cursor_key:
                self._sent[n] = (at, size, replace(sent, after=cursor))
                return sent
        return None
