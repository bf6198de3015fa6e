"""The arguments of `logweir run`, checked before anything is started or imported that takes long."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import BadInput
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources import files
from pipeline.sources.files import Copied
from pipeline.sources.folders import Filter

# Marks a directory as made by `logweir run`; any other directory that is not empty is refused.
MARKER: Final = ".logweir"


# gzip, zstd, xz, bzip2, zip; logs shrink to about a twelfth.
_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zX", b"BZh", b"PK")
_UNPACKED: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The checked arguments."""

    inputs: tuple[Path, ...]
    baseline: tuple[Path, ...]
    out: Path
    workload: str | None
    report: Path | None
    notes: tuple[str, ...] = ()
    normal: tuple[Path, ...] = ()  # files of templates and lines that are no findings
    choice: FormatChoice = DETECTED
    context: int = 0  # records around a finding in the terminal
    stdin: Copied | None = None  # the input that is a copy of standard input


def plan_run(
    inputs: Sequence[str],
    baseline: Sequence[str],
    *,
    out: Path,
    workload: str | None,
    report: Path | None,
    wanted: Filter | None = None,
    stdin: Copied | None = None,
) -> RunPlan:
    """Look at everything before anything starts. `wanted` is for folders and globs. Raises BadInput."""
    if not inputs:
        raise BadInput("no log file is named; give at least one, for example: logweir run /var/log/syslog")
    if workload is not None:
        from pipeline.producer import (
            check_workload,  # it imports redis, which takes longer than the first screen
        )

        check_workload(workload)
    chosen, normal = files.choose(inputs, wanted, copy=stdin), files.choose(baseline, wanted)
    try:
        _check_out(out)
    except PermissionError as exc:
        raise BadInput(
            f"--out {out} cannot be looked at ({exc.strerror}); choose another directory or fix its rights"
        ) from exc
    if report is not None:
        check_folder("--report", report)
        _refuse_to_overwrite(report)
        if any(report.resolve().is_relative_to(out.resolve() / name) for name in (MARKER, "results")):
            raise BadInput(f"--report {report} lies where a run replaces everything; name another directory")
    return RunPlan(
        inputs=chosen.paths,
        baseline=normal.paths,
        out=out.absolute(),
        workload=workload,
        report=report,
        notes=(*chosen.notes, *normal.notes),
        stdin=stdin,
    )


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file; name a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_dir():
        raise BadInput(f"--out {out} is not empty and was not made by logweir; choose another directory")


def check_folder(flag: str, path: Path) -> None:
    """The folder of a file that a run makes at its end. Raises BadInput."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadInput(f"{flag} {path}: the directory {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(
            f"{flag} {path} cannot be written: this user may not write into {folder}; name another file"
        )


def _refuse_to_overwrite(report: Path) -> None:
    """A report may take the place of a report, and of nothing else: a log named by mistake must survive."""
    if not report.exists():
        return
    if not report.is_file():
        raise BadInput(f"--report {report} is not a file; name one, for example {report / 'report.html'}")
    with report.open("rb") as file:
        first = file.read(64).lstrip().lower()
    if first and not first.startswith(b"<!doctype html"):
        raise BadInput(f"--report {report} exists and is no report; choose another name")


def input_bytes(paths: Sequence[Path]) -> float:
    """Bytes of these files, unpacked by rule of thumb; infinite where one is a pipe or a device."""
    return sum(_size(path) for path in paths)


def _size(path: Path) -> float:
    if not path.is_file():
        return math.inf
    with path.open("rb") as file:
        packed = file.read(4).startswith(_PACKED)
    return path.stat().st_size * (_UNPACKED if packed else 1)
