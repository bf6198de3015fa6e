"""The cause of reproduced production failures: its place among the findings, and whether it is printed.

Each failure has a log with it and one or two healthy ones. It is looked at alone (`alone`), with the healthy
logs as baseline (`base`), and one healthy log is held against the other (`healthy`). A cause is printed when
it stands in the first 40 lines of a terminal of 80 columns. Weights were chosen on the failures under
`chosen`; those under `reported` are only measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._running import scratch
from pipeline.report import findings
from pipeline.report.findings import Finding

SCREEN: Final = (80, 40)  # columns and lines
FIRST: Final = 3


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--only", action="append", metavar="CASE", help="a failure; may be repeated")
    parser.add_argument(
        "--keep", type=Path, help="a folder that keeps what each run wrote, and is read again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What a run found, in reading order, and the lines that it printed."""

    found: Sequence[Finding]
    screen: Sequence[str]

    def place(self, cause: re.Pattern[str]) -> int | None:
        texts = ([s.raw for s in f.samples] for f in self.found)
        return next((at for at, raws in enumerate(texts, start=1) if any(map(cause.search, raws))), None)

    def prints(self, cause: re.Pattern[str]) -> bool:
        """Whether the cause is readable, also where a line was broken at the edge."""
        lines = [line.strip() for line in self.screen]
        return any(cause.search(glue.join(lines)) for glue in (" ", ""))


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    sets = data / "anduril"
    causes = json.loads((sets / "causes.json").read_text(encoding="utf-8"))
    names = sorted(args.only or causes)
    with scratch() as folder:
        looked = {name: _case(sets / f"{name}.tar.xz", args.keep or folder) for name in names}
    seen = {
        name: {way: _seen(ran, re.compile(causes[name])) for way, ran in ways.items() if way != "healthy"}
        for name, ways in looked.items()
    }
    healthy = [len(ways["healthy"].found) for ways in looked.values() if "healthy" in ways]
    chosen, reported = names[::2], names[1::2]
    return {
        "base": _total("base", seen, names),
        "alone": _total("alone", seen, names),
        "healthy": {"runs": len(healthy), "findings": sum(healthy)},
        "chosen": {way: _total(way, seen, chosen) for way in ("base", "alone")},
        "reported": {way: _total(way, seen, reported) for way in ("base", "alone")},
        "cases": {
            name: {w: f"{place or '-'}{'' if p else ' not printed'}" for w, (place, p) in ways.items()}
            for name, ways in seen.items()
        },
    }


def _seen(ran: _Ran, cause: re.Pattern[str]) -> tuple[int | None, bool]:
    return ran.place(cause), ran.prints(cause)


def _total(
    way: str, seen: dict[str, dict[str, tuple[int | None, bool]]], names: Sequence[str]
) -> dict[str, int]:
    ways = [seen[name][way] for name in names]
    return {
        "cases": len(ways),
        "first": sum(place == 1 for place, _ in ways),
        "three": sum(place is not None and place <= FIRST for place, _ in ways),
        "printed": sum(printed for _, printed in ways),
    }


def _case(archive: Path, folder: Path) -> dict[str, _Ran]:
    """The runs of one failure: `alone`, `base`, and `healthy` where there are two healthy logs."""
    logs = folder / "logs"
    name = archive.name.removesuffix(".tar.xz")
    if not (logs / name).exists():
        with tarfile.open(archive) as packed:
            packed.extractall(logs, filter="data")
    case = logs / name
    good = sorted(str(path) for path in case.glob("good*"))
    ways = {"alone": [str(case / "bad")], "base": [str(case / "bad"), "--baseline", *good]}
    if len(good) > 1:
        ways["healthy"] = [good[0], "--baseline", *good[1:]]
    return {way: _run(arguments, folder / "out" / name / way) for way, arguments in ways.items()}


def _run(arguments: Sequence[str], out: Path) -> _Ran:
    """Raises CalledProcessError with the command's messages when the run fails."""
    said = out.with_suffix(".txt")
    if not said.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pipeline.cli", "run", *arguments, "--out", str(out)]
        environ = os.environ | {"COLUMNS": str(SCREEN[0]), "NO_COLOR": "1"}
        ended = subprocess.run(command, check=True, env=environ, capture_output=True, text=True)
        said.write_text(ended.stdout, encoding="utf-8")
    found = findings.collect(out / "results", pl.read_parquet(out / "templates.parquet"))
    return _Ran(found=found, screen=said.read_text(encoding="utf-8").splitlines()[: SCREEN[1]])
