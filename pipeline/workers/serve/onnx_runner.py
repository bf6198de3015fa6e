"""Models in ONNX, by onnxruntime: on the GPU of the lease where its package has CUDA, else on the CPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as states

from pipeline.errors import BadBundle, BadInput, DeviceFailed
from pipeline.settings import see_only
from pipeline.workers.serve.runners import as_spec_shape
from pipeline.workers.serve.tensors import BYTES, Array, TensorSpec

CUDA: Final = "CUDAExecutionProvider"
CPU: Final = "CPUExecutionProvider"
THREADS: Final = 4  # of one request on a CPU, as far as there are cores
_DATATYPES: Final = {
    "tensor(bool)": "BOOL", "tensor(string)": BYTES,
    "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32", "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32", "tensor(int64)": "INT64",
    "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
}  # fmt: skip


def has_cuda() -> bool:
    """Whether the installed package computes on GPUs."""
    return CUDA in ort.get_available_providers()


class OnnxRunner:
    """One session of onnxruntime."""

    def __init__(self, file: Path, uuid: str, *, memory_mib: int) -> None:
        """`memory_mib` bounds its arena on a GPU. Raises BadBundle, DeviceFailed."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = (
            min(THREADS, ort.get_cpu_count()) if hasattr(ort, "get_cpu_count") else THREADS
        )
        options.inter_op_num_threads = 1
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # an idle model costs nothing
        options.log_severity_level = 4
        on_gpu = has_cuda()
        providers: list[Any] = [CPU]
        if on_gpu:
            see_only(uuid)
            limit = {
                "device_id": 0,
                "gpu_mem_limit": memory_mib << 20,
                "arena_extend_strategy": "kSameAsRequested",
            }
            providers = [(CUDA, limit), CPU]
        try:
            self.session: Any = ort.InferenceSession(str(file), options, providers=providers)
        except Exception as exc:
            raise BadBundle(f"onnxruntime refuses the file: {_first_line(exc)}") from exc
        if on_gpu and CUDA not in self.session.get_providers():
            raise DeviceFailed(f"onnxruntime does not start CUDA on {uuid}; see `nvidia-smi`")
        self.platform = "onnx, cuda" if on_gpu else "onnx, cpu"
        self.inputs = tuple(_spec(one, "input") for one in self.session.get_inputs())
        self.outputs = tuple(_spec(one, "output") for one in self.session.get_outputs())

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """As the protocol says."""
        texts = {spec.name for spec in self.inputs if spec.datatype == BYTES}
        feed = {name: _as_text(array) if name in texts else array for name, array in inputs.items()}
        try:
            found = self.session.run(list(outputs), feed)
        except states.InvalidArgument as exc:
            raise BadInput(f"the model refuses the inputs: {_first_line(exc)}") from exc
        except Exception as exc:
            raise DeviceFailed(f"the model failed: {_first_line(exc)}") from exc
        return dict(zip(outputs, found, strict=True))

    def close(self) -> None:
        """As the protocol says."""
        self.session = None


def _spec(one: Any, what: str) -> TensorSpec:
    datatype = _DATATYPES.get(one.type)
    if datatype is None:
        raise BadBundle(
            f"its {what} {one.name!r} is a {one.type}, which the protocol does not know; export it as plain tensors"
        )
    return TensorSpec(name=one.name, datatype=datatype, shape=as_spec_shape(one.shape))


def _as_text(array: Array) -> Array:
    """onnxruntime takes strings, not bytes."""
    import numpy as np

    found = np.empty(array.shape, np.dtype("O"))
    found.reshape(-1)[:] = [one.decode("utf-8", "replace") for one in array.reshape(-1)]
    return found


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:300]
