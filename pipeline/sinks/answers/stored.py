"""Which files of a store hold the answer to a question."""

from collections.abc import Iterable
from datetime import datetime

from pipeline.records.pattern_query import PatternQuery
from pipeline.sinks.answers.engine import RowFile
from pipeline.sinks.answers.patterns import FINE_SPAN, RateFiles
from pipeline.sinks.manifest import Part, ResultTable
from pipeline.sinks.parquet import ParquetSink
from pipeline.units import epoch_us


def line_files(sink: ParquetSink, parts: Iterable[Part]) -> list[RowFile]:
    """The files with the lines of these parts. Raises SinkUnavailable."""
    return [
        RowFile(path=path, dropped=part.dropped, elided=part.elided) for part, path in sink.located(parts)
    ]


def finding_files(sink: ParquetSink, parts: Iterable[Part]) -> list[RowFile]:
    """The files with the findings of these parts. Raises SinkUnavailable."""
    table = ResultTable.FINDINGS
    parts = list(parts)
    there = [_table(sink, part, table) for part in parts if table in part.tables]
    # A part with other tables has no findings.
    return there + line_files(sink, [part for part in parts if not part.tables])


def files_of_rates(sink: ParquetSink, begin: datetime, end: datetime, query: PatternQuery) -> RateFiles:
    """Where the counts of a span are. Where lines have expired that are partly in the span, those count whose
    bucket begins in it. Raises SinkUnavailable."""
    first, stop = epoch_us(begin), epoch_us(end)
    hours, fine = ResultTable.RATES_1H, ResultTable.RATES_5M
    inner: list[Part] = []
    border: list[Part] = []
    cut: list[Part] = []
    lines: list[Part] = []
    for part in sink.parts(since=begin, until=end, workloads=query.workloads, table=hours):
        if hours in part.tables and first <= part.first_us and part.last_us < stop:
            inner.append(part)
        elif part.live:
            (cut if {hours, fine} <= part.tables.keys() else lines).append(part)
        elif hours in part.tables:
            border.append(part)
    short = query.until - query.since <= FINE_SPAN
    return RateFiles(
        begin=begin,
        end=end,
        inner=_counts(sink, inner, hours),
        border=_counts(sink, border, hours),
        cut=_counts(sink, cut, fine),
        cut_hours=_counts(sink, cut, hours),
        cut_lines=tuple(line_files(sink, cut)),
        lines=tuple(line_files(sink, lines)),
        fine_inner=_counts(sink, inner, fine) if short else (),
        fine_border=_counts(sink, border, fine) if short else (),
    )


def _counts(sink: ParquetSink, parts: Iterable[Part], table: ResultTable) -> tuple[RowFile, ...]:
    """The counts of these parts; those by the hour where the others have expired."""
    hours = ResultTable.RATES_1H
    return tuple(_table(sink, part, table if table in part.tables else hours) for part in parts)


def _table(sink: ParquetSink, part: Part, table: ResultTable) -> RowFile:
    return RowFile(path=sink.table_file(part.tables[table]))
