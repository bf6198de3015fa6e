"""`logweir senders`: who sends to the intake, who has gone silent, and how far Kafka and NATS are read."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from pipeline.commands.common import cell, out, print_json, reached, reading, redis_explained, settings_of
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.units import plural
from pipeline.workers.kafka.progress import PartitionProgress, stored_partitions
from pipeline.workers.nats.progress import StreamProgress, stored_streams

SHOWN = 50


def main(args: argparse.Namespace) -> int:
    at = reading(args)
    with redis_explained():
        found = at.senders()
        partitions, streams = (
            ((), ()) if args.url is not None else _read(reached(settings_of(args), writes=False))
        )
    if args.json:
        facts = [*map(_facts, partitions), *map(_facts_of_stream, streams)]
        print_json([asdict(sender) for sender in found] + facts)
        return 0
    console = out()
    if partitions:
        _show_partitions(console, partitions)
    if partitions and streams:
        console.print()
    if streams:
        _show_streams(console, streams)
    if partitions or streams:
        if not found:
            return 0
        console.print()
    if not found:
        console.print("nobody has sent to the intake; `logweir intake` shows how", markup=False)
        return 0
    table = Table(
        "protocol", "key", Column("from", overflow="fold"), "lines", "requests", "duplicates", "refused",
        "last heard (UTC)", box=None, pad_edge=False,
    )  # fmt: skip
    for one in found[:SHOWN]:
        numbers = (f"{n:,}" for n in (one.lines, one.requests, one.duplicates, one.refused))
        last = f"{one.last:%m-%d %H:%M:%S}"  # kept for 30 days
        table.add_row(*map(cell, (one.protocol, one.key or "-", one.peer, *numbers, last)))
    console.print(table)
    if len(found) > SHOWN:
        console.print(f"and {plural(len(found) - SHOWN, 'sender')} more; --json shows all", markup=False)
    return 0


def _read(settings: Settings) -> tuple[Sequence[PartitionProgress], Sequence[StreamProgress]]:
    client = connect(settings)
    return stored_partitions(client, settings), stored_streams(client, settings)


def _facts(one: PartitionProgress) -> dict[str, Any]:
    facts: dict[str, Any] = {"protocol": "kafka", "lag": one.lag, "last": _moment(one)}
    return facts | dict(msgspec.to_builtins(one))


def _facts_of_stream(one: StreamProgress) -> dict[str, Any]:
    facts: dict[str, Any] = {"protocol": "nats", "lag": one.lag, "last": _moment(one)}
    return facts | dict(msgspec.to_builtins(one))


def _moment(one: PartitionProgress | StreamProgress) -> datetime:
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


def _show_streams(console: Console, streams: Sequence[StreamProgress]) -> None:
    """One row, as a pipeline has one gateway, and more only after its setting has changed."""
    table = Table(
        "NATS", "sequence", "waiting", "lines", "reader", "last heard (UTC)", box=None, pad_edge=False
    )
    for one in streams[:SHOWN]:
        numbers = (f"{n:,}" for n in (one.sequence, one.lag, one.lines))
        table.add_row(*map(cell, (one.name, *numbers, one.reader, f"{_moment(one):%Y-%m-%d %H:%M:%S}")))
    console.print(table)
