"""How long lines wait for others before they are sent, by a clock that moves only when told."""

import pytest
from polling import Clock

from pipeline.sources.flush_policy import LEAST_S, MOST_S, POLL_S, QUIET_S, Due, FlushPolicy, delay_s

STEP_S = 0.01


@pytest.fixture
def pace(clock: Clock) -> FlushPolicy:
    return FlushPolicy(clock=clock)


def waits_s(
    pace: FlushPolicy, clock: Clock, *, every_s: float, settled: bool = True, half_line: bool = False
) -> float:
    """How long the first line waits while another one comes every so often."""
    began, last = clock.now, clock.now
    pace.came(half_line=half_line)
    while pace.due(unsent=True, settled=settled) is Due.NOTHING:
        assert clock.now < began + 10
        clock.now += STEP_S
        if clock.now - last >= every_s:
            last = clock.now
            pace.came(half_line=half_line)
    return clock.now - began


def test_the_delay_grows_with_what_waits_in_the_pipeline_up_to_a_bound() -> None:
    assert delay_s(0) == delay_s(1) == LEAST_S
    assert delay_s(2) == 2 * LEAST_S
    delays = [delay_s(n) for n in range(20)]
    assert delays == sorted(delays)
    assert delays[-1] == delay_s(2_000) == MOST_S


def test_a_trickle_is_sent_soon_and_its_open_record_stays(pace: FlushPolicy, clock: Clock) -> None:
    assert waits_s(pace, clock, every_s=0.1) == pytest.approx(LEAST_S, abs=2 * STEP_S)
    assert pace.due(unsent=True, settled=True) is Due.FINISHED


def test_behind_a_full_pipeline_lines_wait_for_more_of_them(pace: FlushPolicy, clock: Clock) -> None:
    pace.answered(50)
    assert waits_s(pace, clock, every_s=0.1) == pytest.approx(MOST_S, abs=2 * STEP_S)
    pace.handed_over()
    pace.answered(1)
    assert waits_s(pace, clock, every_s=0.1) == pytest.approx(LEAST_S, abs=2 * STEP_S)


def test_bursts_with_pauses_between_them_wait_as_well_when_the_pipeline_is_full(
    pace: FlushPolicy, clock: Clock
) -> None:
    pace.answered(50)
    assert waits_s(pace, clock, every_s=100) == pytest.approx(MOST_S, abs=2 * STEP_S)
    assert pace.due(unsent=True, settled=True) is Due.EVERYTHING


def test_silence_closes_the_open_record(pace: FlushPolicy, clock: Clock) -> None:
    assert waits_s(pace, clock, every_s=100) == pytest.approx(QUIET_S, abs=2 * STEP_S)
    assert pace.due(unsent=True, settled=True) is Due.EVERYTHING


def test_silence_after_half_a_line_closes_nothing_for_longer(pace: FlushPolicy, clock: Clock) -> None:
    assert waits_s(pace, clock, every_s=100, half_line=True) == pytest.approx(LEAST_S, abs=2 * STEP_S)
    assert pace.due(unsent=True, settled=True) is Due.FINISHED
    clock.now += MOST_S
    assert pace.due(unsent=True, settled=True) is Due.EVERYTHING


def test_before_the_format_is_known_only_silence_or_the_longest_wait_sends(
    pace: FlushPolicy, clock: Clock
) -> None:
    assert waits_s(pace, clock, every_s=0.1, settled=False) == pytest.approx(MOST_S, abs=2 * STEP_S)
    pace.handed_over()
    pace.due(unsent=False, settled=False)
    assert waits_s(pace, clock, every_s=100, settled=False) == pytest.approx(QUIET_S, abs=2 * STEP_S)


def test_what_stays_behind_a_chunk_that_filled_by_itself_has_not_waited_yet(
    pace: FlushPolicy, clock: Clock
) -> None:
    pace.came(half_line=False)
    clock.now += 30  # accept was full
    pace.handed_over()
    pace.came(half_line=False)
    assert pace.due(unsent=True, settled=True) is Due.NOTHING


def test_nothing_is_due_of_what_was_sent(pace: FlushPolicy, clock: Clock) -> None:
    pace.came(half_line=False)
    clock.now += 30
    assert pace.due(unsent=False, settled=True) is Due.NOTHING


def test_an_idle_source_is_looked_at_rarely_and_a_lively_one_often(pace: FlushPolicy, clock: Clock) -> None:
    pace.came(half_line=False)
    assert pace.poll_s(0.25) == POLL_S
    pace.due(unsent=False, settled=True)
    clock.now += MOST_S
    assert pace.poll_s(0.25) == 0.25
