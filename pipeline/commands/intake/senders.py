"""`logweir senders`: who sends to the intake, who has gone silent, and how far Kafka is read."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.commands.common import cell, out, print_json, reading, redis_explained, settings_of
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.units import plural
from pipeline.workers.kafka.progress import PartitionProgress, stored_partitions

SHOWN = 50
FORMATS = 3


def main(args: argparse.Namespace) -> int:
    at = reading(args)
    with redis_explained():
        found = at.senders()
        partitions = () if args.url is not None else _partitions(settings_of(args))
    if args.json:
        print_json([asdict(sender) for sender in found] + [_facts(one) for one in partitions])
        return 0
    console = out()
    if partitions:
        _show_partitions(console, partitions)
        if not found:
            return 0
        console.print()
    if not found:
        console.print("nobody has sent to the intake; `logweir intake` shows how", markup=False)
        return 0
    table = Table(
        "protocol", "key", "from", "lines", "requests", "duplicates", "refused", "formats", "last heard (UTC)",
        box=None, pad_edge=False,
    )  # fmt: skip
    for one in found[:SHOWN]:
        numbers = (f"{n:,}" for n in (one.lines, one.requests, one.duplicates, one.refused))
        last = f"{one.last:%Y-%m-%d %H:%M:%S}"
        formats = ", ".join(f"{name} {share:.0%}" for name, share in list(one.formats.items())[:FORMATS])
        table.add_row(*map(cell, (one.protocol, one.key or "-", one.peer, *numbers, formats or "-", last)))
    console.print(table)
    if len(found) > SHOWN:
        console.print(f"and {plural(len(found) - SHOWN, 'sender')} more; --json shows all", markup=False)
    return 0


def _partitions(settings: Settings) -> Sequence[PartitionProgress]:
    return stored_partitions(connect(settings), settings)


def _facts(one: PartitionProgress) -> dict[str, Any]:
    facts: dict[str, Any] = {"protocol": "kafka", "lag": one.lag, "last": _moment(one)}
    return facts | dict(msgspec.to_builtins(one))


def _moment(one: PartitionProgress) -> datetime:
    return datetime.fromtimestamp(one.at_ms / 1000, UTC)


def _show_partitions(console: Console, partitions: Sequence[PartitionProgress]) -> None:
    """The partitions that lag most come first."""
    table = Table(
        "Kafka", "offset", "waiting", "lines", "reader", "last heard (UTC)", box=None, pad_edge=False
    )
    for one in partitions[:SHOWN]:
        numbers = (f"{n:,}" for n in (one.offset, one.lag, one.lines))
        table.add_row(*map(cell, (one.name, *numbers, one.reader, f"{_moment(one):%Y-%m-%d %H:%M:%S}")))
    console.print(table)
    if len(partitions) > SHOWN:
        console.print(
            f"and {plural(len(partitions) - SHOWN, 'partition')} more; --json shows all", markup=False
        )
