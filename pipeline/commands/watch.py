"""`logweir watch add | remove | list`: whose logs get models by themselves."""

import argparse
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, printable, reached, redis_explained, settings_of
from pipeline.controller.watchlist import Watched, Watchlist, covers, unwatched
from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.units import plural

SHOWN = 30  # unwatched workloads, those with most lines


def main(args: argparse.Namespace) -> int:
    settings = reached(settings_of(args))
    with redis_explained():
        if args.action == "list":
            if args.pattern:
                raise BadInput(f"`logweir watch list` takes no workload; {args.pattern[0]!r} is one too many")
            return _list(args, settings)
        return _change(args, settings)


def _change(args: argparse.Namespace, settings: Settings) -> int:
    if not args.pattern:
        raise BadInput(
            f"`logweir watch {args.action}` needs a workload, such as prod/shop/cart or prod/*; "
            "`logweir watch list` shows what was seen"
        )
    watchlist = Watchlist(connect(settings), settings)
    adding = args.action == "add"
    changed = (watchlist.add if adding else watchlist.remove)(*args.pattern)
    watched = watchlist.look()
    unchanged = [p for p in dict.fromkeys(args.pattern) if p not in changed]
    if unchanged and not adding:
        raise BadInput(
            f"{unchanged[0]!r} is not on the watchlist{'; the others were removed' if changed else ''}; "
            "`logweir watch list` shows what is"
        )
    if args.json:
        print_json(
            {
                "changed": changed,
                "unchanged": unchanged,
                "version": watched.version,
                "patterns": watched.patterns,
            }
        )
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


def watchlist_facts(watched: Watched, totals: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The watchlist with what each pattern covers, and what is seen but not watched."""

    def workload_facts(name: str) -> dict[str, Any]:
        t = totals[name]
        last = datetime.fromtimestamp(t.get("last_ms", 0) / 1000, UTC)
        return {
            "workload": name,
            "lines": t.get("accepted", 0),
            "skipped": t.get("skipped", 0),
            "last_seen": last,
        }

    # Once: thousands of patterns by thousands of workloads are seconds already.
    covered = {
        entry.pattern: [name for name in totals if covers([entry.pattern], name)] for entry in watched.entries
    }
    return {
        "version": watched.version,
        "watched": [
            {
                "pattern": entry.pattern,
                "added": entry.added,
                "workloads": covered[entry.pattern],
                "lines": sum(totals[name].get("accepted", 0) for name in covered[entry.pattern]),
            }
            for entry in watched.entries
        ],
        "unwatched": [workload_facts(name) for name in unwatched(watched, totals)],
    }


def _list(args: argparse.Namespace, settings: Settings) -> int:
    client = connect(settings)
    found = watchlist_facts(Watchlist(client, settings).look(), Ledger(client, settings).backlog.totals())
    if args.json:
        print_json(found | {"unwatched_are": settings.watch.unwatched})
        return 0
    console = out()
    if found["watched"]:
        table = Table("watched", "workloads", "lines", "since (UTC)", box=None, pad_edge=False)
        for row in found["watched"]:
            names = ", ".join(row["workloads"][:3]) + (" ..." if len(row["workloads"]) > 3 else "")
            table.add_row(
                *map(
                    cell,
                    (
                        row["pattern"],
                        names or "none seen yet",
                        f"{row['lines']:,}",
                        f"{row['added']:%Y-%m-%d %H:%M}",
                    ),
                )
            )
        console.print(table)
    else:
        console.print(
            "nothing is watched; `logweir watch add NAME` does, with a name from below or a pattern",
            markup=False,
        )
    if not found["unwatched"]:
        return 0
    console.print()
    treatment = "scored by the shared model" if settings.watch.unwatched == "score" else "counted and skipped"
    table = Table(f"seen, not watched ({treatment})", "lines", "last seen (UTC)", box=None, pad_edge=False)
    for row in found["unwatched"][:SHOWN]:
        table.add_row(
            *map(cell, (row["workload"], f"{row['lines']:,}", f"{row['last_seen']:%Y-%m-%d %H:%M:%S}"))
        )
    console.print(table)
    more = len(found["unwatched"]) - SHOWN
    if more > 0:
        console.print(f"and {plural(more, 'workload')} more; --json shows all", markup=False)
    return 0
