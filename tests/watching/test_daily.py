"""Errors that come at a known rate, and starts of a program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.watching.incidents.daily import LOOKED_BACK, MOST_TEMPLATES, USUAL, DailyTemplates
from pipeline.watching.incidents.starts import MOST, Starts, says_start

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
TODAY = 20_600


def came(state: DailyTemplates, day: int, n: int = 1, *, hour: float = 12, template: int = 7) -> int:
    """The template came n times then; the time in milliseconds."""
    at = day * DAY_MS + int(hour * HOUR_MS)
    state.note(template, at, at, n)
    return at


@given(st.lists(st.integers(TODAY - 12, TODAY + 3), max_size=30))
def test_a_template_is_usual_after_enough_of_the_days_before_in_whatever_order(days: list[int]) -> None:
    state = DailyTemplates()
    for day in dict.fromkeys(days):
        came(state, day)
    state = DailyTemplates.unpack(state.pack())
    newest = max(days, default=TODAY)
    before = {day for day in days if newest - LOOKED_BACK <= day < newest}
    assert state.is_usual(7, newest * DAY_MS) is (len(before) >= USUAL)
    assert not state.is_usual(8, newest * DAY_MS)


def test_a_rate_that_the_training_knows_is_usual_from_the_first_day_on() -> None:
    state = DailyTemplates()
    at = came(state, TODAY, 60)
    assert state.is_usual(7, at, 70.0) and not state.is_usual(7, at)
    came(state, TODAY, 60)
    assert not state.is_usual(7, at, 70.0), "far above it"


def test_a_count_far_above_the_days_before_is_not_usual() -> None:
    state = DailyTemplates()
    for day in range(TODAY - 6, TODAY):
        came(state, day, 20)
    assert state.is_usual(7, came(state, TODAY, 30))
    assert not state.is_usual(7, came(state, TODAY, 30))


def test_a_nightly_template_is_not_usual_at_noon() -> None:
    state = DailyTemplates()
    for day in range(TODAY - 6, TODAY):
        came(state, day, hour=3.2)
    night, noon = TODAY * DAY_MS + int(3.9 * HOUR_MS), TODAY * DAY_MS + 12 * HOUR_MS
    assert state.at_its_hour(7, night) and state.at_its_hour(7, night - HOUR_MS)
    assert not state.at_its_hour(7, noon)
    for day in range(TODAY - 6, TODAY):
        for hour in range(7):
            came(state, day, hour=3 * hour, template=8)
    assert state.at_its_hour(8, noon + 10 * HOUR_MS), "it comes at any hour"
    assert state.at_its_hour(9, noon), "never seen"


def test_a_rare_template_that_comes_by_chance_has_no_hours_of_its_own() -> None:
    state = DailyTemplates()
    for day, hour in zip(range(TODAY - 3, TODAY), (9, 14, 15), strict=True):
        came(state, day, hour=hour)
    assert state.at_its_hour(7, TODAY * DAY_MS + 22 * HOUR_MS)


def test_a_stretch_of_days_counts_each() -> None:
    state = DailyTemplates()
    state.note(7, TODAY * DAY_MS, (TODAY + 5) * DAY_MS, 6)
    assert state.is_usual(7, (TODAY + 5) * DAY_MS)
    assert not state.is_usual(7, (TODAY + 9) * DAY_MS) and not state.is_usual(7, -DAY_MS)


def test_templates_are_bounded_and_a_damaged_state_is_refused() -> None:
    state = DailyTemplates()
    for template in range(MOST_TEMPLATES + 5):
        came(state, TODAY + template, template=template)
    assert len(state.seen) == MOST_TEMPLATES and 4 not in state.seen
    with pytest.raises(BadPayload):
        DailyTemplates.unpack(b"\xc1")


def test_a_start_is_a_line_that_says_so_and_did_not_come_for_a_while() -> None:
    says = ["Server started on port <NUM>", "Booting worker with pid <NUM>", "now listening on <IP>"]
    assert all(map(says_start, says))
    assert not any(map(says_start, ["restarting is off", "started_at=<TIME>", "the end"]))
    state, minute = Starts(), 60_000
    assert state.note(5, 100 * minute) and state.newest_ms == 100 * minute
    for at in range(101, 200):  # a job that starts every minute
        state.note(5, at * minute)
    assert state.newest_ms == 100 * minute and state.just_before(120 * minute)
    assert not state.just_before(99 * minute) and not state.just_before(140 * minute)
    assert state.note(5, 260 * minute) and state.newest_ms == 260 * minute
    for template in range(100):
        state.note(template, (300 + template) * minute)
    assert len(state.last) == MOST
