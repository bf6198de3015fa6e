"""Records of a stream that is read once: standard input, a pipe."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from pipeline.errors import BadInput
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS, Assembly, Chunk, Cursor
from pipeline.sources.files import STREAM
from pipeline.sources.flush_policy import MOST_S, FlushPolicy

_BLOCK_BYTES: Final = 256 * 1024
_AHEAD_BYTES: Final = 8 * _BLOCK_BYTES  # the writer waits when we are slower
# A program that writes line by line would have every line cut and framed alone, which costs a millisecond each. So what
# comes in small pieces is gathered for so long.
_SMALL_BYTES: Final = 64 * 1024
_GATHER_S: Final = 0.02


def read_stream(
    stream: BinaryIO,
    name: str = "stdin",
    *,
    pace: FlushPolicy | None = None,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Chunk]:
    """Chunks as they fill, or at the `pace` given; ends with the stream, which may never end.

    After a pause in the stream the open record is handed over too, but never half a line. Raises
    BadInput when the stream breaks, after handing over what came before.
    """
    assembly = Assembly(Cursor(path=name, identity=STREAM), max_records=max_records, max_bytes=max_bytes)
    pace = pace or FlushPolicy()
    ahead = _Ahead()
    # a daemon, because a read from a silent pipe cannot be interrupted
    threading.Thread(target=_pump, args=(stream, ahead), name=f"read-{name}", daemon=True).start()
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
    """Bytes that were read and not taken yet, between the thread that reads and the one that takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: list[bytes] = []
        self._size = 0
        self._ended = False
        self.failure: OSError | None = None
        self.left = False  # nobody takes any more

    def put(self, block: bytes) -> None:
        """Waits while too much lies here."""
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
        """All that is there; b"" when nothing came for so long, None after the end."""
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


def _pump(stream: BinaryIO, ahead: _Ahead) -> None:
    """Moves blocks from the stream to where they are taken, until either end is gone."""
    read, failure = _reader(stream), None
    try:
        while not ahead.left and (block := read()):
            ahead.put(block)
    except OSError as exc:
        failure = exc
    except ValueError:  # closed under us
        pass
    ahead.end(failure)


def _reader(stream: BinaryIO) -> Callable[[], bytes]:
    """Reads what is there, without waiting for a whole block.

    From the descriptor where there is one: a thread inside a buffered reader would hold its lock when
    the interpreter ends.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, io.UnsupportedOperation, AttributeError):
        read1 = getattr(stream, "read1", stream.read)
        return lambda: bytes(read1(_BLOCK_BYTES))
    return lambda: os.read(descriptor, _BLOCK_BYTES)
