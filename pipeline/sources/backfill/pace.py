"""The pace of a backfill as one observer measures it, and the time left by it."""

from collections import deque
from typing import Final

# Pieces end at once and lines come in batches, so that a shorter window would jump.
WINDOW_S: Final = 60.0
LEAST_S: Final = 5.0


class ReadingPace:
    """The reading of the last minute. Everything is None until it was measured for five seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def see(self, now: float, *, lines: int, bytes_read: int) -> None:
        """The sums at a moment; they may fall back where a reader was replaced."""
        self._seen.append((now, lines, bytes_read))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    @property
    def lines_per_s(self) -> float | None:
        return self._rate(1)

    def left_s(self, bytes_left: int) -> float | None:
        """Seconds until so many bytes of the archive are read; None while nothing moves."""
        rate = self._rate(2)
        return None if not rate else bytes_left / rate

    def _rate(self, column: int) -> float | None:
        if not self._seen:
            return None
        first, last = self._seen[0], self._seen[-1]
        length = last[0] - first[0]
        return None if length < LEAST_S else max(0, last[column] - first[column]) / length
