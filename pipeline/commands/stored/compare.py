"""`logweir compare`: patterns that are new, gone, more or fewer beside another span or workload."""

import argparse
from dataclasses import asdict

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, reading
from pipeline.service.stored.values import ChangeKind, ComparedSide, Comparison
from pipeline.units import chance, plural


def main(args: argparse.Namespace) -> int:
    found = reading(args, stored=True).compare(
        args.a,
        args.b,
        workload=args.workload or None,
        other=args.other or None,
        kind=None if args.kind is None else ChangeKind(args.kind),
        limit=args.limit,
    )
    if args.json:
        print_json(asdict(found))
        return 0
    console = out()
    if found.differences:
        console.print(_table(found))
    for sentence in _summary(found):
        console.print(cell(sentence), soft_wrap=True)
    return 0


def _table(found: Comparison) -> Table:
    table = Table("what", "how sure", "a", "b", "p", "workload", "pattern", box=None, pad_edge=False)
    for one in found.differences:
        values = (
            one.kind, one.certainty, f"{one.a:,}", f"{one.b:,}", chance(one.p_value), one.workload,
            f"T{one.template_id} {one.template or one.sample or ''}",
        )  # fmt: skip
        table.add_row(*(cell(value) for value in values))
    return table


def _summary(found: Comparison) -> list[str]:
    sides = [
        f"{name}: {_side_text(side)}, {plural(lines, 'line')}"
        for name, side, lines in zip("ab", (found.a, found.b), found.lines, strict=True)
    ]
    return [*sides, f"{plural(found.compared, 'pattern')} compared, {found.alike:,} without a difference"]


def _side_text(side: ComparedSide) -> str:
    whose = f" of {side.workload}" if side.workload else ""
    return f"{side.since:%Y-%m-%d %H:%M:%S} to {side.until:%Y-%m-%d %H:%M:%S} UTC{whose}"
