"""A worker that cannot start ends with a sentence, as the command does: containers show nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_a_setting_that_does_not_exist_is_said_in_a_sentence(program: str) -> None:
    said = ends(program, LOGWEIR_SEDE="1")
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
