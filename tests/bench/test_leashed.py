"""A benchmark that is killed leaves no process: none of its pool, none of a stack, none that detached
itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from polling import wait_until

ROOT = Path(__file__).resolve().parents[2]
# A benchmark of this test, run as `python -m bench` runs those of the folder.
BENCH = """
import os, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(sys.argv[0]).parent

def show(name):
    (FOLDER / f"{name}.pid").write_text(str(os.getpid()))
    time.sleep(600)

def measure(data):
    detached = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(detached, start_new_session=True)
    (FOLDER / "detached.pid").write_text(str(child.pid))
    (FOLDER / "bench.pid").write_text(str(os.getpid()))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(show, ["first", "second"]))

if __name__ == "__main__":
    from bench import __main__ as command
    name = "bench.sleeping"
    sys.modules[name] = SimpleNamespace(measure=measure)
    command.modules = lambda: {"sleeping": name}
    sys.argv[1:] = ["sleeping"]
    sys.exit(command.main())
"""


@pytest.fixture
def started(tmp_path: Path) -> "Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]":
    """The process that a user would kill, and the pids of the benchmark, its pool and its detached child."""
    script = tmp_path / "sleeping.py"
    script.write_text(BENCH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script], env=environment)
    names = ("bench", "detached", "first", "second")

    def pids() -> dict[str, int]:
        found = {name: tmp_path / f"{name}.pid" for name in names}
        return {
            name: int(path.read_text()) for name, path in found.items() if path.exists() and path.read_text()
        }

    try:
        assert wait_until(lambda: len(pids()) == len(names), timeout_s=90), pids()
        yield process, pids()
    finally:
        for pid in (process.pid, *pids().values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def running(pids: dict[str, int]) -> list[str]:
    """The names of those that still run; a zombie does not."""
    return [name for name, pid in pids.items() if alive(pid)]


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whom", ["command", "benchmark"])
def test_a_killed_benchmark_leaves_no_process(
    started: "tuple[subprocess.Popen[bytes], dict[str, int]]", whom: str, number: signal.Signals
) -> None:
    process, pids = started
    os.kill(process.pid if whom == "command" else pids["bench"], number)
    assert wait_until(lambda: not running(pids), timeout_s=30), running(pids)
    assert wait_until(lambda: process.poll() is not None, timeout_s=30)
