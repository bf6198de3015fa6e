"""Answers from the Parquet files of a store."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.records.news import NewsQuery
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.around import NEIGHBOURHOOD, with_context
from pipeline.sinks.answers.bounds import LIMIT_S, MEMORY
from pipeline.sinks.answers.engine import Engine
from pipeline.sinks.answers.lines import matching_lines, near_lines, newest_lines, newest_time
from pipeline.sinks.answers.news import calm_news
from pipeline.sinks.answers.patterns import pattern_page
from pipeline.sinks.answers.rates import workload_rates
from pipeline.sinks.answers.stored import files_of_rates, finding_files, line_files
from pipeline.sinks.manifest import ResultTable
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.results import readable

PAGE_PARTS: Final = 8  # of a page; a sealed part has some ten thousand lines


class FileAnswers:
    """`Answers` from one store of results. Text is looked for as it stands in a message.

    `cache`: where temporary files of large questions may lie."""

    def __init__(
        self,
        sink: ParquetSink,
        *,
        cache: Path | None = None,
        limit_s: float | None = LIMIT_S,
        memory: str = MEMORY,
    ) -> None:
        self.sink = sink
        self.engine = Engine([sink.files.folder], cache=cache, limit_s=limit_s, memory=memory)

    def workloads(self) -> list[str]:
        """As the protocol says."""
        with readable(self.sink):
            return self.sink.workloads()

    def last_time(self, workloads: tuple[str, ...] | None) -> datetime | None:
        """As the protocol says."""
        return newest_time(
            self.engine, self.sink.parts(workloads=workloads), partial(line_files, self.sink), workloads
        )

    def lines(self, query: ResultQuery) -> pl.DataFrame:
        """As the protocol says."""
        self.sink.files.not_found.clear()
        table = ResultTable.FINDINGS if query.anomalous else ResultTable.LINES
        parts = self.sink.parts(since=query.since, until=query.end, workloads=query.workloads, table=table)

        find = finding_files if query.anomalous else line_files
        return newest_lines(self.engine, parts, partial(find, self.sink), query)

    def pages(self, query: ResultQuery, names: Sequence[str]) -> Iterator[pl.DataFrame]:
        """As the protocol says."""
        parts = self.sink.parts(since=query.since, until=query.end, workloads=query.workloads)
        live = [part for part in parts if part.live]
        for begin in range(0, len(live), PAGE_PARTS):
            group = live[begin : begin + PAGE_PARTS]
            yield matching_lines(self.engine, group, partial(line_files, self.sink), query, names)

    def context(self, hits: pl.DataFrame, records: int) -> pl.DataFrame:
        """As the protocol says."""
        first, last = hits["timestamp"].min(), hits["timestamp"].max()
        since = first - NEIGHBOURHOOD if isinstance(first, datetime) else None
        until = last + NEIGHBOURHOOD if isinstance(last, datetime) else None
        parts = self.sink.parts(since=since, until=until, workloads=hits["workload"].unique().to_list())
        neighbours = near_lines(self.engine, line_files(self.sink, parts), hits, records, list(RESULT_SCHEMA))
        return with_context(neighbours, hits, records)

    def patterns(self, query: PatternQuery) -> pl.DataFrame:
        """As the protocol says."""
        self.sink.files.not_found.clear()
        now = files_of_rates(self.sink, query.since, query.until, query)
        then = None if query.against is None else files_of_rates(self.sink, *query.against, query)
        return pattern_page(self.engine, query, now, then)

    def rates(self, query: PatternQuery) -> pl.DataFrame:
        """As the protocol says."""
        return workload_rates(self.engine, query, files_of_rates(self.sink, query.since, query.until, query))

    def news(self, query: NewsQuery) -> pl.DataFrame:
        """As the protocol says."""
        self.sink.files.not_found.clear()
        parts = self.sink.parts(
            since=query.past, until=query.until, workloads=query.workloads, table=ResultTable.FINDINGS
        )
        return calm_news(self.engine, finding_files(self.sink, parts), query)

    def not_read(self) -> int:
        """As the protocol says."""
        return sum(self.sink.files.not_found.values())

    def missing_rows(self, query: ResultQuery) -> int:
        """As the protocol says."""
        return self.sink.missing_rows(since=query.since, until=query.end, workloads=query.workloads)

    def cancel(self) -> None:
        """As the protocol says."""
        self.engine.cancel()

    def close(self) -> None:
        """As the protocol says."""
        self.engine.close()
