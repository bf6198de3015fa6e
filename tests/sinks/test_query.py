"""Which stored records a question finds, and which stand around them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records.levels import LEVELS
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.query import matching, with_context

FIRST = datetime(2026, 11, 20, 10, tzinfo=UTC)


def stored(rows: list[dict[str, Any]]) -> pl.LazyFrame:
    blank = dict.fromkeys(RESULT_SCHEMA)
    return pl.DataFrame([blank | row for row in rows], schema=RESULT_SCHEMA).lazy()


def row(line: int, key: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "record_id": f"{key}-{line}", "source": f"{key}.log", "line": line, "lines": 1, "workload": "shop/web",
        "timestamp": FIRST + timedelta(seconds=line), "level": "info", "message": f"line {line}",
        "template_id": 1, "anomalous": False,
    } | changes  # fmt: skip


LINES = [
    row(1),
    row(2, level="error", message="Disk FULL on /dev/sda1", template_id=7),
    row(3, workload="shop/db", anomalous=True),
    row(4, level="fatal", template_id=-3),
    row(5, level=None),
]


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"limit": 2}, [4, 5]),
        ({"level": "error"}, [2, 4]),
        ({"level": "fatal"}, [4]),
        ({"text": "disk full"}, [2]),
        ({"text": "d.sk"}, []),
        ({"template_id": 7}, [2]),
        ({"template_id": -3}, [4]),
        ({"anomalous": True}, [3]),
        ({"workloads": ("shop/db",)}, [3]),
        ({"workloads": ()}, []),
        ({"since": FIRST + timedelta(seconds=3)}, [3, 4, 5]),
        ({"until": FIRST + timedelta(seconds=3)}, [1, 2]),
        ({"level": "error", "until": FIRST + timedelta(seconds=3)}, [2]),
    ],
)
def test_a_query_finds_the_newest_records_that_match_all_of_it(
    asked: dict[str, Any], lines: list[int]
) -> None:
    query = ResultQuery(**({"limit": 50} | asked))
    assert matching(stored(LINES), query)["line"].to_list() == lines


def test_a_level_means_itself_and_the_graver_ones() -> None:
    assert ResultQuery(limit=1, level="error").levels == ("error", "critical", "fatal")
    assert ResultQuery(limit=1).levels == LEVELS


def test_context_stays_in_the_source_and_shows_each_record_once() -> None:
    rows = [row(n) for n in range(1, 41)] + [row(n, key="b") for n in range(1, 41)]
    hits = stored([row(10), row(12), row(30, key="b")]).collect()
    shown = with_context(stored(rows), hits, 2)
    assert shown["record_id"].to_list() == [
        *(f"a-{n}" for n in range(8, 15)),
        *(f"b-{n}" for n in range(28, 33)),
    ]
    assert shown.filter("hit")["record_id"].to_list() == ["a-10", "a-12", "b-30"]


def test_context_counts_records_where_a_record_has_many_lines() -> None:
    rows = [row(n) for n in range(1, 400, 60)]  # traces of 60 lines each
    shown = with_context(stored(rows), stored([row(181)]).collect(), 1)
    assert shown["line"].to_list() == [121, 181, 241]


def test_without_hits_there_is_no_context() -> None:
    assert with_context(stored(LINES), stored([]).collect(), 3).is_empty()


@given(
    hits=st.sets(st.integers(0, 60), min_size=1, max_size=6),
    records=st.integers(1, 5),
)
def test_context_is_what_is_near_enough_in_the_order_of_lines(hits: set[int], records: int) -> None:
    rows = [row(n) for n in range(61)]
    shown = with_context(stored(rows), stored([rows[n] for n in sorted(hits)]).collect(), records)
    expected = [n for n in range(61) if any(abs(n - hit) <= records for hit in hits)]
    assert shown["line"].sort().to_list() == expected
    assert set(shown.filter("hit")["line"]) == hits
