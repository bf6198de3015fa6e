"""The output directory of `logweir run`: a run writes aside and replaces the earlier one at its end.

    DIR/.logweir/next/    results/, templates.parquet, summary.json and report.html of the run that works
    DIR/.logweir/ready/   the same files once all are written; the rename from `next` decides the run.
                          If the report belongs elsewhere, `report.to` names its place, and a copy lies there
    DIR/.logweir/old/     the results of the earlier run, until they are removed

The renames go from `ready` into DIR in the order of NAMES, the report last. Each file is whole at every
moment: a kill between two renames leaves the earlier report or the new one. The next run in the directory
does the missing renames before anything else. A run that fails, is stopped or is killed before `ready`
leaves the earlier files untouched."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from pipeline.commands.run.inputs import MARKER
from pipeline.errors import BadInput, SinkUnavailable
from pipeline.workers.stack.data_dir import lock

# In the order in which they take their place.
REPORT: Final = "report.html"
NAMES: Final = ("results", "templates.parquet", "summary.json", REPORT)
ELSEWHERE: Final = "report.to"  # holds the path of a report that does not stay in the output directory


def staging(out: Path) -> Path:
    """Where a run writes until its end."""
    return out / MARKER / "next"


def open_place(out: Path) -> Path:
    """Make the output directory ready for a run; returns the directory for the run's state.

    The files of an earlier run stay; leftovers of a killed one are removed, and its swap is finished if it
    had begun. Raises BadInput when the directory cannot be written, or when another run or stack works in
    it."""
    state = out / MARKER
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will hold log lines
        state.mkdir(mode=0o700, exist_ok=True)
        # The stack takes the lock again; a run that comes in between finds the same state.
        with lock(state):
            if not os.access(out, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied", str(out))
            _finish(out)
            _drop_copy(out)
            empty(state)
            (staging(out) / "results").mkdir(parents=True)
    except OSError as exc:
        raise BadInput(
            f"--out {out} cannot be written ({exc.strerror or exc}); choose another directory or fix its "
            "rights"
        ) from exc
    return state


def swap(out: Path, report: Path | None) -> None:
    """The files of the run that has ended take the place of the earlier ones. Raises SinkUnavailable.

    The caller holds the lock of the state directory. `report`: where the page goes if not into `out`."""
    staged = staging(out)
    try:
        if report is not None:
            (staged / ELSEWHERE).write_bytes(os.fsencode(report.absolute()))
            shutil.copyfile(staged / REPORT, _part(report))
            (staged / REPORT).unlink()
        staged.rename(out / MARKER / "ready")
        try:
            _finish(out)
        except BaseException:  # Ctrl-C between two renames: they are ended first
            _finish(out)
            raise
    except OSError as exc:
        where = out if report is None else f"{out} or {report}"
        raise SinkUnavailable(
            f"{where} cannot be written ({exc.strerror or exc}); free space there or fix its rights, and run "
            "again"
        ) from exc
    shutil.rmtree(out / MARKER / "old", ignore_errors=True)


def close_place(out: Path, *, keep_state: bool) -> None:
    """Remove what a run staged and did not use; without `keep_state` logs, models and queues as well.

    Nothing is removed when another run has taken the directory over meanwhile. Never raises OSError."""
    state = out / MARKER
    with contextlib.suppress(OSError, BadInput), lock(state):
        _drop_copy(out)
        for leftover in (staging(out), state / "old"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not keep_state:
            empty(state)


def empty(state: Path) -> None:
    """Removes everything but the lock; the directory stays as the mark of `logweir run`."""
    for path in state.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


def _finish(out: Path) -> None:
    """Every file of `ready` takes its place; nothing where no run has got so far. Raises OSError.

    Doing it again after a kill does the rest: a name that is missing in `ready` has its place already."""
    ready, old = out / MARKER / "ready", out / MARKER / "old"
    if not ready.is_dir():
        return
    old.mkdir(exist_ok=True)
    for name in NAMES:
        new, place = ready / name, out / name
        if not new.exists():
            continue
        if place.is_dir() or place.is_symlink():  # a directory is not replaced by a rename
            if (old / name).is_dir():
                shutil.rmtree(old / name)
            place.rename(old / name)
        new.replace(place)
    if (report := _elsewhere(ready)) is not None:
        if _part(report).exists():
            _part(report).replace(report)
        own = out / REPORT
        # Of an earlier run, whose results are gone, unless it is this report under another path.
        if own.exists() and not (report.exists() and own.samefile(report)):
            own.unlink()
        (ready / ELSEWHERE).unlink()
    ready.rmdir()


def _elsewhere(folder: Path) -> Path | None:
    """Where the report of a run belongs if not into its output directory. `folder`: `next` or `ready`."""
    note = folder / ELSEWHERE
    return Path(os.fsdecode(note.read_bytes())) if note.exists() else None


def _drop_copy(out: Path) -> None:
    """Removes the copy of a report that a run left next to its place before it was decided."""
    if (report := _elsewhere(staging(out))) is not None:
        with contextlib.suppress(OSError):
            _part(report).unlink()


def _part(report: Path) -> Path:
    """The copy beside a report elsewhere: on the same file system, whole before it takes its place."""
    return report.with_name(f".{report.name}.part")
