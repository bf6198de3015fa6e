"""Answers from the indices of OpenSearch."""

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime

import polars as pl

from pipeline.opensearch import newest
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.neighbours import neighbours
from pipeline.opensearch.news import news_documents
from pipeline.opensearch.patterns import pattern_counts, rate_counts
from pipeline.records.news import NewsQuery
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.settings import Settings
from pipeline.sinks.answers.around import NEIGHBOURHOOD, with_context


class IndexAnswers:
    """`Answers` from OpenSearch. Text is looked for as a phrase of whole words, and times of patterns are in
    milliseconds. Lines of the last seconds may be missing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = opensearch_client(settings)
        self._stop = threading.Event()

    def workloads(self) -> list[str]:
        """As the protocol says."""
        return newest.workloads(self._client, self._settings)

    def last_time(self, workloads: tuple[str, ...] | None) -> datetime | None:
        """As the protocol says."""
        found = self.lines(ResultQuery(limit=1, workloads=workloads))
        return None if found.is_empty() else found["timestamp"][0]

    def lines(self, query: ResultQuery) -> pl.DataFrame:
        """As the protocol says."""
        return newest.newest(self._client, self._settings, query)

    def pages(self, query: ResultQuery, names: Sequence[str]) -> Iterator[pl.DataFrame]:
        """As the protocol says."""
        return newest.matching_pages(self._client, self._settings, query, names)

    def context(self, hits: pl.DataFrame, records: int) -> pl.DataFrame:
        """As the protocol says."""
        self._stop.clear()
        found = neighbours(self._client, self._settings, hits, records, within=NEIGHBOURHOOD, stop=self._stop)
        return with_context(found, hits, records)

    def patterns(self, query: PatternQuery) -> pl.DataFrame:
        """As the protocol says."""
        self._stop.clear()
        return pattern_counts(self._client, self._settings, query, stop=self._stop)

    def rates(self, query: PatternQuery) -> pl.DataFrame:
        """As the protocol says."""
        self._stop.clear()
        return rate_counts(self._client, self._settings, query, stop=self._stop)

    def news(self, query: NewsQuery) -> pl.DataFrame:
        """As the protocol says."""
        self._stop.clear()
        return news_documents(self._client, self._settings, query, stop=self._stop)

    def not_read(self) -> int:
        """None: a document is there or it is not."""
        return 0

    def missing_rows(self, query: ResultQuery) -> int:  # noqa: ARG002
        """As `not_read`."""
        return 0

    def cancel(self) -> None:
        """As the protocol says; a request that the server has is waited for."""
        self._stop.set()

    def close(self) -> None:
        """As the protocol says."""
        self._client.close()
