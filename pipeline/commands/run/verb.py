"""`logweir run`: a first screen at once, progress while it works, then the findings."""

import argparse
import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Final

from pipeline.commands.common import answering_with, display, err, out, print_json, remark, settings_of
from pipeline.commands.recognition import choice_of
from pipeline.commands.run.first_screen import look, rows
from pipeline.commands.run.inputs import RunPlan, check_folder, plan_run
from pipeline.commands.run.stdin_copy import stdin_as_file
from pipeline.errors import BadInput
from pipeline.logs import set_up
from pipeline.settings import Settings
from pipeline.sources.folders import Filter
from pipeline.units import one_line

if TYPE_CHECKING:
    from rich.console import Console


FOUND: Final = 3  # exit code: `--fail-on` says so


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if "-" in args.baseline:
        raise BadInput(
            "--baseline - is not possible; a baseline must be files, so save the lines to one first"
        )
    choice = choice_of(args)
    if args.csv is not None and not args.csv.exists():
        check_folder("--csv", args.csv)
    elif args.csv is not None:
        from pipeline.report.export import check_csv

        check_csv(args.csv)
    with stdin_as_file(args.files) as given:
        plan = plan_run(
            given.files,
            args.baseline,
            stdin=given.stdin,
            out=args.out,
            workload=args.workload,
            report=args.report,
            wanted=Filter(include=args.include, exclude=args.exclude),
        )
        plan = replace(plan, normal=tuple(args.normal), choice=choice, context=args.context)
        plan = replace(plan, notes=(*given.notes, *plan.notes))
        screen = _first_screen(plan, settings)
        from pipeline.commands.run.progress import Bars

        with Bars(screen) as bars:
            # Celery, Redis and the report take longer to import than the first screen to print.
            from pipeline.commands.run import plan as runs
            from pipeline.report import terminal
            from pipeline.report.export import fails, write_csv

            set_up(settings.stack.log_level)
            with _saying_that_it_stops(bars.console):
                outcome = runs.run(plan, settings, bars.show)
    code = FOUND if fails(outcome.findings, args.fail_on) else 0
    if args.csv is not None:
        write_csv(args.csv, outcome.findings)
    with answering_with(code):
        if args.json:
            print_json(outcome.summary)
            return code
        console = out()
        terminal.print_findings(
            outcome.findings,
            outcome.summary,
            console,
            limit=None if args.all else args.limit,
            context=args.context,
        )
        for note in outcome.notes:
            remark(console, note)
        if outcome.report is not None:
            console.print(f"report:  {one_line(display(outcome.report))}", markup=False, soft_wrap=True)
        console.print(f"results: {one_line(display(outcome.out))}", markup=False, soft_wrap=True)
    return code


def _first_screen(plan: RunPlan, settings: Settings) -> list[str]:
    """The rows of the first screen, printed already where standard error is no terminal.

    On standard error, so that programs read the findings alone from standard output."""
    console = err()
    screen = rows(look(plan.inputs, settings, choice=plan.choice), width=console.width)
    if not console.is_terminal:
        for row in screen:
            with contextlib.suppress(OSError):  # its reader has gone
                console.print(row, markup=False, soft_wrap=True)
    return screen


@contextmanager
def _saying_that_it_stops(console: "Console") -> Iterator[None]:
    """Ctrl-C ends the stack in order, which takes seconds: say so at once, from where the signal arrives."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, as in the background of a script: it stays so
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C has nothing new to say
        with contextlib.suppress(OSError, RuntimeError):  # nobody reads, or it came in the middle of a write
            console.print("stopping: workers finish their step first", markup=False)
        before(number, frame)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
