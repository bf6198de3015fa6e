"""`logweir watch add | remove | list`: whose logs get models by themselves."""

import argparse
from dataclasses import asdict

from rich.table import Table

from pipeline.commands.common import (
    cell,
    named_workloads,
    out,
    print_json,
    printable,
    reached,
    reading,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput
from pipeline.units import plural

SHOWN = 30  # unwatched workloads, those with most lines


def main(args: argparse.Namespace) -> int:
    if args.action != "list":
        if args.url is not None:
            raise BadInput(f"`logweir watch {args.action}` works on the machine itself; leave out --url")
        return _change(args)
    if args.pattern or args.workloads:
        one = args.pattern[0] if args.pattern else str(args.workloads)
        raise BadInput(f"`logweir watch list` takes no workload; {one!r} is one too many")
    with redis_explained():
        return _list(args)


def _change(args: argparse.Namespace) -> int:
    from pipeline.redis.connection import connect
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.watchlist import change_watchlist

    settings = reached(settings_of(args))
    patterns = named_workloads(args.pattern, args.workloads)
    if not patterns:
        raise BadInput(
            f"`logweir watch {args.action}` needs a workload, such as prod/shop/cart or prod/*; "
            "`logweir watch list` shows what was seen"
        )
    adding = args.action == "add"
    with redis_explained():
        change = change_watchlist(connect(settings), settings, patterns, adding=adding, by=user_of_machine())
    changed, unchanged = change.changed, change.unchanged
    if unchanged and not adding:
        raise BadInput(
            f"{unchanged[0]!r} is not on the watchlist{'; the others were removed' if changed else ''}; "
            "`logweir watch list` shows what is"
        )
    if args.json:
        print_json(asdict(change))
        return 0
    console = out()
    for pattern in changed:
        console.print(f"{'watching' if adding else 'no longer watching'} {printable(pattern)}", markup=False)
    for pattern in unchanged:
        console.print(f"{printable(pattern)} was watched already", markup=False)
    if adding and changed:
        console.print(
            "a model is trained when there are lines enough; `logweir status` shows when", markup=False
        )
    return 0


def _list(args: argparse.Namespace) -> int:
    found = reading(args).watchlist()
    if args.json:
        print_json(asdict(found))
        return 0
    console = out()
    if found.watched:
        table = Table("watched", "workloads", "lines", "since (UTC)", box=None, pad_edge=False)
        for row in found.watched:
            names = ", ".join(row.workloads[:3]) + (" ..." if len(row.workloads) > 3 else "")
            table.add_row(
                *map(
                    cell,
                    (
                        row.pattern,
                        names or "none seen yet",
                        f"{row.lines:,}",
                        f"{row.added:%Y-%m-%d %H:%M}",
                    ),
                )
            )
        console.print(table)
    else:
        console.print(
            "nothing is watched; `logweir watch add NAME` does, with a name from below or a pattern",
            markup=False,
        )
    if not found.unwatched:
        return 0
    console.print()
    treatment = "scored by the shared model" if found.unwatched_are == "score" else "counted and skipped"
    table = Table(f"seen, not watched ({treatment})", "lines", "last seen (UTC)", box=None, pad_edge=False)
    for seen in found.unwatched[:SHOWN]:
        table.add_row(*map(cell, (seen.workload, f"{seen.lines:,}", f"{seen.last_seen:%Y-%m-%d %H:%M:%S}")))
    console.print(table)
    more = len(found.unwatched) - SHOWN
    if more > 0:
        console.print(f"and {plural(more, 'workload')} more; --json shows all", markup=False)
    return 0
