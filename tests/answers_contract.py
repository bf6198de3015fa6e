"""The contract of answers about stored results. Each kind is held to it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from pipeline.records.news import NEWS_SCHEMA, NewsQuery
from pipeline.records.pattern_query import PATTERN_SCHEMA, RATE_SCHEMA, PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.answers import Answers

FIRST = datetime(2026, 11, 20, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

Row = dict[str, Any]
# Stores rows, and gives what answers questions about them.
Ask = Callable[[list[Row]], Answers]


def row(line: int, key: str = "a", **changes: Any) -> Row:
    """A record of RESULT_SCHEMA, a second behind the one of the line before."""
    return dict.fromkeys(RESULT_SCHEMA) | {
        "record_id": f"{key}-{line}", "source": f"{key}.log", "line": line, "lines": 1, "workload": "shop/web",
        "timestamp": FIRST + timedelta(seconds=line), "timed": True, "level": "info",
        "message": f"line {line}", "raw": f"raw {line}", "template_id": 1, "pattern_id": 2**64 - 1 - line,
        "anomalous": False, "score": 0.5, "reasons": ["rare:1/9"],
    } | changes  # fmt: skip


def frame(rows: list[Row]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=RESULT_SCHEMA)


LINES = [
    row(1),
    row(2, level="error", message="Disk FULL on sda1", template_id=7),
    row(3, workload="shop/db", anomalous=True),
    row(4, level="fatal", template_id=-3),
    row(5, level=None, template_id=None),
]
# Of one day, a day before and two before.
PATTERNS = [
    row(1, timestamp=FIRST, level="error", score=0.9, anomalous=True),
    row(2, timestamp=FIRST + 1.5 * HOUR),
    row(3, timestamp=FIRST + 23 * HOUR, score=None, anomalous=None),
    row(4, timestamp=FIRST + 7 * HOUR, template_id=2, message="x" * 500),
    row(5, timestamp=FIRST + 8 * HOUR, template_id=None),
    row(6, timestamp=FIRST + 9 * HOUR, template_id=-3),
    row(7, timestamp=FIRST - 1 * HOUR, template_id=2),
    row(8, timestamp=FIRST - 2 * HOUR, template_id=2),
    row(9, timestamp=FIRST - 2 * HOUR, workload="shop/db", level="fatal", message="gone", score=0.1),
    row(10, timestamp=FIRST - 25 * HOUR, workload="shop/db"),
]
# Beside PATTERNS, which hold no news.
SAID = ["never-said:900 saved"]
NEWS = [
    row(1, "n", template_id=5, pattern_id=5, score=0.2, anomalous=True, reasons=SAID, message="saved twice"),
    row(
        2,
        "n",
        template_id=5,
        pattern_id=6,
        score=0.4,
        anomalous=True,
        reasons=["never-said:900 clean", "x"],
        message="lost",
    ),
    row(3, "n", template_id=5, pattern_id=6, score=0.4, anomalous=True, reasons=SAID, message="lost again"),
    row(4, "n", template_id=6, score=0.6, anomalous=True, reasons=["new-template", "rare:0/9"], level=None),
    row(5, "n", template_id=7, score=0.9, anomalous=True, reasons=["new-template", "error-severity:failed"]),
    row(6, "n", template_id=8, score=0.9, anomalous=True, reasons=["new-template"], level="warning"),
    row(7, "n", template_id=9, score=0.9, anomalous=True, reasons=[]),
    row(8, "n", template_id=-3, score=0.9, anomalous=True, reasons=["rare:0/9"]),
    row(9, "n", template_id=10, score=0.9, reasons=["new-template"]),
    row(
        10, "n", template_id=None, workload="shop/db", score=0.3, anomalous=True, reasons=SAID, pattern_id=20
    ),
    row(
        11,
        "n",
        template_id=11,
        workload="shop/db",
        score=0.1,
        timestamp=FIRST - HOUR,
        anomalous=True,
        reasons=SAID,
        pattern_id=21,
    ),
    # Marked by a person.
    row(14, "n", template_id=13, score=1.0, anomalous=True, reasons=["marked:anomalous by ann", *SAID]),
    row(15, "n", template_id=14, score=0.0, reasons=["marked:normal by ann", *SAID]),
    # Said two days ago, and again.
    row(
        12,
        "n",
        template_id=12,
        score=0.9,
        timestamp=FIRST - 2 * DAY,
        anomalous=True,
        reasons=SAID,
        pattern_id=22,
    ),
    row(13, "n", template_id=12, score=0.9, anomalous=True, reasons=SAID, pattern_id=22),
]
SPAN = {"since": FIRST, "until": FIRST + DAY, "against": (FIRST - DAY, FIRST), "buckets": 4}


class AnswersContract:
    """Tests over a fixture named `ask`."""

    def test_the_newest_lines_that_match_all_of_a_question_are_found(self, ask: Ask) -> None:
        answers = ask(LINES)
        for asked, lines in (
            ({}, [1, 2, 3, 4, 5]),
            ({"limit": 2}, [4, 5]),
            ({"level": "error"}, [2, 4]),
            ({"level": "fatal"}, [4]),
            ({"text": "disk full"}, [2]),
            ({"text": "full disk"}, []),
            ({"key": "FULL"}, [2]),
            ({"template_id": 7}, [2]),
            ({"template_id": -3}, [4]),
            ({"template_id": 0}, [5]),
            ({"anomalous": True}, [3]),
            ({"workloads": ("shop/db",)}, [3]),
            ({"workloads": ("shop/db", "shop/web"), "limit": 3}, [3, 4, 5]),
            ({"workloads": ()}, []),
            ({"since": FIRST + timedelta(seconds=3)}, [3, 4, 5]),
            ({"until": FIRST + timedelta(seconds=3)}, [1, 2]),
            ({"level": "error", "until": FIRST + timedelta(seconds=3)}, [2]),
        ):
            found = answers.lines(ResultQuery(**({"limit": 50} | asked)))
            assert found["line"].to_list() == lines, asked
            assert found.equals(frame([row for row in LINES if row["line"] in lines])), asked

    def test_lines_before_a_record_are_found_by_time_and_then_by_id(self, ask: Ask) -> None:
        at = [FIRST, FIRST, FIRST + HOUR, FIRST + HOUR, FIRST + 2 * HOUR]
        answers = ask([row(n, timestamp=moment) for n, moment in enumerate(at)])
        found: list[str] = []
        before = None
        while page := answers.lines(ResultQuery(limit=2, before=before, until=FIRST + 2 * HOUR)).to_dicts():
            found += [one["record_id"] for one in reversed(page)]
            before = (page[0]["timestamp"], page[0]["record_id"])
        assert found == ["a-3", "a-2", "a-1", "a-0"]
        (one,) = answers.lines(ResultQuery(limit=5, record_id="a-2")).to_dicts()
        assert one["timestamp"] == FIRST + HOUR

    def test_pages_hold_every_line_that_matches_whatever_the_limit(self, ask: Ask) -> None:
        answers = ask(LINES)
        for asked, lines in (
            ({}, [1, 2, 3, 4, 5]),
            ({"workloads": ("shop/db",)}, [3]),
            ({"until": FIRST}, []),
        ):
            found = list(
                answers.pages(ResultQuery(**({"limit": 1} | asked)), ["line", "template_id", "host"])
            )
            assert all(page.columns == ["line", "template_id", "host"] for page in found)
            assert sorted(line for page in found for line in page["line"]) == lines, asked

    def test_nothing_is_stored_at_first(self, ask: Ask) -> None:
        answers = ask([])
        assert answers.workloads() == []
        assert dict(answers.lines(ResultQuery(limit=5)).schema) == RESULT_SCHEMA
        found = answers.patterns(PatternQuery(**SPAN))
        assert (found.height, dict(found.schema)) == (0, PATTERN_SCHEMA)

    def test_workloads_are_named_in_order(self, ask: Ask) -> None:
        assert ask(LINES).workloads() == ["shop/db", "shop/web"]

    def test_context_stays_in_the_source_and_shows_each_record_once(self, ask: Ask) -> None:
        rows = [row(n) for n in range(1, 41)] + [row(n, key="b") for n in range(1, 41)]
        shown = ask(rows).context(frame([row(10), row(12), row(30, key="b")]), 2)
        assert shown["record_id"].to_list() == [
            *(f"a-{n}" for n in range(8, 15)),
            *(f"b-{n}" for n in range(28, 33)),
        ]
        assert shown.filter("hit")["record_id"].to_list() == ["a-10", "a-12", "b-30"]
        assert shown.drop("hit", "place").rows()[0] == frame([row(8)]).rows()[0]

    def test_context_counts_records_where_a_record_has_many_lines(self, ask: Ask) -> None:
        rows = [row(n) for n in range(1, 400, 60)]  # traces of 60 lines each
        assert ask(rows).context(frame([row(181)]), 1)["line"].to_list() == [121, 181, 241]

    def test_another_reading_of_a_source_is_no_context(self, ask: Ask) -> None:
        rows = [row(1), row(2), row(2, key="b", source="a.log"), row(3)]
        assert ask(rows).context(frame([row(2)]), 1)["record_id"].to_list() == ["a-1", "a-2", "a-3"]

    def test_a_hit_whose_neighbours_have_gone_stands_alone(self, ask: Ask) -> None:
        shown = ask([row(1), row(2)]).context(frame([row(5, key="z")]), 3)
        assert (shown["record_id"].to_list(), shown["hit"].to_list()) == (["z-5"], [True])

    def test_patterns_have_sums_trend_and_the_counts_of_another_span(self, ask: Ask) -> None:
        found = ask(PATTERNS).patterns(PatternQuery(**SPAN))
        assert dict(found.schema) == PATTERN_SCHEMA
        shown = found.select("workload", "template_id", "records", "before", "anomalous", "severe", "trend")
        assert shown.rows() == [
            ("shop/web", 1, 3, 0, 1, 1, [2, 0, 0, 1]),
            ("shop/web", 0, 1, 0, 0, 0, [0, 1, 0, 0]),
            ("shop/web", 2, 1, 2, 0, 0, [0, 1, 0, 0]),
            ("shop/db", 1, 0, 1, 0, 0, [0, 0, 0, 0]),
        ]
        assert found["change"].to_list() == [4.0, 2.0, pytest.approx(2 / 3), 0.5]
        assert found["score"].to_list() == [0.9, 0.5, 0.5, 0.1]
        assert found.select("first", "last").rows() == [
            (FIRST, FIRST + 23 * HOUR),
            (FIRST + 8 * HOUR, FIRST + 8 * HOUR),
            (FIRST + 7 * HOUR, FIRST + 7 * HOUR),
            (FIRST - 2 * HOUR, FIRST - 2 * HOUR),
        ]
        samples = found["sample"].to_list()
        assert samples[0] in ("line 1", "line 2", "line 3")
        assert samples[1:] == ["line 5", "x" * 160, "gone"]

    def test_patterns_are_chosen_and_ordered_as_was_asked(self, ask: Ask) -> None:
        answers = ask(PATTERNS)
        for asked, templates in (
            ({"order": "change"}, [1, 0, 2, 1]),
            ({"order": "new"}, [0, 2, 1, 1]),
            ({"order": "less"}, [1, 2, 0, 1]),
            ({"limit": 2}, [1, 0]),
            ({"limit": 1, "order": "less"}, [1]),
            ({"anomalous": True}, [1]),
            ({"workloads": ("shop/db",)}, [1]),
            ({"workloads": ()}, []),
            ({"template_ids": (2, 0)}, [0, 2]),
            ({"against": None}, [1, 0, 2]),
        ):
            found = answers.patterns(PatternQuery(**(SPAN | asked)))
            assert found["template_id"].to_list() == templates, asked

    def test_a_line_at_the_end_of_a_span_is_not_in_it(self, ask: Ask) -> None:
        answers = ask([row(1, timestamp=FIRST), row(2, timestamp=FIRST + HOUR)])
        found = answers.patterns(PatternQuery(since=FIRST, until=FIRST + HOUR, buckets=1))
        assert (found["records"].to_list(), found["trend"].to_list()) == ([1], [[1]])

    def test_rates_are_the_lines_of_each_workload_in_the_parts_of_a_span(self, ask: Ask) -> None:
        answers = ask(PATTERNS)
        found = answers.rates(PatternQuery(**SPAN))
        assert dict(found.schema) == RATE_SCHEMA
        assert found.rows() == [("shop/web", 5, 1, 1, [2, 2, 0, 1])]
        before = PatternQuery(since=FIRST - 2 * DAY, until=FIRST, buckets=2)
        assert answers.rates(before).rows() == [
            ("shop/db", 2, 0, 1, [1, 1]),
            ("shop/web", 2, 0, 0, [0, 2]),
        ]
        for asked in ({"workloads": ()}, {"until": FIRST + timedelta(seconds=1), "workloads": ("shop/db",)}):
            assert answers.rates(PatternQuery(**(SPAN | asked))).rows() == []

    def test_the_time_of_the_newest_result_is_told_for_chosen_workloads(self, ask: Ask) -> None:
        answers = ask(LINES)
        assert answers.last_time(None) == answers.last_time(("shop/web",)) == FIRST + timedelta(seconds=5)
        assert answers.last_time(("shop/db", "other")) == FIRST + timedelta(seconds=3)
        assert answers.last_time(("other",)) is answers.last_time(()) is None

    def test_calm_new_lines_are_found_by_template_each_day_the_strangest_of_each_workload_first(
        self, ask: Ask
    ) -> None:
        answers = ask([*PATTERNS, *NEWS])
        asked = {"past": FIRST - 7 * DAY, "since": FIRST, "until": FIRST + DAY, "limit": 9}
        found = answers.news(NewsQuery(**asked))
        assert dict(found.schema) == NEWS_SCHEMA
        counted = found.select("workload", "template_id", "records", "score", "record_id")
        assert counted.rows() == [
            ("shop/web", 6, 1, 0.6, "n-4"),
            ("shop/db", 0, 1, 0.3, "n-10"),
            ("shop/web", 5, 3, 0.4, "n-2"),
        ]
        said = found.select("message", "level", "at", "reasons").row(2)
        assert said == ("lost", "info", FIRST + timedelta(seconds=2), ["never-said:900 clean", "x"])
        assert found.select("first", "last").row(2) == tuple(FIRST + timedelta(seconds=n) for n in (1, 3))
        for changes, templates in (
            ({"limit": 1}, [6]),
            ({"since": FIRST - DAY, "limit": 1}, [6, 11]),
            ({"since": FIRST - DAY, "until": FIRST - HOUR}, []),
            ({"past": FIRST}, [12, 0, 6, 5]),
            ({"workloads": ("shop/db",)}, [0]),
            ({"workloads": ()}, []),
        ):
            found = answers.news(NewsQuery(**(asked | changes)))
            assert found["template_id"].to_list() == templates, changes

    def test_cancelling_without_a_question_changes_nothing(self, ask: Ask) -> None:
        answers = ask(LINES)
        answers.cancel()
        assert answers.lines(ResultQuery(limit=9)).height == 5
