"""Requests and answers of the Open Inference Protocol: what is read, what is refused, what is written."""

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.workers.serve.tensors import (
    DATATYPES,
    InferRequest,
    TensorSpec,
    check_inputs,
    read_request,
    timeout_us,
    wanted_outputs,
    write_answer,
)


def a_tensor(
    datatype: str = "FP32", shape: list[int] | None = None, data: Any = None, **more: Any
) -> dict[str, Any]:
    plain = {"name": "x", "datatype": datatype, "shape": [2] if shape is None else shape}
    return plain | ({} if data is None else {"data": data}) | more


def a_body(*tensors: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(tensors), **more}).encode()


def binary(tensor: dict[str, Any], piece: bytes) -> tuple[bytes, int]:
    head = a_body(tensor | {"parameters": {"binary_data_size": len(piece)}})
    return head + piece, len(head)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]), ("UINT64", [0, 2**64 - 1]), ("INT8", [-128, 127]), ("INT64", [-(2**63), 2**63 - 1]),
        ("FP16", [0.5, -2]), ("FP32", [1, 2]), ("FP64", [1e300, -0.0]), ("BYTES", ["ä", ""]),
    ],
)  # fmt: skip
def test_numbers_of_json_keep_their_values(datatype: str, data: list[Any]) -> None:
    found = read_request(a_body(a_tensor(datatype, data=data))).inputs["x"]
    assert found.tolist() == ([text.encode() for text in data] if datatype == "BYTES" else data)
    nested = read_request(a_body(a_tensor(datatype, [1, 2], [data]))).inputs["x"]
    assert nested.shape == (1, 2) and nested.reshape(-1).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (a_tensor("BF16", data=[1, 2]), "has the datatype 'BF16'; use one of BOOL"),
        (a_tensor(data=[1]), "has 1 values, and its shape [2] takes 2"),
        (a_tensor(data=[[1, 2], [3]]), "has 3 values"),
        (a_tensor(data=["1", "2"]), "is no FP32: it holds str"),
        (a_tensor("INT32", data=[1.5, 2]), "is no INT32: it holds float"),
        (a_tensor("INT8", data=[128, 0]), "a number of it is too large or too small"),
        (a_tensor("UINT8", data=[-1, 0]), "a number of it is too large or too small"),
        (a_tensor("BOOL", data=[1, 0]), "is no BOOL"),
        (a_tensor("BYTES", data=[1, 2]), "is no BYTES: it holds int"),
        (a_tensor(), "has no data"),
        (a_tensor(shape=[-1], data=[1]), "has the shape [-1]"),
        (a_tensor(shape=[2**40, 2**40], data=[1]), "has 1 values"),
        (a_tensor(shape=[0, 2**62, 2**62], data=[]), "give smaller sizes"),
        (a_tensor(data=[1, 2], parameters={"binary_data_size": 8}), "has data in JSON and in bytes"),
        (
            a_tensor(data=[1, 2], parameters={"shared_memory_region": "r"}),
            "'shared_memory_region' is not offered",
        ),
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_refused(tensor: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_request(a_body(tensor))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"inputs": 3}', b'{"inputs": []}', b"[" * 100_000, b"\xff"]
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput):
        read_request(body)
    assert timeout_us(body, None) is None


def test_bytes_behind_the_json_are_tensors_too() -> None:
    body, header = binary(a_tensor(), struct.pack("<ff", 1, 2))
    assert read_request(body, header).inputs["x"].tolist() == [1, 2]
    body, header = binary(a_tensor("BYTES"), struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0))
    assert read_request(body, header).inputs["x"].tolist() == [b"ab", b""]


@pytest.mark.parametrize(
    ("datatype", "piece", "said"),
    [
        ("FP32", b"1234567", "has 7 bytes, and its shape [2] takes 8"),
        ("BYTES", struct.pack("<I", 9) + b"ab", "has 0 whole elements"),
        ("BYTES", struct.pack("<I", 2**32 - 1), "has 0 whole elements"),
        ("BYTES", b"\0\0", "has 0 whole elements"),
        ("BYTES", struct.pack("<I", 0) * 3, "has 3 whole elements"),
    ],
)
def test_bytes_of_another_size_are_refused(datatype: str, piece: bytes, said: str) -> None:
    body, header = binary(a_tensor(datatype), piece)
    with pytest.raises(BadInput) as refused:
        read_request(body, header)
    assert said in str(refused.value)


