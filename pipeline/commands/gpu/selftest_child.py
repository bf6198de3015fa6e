"""`python -m pipeline.commands.gpu.selftest_child limit|hold|model UUID CONTEXT_MIB`: one check of a device.

It is a process of its own, because CUDA stays with the process that began it. It prints one line of JSON.
`model` takes `cpu` in place of a UUID.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from pipeline.errors import LogweirError
from pipeline.gpu.node import cuda
from pipeline.gpu.node.host_lock import HOST_DIRECTORY, host_lock

LIMIT_MIB: Final = 2_048  # of the lease whose limit is proved; a MIG slice has twice as much
LINES: Final = 2_000  # distinct ones; a small training, and enough to time scoring
SCORED_S: Final = 5.0


def main(argv: list[str]) -> int:
    kind, uuid, context = argv
    try:
        facts = {"limit": limit_of_lease, "hold": hold_alone, "model": train_and_score}[kind](
            uuid, int(context)
        )
    except LogweirError as exc:
        facts = {"error": str(exc)}
    print(json.dumps(facts), flush=True)  # noqa: T201 - the answer of this process
    return 0


def limit_of_lease(uuid: str, context_mib: int) -> dict[str, Any]:
    """MiB that tensors got of a lease."""
    got = cuda.prove_limit(uuid, memory_mib=LIMIT_MIB, context_mib=context_mib)
    return {"leased_mib": LIMIT_MIB, "got_mib": got, "context_mib": context_mib}


def hold_alone(uuid: str, context_mib: int) -> dict[str, Any]:
    """Uses the device alone until standard input ends."""
    with host_lock(HOST_DIRECTORY, uuid, exclusive=True):
        cuda.begin(uuid, memory_mib=None, context_mib=context_mib)
        print(json.dumps({"pid": os.getpid()}), flush=True)  # noqa: T201 - as above
        sys.stdin.read()
    return {}


def train_and_score(uuid: str, context_mib: int, seconds: float = SCORED_S) -> dict[str, Any]:
    """One training on made-up lines, and lines per second of its model."""
    import polars as pl

    from pipeline.drain.masking.mask_set import MaskSet
    from pipeline.models.fitting import TrainConfig
    from pipeline.models.line import LineModel
    from pipeline.models.trainer import FitRequest, fit
    from pipeline.records.schema import SAMPLE_SCHEMA

    place = "cpu" if uuid == "cpu" else cuda.begin(uuid, memory_mib=None, context_mib=context_mib)
    words = ("opened", "closed", "read", "wrote", "moved", "kept", "asked", "answered")
    lines = [
        f"service{n % 17} {words[n % 8]} {words[n // 8 % 8]} part{n % 29} of item{n % 131} in <NUM> ms step{n}"
        for n in range(LINES)
    ]
    sample = pl.DataFrame(
        {
            "masked": lines,
            "pattern_id": range(LINES),
            "count": [5] * LINES,
            "severe": [False] * LINES,
            "template_id": range(LINES),
            "baseline": [True] * LINES,
        },
        schema=SAMPLE_SCHEMA,
    )
    masks = MaskSet.load()
    with tempfile.TemporaryDirectory(prefix="logweir-selftest-") as folder:
        request = FitRequest(
            version="selftest",
            out=Path(folder) / "v1",
            config=TrainConfig(),
            seed=1,
            tokens=masks.tokens,
            mask_version=masks.version,
            device=place,
        )
        began = time.perf_counter()
        for _ in fit(sample, request):
            pass
        trained_s = time.perf_counter() - began
        scorer = LineModel.load(request.out, device=place)
    scorer.score(lines[:200])  # kernels are loaded
    scored, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < seconds:
        scorer.score(lines)
        scored += LINES
    return {"training_s": round(trained_s, 1), "lines_per_s": round(scored / took_s), "place": place}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
