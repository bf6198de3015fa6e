"""`logweir results`: stored lines that match, the newest at the end; `results files`: where they are."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline.commands.common import (
    NO_TIME,
    cell,
    err,
    of_pipeline,
    out,
    print_json,
    printable,
    reading,
    remark,
    remark_missing,
    settings_of,
)
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.questions import LinesAsked, asked_moment, pattern_span, template_number
from pipeline.service.stored.values import NEWS_SPAN
from pipeline.service.values import Line, LinePage
from pipeline.units import chance, clipped, listed, plural

if TYPE_CHECKING:
    from pipeline.settings import Settings
    from pipeline.sinks.manifest import Part
    from pipeline.sinks.parquet import ParquetSink

# The flags that choose lines, in the order of a sentence that names them.
_CHOOSING = ("workload", "level", "text", "template", "since", "until", "anomalous")
_NOT_OF_NEWS = ("level", "text", "template", "anomalous", "context")
NEWS_CHARS: Final = 320  # of a line that is shown


def main(args: argparse.Namespace) -> int:
    if args.action == "files":
        if args.url is not None:
            raise BadInput("`results files` names files of a machine; leave out --url, and run it there")
        return _print_files(args, of_pipeline(settings_of(args)))
    if args.news:
        return _print_news(args)
    at, (asked, further) = reading(args, stored=True), lines_asked(args).at_clock(utc_now())
    page = at.lines(asked)
    _remark_ahead(at.lines(further).lines if further else [])
    if not args.context:
        page.lines.reverse()  # the newest at the end
    if args.json:
        print_json([line.facts() for line in page.lines])
        return remark_missing(page.missing)
    console = out()
    if not page.lines:
        console.print(_nothing(args, page), markup=False, soft_wrap=True)
        return remark_missing(page.missing)
    table = Table(box=None, pad_edge=False)
    table.add_column("time (UTC)", no_wrap=True)
    for name in ("workload", "level", "score", "p", "line", "message"):
        table.add_column(name)
    for row in _rows(page.lines):
        table.add_row(*row)
    console.print(table)
    return remark_missing(page.missing)


def _remark_ahead(newest: Sequence[Line]) -> None:
    """Says that lines are left out whose times are ahead of the clock; `newest` of them, at most one."""
    for line in newest:
        remark(
            err(),
            f"lines up to {line.timestamp:%Y-%m-%d %H:%M:%S} UTC are left out, because they are more than a day ahead "
            f"of the clock; --until {line.timestamp + timedelta(days=1):%Y-%m-%d} shows them",
        )


def _print_news(args: argparse.Namespace) -> int:
    """Each with its reason, and its text in the full width."""
    if chosen := [name for name in _NOT_OF_NEWS if getattr(args, name)]:
        raise BadInput(f"--news chooses lines by itself; leave out --{chosen[0]}")
    since, until = pattern_span(args.since or NEWS_SPAN, args.until, utc_now(), flags=("--since", "--until"))
    page = reading(args, stored=True).news(since, until, args.workload or None)
    shown = page.news[: args.limit]
    if args.json:
        print_json([asdict(one) for one in shown])
        return remark_missing(page.missing)
    console = out()
    for place, one in enumerate(shown, start=1):
        facts = (f"n{place}", f"{one.at:%Y-%m-%d %H:%M:%S}", one.level or "", plural(one.records, "line"))
        about = " · ".join(filter(None, (*facts, one.workload, f"T{one.template_id}")))
        console.print(cell(about), style="bold")
        for text, style in ((one.message, ""), (one.why, "dim")):
            console.print(Padding(cell(clipped(text, NEWS_CHARS)), (0, 0, 0, 4), style=style))
    span = f"{since:%Y-%m-%d %H:%M} – {until:%Y-%m-%d %H:%M} UTC"
    if not shown:
        console.print(f"all calm lines had been said before, {span}", markup=False)
        return remark_missing(page.missing)
    console.print(f"{plural(len(shown), 'calm line')} never said before, {span}", style="dim", markup=False)
    console.print("`logweir mark T17 normal` keeps one off this list", style="dim", markup=False)
    return remark_missing(page.missing)


def _print_files(args: argparse.Namespace, settings: "Settings") -> int:
    """One file in a line. Files of which some rows are no results any more are rewritten first."""
    from pipeline.sinks.choose import parquet_of
    from pipeline.sinks.compaction import rewrite_dropped

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


def _location(sink: "ParquetSink", part: "Part") -> str:
    url = sink.objects.url
    return str(sink.files.file(part)) if url.startswith("file:") else f"{url}/{part.name}"


def lines_asked(args: argparse.Namespace) -> LinesAsked:
    """The question of the flags. Raises BadInput."""
    now = utc_now()
    return LinesAsked(
        limit=args.limit,
        since=asked_moment(args.since, now, flag="--since"),
        until=asked_moment(args.until, now, flag="--until"),
        workload=args.workload or None,
        level=args.level,
        text=args.text,
        template_id=template_number(args.template) if args.template else None,
        anomalous=args.anomalous,
        context=getattr(args, "context", None) or 0,
    )


def _nothing(args: argparse.Namespace, page: LinePage) -> str:
    """The answer when nothing matches: the filters and the place, or that nothing is stored at all."""
    place = printable(page.stored_in)
    filters = [(name, value) for name in _CHOOSING if (value := getattr(args, name))]
    if not filters or not page.workloads:
        return f"no results in {place}"
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value!r}" for name, value in filters)
    there = f"; workloads there: {printable(listed(page.workloads, 5))}" if args.workload else ""
    return f"no line in {place} matches {printable(flags)}{there}"


def _rows(lines: Sequence[Line]) -> Iterator[tuple[Text, ...]]:
    """Cells of the table. Among lines of context, `>` marks those that match; groups stand apart."""
    before: int | None = None
    for line in lines:
        if before is not None and line.place != before:
            yield tuple(Text("") for _ in range(7))
        before = line.place
        mark = "" if line.hit is None else "> " if line.hit else "  "
        score = "warming" if line.score is None else f"{line.score:.2f}"
        shown = (
            f"{mark}{line.timestamp:%Y-%m-%d %H:%M:%S}" if line.timed is not False else mark + NO_TIME,
            line.workload, line.level or "", score, chance(line.p_value),
            _line(line.line or 0), (line.message or "")[:300] + _trace(line),
        )  # fmt: skip
        yield tuple(cell(value) for value in shown)


def _trace(line: Line) -> str:
    """The ids of its trace, behind a message."""
    ids = (("trace_id", line.trace_id), ("span_id", line.span_id))
    return "".join(f"  {name}={value[:80]}" for name, value in ids if value)


def _line(number: int) -> str:
    """The line in its source; a polled document has none, but a number made of its id."""
    return str(number) if number < 2**40 else ""
