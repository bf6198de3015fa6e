"""Requests and answers of the Open Inference Protocol, version 2, over HTTP.

Tensors stand in the JSON, or behind it as bytes (the binary tensor extension, which clients of Triton use).
`Inference-Header-Content-Length` says where the JSON ends. A number that is no number or infinite is null in
JSON.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import BadInput

JSON_TYPE: Final = "application/json"
BINARY_TYPE: Final = "application/octet-stream"
HEADER_LENGTH: Final = "Inference-Header-Content-Length"
MOST_TENSORS: Final = 256
MOST_DIMENSIONS: Final = 32
BYTES: Final = "BYTES"
_KINDS: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    BYTES: np.dtype("O"),
}  # fmt: skip
DATATYPES: Final = tuple(_KINDS)
# Types in JSON by the kind of the datatype: a fraction is no integer, and 1 is no truth.
_FROM_JSON: Final[Mapping[str, frozenset[type]]] = {
    "b": frozenset({bool}), "u": frozenset({int}), "i": frozenset({int}), "f": frozenset({int, float}),
    "O": frozenset({str}),
}  # fmt: skip
# Parameters of extensions that are not offered; ignored, they would change an answer.
_REFUSED: Final = frozenset({"shared_memory_region", "classification", "sequence_id"})

Array = NDArray[Any]


class _WireTensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _WireOutput(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _WireRequest(msgspec.Struct, frozen=True):
    inputs: list[_WireTensor]
    id: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    outputs: list[_WireOutput] = msgspec.field(default_factory=list)


class _Timed(msgspec.Struct, frozen=True):
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output of a model; a dimension of -1 may have any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def facts(self) -> dict[str, Any]:
        """As the metadata of a model has it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A decoded request. BYTES are arrays of objects, each of bytes."""

    inputs: Mapping[str, Array]
    datatypes: Mapping[str, str]  # of the inputs
    outputs: Sequence[str] = ()  # wanted; empty: all
    binary: Mapping[str, bool] = field(default_factory=dict)  # of the wanted outputs that say how
    all_binary: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """An encoded answer. `header`: bytes of its JSON where tensors follow it."""

    body: bytes
    header: int | None = None


def read_request(body: bytes, header: int | None = None) -> InferRequest:
    """`header`: the bytes of the JSON, None for all of the body. Raises BadInput."""
    if header is not None and not 0 <= header <= len(body):
        raise BadInput(
            f"{HEADER_LENGTH} is {header}, and the body has {len(body)} bytes; send the length of its JSON"
        )
    end = len(body) if header is None else header
    try:
        wire = msgspec.json.decode(body[:end], type=_WireRequest)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadInput(f"the body is no request of the protocol: {exc}; see docs/gpu.md") from exc
    of_tensors = [one.parameters for one in wire.inputs] + [one.parameters for one in wire.outputs]
    for parameters in (wire.parameters, *of_tensors):
        if found := sorted(_REFUSED & {name for name, value in parameters.items() if value}):
            raise BadInput(f"the parameter {found[0]!r} is not offered here; leave it out")
    if not 0 < len(wire.inputs) <= MOST_TENSORS or len(wire.outputs) > MOST_TENSORS:
        raise BadInput(
            f"{len(wire.inputs)} inputs and {len(wire.outputs)} outputs; send 1 to {MOST_TENSORS} inputs"
        )
    inputs: dict[str, Array] = {}
    for tensor in wire.inputs:
        if tensor.name in inputs:
            raise BadInput(f"the input {tensor.name[:80]!r} is there twice; send it once")
        inputs[tensor.name], end = _input(tensor, body, end)
    if end != len(body):
        raise BadInput(
            f"{len(body) - end} bytes follow the last tensor; give its binary_data_size, and {HEADER_LENGTH}"
        )
    return InferRequest(
        inputs=inputs,
        datatypes={tensor.name: tensor.datatype for tensor in wire.inputs},
        outputs=tuple(one.name for one in wire.outputs),
        binary={
            one.name: bool(one.parameters["binary_data"])
            for one in wire.outputs
            if "binary_data" in one.parameters
        },
        all_binary=bool(wire.parameters.get("binary_data_output", False)),
        request_id=wire.id,
    )


def timeout_us(body: bytes, header: int | None) -> float | None:
    """The parameter `timeout` of a request in microseconds, as clients of Triton send it; None without."""
    try:
        found = msgspec.json.decode(body[:header], type=_Timed).parameters.get("timeout")
    except (msgspec.DecodeError, RecursionError):
        return None  # read_request says so
    return float(found) if isinstance(found, int | float) and found > 0 else None


def _input(tensor: _WireTensor, body: bytes, at: int) -> tuple[Array, int]:
    """The array of an input, and where the next one begins. Raises BadInput."""
    name, kind = tensor.name[:80], _KINDS.get(tensor.datatype)
    if kind is None:
        raise BadInput(
            f"input {name!r} has the datatype {tensor.datatype[:20]!r}; use one of {', '.join(DATATYPES)}"
        )
    if len(tensor.shape) > MOST_DIMENSIONS or any(size < 0 for size in tensor.shape):
        raise BadInput(
            f"input {name!r} has the shape {tensor.shape[:40]}; give up to {MOST_DIMENSIONS} sizes from 0 up"
        )
    count = math.prod(tensor.shape)
    binary = tensor.parameters.get("binary_data_size")
    if binary is None:
        return _of_json(tensor, kind, count), at
    if tensor.data is not None:
        raise BadInput(f"input {name!r} has data in JSON and in bytes; send one of them")
    if not isinstance(binary, int) or not 0 <= binary <= len(body) - at:
        raise BadInput(f"input {name!r} says binary_data_size {binary!r}, and {len(body) - at} bytes follow")
    piece = memoryview(body)[at : at + binary]
    if tensor.datatype == BYTES:
        found = _split(piece, count, name)
    else:
        if binary != count * kind.itemsize:
            raise BadInput(
                f"input {name!r} has {binary} bytes, and its shape {tensor.shape} takes {count * kind.itemsize}"
            )
        found = np.frombuffer(piece, kind)
    return _shaped(found, tensor), at + binary


def _shaped(values: Array, tensor: _WireTensor) -> Array:
    """As many values as the shape has places. Raises BadInput for one that numpy cannot count."""
    try:
        return values.reshape(tensor.shape)
    except (ValueError, OverflowError):  # 0 beside sizes of 2**62
        raise BadInput(
            f"input {tensor.name[:80]!r} has the shape {tensor.shape}; give smaller sizes"
        ) from None


def _of_json(tensor: _WireTensor, kind: np.dtype[Any], count: int) -> Array:
    name = tensor.name[:80]
    if not isinstance(tensor.data, list):
        raise BadInput(f"input {name!r} has no data; send a list, or bytes with binary_data_size")
    values = _flat(tensor.data)
    wrong = sorted(kind.__name__ for kind in set(map(type, values)) - _FROM_JSON[kind.kind])
    if wrong:
        raise BadInput(f"input {name!r} is no {tensor.datatype}: it holds {wrong[0]}")
    found = np.empty(len(values), kind)
    try:
        with np.errstate(over="ignore"):  # a number that FP16 cannot hold is infinite there
            found[:] = (
                [text.encode("utf-8", "replace") for text in values] if tensor.datatype == BYTES else values
            )
    except OverflowError:
        raise BadInput(
            f"input {name!r} is no {tensor.datatype}: a number of it is too large or too small"
        ) from None
    if found.size != count:
        raise BadInput(f"input {name!r} has {found.size} values, and its shape {tensor.shape} takes {count}")
    return _shaped(found, tensor)


def _flat(data: list[Any]) -> list[Any]:
    """The values of nested lists, row by row; bounded by MOST_DIMENSIONS."""
    for _ in range(MOST_DIMENSIONS):
        if not any(isinstance(one, list) for one in data):
            return data
        data = [value for one in data for value in (one if isinstance(one, list) else [one])]
    return data


def _split(piece: memoryview, count: int, name: str) -> Array:
    """Elements of BYTES, each after its length in four bytes. Raises BadInput."""
    found: list[bytes] = []
    at = 0
    while at < len(piece):
        if at + 4 > len(piece):
            break
        (length,) = struct.unpack_from("<I", piece, at)
        if at + 4 + length > len(piece):
            break
        found.append(bytes(piece[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != len(piece) or len(found) != count:
        raise BadInput(
            f"input {name!r} has {len(found)} whole elements of BYTES, and its shape takes {count}"
        )
    array = np.empty(count, np.dtype("O"))
    array[:] = found
    return array


def check_inputs(request: InferRequest, specs: Sequence[TensorSpec]) -> None:
    """Whether a model takes these inputs. Raises BadInput."""
    known = {spec.name: spec for spec in specs}
    for name, array in request.inputs.items():
        spec = known.get(name)
        if spec is None:
            raise BadInput(f"the model has no input {name[:80]!r}; it has {', '.join(known)}")
        if request.datatypes[name] != spec.datatype:
            raise BadInput(
                f"input {name!r} is {request.datatypes[name]}, and the model takes {spec.datatype}"
            )
        fits = len(array.shape) == len(spec.shape) and all(
            wanted in (-1, size) for wanted, size in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            raise BadInput(
                f"input {name!r} has the shape {list(array.shape)}, and the model takes {list(spec.shape)}"
            )
    if missing := [spec.name for spec in specs if not spec.optional and spec.name not in request.inputs]:
        raise BadInput(f"the input {missing[0]!r} is missing; the model takes {', '.join(known)}")


def wanted_outputs(request: InferRequest, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The outputs that a request asks for, all without a word. Raises BadInput."""
    known = {spec.name: spec for spec in specs}
    if unknown := [name for name in request.outputs if name not in known]:
        raise BadInput(f"the model has no output {unknown[0][:80]!r}; it has {', '.join(known)}")
    return [known[name] for name in request.outputs] or list(specs)


