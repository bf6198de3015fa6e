"""Templates that come every day, and starts of a program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.watching.incidents.daily import LOOKED_BACK, MOST_TEMPLATES, USUAL, DailyTemplates
from pipeline.watching.incidents.starts import MOST, Starts, says_start

DAY_MS = 86_400_000
TODAY = 20_600


@given(st.lists(st.integers(TODAY - 12, TODAY + 3), max_size=30))
def test_a_template_is_usual_after_enough_of_the_days_before_in_whatever_order(days: list[int]) -> None:
    state = DailyTemplates()
    for day in days:
        state.note(7, day * DAY_MS + 5, day * DAY_MS + 9)
    state = DailyTemplates.unpack(state.pack())
    newest = max(days, default=TODAY)
    before = {day for day in days if newest - LOOKED_BACK <= day < newest}
    assert state.is_usual(7, newest * DAY_MS) is (len(before) >= USUAL)
    assert not state.is_usual(8, newest * DAY_MS)


def test_a_stretch_of_days_counts_each_and_a_repetition_changes_nothing() -> None:
    state = DailyTemplates()
    assert state.note(7, TODAY * DAY_MS, (TODAY + 5) * DAY_MS)
    assert not state.note(7, (TODAY + 1) * DAY_MS, (TODAY + 5) * DAY_MS)
    assert state.is_usual(7, (TODAY + 5) * DAY_MS) and state.is_usual(7, (TODAY + 6) * DAY_MS)
    assert not state.is_usual(7, (TODAY + 9) * DAY_MS) and not state.is_usual(7, -DAY_MS)


def test_templates_are_bounded_and_a_damaged_state_is_refused() -> None:
    state = DailyTemplates()
    for template in range(MOST_TEMPLATES + 5):
        state.note(template, (TODAY + template) * DAY_MS, (TODAY + template) * DAY_MS)
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
