"""`logweir train | models | dead | results`: facts of a running stack, and the few things to do about them."""

import argparse
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Final

import polars as pl
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import (
    cell,
    err,
    out,
    print_json,
    printable,
    reached,
    redis_explained,
    settings_of,
)
from pipeline.commands.own import batches
from pipeline.errors import BadInput, TrainingFailed
from pipeline.ledger import DeadLetter, Ledger
from pipeline.producer import Producer
from pipeline.records import utc_now
from pipeline.registry import Registry
from pipeline.results import readable
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.tasks.context import connect
from pipeline.training import State, Status

SPAN: Final = re.compile(r"(\d{1,6})([smhd])")
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if args.verb == "results":
        return _results(args, settings)
    settings = reached(settings)
    with redis_explained():
        return {"train": _train, "models": _models, "dead": _dead}[args.verb](args, settings)


def _train(args: argparse.Namespace, settings: Settings) -> int:
    client = connect(settings)
    ledger = Ledger(client, settings)
    now = Status.from_redis(client.hgetall(ledger.keys.training))
    if now.state is not State.NONE and not now.ended:
        raise BadInput(f"a training is {now.state.value} already ({now.percent:.0f} %); wait for its end")
    request = uuid.uuid4().hex
    client.hset(ledger.keys.training, mapping=Status(state=State.QUEUED, request_id=request).to_redis())
    Producer.connect(settings).submit.train(request)
    console = err()
    with console.status("queued") as line:
        while not (status := Status.from_redis(client.hgetall(ledger.keys.training))).ended:
            line.update(f"{status.state.value} {status.percent:.0f} %, {status.remaining_s:.0f} s left")
            time.sleep(0.2)
    if status.state is State.FAILED:
        raise TrainingFailed(status.reason)
    if args.json:
        print_json(asdict(status))
    else:
        out().print(
            f"{status.version} is live: learnt from {status.lines:,} lines ({status.patterns:,} distinct) in {status.elapsed_s:.1f} s",
            markup=False,
        )
    return 0


def _models(args: argparse.Namespace, settings: Settings) -> int:
    registry = Registry(connect(settings), settings)
    live = registry.current()
    if args.action == "show":
        version = args.version or (live.version if live else None)
        if version is None:
            raise BadInput("there is no model yet; train one with `logweir train`")
        if version not in registry.versions():
            raise BadInput(f"there is no model {version!r}; `logweir models list` shows what there is")
        print_json(asdict(registry.manifest(version)))
        return 0
    rows = [
        {
            "version": v,
            "live": live is not None and v == live.version,
            "created": registry.manifest(v).created,
        }
        for v in registry.versions()
    ]
    if args.json:
        print_json(rows)
        return 0
    table = Table("version", "created", "", box=None, pad_edge=False)
    for row in rows:
        table.add_row(cell(row["version"]), cell(row["created"]), "live" if row["live"] else "")
    out().print(table if rows else "no models yet; train one with `logweir train`")
    return 0


def _dead(args: argparse.Namespace, settings: Settings) -> int:
    ledger = Ledger(connect(settings), settings)
    if args.action == "list":
        return _dead_list(args, ledger)
    letters = _chosen(args, ledger)
    if args.action == "show":
        for letter in letters:
            records = ledger.payload(letter.batch_id)["raw"].head(100).to_list()
            print_json({**asdict(letter), "records": records})
        return 0
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
        out().print(f"{batches(len(done))} {word}", markup=False)
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
    letters = _all_dead(ledger)
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
    if not letters:
        console.print("no dead batches")
    return 0


def _results(args: argparse.Namespace, settings: Settings) -> int:
    with readable(settings.results):
        rows = _wanted(args, ParquetSink(settings.results).scan())
    if args.json:
        print_json(rows.to_dicts())
        return 0
    console = out()
    if rows.is_empty():
        console.print(f"no results in {printable(settings.results)}", markup=False, soft_wrap=True)
        return 0
    table = Table("time (UTC)", "workload", "level", "score", "line", "message", box=None, pad_edge=False)
    for row in _rows(rows):
        table.add_row(*row)
    console.print(table)
    return 0


def _wanted(args: argparse.Namespace, stored: pl.LazyFrame) -> pl.DataFrame:
    """The newest records that were asked for, oldest first."""
    if args.since:
        stored = stored.filter(pl.col("timestamp") >= _since(args.since, utc_now()))
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
            f"{when:%Y-%m-%d %H:%M:%S}", row["workload"], row["level"] or "", score, row["line"],
            row["message"][:300],
        )  # fmt: skip
        yield tuple(cell(value) for value in shown)


def _since(text: str, now: datetime) -> datetime:
    match = SPAN.fullmatch(text)
    if match is None:
        raise BadInput(f"--since {text!r} is not a span; write 90s, 15m, 1h or 7d")
    try:
        return now - timedelta(**{UNITS[match[2]]: int(match[1])})
    except OverflowError as exc:
        raise BadInput(
            f"--since {text!r} reaches back before the year 1; leave it out for all times"
        ) from exc
