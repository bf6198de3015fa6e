"""The packing benchmark on small made-up traces of the same form."""

import gzip
import json
import random
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_packing
from bench._packing import FULL_SHARE, Cluster, arrivals, demand, read_nodes, read_tasks
from bench._packing_policies import BestFit, Fgd, Ours, Random
from pipeline.errors import BadInput
from pipeline.gpu.policy.shapes import NeedShape, NodeRoom

NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
TASKS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"


def nodes_file(folder: Path) -> Path:
    lines = [
        f"n{n},{96_000 if n % 3 else 16_000},262144,{8 if n % 3 else 2},{'A' if n % 3 else 'B'}"
        for n in range(9)
    ]
    (folder / "nodes.csv").write_text(NODES + "\n".join(lines) + "\n")
    return folder / "nodes.csv"


def tasks_file(folder: Path, name: str = "pods_small.csv.gz") -> Path:
    chance = random.Random(3)
    rows = []
    for n in range(60):
        gpus, share = chance.choice(
            [(0, 0), (1, 1000), (1, 1000), (1, 470), (1, 230), (1, 810), (4, 1000), (8, 1000)]
        )
        spec = "A|C" if gpus == 1 and n % 5 == 0 else ""
        rows.append(f"t{n},{chance.choice([2_000, 6_000, 11_000])},8192,{gpus},{share},{spec},LS")
    with gzip.open(folder / name, "wt") as file:
        file.write(TASKS + "\n".join(rows) + "\n")
    return folder / name


def world(folder: Path) -> tuple[Cluster, list[NeedShape]]:
    cluster = read_nodes(nodes_file(folder))
    return cluster, read_tasks(tasks_file(folder), cluster)


def test_the_command_says_the_allocated_share_by_load_for_any_files_of_the_form(tmp_path: Path) -> None:
    files = [nodes_file(tmp_path), tasks_file(tmp_path), tasks_file(tmp_path, "other.csv.gz")]
    command = [
        sys.executable,
        "-m",
        "bench",
        "gpu-packing",
        "--json",
        "--seeds",
        "2",
        "--nodes",
        str(files[0]),
    ]
    ended = subprocess.run(
        [*command, "--pods", *map(str, files[1:])], check=False, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert set(found["workloads"]) == {"small", "other"}
    assert found["decision_us"] > 0
    for policy in ("random", "best_fit", "fgd", "ours"):
        shares = found["workloads"]["small"][policy]
        assert {"90", "95", "100", "110", "130"} <= set(shares)
        assert 0 < shares["90"] <= shares["130"] <= 100


@pytest.mark.parametrize(
    ("nodes", "tasks", "word"),
    [
        ("sn,cpu_milli,gpu\nn,1,1\n", None, "memory_mib"),
        (NODES + "n,1000,1000,0,A\n", None, "no GPU"),
        (NODES + "n,-5,1000,1,A\n", None, "'-5'"),
        (None, TASKS + "t,1000,1000,1,1500,,LS\n", "1500"),
        (None, TASKS + "t,1000,1000,one,1000,,LS\n", "'one'"),
        (None, TASKS + "t,1000,1000,0,0,,LS\n", "no task with a GPU"),
        (None, "", "cpu_milli"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_value_and_a_remedy(
    tmp_path: Path, nodes: str | None, tasks: str | None, word: str
) -> None:
    place, pods = nodes_file(tmp_path), tasks_file(tmp_path)
    if nodes is not None:
        place.write_text(nodes)
    if tasks is not None:
        pods = tmp_path / "pods_bad.csv"
        pods.write_text(tasks)
    with pytest.raises(BadInput, match=word):
        gpu_packing.measure(tmp_path, Namespace(nodes=place, pods=[pods], seeds=1))


def test_a_file_that_is_not_there_ends_the_command_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "gpu-packing", "--nodes", str(tmp_path / "none.csv")]
    ended = subprocess.run(
        [*command, "--pods", str(tasks_file(tmp_path))],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 2
    assert "none.csv" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_arrivals_ask_for_1_3_clusters_whether_the_trace_asks_for_less_or_more(tmp_path: Path) -> None:
    cluster, tasks = world(tmp_path)
    limit = 1.3 * cluster.gpus * FULL_SHARE
    for trace in (tasks, tasks * 9):
        queue = arrivals(trace, cluster, random.Random(1))
        assert abs(sum(map(demand, queue)) - limit) <= 8 * FULL_SHARE
        assert set(queue) <= set(trace)


def test_every_policy_keeps_to_each_node_and_drops_only_what_fits_nowhere(tmp_path: Path) -> None:
    cluster, tasks = world(tmp_path)
    sizes, chance = cluster.sizes_mib, random.Random(4)
    queue = arrivals(tasks, cluster, chance)
    policies = (
        Random(cluster.rooms, sizes, chance),
        BestFit(cluster.rooms, sizes),
        Fgd(cluster.rooms, sizes, tasks),
        Ours(cluster.rooms, cluster, Counter(tasks)),
    )
    for policy in policies:
        now = list(cluster.rooms)
        dropped = 0
        for task in queue:
            placed = policy.decide(task)
            if placed is None:
                dropped += 1
                assert not any(fits(room, task) for room in now)
                continue
            node, after = placed
            before, now[node] = now[node], after
            assert before.cpu_milli - after.cpu_milli == task.cpu_milli
            assert before.memory_mib - after.memory_mib == task.node_memory_mib
            assert sum(d.share for d in before.devices) - sum(d.share for d in after.devices) == demand(task)
            assert min(after.cpu_milli, after.memory_mib, *(d.share for d in after.devices)) >= 0
        assert 0 < dropped < len(queue)


def fits(room: NodeRoom, task: NeedShape) -> bool:
    """In the words of the protocol: CPU, memory, whole devices or a share, of an allowed model."""
    if task.cpu_milli > room.cpu_milli or task.node_memory_mib > room.memory_mib:
        return False
    share = FULL_SHARE if task.exclusive else task.memory_mib
    allowed = [d for d in room.devices if task.groups >> d.group & 1]
    return sum(d.share >= share for d in allowed) >= task.devices
