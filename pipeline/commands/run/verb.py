"""`logweir run`: progress while it works, then the findings."""

import argparse
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from pipeline.commands.common import display, err, out, print_json, remark, settings_of, standard_input
from pipeline.commands.run import plan as runs
from pipeline.errors import BadInput
from pipeline.logs import set_up
from pipeline.report import terminal
from pipeline.units import one_line

COPY_BLOCK: Final = 1 << 20
SAY_EVERY_S: Final = 10.0  # how often a log file is told how far a phase is


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    set_up(settings.stack.log_level)
    if "-" in args.baseline:
        raise BadInput(
            "--baseline - is not possible; a baseline must be files, so save the lines to one first"
        )
    with _stdin_as_file(args.files) as files:
        plan = runs.plan_run(files, args.baseline, out=args.out, workload=args.workload, report=args.report)
        with _Bars() as bars, _saying_that_it_stops(bars.console):
            outcome = runs.run(plan, settings, bars.show)
    if args.json:
        print_json(outcome.summary)
        return 0
    console = out()
    terminal.print_findings(outcome.findings, outcome.summary, console, limit=args.limit)
    for note in outcome.notes:
        remark(console, note)
    about = outcome.summary["run"]
    console.print(
        f"\n{about['lines_read']:,} lines in {about['seconds']:.1f} s "
        f"(ready after {about['ready_seconds']:.1f} s; {about['lines_per_s']:,} lines/s read, scored and "
        "stored)",
        markup=False,
    )
    if outcome.report is not None:
        console.print(f"report:  {one_line(display(outcome.report))}", markup=False, soft_wrap=True)
    console.print(f"results: {one_line(display(outcome.out))}", markup=False, soft_wrap=True)
    return 0


@contextmanager
def _stdin_as_file(names: list[str]) -> Iterator[list[str]]:
    """Copies standard input (`-`) to a temporary file, because a run checks its input before it starts."""
    if "-" not in names:
        yield names
        return
    stream = standard_input()
    with tempfile.TemporaryDirectory(prefix="logweir-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(stream, copy, COPY_BLOCK)
        yield [str(path) if name == "-" else name for name in names]


@contextmanager
def _saying_that_it_stops(console: Console) -> Iterator[None]:
    """Ctrl-C ends the stack in order, which takes seconds: say so at once, from where the signal arrives."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in the background of a script: it stays so
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C has nothing new to say
        with contextlib.suppress(OSError, RuntimeError):  # nobody reads, or it came in the middle of a write
            console.print("stopping: workers finish their step first", markup=False)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Left(ProgressColumn):
    """The time a phase still takes, or took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Nothing while it is not known."""
        if task.finished:
            return Text(f"{task.finished_time or 0:,.1f} s".rjust(11))
        if task.time_remaining is None:
            return Text(" " * 11)
        minutes, seconds = divmod(round(task.time_remaining), 60)
        return Text(f"{minutes}:{seconds:02d} left".rjust(11), style="progress.remaining")


class _Bars:
    """One progress bar per phase, on standard error; plain lines when it is no terminal."""

    def __init__(self) -> None:
        self.console = err()
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=14),
            TaskProgressColumn(),
            _Left(),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self.console,
            disable=not self.console.is_terminal,
            expand=True,
        )
        self.tasks: dict[str, TaskID] = {}
        self.last = ""
        self.said = 0.0

    def __enter__(self) -> "_Bars":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        self.progress.stop()

    def show(self, phase: str, done: float, total: float, detail: str) -> None:
        """The `Show` of a run."""
        detail = one_line(detail)
        if phase != self.last:
            self._finish()
            self.last = phase
            self.tasks[phase] = self.progress.add_task(phase, total=total or None, detail=detail)
            if not self.console.is_terminal:
                self.console.print(f"{phase} ...", markup=False)
                self.said = time.monotonic()
        self.progress.update(self.tasks[phase], completed=done, total=total or None, detail=detail)
        if not self.console.is_terminal and total and time.monotonic() - self.said > SAY_EVERY_S:
            self.said = time.monotonic()
            self.console.print(f"{phase} {100 * done / total:.0f} %, {detail} ...", markup=False)

    def _finish(self) -> None:
        if self.last:
            task = self.tasks[self.last]
            total = self.progress.tasks[self.progress.task_ids.index(task)].total or 1
            self.progress.update(task, total=total, completed=total)
