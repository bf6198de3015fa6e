"""Names that running systems depend on: a move of code may not change them, and a change of one is a
decision.

Messages in a queue name their task, Redis holds keys, dashboards and alert rules name metrics, scripts of
users name commands. `pinned_names.json` lists them all."""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import parser
from pipeline.messages import reload, routing
from pipeline.observe import counters as metrics
from pipeline.redis import keys
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
        "queues": sorted(routing.ALL_QUEUES),
        "roles": sorted(ROLES),
        "broadcasts": [reload.COMMAND],
        "redis_keys": [name for name, *_ in keys.table()],
        "metrics": sorted(meter.name for meter in (*metrics.METERS, *gauges.SHOWN)),
        "verbs": sorted(verbs),
        "commands": sorted(e.name for e in entry_points(group="console_scripts") if e.name == "logweir"),
        "modules_to_run": sorted(
            f"pipeline.workers.{path.parent.name if path.stem == '__main__' else path.stem}"
            for path in (ROOT / "pipeline" / "workers").rglob("*.py")
            if "__main__" in path.read_text(encoding="utf-8")
        ),
    }


@pytest.mark.parametrize("kind", PINNED)
def test_names_that_running_systems_know_stay(kind: str) -> None:
    assert current()[kind] == PINNED[kind]


if __name__ == "__main__":
    print(json.dumps(current(), indent=1))
