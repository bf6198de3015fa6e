"""What `logweir up` costs while nothing comes: CPU and memory of all its processes together.

As shipped (Flower and metrics included), in an empty data directory, so no model is needed yet. CPU is user +
system time of every process of the tree, Redis too, as a share of one core. RSS counts shared pages in every
process, PSS counts each once: PSS is what the machine has less of."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from bench._running import cpu_seconds, family, scratch
from pipeline.redis.attach import running

READY_S: Final = 90.0
SETTLE_S: Final = 20.0  # torch is read in beside the first seconds, where anything reads it
CPU_MOST_PERCENT: Final = 3.0
MEMORY_MOST_MIB: Final = 1.2 * 1024


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is measured (60)")


def failed(values: dict[str, Any]) -> bool:
    return not (values["cpu_within"] and values["memory_within"])


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder, up(folder) as tree:
        time.sleep(SETTLE_S)
        names = named(tree, folder / "data")
        before, began = cpu_seconds(tree), time.monotonic()
        time.sleep(args.seconds)
        after, seconds = cpu_seconds(tree), time.monotonic() - began
        memory = sizes(tree)
        ended = sorted(set(before) - set(after))
    percent = {pid: 100 * (spent - before.get(pid, 0.0)) / seconds for pid, spent in after.items()}
    rss, pss = (sum(size[i] for size in memory.values()) for i in (0, 1))
    cpu = sum(percent.values())
    return {
        "seconds": round(seconds, 1),
        "cpu_percent_of_a_core": round(cpu, 2),
        "cpu_limit_percent": CPU_MOST_PERCENT,
        "cpu_within": cpu < CPU_MOST_PERCENT and not ended,
        "rss_mib": round(rss),
        "pss_mib": round(pss),
        "memory_limit_mib": round(MEMORY_MOST_MIB),
        "memory_within": rss < MEMORY_MOST_MIB,
        "judged_by": "rss",
        "processes": len(after),
        "ended_meanwhile": len(ended),
        "by_process": {
            names.get(pid, str(pid)): {
                "cpu_percent": round(percent[pid], 2),
                "rss_mib": round(memory[pid][0]) if pid in memory else 0,
                "pss_mib": round(memory[pid][1]) if pid in memory else 0,
            }
            for pid in sorted(percent, key=lambda pid: -percent[pid])
        },
    }


@contextmanager
def up(folder: Path, **extra: str) -> Iterator[psutil.Process]:
    """A ready `logweir up` with nothing of a developer's own settings; the top of its tree. `extra`: more
    environment."""
    kept = {k: v for k, v in os.environ.items() if k != "REDIS_URL" and not k.startswith("LOGWEIR_")}
    env = {**kept, "LOGWEIR_DATA_DIR": str(folder / "data"), **extra}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        command = [sys.executable, "-m", "pipeline.cli", "up", "--json"]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=err, cwd=folder)
    try:
        deadline = time.monotonic() + READY_S
        while not (folder / "out").read_text().strip():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"logweir up is not ready: {(folder / 'err').read_text()[-1000:]}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def sizes(top: psutil.Process) -> dict[int, tuple[float, float]]:
    """(RSS, PSS) in MiB by pid."""
    found = {}
    for one in family(top):
        try:
            full = one.memory_full_info()
        except psutil.Error:
            continue
        found[one.pid] = (full.rss / 2**20, getattr(full, "pss", full.rss) / 2**20)
    return found


def named(top: psutil.Process, data_dir: Path) -> dict[int, str]:
    """What the stack calls its processes; a child of a pool has its parent's name and a mark."""
    state: dict[str, Any] = running(data_dir) or {}
    names = {int(pid): str(name) for name, pid in state.get("workers", {}).items()}
    for kind, pids in (("redis", "redis"), ("flower", "flower_pids"), ("metrics", "metrics_pids")):
        names |= {int(pid): kind for pid in state.get(pids, [])}
    names[top.pid] = "supervisor"
    for one in top.children(recursive=True):
        if one.pid not in names:
            names[one.pid] = f"{names.get(one.ppid(), one.name())} (pool)"
    return names
