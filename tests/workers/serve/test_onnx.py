"""Models in ONNX: their inputs and outputs, and files that hold none or lead elsewhere."""

from pathlib import Path

import numpy as np
import pytest
from onnx_bytes import leaking, multiplying, repeating

from pipeline.errors import BadBundle, BadInput
from pipeline.workers.serve.onnx_runner import OnnxRunner


def runner_of(folder: Path, content: bytes) -> OnnxRunner:
    folder.mkdir(exist_ok=True)
    file = folder / "model.onnx"
    file.write_bytes(content)
    return OnnxRunner(file, "GPU-none", memory_mib=64)


def test_a_model_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, multiplying(0.5, columns=3))
    assert [one.facts() for one in (*runner.inputs, *runner.outputs)] == [
        {"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in ("x", "y")
    ]
    found = runner.run({"x": np.array([[2, 4, 6]], np.float32)}, ["y"])
    assert found["y"].tolist() == [[1, 2, 3]]
    with pytest.raises(BadInput, match="the model refuses the inputs"):
        runner.run({"x": np.zeros((1, 2), np.float32)}, ["y"])


def test_strings_go_through(tmp_path: Path) -> None:
    heard = np.empty((2, 1), np.object_)
    heard[:, 0] = ["ä".encode(), b"\xff"]
    said = runner_of(tmp_path, repeating()).run({"heard": heard}, ["said"])["said"]
    assert said.tolist() == [["ä"], ["\ufffd"]]


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "../../../../../../etc/passwd"])
def test_a_model_reads_no_file_outside_its_own_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"12345678")
    with pytest.raises(BadBundle, match="onnxruntime refuses the file"):
        runner_of(tmp_path / "own", leaking(path))


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x08", multiplying(1.0)[:-9]])
def test_a_file_that_is_no_whole_model_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadBundle, match="onnxruntime refuses the file"):
        runner_of(tmp_path, content)
