"""What a stack that has nothing to do keeps in memory; what it costs is measured by bench/idle.py."""

import contextlib
import json
from collections.abc import Iterator

import psutil
import pytest
from intake_process import free_port

from e2e.harness import Up, ordinary, running, until

# Measured at 1,010 MiB without the reader of archives and the intake, 1,343 MiB with both, and 1,442 with
# Debian's Python 3.11.2.
RSS_MOST_MIB = 1.45 * 1024


@pytest.fixture(scope="module")
def idle() -> Iterator[Up]:
    """As shipped: with Flower, metrics, a reader and the intake."""
    shipped = {"LOGWEIR_FLOWER": "yes", "LOGWEIR_METRICS": "yes", "LOGWEIR_READER_PROCESSES": "1"}
    with running(
        {
            **shipped,
            "LOGWEIR_INTAKE": f"http://127.0.0.1:{free_port()}",
            "LOGWEIR_API": f"http://127.0.0.1:{free_port()}",
        }
    ) as up:
        yield up


def family(up: Up) -> list[psutil.Process]:
    top = psutil.Process(up.process.pid)
    return [top, *top.children(recursive=True)]


def with_torch(up: Up) -> list[int]:
    """Pids of the processes that have torch in memory."""
    found = []
    for process in family(up):
        with contextlib.suppress(psutil.Error):
            if any("libtorch" in one.path for one in process.memory_maps()):
                found.append(process.pid)
    return found


def test_all_processes_together_stay_small_and_none_has_torch_until_a_model_is_needed(idle: Up) -> None:
    idle.send(ordinary(300), "base")  # every path but scoring has been gone, Polars' threads are there
    assert with_torch(idle) == []
    rss = sum(process.memory_info().rss for process in family(idle)) / 2**20
    assert rss < RSS_MOST_MIB
    done = idle.logweir("train", "--json")
    assert done.returncode == 0, done.stderr
    version = json.loads(done.stdout)["version"]
    until(lambda: bool(with_torch(idle)), what="the scoring process has read torch")

    def served() -> bool:
        said = {worker["name"]: worker["serves"] for worker in idle.status()["workers"]}
        return all(said[name] == {"shared": version} for name in ("ingest-1", "infer-cpu", "drain"))

    until(served, what="every worker answers under the first model")
