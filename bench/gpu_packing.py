"""Packing of GPUs by a production trace: allocated share by load under Random, BestFit, FGD and our policy.

Nodes and tasks are files in the form of Alibaba's `cluster-trace-gpu-v2023`, by default those of
../shared/data/openb. `ours` and `fgd` know the distribution of the trace. `ours_learnt` counts what has
arrived so far, as the pool does. `decision_us` is CPU time of our policy per arrival, with building its
index."""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench._packing import MARKS, Cluster, Placing, Replay, read_nodes, read_tasks, replay
from bench._packing_policies import BestFit, Fgd, Ours, OursLearnt, Random
from pipeline.errors import BadInput
from pipeline.gpu.policy.shapes import NeedShape

FIRST_SEED: Final = 42
SEEDS: Final = 10
POLICIES: Final = ("random", "best_fit", "fgd", "ours", "ours_learnt")


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--nodes", type=Path, metavar="FILE", help="nodes (default: nodes.csv of openb)")
    parser.add_argument(
        "--pods",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="tasks, one workload a file (default: all of openb)",
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"runs (default {SEEDS})")


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    if args.seeds < 1:
        raise BadInput(f"{args.seeds} seeds measure nothing; ask for 1 or more")
    folder = data / "openb"
    nodes = args.nodes or folder / "nodes.csv"
    files = args.pods or sorted(folder.glob("pods_*.csv*"))
    if not files:
        raise BadInput(f"{folder} has no file pods_*.csv; name workloads with --pods")
    cluster = read_nodes(nodes)
    traces = {_name(path): read_tasks(path, cluster) for path in files}
    if len(traces) < len(files):
        raise BadInput("two files of --pods have one name; give each workload a name of its own")
    work = [
        (name, policy, FIRST_SEED + n) for name in traces for policy in POLICIES for n in range(args.seeds)
    ]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        runs = pool.map(_run, [(traces[name], cluster, policy, seed) for name, policy, seed in work])
        replays = dict(zip(work, runs, strict=True))
    found: dict[str, Any] = {}
    for name in traces:
        found[name] = {
            policy: _means([replays[name, policy, FIRST_SEED + n] for n in range(args.seeds)])
            for policy in POLICIES
        }
        found[name]["decision_us"] = found[name]["ours"]["decision_us"]
    return {
        "nodes": len(cluster.rooms),
        "gpus": cluster.gpus,
        "seeds": args.seeds,
        "workloads": found,
        "decision_us": round(mean(one["decision_us"] for one in found.values()), 1),
    }


def _name(path: Path) -> str:
    """`default` of pods_default.csv.gz."""
    return path.name.removesuffix(".gz").removesuffix(".csv").removeprefix("pods_")


def _means(replays: Sequence[Replay]) -> dict[str, float]:
    means = {str(mark): round(mean(one.allocated[mark] for one in replays), 2) for mark in MARKS}
    return means | {"decision_us": round(mean(one.decision_us for one in replays), 1)}


def _run(job: tuple[Sequence[NeedShape], Cluster, str, int]) -> Replay:
    tasks, cluster, policy, seed = job
    sizes = cluster.sizes_mib
    policies: dict[str, Callable[..., Placing]] = {
        "random": lambda rooms, chance: Random(rooms, sizes, chance),
        "best_fit": lambda rooms, _chance: BestFit(rooms, sizes),
        "fgd": lambda rooms, _chance: Fgd(rooms, sizes, tasks),
        "ours": lambda rooms, _chance: Ours(rooms, cluster, Counter(tasks)),
        "ours_learnt": lambda rooms, _chance: OursLearnt(rooms, cluster),
    }
    return replay(tasks, cluster, seed, policies[policy])
