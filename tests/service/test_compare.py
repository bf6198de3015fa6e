"""Two spans beside each other: a change is told from chance and from one burst."""

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
import redis
from answers_contract import row

from pipeline.errors import BadInput
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.service.stored.compare import compare_stored, compared_sides
from pipeline.service.stored.values import Certainty, ChangeKind, Comparison
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.choose import parquet_of

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEADY, NEW, GONE, MORE, FEWER, BURST, LONE, QUIET = range(1, 9)


@pytest.fixture
def answers(settings: Settings) -> Iterator[Answers]:
    """Patterns over two hours, each by its nature, in two workloads."""
    chance = random.Random(7)

    def spread(count: int, hour: int) -> list[datetime]:
        return [NOW - (2 - hour) * HOUR + chance.random() * HOUR for _ in range(count)]

    times = {
        STEADY: spread(300, 0) + spread(310, 1),
        NEW: spread(60, 1),
        GONE: spread(60, 0),
        MORE: spread(50, 0) + spread(300, 1),
        FEWER: spread(300, 0) + spread(50, 1),
        BURST: [NOW - timedelta(minutes=20) + timedelta(seconds=chance.random()) for _ in range(80)],
        LONE: spread(1, 1),
        QUIET: spread(3, 0) + spread(4, 1),
    }
    rows = [
        row(n, f"k{number}", timestamp=at, template_id=number, workload="shop/web", message=f"p{number}")
        for number, moments in times.items()
        for n, at in enumerate(moments)
    ]
    rows += [
        row(n, "db", timestamp=at, template_id=STEADY, workload="shop/db", message="p1")
        for n, at in enumerate(spread(300, 1))
    ]
    parquet_of(settings).write("all", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    with closing(answers_of(settings)) as found:
        yield found


def compared(
    answers: Answers,
    client: "redis.Redis",
    settings: Settings,
    a: str = "1h",
    b: str | None = None,
    **sides: str,
) -> Comparison:
    only = tuple(filter(None, [sides.pop("only", "")]))
    return compare_stored(answers, client, settings, compared_sides(a, b, NOW, **sides), only=only)


def test_kinds_and_certainties_are_told_apart(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    found = compared(answers, client, settings, workload="shop/web")
    by_template = {one.template_id: (one.kind, one.certainty) for one in found.differences}
    assert by_template == {
        NEW: (ChangeKind.NEW, Certainty.CLEAR),
        GONE: (ChangeKind.GONE, Certainty.CLEAR),
        MORE: (ChangeKind.MORE, Certainty.CLEAR),
        FEWER: (ChangeKind.FEWER, Certainty.CLEAR),
        BURST: (ChangeKind.NEW, Certainty.BURST),
        LONE: (ChangeKind.NEW, Certainty.FEW),
    }
    assert (found.compared, found.alike, found.lines) == (8, 2, (805, 713))
    kinds = [one.kind for one in found.differences]
    assert kinds == sorted(kinds, key=list(ChangeKind).index)


def test_equal_halves_of_a_steady_stream_show_no_sure_difference(
    client: "redis.Redis", settings: Settings
) -> None:
    chance = random.Random(11)
    rows = [
        row(n, timestamp=NOW - 2 * HOUR * chance.random(), template_id=chance.randint(1, 200))
        for n in range(8_000)
    ]
    parquet_of(settings).write("all", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    with closing(answers_of(settings)) as answers:
        found = compared(answers, client, settings)
    assert found.compared == 200
    assert [one for one in found.differences if one.certainty in (Certainty.CLEAR, Certainty.LIKELY)] == []


def test_spans_of_different_lengths_are_compared_by_their_rates(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    found = compared(answers, client, settings, "30m", "1h..30m", workload="shop/db")
    assert found.differences == [] and found.alike == 1
    found = compared(answers, client, settings, "15m", "1h..15m", workload="shop/db")
    assert found.differences == [] and found.alike == 1


def test_two_workloads_are_compared_by_template(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    found = compared(answers, client, settings, workload="shop/db", other="shop/web")
    assert (found.a.since, found.a.until) == (found.b.since, found.b.until)
    assert {one.workload for one in found.differences} == {""}
    gone = {one.template_id for one in found.differences if one.kind is ChangeKind.GONE}
    assert {NEW, MORE, BURST} <= gone and STEADY not in gone


def test_a_key_compares_only_its_workloads(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    found = compared(answers, client, settings, only="shop/db")
    assert found.lines == (300, 0) and {one.workload for one in found.differences} == {"shop/db"}


@pytest.mark.parametrize("text", ["", "1h..", "..1h", "yesterday", "1h..2h", "0001-01-01..0001-01-02"])
def test_a_text_that_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        compared_sides(text, None, NOW)
