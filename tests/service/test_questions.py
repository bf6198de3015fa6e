"""Questions as people write them."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.errors import BadInput
from pipeline.service.questions import (
    LinesAsked,
    PatternsAsked,
    asked_moment,
    pattern_span,
    template_number,
)
from pipeline.service.stored.asked_units import units_asked
from pipeline.watching.rows import RATES, template_of

NOW = datetime(2026, 11, 25, 12, 3, 7, 250, tzinfo=UTC)
FIVE = timedelta(minutes=5)


def test_a_long_span_up_to_now_is_whole_five_minutes_and_so_is_the_one_before() -> None:
    since, until = pattern_span("24h", None, NOW)
    assert (since, until) == (
        datetime(2026, 11, 24, 12, tzinfo=UTC),
        datetime(2026, 11, 25, 12, 5, tzinfo=UTC),
    )
    begin, end = PatternsAsked(since=since, until=until).other
    assert end == since
    assert all((at - since) % FIVE == timedelta(0) for at in (begin, end, until))


def test_other_spans_are_as_they_are_written() -> None:
    assert pattern_span("1h", None, NOW) == (NOW - timedelta(hours=1), NOW)
    assert pattern_span("24h", "1h", NOW) == (NOW - timedelta(hours=24), NOW - timedelta(hours=1))
    assert pattern_span("2026-11-24T10:00:01", None, NOW) == (
        datetime(2026, 11, 24, 10, 0, 1, tzinfo=UTC),
        NOW,
    )
    even = datetime(2026, 11, 25, 12, 5, tzinfo=UTC)
    assert pattern_span("24h", None, even) == (even - timedelta(hours=24), even)


@pytest.mark.parametrize("flag", ["since", "until", "normal", "at"])
@pytest.mark.parametrize(
    "text", ["0001-01-01T00:00:00+14:00", "0001-01-01", "1677-12-31", "9999-12-31T23:59:59-14:00", "200000d"]
)
def test_a_time_of_another_age_is_refused_before_anything_reckons_with_it(text: str, flag: str) -> None:
    with pytest.raises(BadInput, match="give a time from 1678 to 2261"):
        match flag:
            case "normal":
                units_asked("host", "1h", None, text, NOW)
            case "at":
                asked_moment(text, NOW, flag=flag)
            case "until":
                units_asked("host", "1h", text, None, NOW)
            case _:
                pattern_span(text, None, NOW)


def test_units_of_all_ages_are_refused() -> None:
    with pytest.raises(BadInput, match="the span is longer than"):
        units_asked("host", "1678-01-01", "2261-01-01", None, NOW)


def test_templates_of_findings_are_numbers_too() -> None:
    found = template_of("shop/web", RATES, "rate-silence:1")
    assert template_number(f"T{found}") == found < -(1 << 50)
    assert template_number("T17") == template_number("17") == 17
    for text in ("", "T", "T-", "T1x", "T9223372036854775808", "T" + "1" * 30):
        with pytest.raises(BadInput):
            template_number(text)


def test_lines_of_a_span_that_ends_before_it_begins_are_refused() -> None:
    assert LinesAsked(since=NOW, until=NOW).limit == 50
    with pytest.raises(BadInput, match="is before since"):
        LinesAsked(since=NOW, until=NOW - FIVE)
