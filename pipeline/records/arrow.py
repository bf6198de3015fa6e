"""Checks an Arrow stream before Polars reads it, and an Arrow file, which builds before wrote.

Polars allocates the lengths that the bytes state, so a false length ends the whole process (`memory
allocation of 2377108633428164608 bytes failed`). The check compares every length with the bytes that are
there, without decompressing: columns of accepted bytes take at most `max_bytes`. The format:
arrow.apache.org/docs/format/Columnar.html and its File.fbs, Message.fbs, Schema.fbs."""

import struct
from collections.abc import Iterator
from typing import Final

from pipeline.errors import BadPayload

MAGIC: Final = b"ARROW1"  # of a file; a stream begins with the mark of a message
MAX_ROWS: Final = 4_000_000  # forty times the most records that a batch may have
MAX_COLUMNS: Final = 64
MAX_BLOCKS: Final = 64
# Members of Schema.fbs's union Type that our frames are made of; none refers to a dictionary.
INT, FLOAT, TEXT, BOOL, MOMENT, LIST, LARGE_TEXT, LARGE_LIST, TEXT_VIEW = 2, 3, 5, 6, 10, 12, 20, 21, 24
TYPES: Final = frozenset((INT, FLOAT, TEXT, BOOL, MOMENT, LIST, LARGE_TEXT, LARGE_LIST, TEXT_VIEW))
SCHEMA, RECORD_BATCH = 1, 3  # of Message.fbs's union MessageHeader
MARK: Final = b"\xff\xff\xff\xff"  # begins a message
END: Final = MARK + bytes(4)  # a message without a head ends a stream
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def check_arrow(blob: bytes, max_bytes: int) -> None:
    """Raises BadPayload unless these are an Arrow stream, or file, of plain columns that take at most
    `max_bytes` of memory."""
    try:
        memory = _file_bytes(blob, max_bytes) if blob.startswith(MAGIC) else _stream_bytes(blob, max_bytes)
    except (struct.error, _Lie) as exc:
        raise BadPayload(f"a payload of {len(blob)} bytes is not a readable Arrow stream: {exc}") from exc
    if memory > max_bytes:
        raise BadPayload(
            f"a payload of {len(blob)} bytes says that it unpacks to {memory}; at most {max_bytes} are read"
        )


class _Lie(Exception):
    """A length or place that cannot be."""


