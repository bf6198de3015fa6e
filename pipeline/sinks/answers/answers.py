"""The protocol of answers: every question about stored results, whatever stores them.

Both kinds pass the same contract suite (tests/answers_contract.py)."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol

import polars as pl

from pipeline.records.news import NewsQuery
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery


class Answers(Protocol):
    """One question at a time; only `cancel` may come from another thread.

    Every question raises AnswerCancelled when it was cancelled or takes too long, and BadInput when it asks
    for too much. It raises BadPayload for a damaged file, and SinkUnavailable or SourceUnavailable where the
    store does not answer."""

    def workloads(self) -> list[str]:
        """The names of all workloads that have results."""

    def last_time(self, workloads: tuple[str, ...] | None) -> datetime | None:
        """The time of the newest result of these workloads, of all for None. None without any."""

    def lines(self, query: ResultQuery) -> pl.DataFrame:
        """The newest lines that match, oldest first, in RESULT_SCHEMA. With a template: samples of a pattern.

        Anomalous lines are found also where the other lines of their time have expired."""

    def pages(self, query: ResultQuery, names: Sequence[str]) -> Iterator[pl.DataFrame]:
        """All lines that match, in these columns and in no order, whatever the limit says.

        A page has the lines of a few parts, or some thousand documents; findings of the watcher are among
        them."""

    def context(self, hits: pl.DataFrame, records: int) -> pl.DataFrame:
        """The hits of `lines`, and up to so many records before and after each in its source.

        Adds the columns `hit` (Boolean) and `place` (the hits' groups in their order, UInt32)."""

    def patterns(self, query: PatternQuery) -> pl.DataFrame:
        """How often each pattern occurs in a span, beside another span: PATTERN_SCHEMA."""

    def rates(self, query: PatternQuery) -> pl.DataFrame:
        """How many lines each workload has in equal parts of a span: RATE_SCHEMA, by workload.

        The other span, the order and the limit of the query do not count."""

    def news(self, query: NewsQuery) -> pl.DataFrame:
        """The templates of calm new lines, the strangest first: NEWS_SCHEMA.

        They are found also where the other lines of their time have expired."""

    def not_read(self) -> int:
        """Stored lines that the last question for lines, patterns or news did not see, because their files
        are gone."""

    def missing_rows(self, query: ResultQuery) -> int:
        """Stored lines of this span and these workloads whose files are gone, whatever else the query
        says."""

    def cancel(self) -> None:
        """Ends the question that is asked now, if any."""

    def close(self) -> None:
        """Frees what the answers needed."""
