"""`logweir patterns`: what is logged how often, what changed, and since when, from rollups by the hour."""

import argparse
from contextlib import closing
from datetime import datetime
from typing import Final

import polars as pl
from rich.table import Table

from pipeline.commands.common import (
    cell,
    of_pipeline,
    out,
    print_json,
    printable,
    redis_explained,
    settings_of,
)
from pipeline.controller.watchlist import check_pattern, covers
from pipeline.drain.learner import read_templates
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.records.pattern_query import PatternQuery
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.sinks.answers.choose import answers_of
from pipeline.units import plural, time_of

BUCKETS: Final = 24
BARS: Final = " ▁▂▃▄▅▆▇█"


def main(args: argparse.Namespace) -> int:
    settings = of_pipeline(settings_of(args))
    found = _found(args, settings)
    if args.json:
        print_json(found.to_dicts())
        return 0
    if found.is_empty():
        out().print("no lines in this span; choose another --since, --until or --workload", soft_wrap=True)
        return 0
    table = Table(
        "lines",
        "before",
        "trend",
        "first seen (UTC)",
        "last seen",
        "workload",
        "pattern",
        box=None,
        pad_edge=False,
    )
    for row in found.iter_rows(named=True):
        mark = "T0" if not row["template_id"] else f"T{row['template_id']}"
        cells = (
            f"{row['records']:,}", f"{row['before']:,}", _bars(row["trend"]), f"{row['first']:%m-%d %H:%M}",
            f"{row['last']:%m-%d %H:%M}", row["workload"], f"{mark} {row['template'] or row['sample'] or ''}",
        )  # fmt: skip
        table.add_row(*(cell(value) for value in cells))
    console = out()
    console.print(table)
    other = f"the span of the same length from {args.against} on" if args.against else "the span before"
    console.print(f"{plural(found.height, 'pattern')} shown; before: {printable(other)}", soft_wrap=True)
    return 0


def _found(args: argparse.Namespace, settings: Settings) -> pl.DataFrame:
    """The patterns in the order asked for, with `template`, and `before`: records in the other span."""
    now = utc_now()
    since = time_of(args.since, now)
    until = time_of(args.until, now, flag="--until") if args.until else now
    if until <= since:
        raise BadInput(f"--until {args.until} is not after --since {args.since}; give a later time")
    with closing(answers_of(settings)) as answers:
        names = None
        if args.workload:
            pattern = check_pattern(args.workload)
            names = tuple(name for name in answers.workloads() if covers([pattern], name))
        found = answers.patterns(
            PatternQuery(
                since=since,
                until=until,
                against=_against(args, since, until, now),
                workloads=names,
                anomalous=args.anomalous,
                order=args.order,
                limit=args.limit,
                buckets=BUCKETS,
            )
        )
    with redis_explained():
        client = connect(settings)
        texts = {one.template_id: one.text for one in read_templates(client, Keys(settings.redis.key_prefix))}
    text = pl.col("template_id").replace_strict(texts, default=None, return_dtype=pl.String)
    return found.with_columns(text.alias("template"))


def _against(
    args: argparse.Namespace, since: datetime, until: datetime, now: datetime
) -> tuple[datetime, datetime]:
    """The span to compare with, as long as the other one. Raises BadInput."""
    length = until - since
    if not args.against:
        return since - length, since
    start = time_of(args.against, now, flag="--against")
    return start, start + length


def _bars(trend: list[int]) -> str:
    highest = max(trend, default=0) or 1
    return "".join(BARS[-(-count * (len(BARS) - 1) // highest)] for count in trend)
