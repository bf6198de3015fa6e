"""Records of a stream that is read once: standard input, a pipe."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, Unpack

from pipeline.errors import BadInput
from pipeline.sources.chunks import Assembly, Chunk, Cursor, Limits
from pipeline.sources.files import STREAM
from pipeline.sources.flush_policy import MOST_S, FlushPolicy
from pipeline.upkeep import start_thread

_BLOCK_BYTES: Final = 256 * 1024
_AHEAD_BYTES: Final = 8 * _BLOCK_BYTES  # back-pressure: the writer waits above this
# Cutting and framing a single line costs a millisecond, so small blocks are gathered for this long.
_SMALL_BYTES: Final = 64 * 1024
_GATHER_S: Final = 0.02


class Peeked:
    """A stream whose first bytes are known, `first`, before somebody reads it. Waits for them."""

    def __init__(self, stream: BinaryIO, name: str = "stdin") -> None:
        """Raises BadInput for a stream that breaks at once."""
        self._read = _reader(stream)
        try:
            self.first = self._ahead = self._read()
        except OSError as exc:
            raise BadInput(f"{name} cannot be read: {exc.strerror}") from exc

    def read(self, size: int = _BLOCK_BYTES, /) -> bytes:
        """At most `size` bytes, as soon as there are some; b"" at the end."""
        if not self._ahead:
            self._ahead = self._read()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data


def read_stream(
    stream: BinaryIO | Peeked,
    name: str = "stdin",
    *,
    pace: FlushPolicy | None = None,
    **limits: Unpack[Limits],
) -> Iterator[Chunk]:
    """Full chunks, or chunks by the flush policy `pace`, until the stream ends.

    After a pause the open record is flushed too, but never half a line. If the stream breaks, raises BadInput
    after the last chunk."""
    place = Cursor(path=name, identity=STREAM)
    assembly = Assembly(place, documents=True, **limits)
    pace = pace or FlushPolicy()
    ahead = _Ahead()
    # a daemon, because a read from a silent pipe blocks for ever
    start_thread(f"read-{name}", _pump, stream, ahead)
    position = 0
    try:
        while (block := ahead.take(pace.poll_s(MOST_S))) is not None:
            if block:
                position += len(block)
                for chunk in assembly.push(block, position):
                    yield chunk
                    pace.handed_over()
                pace.came(half_line=not block.endswith(b"\n"))
            for chunk in assembly.due(pace, position):
                yield chunk
                pace.handed_over()
            if 0 < len(block) < _SMALL_BYTES:
                time.sleep(_GATHER_S)
        yield from assembly.finish(position)
    finally:
        ahead.leave()
    if ahead.failure is not None:
        raise BadInput(
            f"{name} broke after {position} bytes: {ahead.failure.strerror}; what came before was delivered"
        )


class _Ahead:
    """A bounded queue of bytes between the reading thread and the consumer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: list[bytes] = []
        self._size = 0
        self._ended = False
        self.failure: OSError | None = None
        self.left = False  # the consumer has stopped

    def put(self, block: bytes) -> None:
        """Waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._size < _AHEAD_BYTES or self.left)
            self._blocks.append(block)
            self._size += len(block)
            self._changed.notify_all()

    def end(self, failure: OSError | None = None) -> None:
        with self._changed:
            self._ended, self.failure = True, failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> bytes | None:
        """All queued bytes; b"" after the timeout, None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._size or self._ended, timeout_s)
            if self._ended and not self._size:
                return None
            block = b"".join(self._blocks)
            self._blocks, self._size = [], 0
            self._changed.notify_all()
            return block

    def leave(self) -> None:
        with self._changed:
            self.left = True
            self._changed.notify_all()


def _pump(stream: BinaryIO | Peeked, ahead: _Ahead) -> None:
    """Moves blocks from the stream to the queue until either side ends."""
    read, failure = _reader(stream), None
    try:
        while not ahead.left and (block := read()):
            ahead.put(block)
    except OSError as exc:
        failure = exc
    except ValueError:  # closed under us
        pass
    ahead.end(failure)


def _reader(stream: BinaryIO | Peeked) -> Callable[[], bytes]:
    """A function that reads available bytes without waiting for a whole block.

    A descriptor is read directly: a thread inside a buffered reader would hold its lock when the interpreter
    ends."""
    if isinstance(stream, Peeked):
        return stream.read
    try:
        descriptor = stream.fileno()
    except (OSError, io.UnsupportedOperation, AttributeError):
        read1 = getattr(stream, "read1", stream.read)
        return lambda: bytes(read1(_BLOCK_BYTES))
    return lambda: os.read(descriptor, _BLOCK_BYTES)