class _Table:
    """A table of a flatbuffer: fields by number, each read within the bytes that are there."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at
        vtable = at - self._int("<i", at)
        size = self._int("<H", vtable)
        self._fields = [self._int("<H", vtable + 4 + 2 * i) for i in range(min((size - 4) // 2, 16))]

    def _int(self, form: str, at: int) -> int:
        if at < 0:
            raise _Lie("a place before its begin")
        return int(struct.unpack_from(form, self.data, at)[0])

    def number(self, field: int, form: str) -> int:
        """A scalar; 0 when it is left out."""
        place = self._place(field)
        return self._int(form, place) if place else 0

    def table(self, field: int) -> "_Table | None":
        place = self._place(field)
        return _Table(self.data, place + self._int("<I", place)) if place else None

    def tables(self, field: int, limit: int) -> "Iterator[_Table]":
        """The elements of a vector of tables."""
        for place in self._elements(field, 4, limit):
            yield _Table(self.data, place + self._int("<I", place))

    def structs(self, field: int, form: str, limit: int) -> Iterator[tuple[int, ...]]:
        """The elements of a vector of structs."""
        for place in self._elements(field, struct.calcsize(form), limit):
            yield struct.unpack_from(form, self.data, place)

    def _elements(self, field: int, size: int, limit: int) -> Iterator[int]:
        place = self._place(field)
        if not place:
            return
        start = place + self._int("<I", place)
        count = self._int("<I", start)
        if count > limit:
            raise _Lie(f"{count} parts where at most {limit} are read")
        yield from range(start + 4, start + 4 + size * count, size)

    def _place(self, field: int) -> int:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self.at + offset if offset else 0


def _stream_bytes(blob: bytes, max_bytes: int) -> int:
    """The bytes of memory that the columns of a stream take: a schema, record batches, the end."""
    data = memoryview(blob)
    if not blob.endswith(END):
        raise _Lie("it has no end")
    kind, schema, _, at = _message(data, 0)
    if kind != SCHEMA:
        raise _Lie("it has no schema")
    buffers, nodes = _columns(schema)
    memory = blocks = 0
    while at != len(blob) - len(END):
        kind, batch, body, at = _message(data, at)
        blocks += 1
        if kind != RECORD_BATCH or blocks > MAX_BLOCKS:
            raise _Lie("a part is no record batch, or one too many")
        memory += _batch(batch, body, buffers, nodes)
        if memory > max_bytes:
            break
    return memory


def _message(data: memoryview, at: int) -> tuple[int, _Table, memoryview, int]:
    """Kind, head and body of the message of a stream at this place, and the place behind it."""
    size = struct.unpack_from("<i", data, at + len(MARK))[0]
    head = at + len(MARK) + 4
    if bytes(data[at : at + len(MARK)]) != MARK or not 0 < size <= len(data) - head:
        raise _Lie("a part has no head")
    message = _root(data[head : head + size])
    content, length = message.table(2), message.number(3, "<q")
    body = head + size
    if content is None or not 0 <= length <= len(data) - body:
        raise _Lie("a part lies outside of the stream")
    return message.number(1, "<B"), content, data[body : body + length], body + length


def _file_bytes(blob: bytes, max_bytes: int) -> int:
    """The bytes of memory that the columns of a file take."""
    data = memoryview(blob)
    end = len(blob) - len(MAGIC) - 4
    if end < len(MAGIC) or blob[:6] != MAGIC or blob[-6:] != MAGIC:
        raise _Lie("it does not begin and end as one")
    size = struct.unpack_from("<i", data, end)[0]
    if not 0 < size <= end - 8:
        raise _Lie("its footer is longer than the file")
    footer = _root(data[end - size : end])
    schema = footer.table(1)
    if schema is None:
        raise _Lie("it has no schema")
    buffers, nodes = _columns(schema)
    if any(True for _ in footer.structs(2, "<qi4xq", MAX_BLOCKS)):
        raise _Lie("it has dictionaries")
    memory = 0
    for offset, head, body in footer.structs(3, "<qi4xq", MAX_BLOCKS):
        # A message: 0xFFFFFFFF, the size of its head, the head, its body.
        if offset < 8 or head < 8 or body < 0 or offset + head + body > end - size:
            raise _Lie("a part lies outside of the file")
        mark, inner = struct.unpack_from("<Ii", data, offset)
        if mark != 0xFFFFFFFF or not 0 < inner <= head - 8:
            raise _Lie("a part has no head")
        message = _root(data[offset + 8 : offset + 8 + inner])
        batch = message.table(2)
        if message.number(1, "<B") != RECORD_BATCH or batch is None:
            raise _Lie("a part is no record batch")
        memory += _batch(batch, data[offset + head : offset + head + body], buffers, nodes)
        if memory > max_bytes:
            break
    return memory


def _root(data: memoryview) -> _Table:
    return _Table(data, struct.unpack_from("<I", data, 0)[0])


def _columns(schema: _Table) -> tuple[int, int]:
    """How many buffers and nodes the columns have; text views have more, which are counted per batch."""
    if schema.number(0, "<h"):
        raise _Lie("its numbers have the other byte order")
    buffers = nodes = 0
    waiting = list(schema.tables(1, MAX_COLUMNS))
    while waiting:
        column = waiting.pop()
        kind = column.number(2, "<B")
        children = list(column.tables(5, MAX_COLUMNS))
        if kind not in TYPES or column.table(4) is not None:
            raise _Lie("it has a column of a kind that we do not write")
        if len(children) != (kind in (LIST, LARGE_LIST)):
            raise _Lie("it has a column with too many or too few others inside")
        waiting += children
        nodes += 1
        buffers += 3 if kind in (TEXT, LARGE_TEXT) else 2
        if nodes > MAX_COLUMNS:
            raise _Lie("it has too many columns")
    return buffers, nodes


def _batch(batch: _Table, body: memoryview, buffers: int, nodes: int) -> int:
    """The bytes of memory of one record batch."""
    rows = batch.number(0, "<q")
    lengths = list(batch.structs(1, "<qq", nodes))
    if not 0 <= rows <= MAX_ROWS or len(lengths) != nodes:
        raise _Lie(f"a part of {rows} rows")
    if any(not (0 <= empty <= length <= MAX_ROWS) for length, empty in lengths):
        raise _Lie("a column of more rows than are read")
    views = [count for (count,) in batch.structs(4, "<q", nodes)]
    if any(not 0 <= count <= 4096 for count in views):
        raise _Lie("a column of too many parts")
    parts = list(batch.structs(2, "<qq", buffers + sum(views)))
    if len(parts) != buffers + sum(views):
        raise _Lie("a part has too few buffers")
    compressed = batch.table(3)
    if compressed is not None and compressed.number(0, "<b") != 1:
        raise _Lie("it is compressed in a way that we do not write")
    memory = 0
    for offset, length in parts:
        if offset < 0 or length < 0 or offset + length > len(body):
            raise _Lie("a buffer lies outside of its part")
        memory += _buffer(body[offset : offset + length], compressed is not None)
    return memory


def _buffer(data: memoryview, compressed: bool) -> int:
    """The bytes that a buffer has when it is unpacked."""
    if not compressed or not data:
        return len(data)
    stated = int(struct.unpack_from("<q", data, 0)[0])
    if stated == -1:  # stored as it is
        return len(data) - 8
    if stated < 0 or (stated and bytes(data[8:12]) != ZSTD_MAGIC):
        raise _Lie("a buffer is not compressed as it says")
    return stated
