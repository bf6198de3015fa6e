"""`logweir patterns`: what is logged how often, what changed, and since when, from rollups by the hour."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.table import Column, Table

from pipeline.commands.common import cell, out, print_json, printable, reading, remark_missing
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.questions import PatternsAsked, pattern_span, template_number
from pipeline.service.values import PatternCount
from pipeline.units import clipped, plural, time_of

BARS: Final = " ▁▂▃▄▅▆▇█"
NARROW: Final = 100  # columns of a terminal
SHOWN_CHARS: Final = 240  # of a pattern with its workload; --json has the whole template


def main(args: argparse.Namespace) -> int:
    asked = _asked(args)
    if args.values:
        return _show_values(args, asked)
    page = reading(args, stored=True).patterns(asked)
    found = page.patterns
    if args.json:
        print_json([asdict(pattern) for pattern in found])
        return remark_missing(page.missing)
    if not found:
        out().print("no lines in this span; choose another --since, --until or --workload", soft_wrap=True)
        return remark_missing(page.missing)
    console = out()
    console.print(_table(found, narrow=console.width < NARROW))
    other = f"the span of the same length from {args.against} on" if args.against else "the span before"
    console.print(f"{plural(len(found), 'pattern')} shown; before: {printable(other)}", soft_wrap=True)
    return remark_missing(page.missing)


def _table(found: Sequence[PatternCount], *, narrow: bool) -> Table:
    """A narrow terminal gets half as many bars: a template needs the room."""
    table = Table(
        "lines", "before", Column("trend", no_wrap=True), Column("first, last (UTC)", max_width=11),
        "pattern", box=None, pad_edge=False,
    )  # fmt: skip
    for one in found:
        trend = [sum(one.trend[n : n + 2]) for n in range(0, len(one.trend), 2)] if narrow else one.trend
        named = f"{one.workload} T{one.template_id or 0} {one.template or one.sample or ''}"
        seen = f"{one.first:%m-%d %H:%M} {one.last:%m-%d %H:%M}"
        cells = (f"{one.records:,}", f"{one.before:,}", trend_bars(trend), seen, clipped(named, SHOWN_CHARS))
        table.add_row(*(cell(value) for value in cells))
    return table


def _show_values(args: argparse.Namespace, asked: PatternsAsked) -> int:
    if asked.template_id is None:
        raise BadInput("--values are those of one pattern; name it with --template T17")
    found = reading(args, stored=True).values(asked.template_id, asked.since, asked.until, asked.workload)
    if args.json:
        print_json(asdict(found))
        return 0
    console = out()
    newest = "line" if found.lines == 1 else f"{found.lines:,} newest lines"
    console.print(
        f"T{found.template_id} {printable(found.template or '')}, of its {newest}",
        markup=False,
        soft_wrap=True,
    )
    for one in found.variables:
        console.print(
            f"{one.place}. {printable(one.mask)}, {plural(one.distinct, 'value')}: {_counts(one.values)}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    for usual in found.usual:
        of = f"{usual.kind} `{usual.name}`" if usual.kind else f"`{usual.name}`"
        console.print(
            f"usual {printable(of)} of {printable(usual.workload)}: {usual.summary}",
            markup=False,
            soft_wrap=True,
        )
    for name, counts in (("hosts", found.hosts), ("levels", found.levels)):
        if counts:
            console.print(f"{name}: {_counts(list(counts.items()))}", markup=False, soft_wrap=True)
    return 0


def _counts(values: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{printable(value)} ({count:,})" for value, count in values) or "none"


def _asked(args: argparse.Namespace) -> PatternsAsked:
    """The question of the flags. Raises BadInput."""
    now = utc_now()
    since, until = pattern_span(args.since, args.until, now, flags=("--since", "--until"))
    return PatternsAsked(
        since=since,
        until=until,
        against=time_of(args.against, now, flag="--against") if args.against else None,
        workload=args.workload or None,
        template_id=None if args.template is None else template_number(args.template),
        anomalous=args.anomalous,
        order=args.order,
        limit=args.limit,
    )


def trend_bars(trend: list[int]) -> str:
    """A bar for each part of a span, as high as its share of the highest."""
    highest = max(trend, default=0) or 1
    return "".join(BARS[-(-count * (len(BARS) - 1) // highest)] for count in trend)
