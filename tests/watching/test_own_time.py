"""Durations in lines, and the time that a service needed itself."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from pipeline.watching.alarm_budget import GRAVE
from pipeline.watching.rows import NUMBERS, SESSIONS, WatcherFinding, finding_rows
from pipeline.watching.units.evidence import surprises
from pipeline.watching.units.own_time import BASE, own_times, spans_of
from pipeline.watching.units.ranking import rank_units
from pipeline.watching.units.unit_lines import UNIT_LINES, UnitFold, UnitTable, unit_lines
from pipeline.watching.units.values import UnitEvidence

BEGIN = datetime(2026, 11, 26, tzinfo=UTC)
TRACE = "trace_id=4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("request completed duration_ms=11.7 status=200", 11.7),
        ("GET /products/7 -> 200 in 3.2 ms", 3.2),
        ("bytes=3 request_time=0.023 upstream_time=0.022", 23.0),  # nginx writes seconds
        ("responseTime=0.4 statusCode=200", 0.4),
        ('{"duration": "1.5s"}', 1500.0),
        ("elapsed: 250us", 0.25),
        ("job took 2 s", 2000.0),
        ("uptime=3 timeout=30 timestamp=1764130000", None),
        ("started in 2026", None),
        ("duration=99999999999", None),  # a counter
    ],
)
def test_a_duration_is_read_with_its_unit(text: str, ms: float | None) -> None:
    found = spans_of(pl.DataFrame({"message": [f"{text} {TRACE}", text], "timestamp": [BEGIN, BEGIN]}))
    assert found["ms"].to_list() == [pytest.approx(ms), None]  # without a trace no time is compared
    assert found["request"].is_null().to_list() == [ms is None, True]


def spans(*rows: tuple[Any, ...]) -> pl.DataFrame:
    """Of one trace: unit, end in milliseconds, length, and what an upstream took; the template is 1."""
    return pl.DataFrame(
        [
            (unit, 0, 1, 7, end, ms, *upstream, *[None] * (1 - len(upstream)))
            for unit, end, ms, *upstream in rows
        ],
        schema={
            name: UNIT_LINES[name]
            for name in ("unit", "window", "template_id", "request", "end_ms", "ms", "upstream_ms")
        },
        orient="row",
    )


def own(*rows: tuple[Any, ...]) -> dict[str, float]:
    found = own_times(spans(*rows))
    return {unit: BASE**level - 1 for unit, level in found.select("unit", "level").iter_rows()}


def test_time_that_was_waited_for_others_is_not_of_the_caller() -> None:
    found = own(
        ("gateway", 1_020, 1_020), ("web", 1_015, 1_010), ("orders", 1_010, 1_000), ("payments", 1_005, 950)
    )
    assert found["payments"] == pytest.approx(950, rel=0.15)
    assert found["orders"] == pytest.approx(50, rel=0.15)
    assert found["web"] < 12 and found["gateway"] < 12


def test_a_call_that_outlives_its_caller_counts_as_far_as_it_reaches() -> None:
    # The caller gave up after 2 s; the other one went on for three more.
    found = own(("web", 2_000, 2_000), ("search", 4_900, 4_890))
    assert found["search"] > 4_000
    assert found["web"] < 15


def answered(unit: str, took: Mapping[int, float], *, window: int) -> pl.DataFrame:
    """UNIT_LINES of a unit that answers request n of the window after `took[n]` milliseconds."""
    texts = [f"answered duration_ms={ms} trace_id={n + 1000 * window + 10**6:032x}" for n, ms in took.items()]
    at = [BEGIN + timedelta(minutes=window, seconds=n, milliseconds=ms) for n, ms in took.items()]
    page = pl.DataFrame({"message": texts, "timestamp": at}).with_columns(
        unit=pl.lit(unit), window=pl.lit(window), pattern_id=pl.lit(1), template_id=pl.lit(1),
        second=pl.col("timestamp").dt.epoch("s"), flagged=pl.lit(value=False), found=pl.lit(value=False),
    )  # fmt: skip
    page = page.with_columns(spans_of(page))
    blank = {name: pl.lit(None) for name in UNIT_LINES if name not in page.columns}
    return page.with_columns(**blank).select(list(UNIT_LINES)).cast(UNIT_LINES)


def requests(slow_ms: float, *, window: int, count: int = 20) -> list[pl.DataFrame]:
    """Pages of two services: `web` asks `orders`, which needs 10 ms and `slow_ms` more."""
    return [
        answered(unit, {n: slow_ms + more + n % 3 for n in range(count)}, window=window)
        for unit, more in (("web", 15.0), ("orders", 10.0))
    ]


def folded(pages: list[pl.DataFrame]) -> UnitTable:
    fold = UnitFold()
    for page in pages:
        fold.add(page)
    return fold.table()


def test_the_time_of_an_upstream_is_not_of_the_proxy() -> None:
    assert own(("proxy", 1_020, 1_020, 1_000.0))["proxy"] == pytest.approx(20, rel=0.15)
    line = f"GET / 200 request_time=0.512 upstream_response_time=0.480 {TRACE}"
    found = spans_of(
        pl.DataFrame(
            {"message": [line, line.replace("request_time=0.512 ", "")], "timestamp": [BEGIN, BEGIN]}
        )
    )
    assert found["ms"].to_list() == [pytest.approx(512), None]  # the proxy's own time is not known without
    assert found["upstream_ms"].to_list() == [pytest.approx(480), None]


def test_the_service_that_became_slow_comes_before_its_caller() -> None:
    normal = folded([page for window in range(-6, 0) for page in requests(0, window=window)])
    slow = folded(requests(800, window=0))
    ranking = rank_units(slow, normal, {})
    assert ranking.units[0].unit == "orders"
    assert ranking.units[0].reasons[0].evidence is UnitEvidence.TIME
    times = slow.times.join(
        slow.units.with_row_index("at").select(pl.col("at").cast(pl.Int64), "unit"), on="at"
    )
    assert dict(times.group_by("unit").agg(pl.col("n").sum()).iter_rows()) == {"orders": 20, "web": 20}


def test_slowness_is_measured_by_the_time_that_a_service_usually_needs() -> None:
    # Of 20 requests of 10 ms one took 60 ms longer. Where each needs 400 ms that is little.
    def nats(ms: float) -> float:
        took = {n: ms + n % 3 for n in range(20)}
        normal = folded([answered("orders", took, window=window) for window in range(-6, 0)])
        slow = folded([answered("orders", took | {0: ms + 60}, window=0)])
        return float(surprises(slow, normal)[0][UnitEvidence.TIME][0])

    quick, busy = nats(10), nats(400)
    assert quick > busy > 0


def test_whole_traces_are_drawn_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.watching.units.unit_lines.MAX_SPANS", 10)
    table = folded(requests(0, window=0))
    assert table.times["n"].sum() == 10
    assert set(table.times.group_by("at").agg(pl.col("n").sum())["n"]) == {5}


@pytest.mark.parametrize(("source", "spans", "kept"), [(NUMBERS, 0, 1), (NUMBERS, 9, 0), (SESSIONS, 9, 1)])
def test_findings_about_numbers_count_where_the_own_time_is_not_known(
    source: str, spans: int, kept: int
) -> None:
    finding = WatcherFinding(
        source=source, workload="web", cause="number-shift:7:ms", subject="", at=BEGIN, message="slower",
        detail="", reasons=("number-shift:7",), score=0.9, p_value=1e-9, chance=GRAVE, version="",
    )  # fmt: skip
    ((_, _, rows),) = finding_rows([finding])
    fold = UnitFold()
    fold.add(unit_lines(rows, rows["workload"], pl.Series([0]), pl.Series([True])))
    for page in requests(0, window=0, count=spans) if spans else []:
        fold.add(page)
    table = fold.table()
    assert table.units.filter(unit="web")["findings"].to_list() == [1]
    assert table.findings.height == kept
