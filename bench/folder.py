"""Findings in the log folder of a healthy machine, and what of the folder is left out.

The folder of a Debian server is made up: six weeks of its package manager, sign-ins and journal, with a
solver dump, a manual page and a README among them. It is judged by itself, and against the six weeks before.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from bench._folder_lines import Machine
from bench._running import scratch, watched_run
from pipeline.sources.files import choose

DAYS: Final = 42
MOST: Final = 10  # findings
_SHOWN_CHARS: Final = 120
_SEED: Final = 6
_BEGINS: Final = datetime(2026, 9, 20, tzinfo=UTC)
_NO_LOGS: Final = frozenset({"apt/eipp.log.xz", "ABORT.7.gz", "README", "btmp", "wtmp", "faillog"})


def measure(_data: Path) -> dict[str, Any]:
    with scratch() as folder:
        healthy, before = folder / "log", folder / "before"
        Machine(_SEED, _BEGINS, DAYS).write(healthy)
        Machine(_SEED + 1, _BEGINS - timedelta(days=DAYS), DAYS).write(before)
        chosen = choose([str(healthy)])
        read = {str(path.relative_to(healthy)) for path in chosen.paths}
        there = {str(path.relative_to(healthy)) for path in healthy.rglob("*") if path.is_file()}
        alone = _findings([str(healthy)], folder / "alone")
        compared = _findings([str(healthy), "--baseline", str(before)], folder / "compared")
    return {
        "findings": len(alone),
        "findings_with_baseline": len(compared),
        "files": len(read),
        "left_out": sorted(there - read),
        "wrongly_left_out": sorted(there - read - _NO_LOGS),
        "found": alone,
        "found_with_baseline": compared,
    }


def _findings(arguments: list[str], out: Path) -> list[str]:
    """The workload and the template of each finding."""
    found = watched_run(arguments, out).summary["findings"]
    return [f"{one['workload']}: {one['template']}"[:_SHOWN_CHARS] for one in found]


def failed(values: dict[str, Any]) -> bool:
    most = max(values["findings"], values["findings_with_baseline"])
    return most > MOST or set(values["left_out"]) != _NO_LOGS
