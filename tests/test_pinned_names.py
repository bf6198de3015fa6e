"""Names that running systems depend on: a move of code may not change them, and a change of one is a decision.

Messages in a queue name their task, Redis holds keys, dashboards and alert rules name metrics, scripts of users name
commands. `pinned_names.json` lists them all.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import parser
from pipeline.messages import routing
from pipeline.observe import counters as metrics
from pipeline.redis import keys
from pipeline.tasks import reload
from pipeline.workers import gauges
from pipeline.workers.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent
PINNED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("pinned_names.json").read_text(encoding="utf-8")
)


def current() -> dict[str, list[str]]:
    """The names as the code has them."""
    verbs: dict[str, Any] = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr,assignment]
    return {
        "tasks": sorted(value for name, value in vars(routing).items() if name.startswith("TASK_")),
        "queues": sorted(routing.all_queues(3)),
        "roles": sorted(ROLES),
        "broadcasts": [reload.COMMAND],
        "redis_keys": [name for name, *_ in keys.table()],
        "metrics": sorted(meter.name for meter in (*metrics.METERS, *gauges.SHOWN)),
        "verbs": sorted(verbs),
        "commands": sorted(e.name for e in entry_points(group="console_scripts") if e.name == "logweir"),
        "modules_to_run": sorted(
            f"pipeline.workers.{path.stem}"
            for path in (ROOT / "pipeline" / "workers").glob("*.py")
            if "__main__" in path.read_text(encoding="utf-8")
        ),
    }


@pytest.mark.parametrize("kind", PINNED)
def test_names_that_running_systems_know_stay(kind: str) -> None:
    assert current()[kind] == PINNED[kind]


def test_an_installed_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    # A copy, because a `build/` that an earlier build left would fill the gaps.
    for name in tracked:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "tree" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(tmp_path / "tree")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("logweir-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in tracked if name.startswith("pipeline/")} <= held


if __name__ == "__main__":
    print(json.dumps(current(), indent=1))
