"""Both editions of the line model beside Opni's scorer: what they find, and distinct lines a second a core.

`triage_auroc` is that of `bench detection --only triage`. That of NuLog is of our re-implementation
(bench/_nulog.py): the original takes minutes for each split. `lines_per_s` is of one process with one
thread: both editions and Opni's *original* inference take turns on the same distinct lines, and the median of
the turns counts. A process of ours has met one half of the lines before and is timed with the other, as in
`bench scoring`; the original remembers nothing. The original lies in ../shared/opni and needs
`eval "$(../shared/opni/setup DIR)"` first; without it its figure is null.

Nothing is tuned on what is scored: thresholds come from the training lines. How good a model is does not
change how fast it is, so the original is trained on few lines."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench import _chronological, _hdfs_lines, _opni
from bench._running import scratch
from bench._triage_data import all_sets
from bench._triage_run import Plan, run
from bench.scoring import messages, sample
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput
from pipeline.models import prior
from pipeline.models.line import LineModel
from pipeline.models.threshold import Mode
from pipeline.models.trainer import FitRequest, edition_config, fit

EDITIONS: Final = ("causal", "transformer")
PARTS: Final = ("triage", "hdfs_lines", "bgl", "speed")
TURNS: Final = 3
NULOG_TRAINED: Final = 200  # lines
NULOG_LINES: Final = 150  # of a turn


def options(parser: Any) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given again; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="of each quality figure")
    parser.add_argument("--processes", type=int, default=2, help="of the triage")


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`causal`, `transformer`, `nulog`: triage_auroc, lines_per_s (null where not measured); ratios beside
    them."""
    parts = args.only or PARTS
    values: dict[str, dict[str, Any]] = {
        name: {"triage_auroc": None, "lines_per_s": None} for name in (*EDITIONS, "nulog")
    }
    for edition in EDITIONS:
        print(f"editions: {edition} ...", file=sys.stderr, flush=True)  # takes minutes
        if "triage" in parts:
            plan = Plan(seeds=args.seeds, repeats=args.seeds, peers=edition == EDITIONS[0], edition=edition)
            average = run(all_sets(data), plan, processes=args.processes)["average"]
            values[edition] |= {"triage_auroc": average["auroc"], "triage_auroc_sd": average["auroc_sd"]}
            if plan.peers:
                values["nulog"]["triage_auroc"] = average["baselines"]["nulog"]["auroc"]
        if "hdfs_lines" in parts:
            values[edition]["hdfs_lines"] = _hdfs_lines.measure(data, seeds=args.seeds, edition=edition)
        if "bgl" in parts:
            values[edition]["bgl"] = _chronological.measure(data, seeds=args.seeds, edition=edition)
    if "speed" in parts:
        for name, speed in _speeds(data).items():
            values[name] |= speed
        for edition in EDITIONS:
            for ratio, what in (("ratio_to_nulog", "lines_per_s"), ("cpu_ratio_to_nulog", "lines_per_cpu_s")):
                peer = values["nulog"][what]
                values[edition][ratio] = peer and round(values[edition][what] / peer, 1)
    return values


def _speeds(data: Path) -> dict[str, dict[str, Any]]:
    masks = MaskSet.load()
    frame = sample(masks, messages(data))
    lines = frame["masked"].to_list()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {
        name: {"lines_per_s": [], "lines_per_cpu_s": []} for name in (*EDITIONS, "nulog")
    }
    with scratch() as folder:
        trained: dict[str, float] = {}
        for edition in EDITIONS:
            began = time.process_time()
            request = FitRequest(
                tokens=masks.tokens,
                mask_version=masks.version,
                config=edition_config(edition),
                seed=1,
                out=folder / edition,
                mode=Mode.BASELINE,
                version="v1",
            )
            for _ in fit(frame, request):
                pass
            trained[edition] = round(time.process_time() - began, 1)
        peer = _Original.trained(folder, lines) if _opni.are_here() else None
        for turn in range(TURNS + 1):  # the first one is of imports and allocations
            for name in found:
                speed = _timed(folder / name, lines, turn) if name in EDITIONS else peer and peer.turn()
                if turn and speed:
                    found[name]["lines_per_s"].append(speed[0])
                    found[name]["lines_per_cpu_s"].append(speed[1])
    speeds: dict[str, dict[str, Any]] = {
        name: {what: round(statistics.median(values), 1) if values else None for what, values in rows.items()}
        for name, rows in found.items()
    }
    for edition, seconds in trained.items():
        speeds[edition]["training_cpu_s"] = seconds
    return speeds


def _timed(bundle: Path, lines: Sequence[str], turn: int) -> tuple[float, float]:
    """Distinct lines a second by the clock and of processor time: of one half, once the other was met."""
    prior._features.cache_clear()  # which a process remembers
    model = LineModel.load(bundle, threads=1)
    order = [lines[i] for i in np.random.default_rng(turn).permutation(len(lines))]
    met, asked = order[: len(order) // 2], order[len(order) // 2 :]
    model.score(met)
    began, cpu = time.perf_counter(), time.process_time()
    model.score(asked)
    return len(asked) / (time.perf_counter() - began), len(asked) / (time.process_time() - cpu)


class _Original:
    """Opni's unchanged inference in a process of its own; one masked line after the other, as it runs."""

    def __init__(self, folder: Path, infer: Path) -> None:
        self.folder, self.infer = folder, infer

    @classmethod
    def trained(cls, folder: Path, lines: Sequence[str]) -> "_Original":
        train, infer = folder / "train.log", folder / "infer.log"
        train.write_text("\n".join(lines[:NULOG_TRAINED]), encoding="utf-8", errors="replace")
        step = max(1, len(lines) // NULOG_LINES)
        infer.write_text("\n".join(lines[::step][:NULOG_LINES]), encoding="utf-8", errors="replace")
        peer = cls(folder / "original", infer)
        peer._call("--train", str(train), "--lines", str(NULOG_TRAINED), "--epochs", "1")
        return peer

    def turn(self) -> tuple[float, float]:
        found = self._call()
        return found["predicted"] / found["infer_s"], found["predicted"] / found["infer_cpu_s"]

    def _call(self, *more: str) -> dict[str, Any]:
        command = [os.environ["OPNI_PEERS_PYTHON"], str(_opni.FOLDER / "nulog_bench.py"), *more]
        command += ["--infer", str(self.infer), "--threads", "1", "--keep", str(self.folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise BadInput(f"Opni's inference ended with {done.returncode} ({why}); run its setup with torch")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
