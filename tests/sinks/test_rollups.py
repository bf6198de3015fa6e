"""Counts beside sealed lines are those of the lines, and outlive them. tests/sinks/test_answers.py compares
them with a plain model."""

import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import compaction
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.manifest import ResultTable
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import Retention
from pipeline.sinks.rollups import FINE_SCHEMA, RATES_SCHEMA

START = datetime(2026, 11, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)


def lines(*found: tuple[float, str, int], key: str = "k", **more: Any) -> pl.DataFrame:
    """Records of (hours after START, workload, template)."""
    blank = dict.fromkeys(RESULT_SCHEMA) | {
        "anomalous": False,
        "level": "info",
        "message": "x" * 500,
        "score": 0.1,
    }
    rows = [
        blank
        | {
            "record_id": f"{key}-{n}",
            "timestamp": START + at * HOUR,
            "workload": workload,
            "template_id": template,
        }
        | more
        for n, (at, workload, template) in enumerate(found)
    ]
    return pl.DataFrame(rows, schema=RESULT_SCHEMA)


def seal(sink: ParquetSink) -> None:
    late = compaction.SEAL_AFTER_S + 5
    Compactor(sink, lambda ids: [Fate.FINAL] * len(ids), now=lambda: time.time() + late).round()


def page(sink: ParquetSink, since: datetime, until: datetime, **more: Any) -> pl.DataFrame:
    with closing(FileAnswers(sink)) as answers:
        return answers.patterns(PatternQuery(since=since, until=until, **more))


def sums(sink: ParquetSink, since: datetime, until: datetime) -> dict[tuple[str, int], int]:
    found = page(sink, since, until).select("workload", "template_id", "records")
    return {(workload, template): records for workload, template, records in found.iter_rows()}


def test_a_rollup_tells_what_the_lines_tell(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines((0.1, "shop", 1), (0.9, "shop", 1), (1.5, "shop", 1), (0.2, "shop", -3)))
    sink.write("b", lines((0.5, "shop", 1), key="b", anomalous=True, level="error", score=0.9))
    sink.write("c", lines((0.5, "bank", 1), key="c"))
    until = START + 24 * HOUR
    before = page(sink, START, until, buckets=24)
    seal(sink)
    (part,) = sink.parts()
    assert set(part.tables) == set(ResultTable) - {ResultTable.LINES}
    for table, schema in ((ResultTable.RATES_1H, RATES_SCHEMA), (ResultTable.RATES_5M, FINE_SCHEMA)):
        assert dict(pl.read_parquet_schema(sink.table_file(part.tables[table]))) == schema
    sealed = page(sink, START, until, buckets=24)
    assert sealed.equals(before)
    assert sealed.select("workload", "records", "anomalous", "severe", "score").rows() == [
        ("shop", 4, 1, 1, 0.9), ("bank", 1, 0, 0, 0.1),
    ]  # fmt: skip
    assert sealed["sample"].str.len_chars().unique().to_list() == [160]
    sink.files.file(part).unlink()
    assert sums(sink, START, START + 24 * HOUR) == {("shop", 1): 4, ("bank", 1): 1}, "no line was read"


@pytest.mark.parametrize("spread", [0.0, 10.0], ids=["all in the span", "partly in the span"])
def test_counts_and_findings_stay_when_their_lines_have_expired(tmp_path: Path, spread: float) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines((0.1, "shop", 1), (1.5, "shop", 1), (1.6, "shop", 2), (9 + spread, "bank", 1)))
    sink.write("b", lines((1.2, "shop", 1), key="b", anomalous=True))
    seal(sink)
    kept = {ResultTable.LINES: 60.0}
    month = 30 * 86_400
    Compactor(
        sink, lambda ids: [Fate.FINAL] * len(ids), Retention(keep_s=kept), now=lambda: time.time() + month
    ).round()
    assert sink.parts() == []
    until = START + 10 * HOUR
    wanted = {("shop", 1): 3, ("shop", 2): 1} | ({} if spread else {("bank", 1): 1})
    assert sums(sink, START, until) == wanted
    found = page(sink, START, until, buckets=5)
    assert dict(zip(found["template_id"].to_list(), found["trend"].to_list(), strict=True))[2] == [
        1, 0, 0, 0, 0,
    ]  # fmt: skip
    with closing(FileAnswers(sink)) as answers:
        query = ResultQuery(limit=5, since=START, until=until, anomalous=True)
        assert answers.lines(query)["record_id"].to_list() == ["b-0"]


def test_trends_of_long_spans_come_from_counts_by_the_hour(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines(*[(at, "shop", 1) for at in (0, 0.5, 30, 71.9)], (50, "shop", 2)))
    seal(sink)
    sink.write("b", lines((49, "shop", 2), key="b"))
    (part, _) = sink.parts()
    sink.table_file(part.tables[ResultTable.RATES_5M]).unlink()
    sink.files.file(part).unlink()
    found = page(sink, START, START + 72 * HOUR, buckets=3)
    assert found["trend"].to_list() == [[2, 1, 1], [0, 0, 2]]
    assert found["first"].to_list() == [START, START + 49 * HOUR]


def test_a_short_trend_goes_by_the_hour_where_finer_counts_have_expired(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines((0.5, "shop", 1), (1.5, "shop", 1), (3.5, "shop", 1)))
    seal(sink)
    kept = {ResultTable.LINES: 60.0, ResultTable.RATES_5M: 60.0}
    month = 30 * 86_400
    Compactor(
        sink, lambda ids: [Fate.FINAL] * len(ids), Retention(keep_s=kept), now=lambda: time.time() + month
    ).round()
    assert page(sink, START, START + 4 * HOUR, buckets=4)["trend"].to_list() == [[1, 1, 0, 1]]
