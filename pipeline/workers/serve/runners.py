"""Models in memory that answer requests. Each format is one module beside this one."""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.errors import BadBundle, BadInput
from pipeline.gpu.node import cuda
from pipeline.gpu.placing import Model
from pipeline.gpu.served import ModelFormat, ServedModel
from pipeline.gpu.served_files import fetch_model_file
from pipeline.logs import logger
from pipeline.store.objects import Objects
from pipeline.units import size
from pipeline.workers.serve.tensors import Array, TensorSpec

# A copy may take so much beyond its word; the watchdog of `gpu run` allows the same.
SLACK_MIB: Final = 256
_PACKAGES: Final = {ModelFormat.ONNX: "onnxruntime", ModelFormat.LOGWEIR: "torch"}


class Runner(Protocol):
    """A loaded model. Threads share it."""

    platform: str  # with where it runs, such as `onnx, cpu`
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """The wanted outputs by name. Raises BadInput for inputs that the model refuses, DeviceFailed."""

    def close(self) -> None:
        """Gives its memory back."""


def formats_here() -> tuple[ModelFormat, ...]:
    """The formats whose packages are installed."""
    return tuple(kind for kind, package in _PACKAGES.items() if find_spec(package) is not None)


class RunnerLoader:
    """Loads models of the store for a placement (gpu/placement.py). Called from any thread."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        """`folder`: for files on their way."""
        self.objects = objects
        self.folder = folder
        self.records: dict[tuple[str, str], ServedModel] = {}  # by Model.key
        self.runners: dict[tuple[str, str], Runner] = {}
        self.device_mib = 0  # of the lease, with CUDA's context
        self.context_mib = 0
        self.cuda_tried = False  # by onnxruntime

    @property
    def began(self) -> bool:
        """Whether this process may have memory on a device until it ends, whatever it unloads."""
        return self.cuda_tried or cuda.started_on() is not None

    def load(self, model: Model, uuid: str) -> None:
        """Raises LogweirError; then nothing of the model stays."""
        record = self.records[model.key]
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            file = Path(folder) / ("model.onnx" if record.format is ModelFormat.ONNX else "export.tar")
            try:
                fetch_model_file(self.objects, record.sha256, record.size, file)
                runner = self._runner(record, file, uuid)
            except OSError as exc:
                raise BadBundle(
                    f"{record.name} cannot be written to {self.folder}: {exc}; free space there"
                ) from exc
        self.runners[model.key] = runner
        logger(model=record.field, device=uuid).info("serve.loaded", platform=runner.platform)

    def unload(self, model: Model, uuid: str) -> None:
        """Takes a model off its device."""
        runner = self.runners.pop(model.key, None)
        if runner is not None:
            runner.close()
        logger(model=f"{model.tenant}/{model.name}", device=uuid).info("serve.unloaded")

    def _runner(self, record: ServedModel, file: Path, uuid: str) -> Runner:
        runner: Runner
        if record.format is ModelFormat.ONNX:
            from pipeline.workers.serve.onnx_runner import OnnxRunner, has_cuda

            self.cuda_tried = self.cuda_tried or has_cuda()
            before = _resident_mib()  # with the package, which is no part of a model
            runner = OnnxRunner(file, uuid, memory_mib=record.memory_mib)
        else:
            from pipeline.workers.serve.export_runner import ExportRunner

            before = _resident_mib()
            runner = ExportRunner(file, uuid, device_mib=self.device_mib, context_mib=self.context_mib)
        grown = _resident_mib() - before
        if grown > record.memory_mib + SLACK_MIB:
            runner.close()
            raise BadInput(
                f"a copy took {size(grown)}, and {size(record.memory_mib)} are said; put it again with --memory "
                f"{size(grown).replace(' ', '')}"
            )
        return runner


def _resident_mib() -> int:
    return int(psutil.Process().memory_info().rss) >> 20


def as_spec_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a tensor; names of sizes, and sizes that are not known, are -1."""
    return tuple(one if isinstance(one, int) and one >= 0 else -1 for one in shape)
