"""A worker that cannot start ends with a sentence, as the command does: containers show nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.settings import Settings, without_settings

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = {
    "cpu": ["store", "store"],
    "train": ["train", "cpu"],
    "gpu": ["infer-gpu"],
    "agent": ["agent"],
    "jobs": ["gpu-jobs"],
    "source": ["source"],
    "metrics": [],
    "flower": [],
}


def ends(program: str, **environment: str) -> str:
    """What it says before it ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", f"pipeline.workers.{program}", *PROGRAMS[program]],
        env={**os.environ, "REDIS_URL": "redis://127.0.0.1:1/0", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_setting_that_does_not_exist_is_said_in_a_sentence(program: str, tmp_path: Path) -> None:
    (tmp_path / "logweir.toml").write_text("sede = 1\n")
    said = ends(program, LOGWEIR_CONFIG=str(tmp_path / "logweir.toml"))
    assert said == "logweir: 'sede' is not a setting; did you mean seed (LOGWEIR_SEED)?\n"


@pytest.mark.long
def test_a_source_without_an_index_is_told_which_setting_is_missing() -> None:
    assert ends("source") == (
        "logweir: no index is named to read from; set opensearch_source, such as app-logs-*\n"
    )


def test_every_program_of_the_workers_is_looked_at() -> None:
    ending = "raise SystemExit(exit_code(main))"
    files = (ROOT / "pipeline" / "workers").glob("*.py")
    assert {path.stem for path in files if ending in path.read_text(encoding="utf-8")} == PROGRAMS.keys()


BESIDE_A_THREAD = """
import atexit, threading
from pipeline.workers.exits import leave, may_be_left

atexit.register(print, "taken down")
thread = threading.Thread(target=threading.Event().wait, daemon=True)
may_be_left(thread)
leave(4)
print("nobody works")
thread.start()
leave(3)
"""


@pytest.mark.long
def test_a_process_with_a_thread_in_native_code_ends_with_its_exit_code_and_is_not_taken_down() -> None:
    """Python would end the thread on its way back, and C++ below it aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_THREAD], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "nobody works\n"), done.stderr


# Imports that do not end: longer than a supervisor lives that is killed.
IMPORTS = """
import runpy, sys, time
class Endless:
    def find_spec(self, name, *_):
        if name == "pipeline.workers.{name}.server":
            time.sleep(60)
sys.meta_path.insert(0, Endless())
runpy.run_module("pipeline.workers.{name}", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["api", "serve"])
def test_a_process_ends_with_its_supervisor_also_while_it_imports(name: str, settings: Settings) -> None:
    nobody = settings.replace(supervisor_pid=2**22)  # not the parent of the process
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(name=name)],
        env={**without_settings(), **nobody.to_environ()},
        timeout=40,
        check=False,
    )
    assert done.returncode == -signal.SIGTERM
