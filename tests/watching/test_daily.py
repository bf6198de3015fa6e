"""Templates that come every day."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.watching.incidents.daily import LOOKED_BACK, MOST_TEMPLATES, USUAL, DailyTemplates

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