def test_a_header_that_ends_elsewhere_and_surplus_bytes_are_refused() -> None:
    body, header = binary(a_tensor(), b"12345678")
    for wrong, said in ((len(body) + 1, "and the body has"), (header - 1, "no request of the protocol")):
        with pytest.raises(BadInput, match=said):
            read_request(body, wrong)
    with pytest.raises(BadInput, match="1 bytes follow the last tensor"):
        read_request(body + b"x", header)
    with pytest.raises(BadInput, match="no request of the protocol"):
        read_request(body)


def test_a_model_gets_only_the_inputs_that_it_takes() -> None:
    specs = [
        TensorSpec(name="x", datatype="FP32", shape=(-1,)),
        TensorSpec(name="level", datatype="BYTES", shape=(-1,), optional=True),
    ]
    check_inputs(read_request(a_body(a_tensor(data=[1, 2]))), specs)
    for tensor, said in (
        (a_tensor(data=[1, 2]) | {"name": "z"}, "has no input 'z'; it has x, level"),
        (a_tensor("FP64", data=[1, 2]), "is FP64, and the model takes FP32"),
        (a_tensor(shape=[1, 2], data=[1, 2]), r"the model takes \[-1\]"),
        (a_tensor("BYTES", data=["a", "b"]) | {"name": "level"}, "the input 'x' is missing"),
    ):
        with pytest.raises(BadInput, match=said):
            check_inputs(read_request(a_body(tensor)), specs)
    assert [one.name for one in wanted_outputs(read_request(a_body(a_tensor(data=[1, 2]))), specs)] == [
        "x",
        "level",
    ]
    asked = read_request(a_body(a_tensor(data=[1, 2]), outputs=[{"name": "y"}]))
    with pytest.raises(BadInput, match="has no output 'y'"):
        wanted_outputs(asked, specs)


def test_what_is_no_number_is_null_in_json() -> None:
    spec = TensorSpec(name="y", datatype="FP64", shape=(-1,))
    request = InferRequest(inputs={}, datatypes={}, request_id="r")
    answer = write_answer(request, [(spec, np.array([1.5, math.nan, math.inf]))], model="m", version=3)
    assert answer.header is None
    assert json.loads(answer.body) == {
        "model_name": "m", "model_version": "3", "id": "r",
        "outputs": [{"name": "y", "datatype": "FP64", "shape": [3], "data": [1.5, None, None]}],
    }  # fmt: skip


@given(st.sampled_from([name for name in DATATYPES if name != "BYTES"]), st.data())
def test_what_is_written_as_bytes_is_read_back(datatype: str, data: st.DataObject) -> None:
    kind = read_request(a_body(a_tensor(datatype, [0], []))).inputs["x"].dtype
    size = data.draw(st.integers(0, 4))
    array = np.frombuffer(
        data.draw(st.binary(min_size=size * kind.itemsize, max_size=size * kind.itemsize)), kind
    )
    if datatype == "BOOL":
        array = (array.view("u1") > 127).astype(kind)
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1,))
    request = InferRequest(inputs={}, datatypes={}, all_binary=True)
    answer = write_answer(request, [(spec, array)], model="m", version=1)
    assert answer.header is not None
    (told,) = json.loads(answer.body[: answer.header])["outputs"]
    head = a_body(told)
    again = read_request(head + answer.body[answer.header :], len(head)).inputs["x"]
    assert again.tobytes() == array.tobytes()


def test_a_timeout_is_read_in_microseconds() -> None:
    body, header = binary(a_tensor(), b"12345678")
    assert timeout_us(body, header) is None
    body = a_body(a_tensor(data=[1, 2]), parameters={"timeout": 2_500_000})
    assert timeout_us(body, None) == 2_500_000
    assert timeout_us(a_body(a_tensor(data=[1, 2]), parameters={"timeout": "soon"}), None) is None


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
tensors = st.fixed_dictionaries(
    {"name": st.text(max_size=3), "datatype": st.sampled_from([*DATATYPES, "?"]), "shape": st.lists(st.integers(-1, 5) | st.just(2**62), max_size=4)},
    optional={"data": plain, "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "classification"]), plain, max_size=2)},
)  # fmt: skip


@given(st.lists(tensors, max_size=3), st.binary(max_size=40), st.integers(-2, 2) | st.none(), st.booleans())
def test_no_request_ends_in_another_way_than_a_sentence(
    inputs: list[Any], piece: bytes, off: int | None, raw: bool
) -> None:
    head = piece if raw else a_body(*inputs)
    try:
        found = read_request(head + piece, None if off is None else len(head) + off)
    except BadInput:
        return
    for tensor in inputs:
        assert list(found.inputs[tensor["name"]].shape) == tensor["shape"]