def write_answer(
    request: InferRequest,
    outputs: Sequence[tuple[TensorSpec, Array]],
    *,
    model: str,
    version: int,
) -> InferAnswer:
    """The answer to a request."""
    wire: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    for spec, array in outputs:
        facts: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape)}
        if request.binary.get(spec.name, request.all_binary):
            piece = _as_bytes(spec, array)
            facts["parameters"] = {"binary_data_size": len(piece)}
            pieces.append(piece)
        else:
            facts["data"] = _as_json(spec, array)
        wire.append(facts)
    answer: dict[str, Any] = {"model_name": model, "model_version": str(version), "outputs": wire}
    if request.request_id:
        answer["id"] = request.request_id
    head = msgspec.json.encode(answer)
    return InferAnswer(body=b"".join((head, *pieces)), header=len(head) if pieces else None)


def _as_bytes(spec: TensorSpec, array: Array) -> bytes:
    if spec.datatype == BYTES:
        return b"".join(
            struct.pack("<I", len(one)) + one for one in map(_encoded, array.reshape(-1).tolist())
        )
    return np.ascontiguousarray(array, _KINDS[spec.datatype]).tobytes()


def _as_json(spec: TensorSpec, array: Array) -> list[Any]:
    flat: list[Any] = array.reshape(-1).tolist()
    if spec.datatype == BYTES:
        return [_encoded(one).decode("utf-8", "replace") for one in flat]
    return flat


def _encoded(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode("utf-8", "replace")
