"""Answers where results are stored in OpenSearch alone."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from answers_contract import DAY, FIRST, AnswersContract, Ask, Row, frame, row
from sink_contract import rows

from pipeline.errors import AnswerCancelled, BadInput
from pipeline.opensearch import patterns
from pipeline.opensearch.client import opensearch_client
from pipeline.opensearch.documents import indices
from pipeline.opensearch.neighbours import neighbours
from pipeline.opensearch.newest import MAX_RESULTS, newest, with_number, workloads
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.settings import Settings
from pipeline.sinks.answers.indices import IndexAnswers
from pipeline.sinks.opensearch import OpenSearchSink

BEGIN = datetime(2026, 11, 20, 10, tzinfo=UTC)


def test_the_newest_that_were_asked_for_come_oldest_first(search_settings: Settings) -> None:
    client = opensearch_client(search_settings)
    assert newest(client, search_settings, ResultQuery(limit=5)).is_empty(), "nothing is stored yet"
    times = pl.Series("timestamp", [BEGIN + timedelta(minutes=n) for n in range(6)])
    frame = rows(6).with_columns(
        times.cast(pl.Datetime("us", "UTC")),
        pl.Series("anomalous", [True, False, True, None, True, False]),
        pl.Series("workload", ["shop", "shop", "shop", "shop", "bank", "bank"]),
        pl.Series("level", [None, "fatal", "info", "warning", "error", None]),
        pl.Series("template_id", [1, 1, 7, 1, 1, 1], dtype=pl.Int64),
        pl.Series("message", ["a", "the Disk FULL again", "disk", "full disk", "b", "c"]),
    )
    OpenSearchSink(search_settings).write("b", frame)
    client.indices.refresh(index=indices(search_settings))

    def places(**asked: Any) -> list[int]:
        found = newest(client, search_settings, ResultQuery(**({"limit": 10} | asked)))
        return [frame["record_id"].to_list().index(i) for i in found["record_id"]]

    assert places() == [0, 1, 2, 3, 4, 5]
    assert places(limit=2) == [4, 5]
    assert places(anomalous=True) == [0, 2, 4]
    assert places(workloads=("shop",), anomalous=True) == [0, 2]
    assert places(workloads=()) == []
    assert places(since=BEGIN + timedelta(minutes=3)) == [3, 4, 5]
    assert places(until=BEGIN + timedelta(minutes=3), level="error") == [1]
    assert places(template_id=7) == [2]
    assert places(text="disk full") == [1]
    assert workloads(client, search_settings) == ["bank", "shop"]
    assert newest(client, search_settings, ResultQuery(limit=6)).equals(frame)


def test_more_than_a_search_gives_at_once_is_refused(search_settings: Settings) -> None:
    with pytest.raises(BadInput, match="10,001 is more than OpenSearch gives at once"):
        newest(opensearch_client(search_settings), search_settings, ResultQuery(limit=MAX_RESULTS + 1))


def test_how_many_records_have_a_pattern_is_counted_with_the_newest_of_them(
    search_settings: Settings,
) -> None:
    client = opensearch_client(search_settings)
    assert with_number(client, search_settings, "pattern_id", 5) == (0, None), "nothing is stored yet"
    frame = rows(6).with_columns(
        pl.Series("pattern_id", [2**64 - 1, 2**64 - 1, 7, 7, 7, 8], dtype=pl.UInt64),
        pl.Series("template_id", [3, 3, 3, 4, 4, 4], dtype=pl.Int64),
        pl.Series("message", list("abcdef")),
        pl.Series("timestamp", [BEGIN + timedelta(minutes=n) for n in range(6)]).cast(
            pl.Datetime("us", "UTC")
        ),
    )
    OpenSearchSink(search_settings).write("b", frame)
    client.indices.refresh(index=indices(search_settings))
    for column, number, expected in (
        ("pattern_id", 2**64 - 1, (2, "b")),
        ("pattern_id", 7, (3, "e")),
        ("template_id", 3, (3, "c")),
    ):
        count, newest_one = with_number(client, search_settings, column, number)
        assert newest_one is not None and (count, newest_one["message"]) == expected


class TestIndexAnswers(AnswersContract):
    @pytest.fixture
    def ask(self, search_settings: Settings) -> Ask:
        def asked(found: list[Row]) -> IndexAnswers:
            if found:
                OpenSearchSink(search_settings).write("b", frame(found))
                opensearch_client(search_settings).indices.refresh(index=indices(search_settings))
            return IndexAnswers(search_settings)

        return asked


def test_patterns_are_read_in_pages_and_a_question_ends_between_them(
    search_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGE", "SAMPLES"):
        monkeypatch.setattr(patterns, name, 2)
    found = [row(n, template_id=n // 2) for n in range(2, 12)]
    OpenSearchSink(search_settings).write("b", frame(found))
    client = opensearch_client(search_settings)
    client.indices.refresh(index=indices(search_settings))
    query = PatternQuery(since=FIRST, until=FIRST + DAY, buckets=3)
    page = patterns.pattern_counts(client, search_settings, query, stop=threading.Event())
    assert page.select("template_id", "records", "trend").rows() == [(n, 2, [2, 0, 0]) for n in range(1, 6)]
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(AnswerCancelled):
        patterns.pattern_counts(client, search_settings, query, stop=stopped)
    with pytest.raises(AnswerCancelled):
        neighbours(client, search_settings, frame(found), 1, within=DAY, stop=stopped)
