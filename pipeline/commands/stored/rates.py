"""`logweir rates`: how many lines each workload wrote in equal parts of a span."""

import argparse
from dataclasses import asdict

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, reading
from pipeline.commands.patterns import trend_bars
from pipeline.records.batch import utc_now
from pipeline.service.questions import pattern_span
from pipeline.units import plural, seconds


def main(args: argparse.Namespace) -> int:
    since, until = pattern_span(args.since, args.until, utc_now(), flags=("--since", "--until"))
    found = reading(args, stored=True).rates(since, until, args.workload or None, args.buckets)
    if args.json:
        print_json(asdict(found))
        return 0
    if not found.workloads:
        out().print("no lines in this span; choose another --since, --until or --workload", soft_wrap=True)
        return 0
    table = Table("lines", "anomalous", "errors", "over time", "workload", box=None, pad_edge=False)
    for one in found.workloads:
        counts = (f"{number:,}" for number in (one.records, one.anomalous, one.severe))
        table.add_row(*(cell(value) for value in (*counts, trend_bars(one.trend), one.workload)))
    console = out()
    console.print(table)
    console.print(
        f"{plural(len(found.workloads), 'workload')}; each bar is {seconds(found.bucket_s)}", soft_wrap=True
    )
    return 0
