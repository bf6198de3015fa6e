"""`logweir results`: stored lines that match, the newest at the end; `results files`: where they are."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import Any

import polars as pl
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import NO_TIME, cell, of_pipeline, out, print_json, printable, settings_of
from pipeline.controller.watchlist import check_pattern, covers
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.records.result_query import ResultQuery
from pipeline.records.structured import structured_fields, trace_ids
from pipeline.settings import Settings
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.compaction import rewrite_dropped
from pipeline.sinks.manifest import Part
from pipeline.sinks.parquet import ParquetSink
from pipeline.units import chance, listed, time_of

# The flags that choose lines, in the order of a sentence that names them.
_CHOOSING = ("workload", "level", "text", "template", "since", "until", "anomalous")


def main(args: argparse.Namespace) -> int:
    settings = of_pipeline(settings_of(args))
    if args.action == "files":
        return _print_files(args, settings)
    query = asked_query(args)
    rows, workloads = _stored(args, settings, query)
    if args.json:
        print_json([_facts(row) for row in rows.iter_rows(named=True)])
        return 0
    console = out()
    if rows.is_empty():
        console.print(_nothing(args, settings, workloads), markup=False, soft_wrap=True)
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("time (UTC)", no_wrap=True)
    for name in ("workload", "level", "score", "p", "line", "message"):
        table.add_column(name)
    for row in _rows(rows):
        table.add_row(*row)
    console.print(table)
    return 0


def _print_files(args: argparse.Namespace, settings: Settings) -> int:
    """One file in a line. Files of which some rows are no results any more are rewritten first."""
    if "parquet" not in settings.data.sinks:
        raise BadInput("results lie in OpenSearch (sinks); there are no files")
    if filters := [name for name in _CHOOSING if getattr(args, name)]:
        raise BadInput(f"`results files` lists all files; leave out --{filters[0]}")
    sink = parquet_of(settings)
    rewrite_dropped(sink)
    names = [_location(sink, part) for part in sink.parts()]
    if args.json:
        print_json(names)
    else:
        for name in names:
            out().print(name, markup=False, highlight=False, soft_wrap=True)
    return 0


def _location(sink: ParquetSink, part: Part) -> str:
    url = sink.objects.url
    return str(sink.files.file(part)) if url.startswith("file:") else f"{url}/{part.name}"


def asked_query(args: argparse.Namespace) -> ResultQuery:
    """The query of the flags, without the workload. Raises BadInput."""
    now = utc_now()
    return ResultQuery(
        limit=args.limit,
        since=time_of(args.since, now) if args.since else None,
        until=time_of(args.until, now, flag="--until") if args.until else None,
        level=args.level,
        text=args.text,
        template_id=_template_id(args.template) if args.template else None,
        anomalous=args.anomalous,
    )


def _template_id(text: str) -> int:
    number = text.removeprefix("T").removeprefix("t")
    if not number.removeprefix("-").isdecimal() or len(number) > 18:
        raise BadInput(f"--template {text!r} is no template; give its number, such as T17")
    return int(number)


def _stored(
    args: argparse.Namespace, settings: Settings, query: ResultQuery
) -> tuple[pl.DataFrame, list[str]]:
    """The rows, and the workloads that there are when no row matches."""
    with closing(answers_of(settings)) as answers:
        query = of_workloads(args, query, answers.workloads() if args.workload else ())
        rows = answers.lines(query)
        if args.context and not rows.is_empty():
            rows = answers.context(rows, args.context)
        return rows, answers.workloads() if rows.is_empty() else []


def of_workloads(args: argparse.Namespace, query: ResultQuery, names: Iterable[str]) -> ResultQuery:
    """The query with the workloads that match the pattern. Raises BadInput."""
    if not args.workload:
        return query
    pattern = check_pattern(args.workload)
    return replace(query, workloads=tuple(name for name in names if covers([pattern], name)))


def _nothing(args: argparse.Namespace, settings: Settings, workloads: list[str]) -> str:
    """The answer when nothing matches: the filters and the place, or that nothing is stored at all."""
    place = printable(_place(settings))
    filters = [(name, value) for name in _CHOOSING if (value := getattr(args, name))]
    if not filters or not workloads:
        return f"no results in {place}"
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value!r}" for name, value in filters)
    there = f"; workloads there: {printable(listed(workloads, 5))}" if args.workload else ""
    return f"no line in {place} matches {printable(flags)}{there}"


def _place(settings: Settings) -> object:
    if "parquet" in settings.data.sinks:
        url = settings.data.results_url
        return settings.data.results if url.startswith("file:") else url
    from pipeline.opensearch.documents import indices

    return indices(settings)


def _rows(rows: pl.DataFrame) -> Iterator[tuple[Text, ...]]:
    """Cells of the table. Among lines of context, `>` marks those that match; groups stand apart."""
    around = "hit" in rows.columns
    before: int | None = None
    for row in rows.iter_rows(named=True):
        if around and before is not None and row["place"] != before:
            yield tuple(Text("") for _ in range(7))
        before = row.get("place")
        when: datetime = row["timestamp"]
        mark = ("> " if row["hit"] else "  ") if around else ""
        score = "warming" if row["score"] is None else f"{row['score']:.2f}"
        shown = (
            f"{mark}{when:%Y-%m-%d %H:%M:%S}" if row["timed"] is not False else mark + NO_TIME,
            row["workload"], row["level"] or "", score, chance(row["p_value"]),
            _line(row["line"]), row["message"][:300] + _trace(row["raw"]),
        )  # fmt: skip
        yield tuple(cell(value) for value in shown)


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the fields of its raw text in place of that text."""
    fields = structured_fields(row["raw"])
    facts = {name: value for name, value in row.items() if name != "raw"}
    return facts | trace_ids(fields)._asdict() | {"fields": fields}


def _trace(raw: str | None) -> str:
    """The ids of its trace, behind a message."""
    ids = trace_ids(structured_fields(raw))
    return "".join(f"  {name}={value[:80]}" for name, value in ids._asdict().items() if value)


def _line(number: int) -> str:
    """The line in its source; a polled document has none, but a number made of its id."""
    return str(number) if number < 2**40 else ""
