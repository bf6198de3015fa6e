"""`logweir senders`: who sends to the intake, and who has gone silent."""

import argparse
from dataclasses import asdict

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, reached, redis_explained, settings_of
from pipeline.redis.connection import connect
from pipeline.units import plural
from pipeline.workers.intake.senders import read_senders

SHOWN = 50


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        found = read_senders(connect(settings), settings)
    if args.json:
        print_json([asdict(sender) for sender in found])
        return 0
    console = out()
    if not found:
        console.print("nobody has sent to the intake; `logweir intake` shows how", markup=False)
        return 0
    table = Table(
        "protocol", "key", "from", "lines", "requests", "duplicates", "refused", "last heard (UTC)",
        box=None, pad_edge=False,
    )  # fmt: skip
    for one in found[:SHOWN]:
        numbers = (f"{n:,}" for n in (one.lines, one.requests, one.duplicates, one.refused))
        last = f"{one.last:%Y-%m-%d %H:%M:%S}"
        table.add_row(*map(cell, (one.protocol, one.key or "-", one.peer, *numbers, last)))
    console.print(table)
    if len(found) > SHOWN:
        console.print(f"and {plural(len(found) - SHOWN, 'sender')} more; --json shows all", markup=False)
    return 0
