"""Tiny ONNX models as bytes, written field by field: the format is protobuf, and this needs no package."""

import struct

FLOAT, UINT8, STRING = 1, 2, 8  # TensorProto.DataType


def multiplying(factor: float, *, columns: int = 2) -> bytes:
    """`y = x * factor`: x and y are FP32 of [rows, columns]."""
    constant = b"".join(
        (_number(2, FLOAT), _field(8, b"factor"), _field(9, struct.pack("<f", factor)))  # of no dimension
    )
    node = _field(1, b"x") + _field(1, b"factor") + _field(2, b"y") + _field(4, b"Mul")
    return _model(node, _value("x", FLOAT, columns), _value("y", FLOAT, columns), _field(5, constant))


def repeating() -> bytes:
    """`said = heard`: BYTES of [rows, 1]."""
    node = _field(1, b"heard") + _field(2, b"said") + _field(4, b"Identity")
    return _model(node, _value("heard", STRING, 1), _value("said", STRING, 1))


def leaking(path: str, size: int = 8) -> bytes:
    """Its output is the beginning of another file, as external data of a constant."""
    entries = {"location": path.encode(), "length": str(size).encode()}
    external = b"".join(
        _field(13, _field(1, name.encode()) + _field(2, value)) for name, value in entries.items()
    )
    constant = _number(1, size) + _number(2, UINT8) + _field(8, b"secret") + external + _number(14, 1)
    node = _field(1, b"secret") + _field(2, b"y") + _field(4, b"Identity")
    return _model(node, _value("x", FLOAT, 2), _value("y", UINT8, size), _field(5, constant))


def _model(node: bytes, value_in: bytes, value_out: bytes, more: bytes = b"") -> bytes:
    graph = _field(1, node) + _field(2, b"g") + more + _field(11, value_in) + _field(12, value_out)
    return _number(1, 8) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, 13))


def _value(name: str, kind: int, columns: int) -> bytes:
    shape = _field(1, _field(2, b"rows")) + _field(1, _number(1, columns))
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, kind) + _field(2, shape)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))
