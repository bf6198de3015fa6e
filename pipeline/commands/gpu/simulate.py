"""`logweir gpu simulate`: waiting times under each rule of backfill, from a simulation."""

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from rich.status import Status
from rich.table import Table

from pipeline.commands.common import err, out, print_json, printable, settings_of
from pipeline.errors import BadInput
from pipeline.gpu.policy import workloads
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.gpu.policy.simulator import PATIENCE_S, SimulationResult
from pipeline.gpu.values import Backfill
from pipeline.settings import Settings
from pipeline.units import plural, seconds

SHOW_EVERY_S: Final = 0.2
SAY_EVERY_S: Final = 5.0  # where standard error is no terminal
LEGEND = (
    "waits are means; who may overtake the first that finds no room: easy whoever does not delay it, strict "
    "nobody, free "
    f"everybody; starved: waits for more than {PATIENCE_S / 60:.0f} min at the end"
)


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    rules = list(Backfill) if args.backfill == "all" else [Backfill(args.backfill)]
    rows = None if args.file is None else list(_rows(Path(args.file)))
    if rows is None:
        workloads.check_story(args.load)
    else:
        workloads.jobs_of(rows)
    found = {}
    for rule in rules:
        with _Percent(rule) as percent:
            found[rule] = _figures(args, settings, rule, rows, percent)
    if args.json:
        print_json({rule.value: asdict(figures) for rule, figures in found.items()})
        return 0
    console = out()
    console.print(_about(args, next(iter(found.values()))), markup=False)
    console.print()
    console.print(_table(found))
    console.print()
    console.print(LEGEND, markup=False)
    return 0


def _figures(
    args: argparse.Namespace,
    settings: Settings,
    rule: Backfill,
    rows: list[Mapping[str, object]] | None,
    progress: Callable[[float], None],
) -> SimulationResult:
    if rows is None:
        return workloads.story(args.load, rule, args.seed, progress=progress)
    tenants = parse_tenants(settings.gpu.tenants)
    return workloads.from_file(rows, tenants=tenants, backfill=rule, progress=progress)


class _Percent:
    """How far the simulation of one rule is, on standard error: a row that is rewritten, else a line now and
    then."""

    def __init__(self, rule: Backfill) -> None:
        self.console = err()
        self.rule = rule
        self.said = time.monotonic()
        self.console.print(f"simulating {rule.value} ...", markup=False)
        self.status: Status | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.status = self.console.status(f"simulating {self.rule.value}")
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def __call__(self, finished: float) -> None:
        """`done`: the part of the needs that has arrived, 0 to 1."""
        every_s = SHOW_EVERY_S if self.status is not None else SAY_EVERY_S
        if time.monotonic() - self.said < every_s:
            return
        self.said = time.monotonic()
        text = f"simulating {self.rule.value} {100 * finished:.0f} % ..."
        if self.status is None:
            self.console.print(text, markup=False)
        else:
            self.status.update(text)


def _rows(path: Path) -> Iterator[Mapping[str, object]]:
    """Rows of a .csv file with a header, else one JSON object per line. Raises BadInput."""
    try:
        text = path.read_text(
            encoding="utf-8-sig"
        )  # with a byte order mark, as spreadsheets write it, or without
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise BadInput(f"--file {printable(path)} cannot be read: {why}") from exc
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(text.splitlines())
        for cells in reader:
            if None in cells:
                raise BadInput(
                    f"line {reader.line_num} of {printable(path)} has more cells than the header has names; "
                    "correct it"
                )
            yield cells
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise BadInput(
                f"line {number} of {printable(path)} is not JSON ({exc}); write one object per line"
            ) from exc
        if not isinstance(row, dict):
            raise BadInput(
                f"line {number} of {printable(path)} is no object; write {{...}} with the columns of a need"
            )
        yield row


def _about(args: argparse.Namespace, one: SimulationResult) -> str:
    if args.file is not None:
        needs = plural(one.gangs.count + one.small.count, "need")
        return f"{needs} of {printable(args.file)} on 8 GPUs, until all were done"
    return (
        f"8 GPUs asked for {args.load * 100:g} % of their time: {one.small.count:,} needs for one GPU "
        f"({workloads.SMALL_S:.0f} s on average) and "
        f"{one.gangs.count} for all 8 ({workloads.GANG_S} s each, one every {workloads.PERIOD_S} s)"
    )


def _table(found: Mapping[Backfill, SimulationResult]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("backfill")
    for name in ("gangs begun", "gang wait", "longest", "small wait", "p99", "busy", "starved"):
        table.add_column(name, justify="right", no_wrap=True)
    for rule, f in found.items():
        row: tuple[Any, ...] = (
            rule.value, f"{f.gangs.count - f.gangs.pending}/{f.gangs.count}", seconds(f.gangs.mean_s),
            seconds(f.gangs.max_s), seconds(f.small.mean_s), seconds(f.small.p99_s),
            f"{f.utilisation * 100:.1f}%", f.starved,
        )  # fmt: skip
        table.add_row(*map(str, row))
    return table
