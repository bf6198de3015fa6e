"""Traces of a GPU cluster in the form of Alibaba's `cluster-trace-gpu-v2023`, and the protocol of their
replay.

The tasks of a trace arrive one at a time, in an order shuffled by a seed. Behind them come copies of random
tasks until the GPU demand is 1.3 times the cluster's. A task that fits on a node is placed at once, any other
is dropped; none leaves or moves. The load is the GPU demand of all arrivals over all GPUs. The allocated
share at a load is the mean over the arrivals whose load rounds to it (Weng et al., USENIX ATC 2023)."""

import csv
import gzip
import io
import random
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final, Protocol

from pipeline.errors import BadInput
from pipeline.gpu.policy.shapes import FULL_SHARE, Free, NeedShape, NodeRoom
from pipeline.gpu.values import FULL_PERCENT

MARKS: Final = (90, 95, 100, 110, 130)  # percent of load
LIMIT: Final = 1.3  # of the demand, in clusters
NODE_COLUMNS: Final = ("cpu_milli", "memory_mib", "gpu", "model")
TASK_COLUMNS: Final = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The empty nodes of a trace. Every GPU has 1,000 thousandths, and each model is a group of its own."""

    rooms: tuple[NodeRoom, ...]
    groups: Mapping[str, int]

    @property
    def gpus(self) -> int:
        return sum(len(room.devices) for room in self.rooms)

    @property
    def sizes_mib(self) -> list[int]:
        return [FULL_SHARE] * len(self.groups)


@dataclass(frozen=True, slots=True)
class Replay:
    """One seed of one policy: percent of all GPUs allocated by load, and CPU time of a decision."""

    allocated: Mapping[int, float]
    decision_us: float


class Placing(Protocol):
    """A policy with its picture of the nodes. `decide` is all that is timed."""

    def decide(self, shape: NeedShape) -> tuple[int, NodeRoom] | None:
        """The node for a task and the room that it has then; None where it fits nowhere."""


def read_nodes(path: Path) -> Cluster:
    """The nodes of a file with the columns of NODE_COLUMNS. Raises BadInput."""
    rows = _rows(path, NODE_COLUMNS)
    groups = {model: n for n, model in enumerate(sorted({row["model"] for row in rows}))}
    rooms = []
    for number, row in enumerate(rows, 2):
        cpu, memory, gpus = (_count(path, number, row, name) for name in ("cpu_milli", "memory_mib", "gpu"))
        one = Free(FULL_SHARE, FULL_SHARE, FULL_PERCENT, True, groups[row["model"]])
        rooms.append(NodeRoom(cpu, memory, (one,) * gpus))
    if not any(room.devices for room in rooms):
        raise BadInput(f"{path} lists no GPU; give a node with a number above 0 in its column gpu")
    return Cluster(tuple(rooms), groups)


def read_tasks(path: Path, cluster: Cluster) -> list[NeedShape]:
    """The tasks of a file (.csv or .csv.gz) with the columns of TASK_COLUMNS, and gpu_spec where it is there.

    Raises BadInput."""
    tasks = []
    for number, row in enumerate(_rows(path, TASK_COLUMNS), 2):
        cpu, memory, gpus, share = (_count(path, number, row, name) for name in TASK_COLUMNS)
        if gpus and not 0 < share <= FULL_SHARE:
            raise BadInput(
                f"{path}: line {number} has gpu_milli = {share}; write 1 to {FULL_SHARE}, "
                "the share of each GPU"
            )
        models = [model for model in (row.get("gpu_spec") or "").split("|") if model]
        allowed = [cluster.groups[model] for model in models if model in cluster.groups]
        whole = gpus > 0 and share == FULL_SHARE
        tasks.append(
            NeedShape(
                devices=gpus,
                memory_mib=0 if whole or not gpus else share,
                compute_percent=0,
                exclusive=whole,
                groups=sum(1 << n for n in (allowed if models and gpus else cluster.groups.values())),
                cpu_milli=cpu,
                node_memory_mib=memory,
            )
        )
    if not any(task.devices for task in tasks):
        raise BadInput(f"{path} lists no task with a GPU; give one with num_gpu above 0")
    return tasks


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        reader = csv.DictReader(io.StringIO(text, newline=""))
        named = reader.fieldnames or ()
        rows = list(reader)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as exc:
        raise BadInput(f"{path} cannot be read ({exc}); name a CSV file, plain or with .gz") from exc
    missing = [name for name in columns if name not in named]
    if missing:
        raise BadInput(f"{path} has no column {missing[0]!r}; the columns {', '.join(columns)} are needed")
    return rows


def _count(path: Path, number: int, row: Mapping[str, str], column: str) -> int:
    text = row[column]
    if text is None or not (text.isascii() and text.isdigit()):
        raise BadInput(f"{path}: line {number} has {column} = {text!r}; write a whole number from 0 up")
    return int(text)


def demand(task: NeedShape) -> int:
    """Thousandths of GPUs that a task asks for."""
    return task.devices * (FULL_SHARE if task.exclusive else task.memory_mib)


def arrivals(tasks: Sequence[NeedShape], cluster: Cluster, chance: random.Random) -> list[NeedShape]:
    """The tasks of the trace in random order, with copies behind them, or less some, up to the limit."""
    limit = LIMIT * cluster.gpus * FULL_SHARE
    queue = list(tasks)
    chance.shuffle(queue)
    demanded = sum(map(demand, queue))
    if demanded > limit:
        while demanded > limit:
            demanded -= demand(queue.pop(chance.randrange(len(queue))))
    else:
        while demanded < limit:
            queue.append(chance.choice(tasks))
            demanded += demand(queue[-1])
    return queue


def replay(
    tasks: Sequence[NeedShape],
    cluster: Cluster,
    seed: int,
    policy: Callable[[Sequence[NodeRoom], random.Random], Placing],
) -> Replay:
    """One run of the protocol. Nodes stand in an order shuffled by the seed, and so do arrivals."""
    chance = random.Random(seed)
    rooms = list(cluster.rooms)
    chance.shuffle(rooms)
    queue = arrivals(tasks, cluster, chance)
    all_gpus = cluster.gpus * FULL_SHARE
    demanded = allocated = 0
    sums: dict[int, list[float]] = defaultdict(list)
    latest = dict.fromkeys(MARKS, 0.0)  # for a cluster so small that no arrival comes at a load
    began = time.process_time()
    placing = policy(rooms, random.Random(seed))
    for task in queue:
        demanded += demand(task)
        if placing.decide(task) is not None:
            allocated += demand(task)
        load, share = round(100 * demanded / all_gpus), 100 * allocated / all_gpus
        sums[load].append(share)
        latest.update((mark, share) for mark in MARKS if load <= mark)
    spent = time.process_time() - began
    shares = {mark: mean(sums[mark]) if sums[mark] else latest[mark] for mark in MARKS}
    return Replay(shares, 1e6 * spent / len(queue))
