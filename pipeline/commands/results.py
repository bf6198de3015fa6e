"""`logweir results`: stored lines, the newest at the end."""

import argparse
from collections.abc import Iterator
from datetime import datetime

import polars as pl
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import cell, out, print_json, printable, settings_of
from pipeline.records.batch import utc_now
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import readable
from pipeline.units import ago, chance


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
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
    if "parquet" in settings.data.sinks:
        with readable(settings.data.results):
            return _wanted(args, ParquetSink(settings.data.results).scan())
    from pipeline.opensearch.client import opensearch_client
    from pipeline.opensearch.newest import newest

    since = ago(args.since, utc_now()) if args.since else None
    rows = newest(
        opensearch_client(settings), settings, limit=args.limit, since=since, workload=args.workload,
        anomalous=args.anomalous,
    )  # fmt: skip
    return rows.drop("raw")


def _place(settings: Settings) -> object:
    if "parquet" in settings.data.sinks:
        return settings.data.results
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
