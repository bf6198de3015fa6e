"""Counts by the hour are those of the lines, whatever was sealed and wherever a span begins."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import compaction
from pipeline.sinks.compaction import Compactor, Fate
from pipeline.sinks.manifest import ResultTable
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.retention import Retention
from pipeline.sinks.rollups import RATES_SCHEMA, compared, pattern_sums, rates

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


def sums(sink: ParquetSink, since: datetime, until: datetime, **more: Any) -> dict[tuple[str, int], int]:
    found = (
        rates(sink, since=since, until=until, **more)
        .group_by("workload", "template_id")
        .agg(pl.col("records").sum())
    )
    return {(workload, template): records for workload, template, records in found.collect().iter_rows()}


def test_a_rollup_tells_what_the_lines_tell(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines((0.1, "shop", 1), (0.9, "shop", 1), (1.5, "shop", 1), (0.2, "shop", -3)))
    sink.write("b", lines((0.5, "shop", 1), key="b", anomalous=True, level="error", score=0.9))
    sink.write("c", lines((0.5, "bank", 1), key="c"))
    open_ = rates(sink, since=START, until=START + 24 * HOUR).collect()
    seal(sink)
    (part,) = sink.parts()
    assert set(part.tables) == set(ResultTable) - {ResultTable.LINES}
    sealed = rates(sink, since=START, until=START + 24 * HOUR).collect()
    assert dict(sealed.schema) == RATES_SCHEMA
    order = ["workload", "template_id", "bucket"]
    assert sealed.sort(order).equals(open_.sort(order).select(sealed.columns))
    assert sealed.sort(order).select("workload", "records", "anomalous", "severe", "score").rows() == [
        ("bank", 1, 0, 0, 0.1), ("shop", 3, 1, 1, 0.9), ("shop", 1, 0, 0, 0.1),
    ]  # fmt: skip
    assert sealed["sample"].str.len_chars().unique().to_list() == [160]
    sink.files.file(part).unlink()
    assert sums(sink, START, START + 24 * HOUR) == {("shop", 1): 4, ("bank", 1): 1}, "no line was read"


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    found=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(["shop", "bank"]), st.integers(1, 3)),
        min_size=1,
        max_size=30,
    ),
    sealed=st.integers(0, 30),
    span=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    only=st.sampled_from([None, ["shop"]]),
)
def test_a_line_counts_once_in_every_span(
    tmp_path_factory: pytest.TempPathFactory,
    found: list[tuple[int, str, int]],
    sealed: int,
    span: tuple[int, int],
    only: list[str] | None,
) -> None:
    sink = ParquetSink(tmp_path_factory.mktemp("results"))
    quarters = [(at / 4, workload, template) for at, workload, template in found]
    for some, name in ((quarters[:sealed], "a"), (quarters[sealed:], "b")):
        for n, line in enumerate(some):
            sink.write(f"{name}{n}", lines(line, key=f"{name}{n}"))
        if name == "a":
            seal(sink)
    since, until = (START + at / 4 * HOUR for at in sorted(span))
    wanted: dict[tuple[str, int], int] = {}
    for at, workload, template in quarters:
        if since <= START + at * HOUR < until and (only is None or workload in only):
            wanted[workload, template] = wanted.get((workload, template), 0) + 1
    assert sums(sink, since, until, workloads=only) == wanted
    assert sums(sink, since, until, workloads=only, table=ResultTable.RATES_5M) == wanted
    findings = sink.findings(since=since, until=until, workloads=only)
    kept = (pl.col("timestamp") >= since) & (pl.col("timestamp") < until)
    assert findings.filter(kept & pl.col("workload").is_in(only or ["shop", "bank"])).collect().is_empty()


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
    for table in (ResultTable.RATES_1H, ResultTable.RATES_5M):
        assert sums(sink, START, until, table=table) == wanted
    found = pattern_sums(sink, START, until, buckets=5)
    assert dict(zip(found["template_id"].to_list(), found["trend"].to_list(), strict=True))[2] == [
        1, 0, 0, 0, 0,
    ]  # fmt: skip
    assert sink.findings(since=START, until=until).collect()["record_id"].to_list() == ["b-0"]


def test_two_spans_are_compared_with_what_came_and_what_went(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines(*[(at, "shop", 1) for at in (0, 1, 2)], (3, "shop", 2), (1, "bank", 1)))
    seal(sink)
    sink.write("b", lines(*[(at, "shop", 1) for at in (24, 25)], (30, "shop", 3), key="b"))
    day = 24 * HOUR
    found = compared(sink, (START + day, START + 2 * day), (START, START + day), buckets=4)
    assert found.select("workload", "template_id", "records", "before", "trend").rows() == [
        ("shop", 1, 2, 3, [2, 0, 0, 0]),
        ("shop", 3, 1, 0, [0, 1, 0, 0]),
        ("bank", 1, 0, 1, [0, 0, 0, 0]),
        ("shop", 2, 0, 1, [0, 0, 0, 0]),
    ]
    only = compared(sink, (START, START + day), (START - day, START), workloads=["bank"], buckets=4)
    assert only.select("workload", "records", "before").rows() == [("bank", 1, 0)]


def test_patterns_have_their_sums_and_their_trend(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("a", lines(*[(at, "shop", 1) for at in (0, 0.5, 5, 23.9)], (7, "shop", 2)))
    seal(sink)
    sink.write("b", lines((6, "shop", 2), key="b"))
    until = START + 24 * HOUR
    found = pattern_sums(sink, START, until, buckets=4)
    assert found["template_id"].to_list() == [1, 2]
    assert found["records"].to_list() == [4, 2]
    assert found["trend"].to_list() == [[3, 0, 0, 1], [0, 2, 0, 0]]
    assert found["first"].to_list() == [START, START + 6 * HOUR]
    assert found["last"].to_list() == [START + 23.9 * HOUR, START + 7 * HOUR]
    assert pattern_sums(sink, until, until + HOUR, buckets=4).is_empty()
