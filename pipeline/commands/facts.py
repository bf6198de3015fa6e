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

from pipeline.commands.common import err, out, print_json, reached, redis_explained, settings_of
from pipeline.errors import BadInput, TrainingFailed
from pipeline.ledger import Ledger
from pipeline.producer import Producer
from pipeline.records import utc_now
from pipeline.registry import Registry
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
        table.add_row(str(row["version"]), str(row["created"]), "live" if row["live"] else "")
    out().print(table if rows else "no models yet; train one with `logweir train`")
    return 0


def _dead(args: argparse.Namespace, settings: Settings) -> int:
    ledger = Ledger(connect(settings), settings)
    if args.action == "list":
        return _dead_list(args, ledger)
    ids = [letter.batch_id for letter in ledger.dead()] if args.batch == ["all"] else args.batch
    if not ids and args.batch != ["all"]:
        raise BadInput(
            f"`logweir dead {args.action}` needs a batch id, or 'all'; `logweir dead list` shows them"
        )
    for batch_id in ids:
        letter = ledger.dead_letter(batch_id)
        if letter is None:
            raise BadInput(f"there is no dead batch {batch_id!r}; `logweir dead list` shows them")
        if args.action == "show":
            print_json({**asdict(letter), "records": ledger.payload(batch_id)["raw"].head(100).to_list()})
        elif args.action == "retry":
            ledger.retry(batch_id)
        else:
            ledger.discard(batch_id)
    if args.action != "show":
        word = "sent through the pipeline again" if args.action == "retry" else "discarded"
        if args.json:
            print_json({"batches": ids, "action": args.action})
        else:
            out().print(f"{len(ids)} batches {word}", markup=False)
    return 0


def _dead_list(args: argparse.Namespace, ledger: Ledger) -> int:
    letters = ledger.dead()
    if args.json:
        print_json([asdict(letter) for letter in letters])
        return 0
    console = out()
    for x in letters:
        what = f"{x.lines:,} {'line' if x.lines == 1 else 'lines'} of {x.workload}, {x.source}:{x.first_line}"
        when = f"died in {x.died_in} on {x.died:%Y-%m-%d %H:%M:%S} UTC"
        # Never cut: an id is there to be copied.
        console.print(x.batch_id, style="bold", markup=False, soft_wrap=True)
        console.print(f"  {what}, {when}\n  {_printable(x.reason)}", markup=False, soft_wrap=True)
    if not letters:
        console.print("no dead batches")
    return 0


def _results(args: argparse.Namespace, settings: Settings) -> int:
    stored = ParquetSink(settings.results).scan()
    if args.since:
        since = utc_now() - _span(args.since)
        stored = stored.filter(pl.col("timestamp") >= since)
    if args.anomalous:
        stored = stored.filter(pl.col("anomalous"))
    if args.workload:
        stored = stored.filter(pl.col("workload") == args.workload)
    rows = stored.sort("timestamp", "record_id").tail(args.limit).drop("raw").collect()
    if args.json:
        print_json(rows.to_dicts())
        return 0
    table = Table("time (UTC)", "workload", "level", "score", "line", "message", box=None, pad_edge=False)
    for row in _rows(rows):
        table.add_row(*row)
    console = out()
    console.print(table if rows.height else f"no results in {settings.results}")
    return 0


def _rows(rows: pl.DataFrame) -> Iterator[tuple[str, ...]]:
    from rich.markup import escape

    for row in rows.iter_rows(named=True):
        when: datetime = row["timestamp"]
        score = "warming" if row["score"] is None else f"{row['score']:.2f}"
        message = _printable(row["message"][:300])
        yield (
            f"{when:%Y-%m-%d %H:%M:%S}",
            escape(row["workload"]),
            row["level"] or "",
            score,
            str(row["line"]),
            escape(message),
        )


def _printable(text: str) -> str:
    """Text from elsewhere, unable to steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _span(text: str) -> timedelta:
    match = SPAN.fullmatch(text)
    if match is None:
        raise BadInput(f"--since {text!r} is not a span; write 90s, 15m, 1h or 7d")
    return timedelta(**{UNITS[match[2]]: int(match[1])})
