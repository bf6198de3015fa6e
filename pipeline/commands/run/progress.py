"""The progress of `logweir run` on standard error.

On a terminal it goes when the run ends, together with the first screen: the answer stands alone."""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import RenderableType
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

from pipeline.commands.common import err
from pipeline.units import one_line

SAY_EVERY_S: Final = 10.0  # how often a log file is told how far a phase is


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


class _Screen(Progress):
    """Rows of text above the bars."""

    rows: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (Text(row, no_wrap=True) for row in self.rows)
        yield from super().get_renderables()


class Bars:
    """One progress bar per phase, on standard error; plain lines when it is no terminal.

    `rows` stand above the bars; where there is no terminal, somebody else prints them."""

    def __init__(self, rows: Sequence[str] = ()) -> None:
        self.console = err()
        self.progress = _Screen(
            SpinnerColumn(),
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=14),
            TaskProgressColumn(),
            _Left(),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self.console,
            disable=not self.console.is_terminal,
            expand=True,
            transient=True,
        )
        self.progress.rows = rows
        self.tasks: dict[str, TaskID] = {}
        self.last = ""
        self.said = 0.0

    def __enter__(self) -> "Bars":
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
