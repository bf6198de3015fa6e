"""`logweir gpu usage`: GPU-hours and GiB-hours of ended leases, from the table `usage` of the store.

Only the store is read, so every host of a pipeline gives the same answer.
"""

import argparse
import csv
import re
import sys
from typing import Final

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, printable, reading
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.values import UsageView
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
    view = reading(args, stored=True).gpu_usage(args.by, since, until)
    if args.json:
        print_json({"since": since, "until": until, "by": args.by, "usage": view.usage})
    elif args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([args.by, "leases", *_HOURS])
        for row in view.usage:
            name = _FORMULA.sub(r"'\g<0>", row[args.by])
            writer.writerow([name, row["leases"], *(f"{row[hours]:.6f}" for hours in _HOURS)])
    elif not view.usage:
        out().print(
            f"no ended leases in this span in {printable(view.stored_in)}; `logweir gpu leases` shows those "
            "that live",
            markup=False,
            soft_wrap=True,
        )
    else:
        _show(view)
    return 0


def _show(view: UsageView) -> None:
    shown = Table(view.by, "leases", "lease-hours", "GPU-hours", "GiB-hours", box=None, pad_edge=False)
    for row in view.usage:
        shown.add_row(*map(cell, (row[view.by], row["leases"], *(f"{row[name]:.2f}" for name in _HOURS))))
    gpu_hours, gib_hours = (sum(row[name] for row in view.usage) for name in ("gpu_hours", "gib_hours"))
    out().print(shown)
    out().print(
        f"in all {gpu_hours:.2f} GPU-hours and {gib_hours:.2f} GiB-hours; "
        "a shared lease counts by its share of the device",
        markup=False,
        soft_wrap=True,
    )
