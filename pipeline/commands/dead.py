"""`logweir dead | results`: what is stored, what could not be, and the few things to do about it."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import polars as pl
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import (
    ago,
    cell,
    out,
    print_json,
    printable,
    reached,
    redis_explained,
    settings_of,
)
from pipeline.errors import BadInput, BadPayload, TooNew
from pipeline.ledger.batches import DeadLetter
from pipeline.ledger.ledger import Ledger
from pipeline.records.schema import utc_now
from pipeline.redis.keys import connect
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import readable
from pipeline.units import chance, plural

PAGE: Final = 100  # dead batches shown at once


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if args.verb == "results":
        return _results(args, settings)
    settings = reached(settings)
    with redis_explained():
        return _dead(args, settings)


def _dead(args: argparse.Namespace, settings: Settings) -> int:
    ledger = Ledger(connect(settings), settings)
    if args.action == "list":
        if args.batch:
            raise BadInput(
                f"`logweir dead list` takes no batch id; `logweir dead show {args.batch[0]}` shows one"
            )
        return _dead_list(args, ledger)
    letters = _chosen(args, ledger)
    if args.action == "show":
        return _show(ledger, letters)
    act, word = (
        (ledger.retry, "sent through the pipeline again")
        if args.action == "retry"
        else (ledger.discard, "discarded")
    )
    # Somebody else may be quicker with one of them.
    done = [letter.batch_id for letter in letters if act(letter.batch_id)]
    if args.json:
        print_json({"batches": done, "action": args.action})
    else:
        out().print(f"{plural(len(done), 'batch')} {word}", markup=False)
    return 0


def _show(ledger: Ledger, letters: list[DeadLetter]) -> int:
    """Every one, also where the payload of some cannot be read; raises the error of the last such one at the end."""
    fault: BadPayload | TooNew | None = None
    for letter in letters:
        facts: dict[str, Any] = asdict(letter)
        try:
            facts["records"] = ledger.payload(letter.batch_id)["raw"].head(100).to_list()
        except (BadPayload, TooNew) as exc:
            facts |= {"records": [], "unreadable": str(exc)}
            fault = exc
        print_json(facts)
    if fault is not None:
        raise fault
    return 0


def _chosen(args: argparse.Namespace, ledger: Ledger) -> list[DeadLetter]:
    """The dead letters that are meant. Raises BadInput before anything is done when one of them is none."""
    if not args.batch:
        raise BadInput(
            f"`logweir dead {args.action}` needs a batch id, or 'all'; `logweir dead list` shows them"
        )
    if args.batch == ["all"]:
        return _all_dead(ledger)
    found = {batch_id: ledger.dead_letter(batch_id) for batch_id in args.batch}
    unknown = [batch_id for batch_id, letter in found.items() if letter is None]
    if unknown:
        undone = "" if len(found) == 1 else ", so nothing was done"
        raise BadInput(f"there is no dead batch {unknown[0]!r}{undone}; `logweir dead list` shows them")
    return [letter for letter in found.values() if letter is not None]


def _all_dead(ledger: Ledger) -> list[DeadLetter]:
    """Those that are dead now: one that is retried and dies again meanwhile is not taken twice."""
    return ledger.dead(limit=max(1, int(ledger.client.zcard(ledger.keys.dead))))


def _dead_list(args: argparse.Namespace, ledger: Ledger) -> int:
    many = int(ledger.client.zcard(ledger.keys.dead))
    # A program wants all of them; a person reads a page.
    letters = ledger.dead(limit=args.limit or (max(1, many) if args.json else PAGE))
    if args.json:
        print_json([asdict(letter) for letter in letters])
        return 0
    console = out()
    for x in letters:
        what = f"{x.lines:,} {'line' if x.lines == 1 else 'lines'} of {printable(x.workload)}, {printable(x.source)}:{x.first_line}"
        when = f"died in {x.died_in} on {x.died:%Y-%m-%d %H:%M:%S} UTC"
        # Never cut: an id is there to be copied.
        console.print(x.batch_id, style="bold", markup=False, soft_wrap=True)
        console.print(f"  {what}, {when}\n  {printable(x.reason)}", markup=False, soft_wrap=True)
    if many > len(letters):
        console.print(
            f"the newest {len(letters):,} of {many:,} dead batches; --limit N shows more", markup=False
        )
    if not letters:
        console.print("no dead batches")
    return 0


def _results(args: argparse.Namespace, settings: Settings) -> int:
    rows = _stored(args, settings)
    if args.json:
        print_json(rows.to_dicts())
        return 0
    console = out()
    if rows.is_empty():
        console.print(f"no results in {printable(_place(settings))}", markup=False, soft_wrap=True)
        return 0
    table = Table(
        "time (UTC)", "workload", "level", "score", "p", "line", "message", box=None, pad_edge=False
    )
    for row in _rows(rows):
        table.add_row(*row)
    console.print(table)
    return 0


def _stored(args: argparse.Namespace, settings: Settings) -> pl.DataFrame:
    """From Parquet files where there are some by setting, else from OpenSearch."""
    if "parquet" in settings.sinks:
        with readable(settings.results):
            return _wanted(args, ParquetSink(settings.results).scan())
    from pipeline.opensearch.client import connect as open_search
    from pipeline.opensearch.newest import newest

    since = ago(args.since, utc_now()) if args.since else None
    rows = newest(
        open_search(settings), settings, limit=args.limit, since=since, workload=args.workload,
        anomalous=args.anomalous,
    )  # fmt: skip
    return rows.drop("raw")


def _place(settings: Settings) -> object:
    if "parquet" in settings.sinks:
        return settings.results
    from pipeline.opensearch.documents import indices

    return indices(settings)


def _wanted(args: argparse.Namespace, stored: pl.LazyFrame) -> pl.DataFrame:
    """The newest records that were asked for, oldest first."""
    if args.since:
        stored = stored.filter(pl.col("timestamp") >= ago(args.since, utc_now()))
    if args.anomalous:
        stored = stored.filter(pl.col("anomalous"))
    if args.workload:
        stored = stored.filter(pl.col("workload") == args.workload)
    return stored.sort("timestamp", "record_id").tail(args.limit).drop("raw").collect()


def _rows(rows: pl.DataFrame) -> Iterator[tuple[Text, ...]]:
    for row in rows.iter_rows(named=True):
        when: datetime = row["timestamp"]
        score = "warming" if row["score"] is None else f"{row['score']:.2f}"
        shown = (
            f"{when:%Y-%m-%d %H:%M:%S}", row["workload"], row["level"] or "", score, chance(row["p_value"]),
            _line(row["line"]), row["message"][:300],
        )  # fmt: skip
        yield tuple(cell(value) for value in shown)


def _line(number: int) -> str:
    """The line in its source; a polled document has none, but a number made of its id."""
    return str(number) if number < 2**40 else ""
