"""Records of a stream that is read once: standard input, a pipe."""

import io
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from pipeline.errors import BadInput
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS, Assembly, Chunk, Cursor
from pipeline.sources.files import STREAM

_BLOCK_BYTES: Final = 256 * 1024
_BLOCKS_AHEAD: Final = 8  # the writer waits when we are slower


def read_stream(
    stream: BinaryIO,
    name: str = "stdin",
    *,
    flush_after_s: float = 1.0,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Chunk]:
    """Chunks as they fill, or after `flush_after_s`; ends with the stream, which may never end.

    After a pause in the stream the open record is handed over too, but never half a line. Raises
    BadInput when the stream breaks, after handing over what came before.
    """
    assembly = Assembly(Cursor(path=name, identity=STREAM), max_records=max_records, max_bytes=max_bytes)
    blocks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=_BLOCKS_AHEAD)
    gone = threading.Event()
    # a daemon, because a read from a silent pipe cannot be interrupted
    threading.Thread(target=_pump, args=(stream, blocks, gone), name=f"read-{name}", daemon=True).start()
    position = 0
    oldest: float | None = None
    failure: OSError | None = None
    try:
        while True:
            try:
                block = blocks.get(timeout=flush_after_s)
            except queue.Empty:
                yield from assembly.flush(position)
                oldest = None
                continue
            if isinstance(block, OSError):
                failure = block
                break
            if not block:
                break
            position += len(block)
            for chunk in assembly.push(block, position):
                yield chunk
                oldest = None
            oldest = clock() if oldest is None and assembly.unsent else oldest
            if oldest is not None and clock() - oldest >= flush_after_s:
                yield from assembly.release(position)
                oldest = None
        yield from assembly.finish(position)
    finally:
        gone.set()
    if failure is not None:
        raise BadInput(
            f"{name} broke after {position} bytes: {failure.strerror}; what came before was delivered"
        )


def _pump(stream: BinaryIO, blocks: "queue.Queue[bytes | OSError]", gone: threading.Event) -> None:
    """Moves blocks from the stream to the queue until either end is gone."""
    read = _reader(stream)
    last = False
    while not last and not gone.is_set():
        item: bytes | OSError
        try:
            item = read()
        except OSError as exc:
            item = exc
        except ValueError:  # closed under us
            item = b""
        last = not isinstance(item, bytes) or not item
        while not gone.is_set():
            try:
                blocks.put(item, timeout=0.2)
                break
            except queue.Full:
                continue


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
