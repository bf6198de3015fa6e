"""Our own models: an export of a pipeline judges lines as `score_frame` does.

Input `lines` (BYTES, and optionally `level` of the same size); outputs `score`, `p_value` (not a number
without a calibration), `anomalous`, and `reasons`, joined by commas.
"""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from pipeline.errors import BadInput
from pipeline.gpu.job_files import unpack_archive
from pipeline.gpu.node import cuda
from pipeline.tasks.frames import ExportedModel, judge_records
from pipeline.workers.serve.tensors import BYTES, Array, TensorSpec

INPUTS: Final = (
    TensorSpec(name="lines", datatype=BYTES, shape=(-1,)),
    TensorSpec(name="level", datatype=BYTES, shape=(-1,), optional=True),
)
OUTPUTS: Final = (
    TensorSpec(name="score", datatype="FP64", shape=(-1,)),
    TensorSpec(name="p_value", datatype="FP64", shape=(-1,)),
    TensorSpec(name="anomalous", datatype="BOOL", shape=(-1,)),
    TensorSpec(name="reasons", datatype=BYTES, shape=(-1,)),
)


class ExportRunner:
    """One export in memory."""

    def __init__(self, file: Path, uuid: str, *, device_mib: int, context_mib: int) -> None:
        """Raises BadBundle, DeviceFailed, BadInput."""
        device = "cpu"
        if cuda.usable():
            device = cuda.begin(uuid, memory_mib=device_mib, context_mib=context_mib)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            unpack_archive(file, Path(folder), what="the export")
            self.export = ExportedModel(Path(folder), device)
        self._turn = threading.Lock()  # masks and templates remember what they have seen
        self.platform = f"logweir, {device.partition(':')[0]}"
        self.inputs: tuple[TensorSpec, ...] = INPUTS
        self.outputs: tuple[TensorSpec, ...] = OUTPUTS

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """As the protocol says."""
        columns = {"message": _texts(inputs["lines"])}
        if "level" in inputs:
            if inputs["level"].shape != inputs["lines"].shape:
                raise BadInput(
                    f"`lines` has {len(inputs['lines'])} values and `level` {len(inputs['level'])}; send a level "
                    "for each line"
                )
            columns["level"] = _texts(inputs["level"])
        rows = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))
        with self._turn:
            judged = judge_records(rows, self.export)
        reasons = np.empty(judged.height, np.dtype("O"))
        reasons[:] = [",".join(one or ()).encode() for one in judged["reasons"].to_list()]
        found: dict[str, Array] = {
            "score": judged["score"].cast(pl.Float64).fill_null(float("nan")).to_numpy(),
            "p_value": judged["p_value"].cast(pl.Float64).fill_null(float("nan")).to_numpy(),
            "anomalous": judged["anomalous"].fill_null(value=False).to_numpy(),
            "reasons": reasons,
        }
        return {name: found[name] for name in outputs}

    def close(self) -> None:
        """As the protocol says."""
        del self.export
        cuda.unload()


def _texts(array: Array) -> list[str]:
    return [one.decode("utf-8", "replace") for one in array]
