"""`logweir gpu usage`: GPU-hours and GiB-hours of ended leases, from the table `usage` of the store.

Only the store is read, so every host of a pipeline gives the same answer.
"""

import argparse
import re
import sys
from typing import Final

import polars as pl
from rich.table import Table

from pipeline.commands.common import cell, of_pipeline, out, print_json, printable, settings_of
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.sinks.choose import usage_of
from pipeline.sinks.usage import usage_sums
from pipeline.units import time_of

# A cell that a spreadsheet would take for a formula: a program may name any tenant.
_FORMULA: Final = re.compile(r"^[=+\-@\t\r]")
_HOURS: Final = ("lease_hours", "gpu_hours", "gib_hours")


def main(args: argparse.Namespace) -> int:
    if args.csv and args.json:
        raise BadInput("--csv and --json are two forms of one answer; choose one of them")
    now = utc_now()
    since = time_of(args.since, now) if args.since else None
    until = time_of(args.until, now, flag="--until") if args.until else None
    settings = of_pipeline(settings_of(args))
    table = usage_of(settings)
    sums = usage_sums(table, args.by, since, until)
    if args.json:
        print_json({"since": since, "until": until, "by": args.by, "usage": sums.to_dicts()})
    elif args.csv:
        names = pl.Series(args.by, [_FORMULA.sub(r"'\g<0>", name) for name in sums[args.by]], pl.String)
        sys.stdout.write(sums.with_columns(names).write_csv(float_precision=6))
    elif sums.is_empty():
        place = printable(table.objects.url)
        out().print(
            f"no ended leases in this span in {place}; `logweir gpu leases` shows those that live",
            markup=False,
            soft_wrap=True,
        )
    else:
        _show(args.by, sums)
    return 0


def _show(by: str, sums: pl.DataFrame) -> None:
    shown = Table(by, "leases", "lease-hours", "GPU-hours", "GiB-hours", box=None, pad_edge=False)
    for row in sums.iter_rows(named=True):
        shown.add_row(*map(cell, (row[by], row["leases"], *(f"{row[name]:.2f}" for name in _HOURS))))
    out().print(shown)
    out().print(
        f"in all {sums['gpu_hours'].sum():.2f} GPU-hours and {sums['gib_hours'].sum():.2f} GiB-hours; "
        "a shared lease counts by its share of the device",
        markup=False,
        soft_wrap=True,
    )
