"""How much a round of the watcher does, and when it leaves its process to the batches."""

import pytest

from pipeline.watching.time_budget import BUDGET_S, ROUND_S, AdaptiveBudget, FairRotation


def test_a_round_that_took_too_long_makes_the_next_one_smaller_and_a_full_quick_one_makes_it_larger() -> None:
    budget = AdaptiveBudget()
    before = budget.of(40_000)
    budget.record(2 * ROUND_S, ROUND_S, full=True)
    assert budget.of(40_000) == before // 2
    budget.record(ROUND_S / 10, ROUND_S, full=False)
    assert budget.of(40_000) == before // 2, "a round with little to do shows nothing"
    budget.record(ROUND_S / 10, ROUND_S, full=True)
    assert budget.of(40_000) == before
    for _ in range(20):
        budget.record(ROUND_S / 10, ROUND_S, full=True)
    assert budget.of(40_000) == 40_000


def test_one_is_always_taken() -> None:
    budget = AdaptiveBudget()
    for _ in range(20):
        budget.record(60.0, ROUND_S, full=True)
    assert budget.of(1) == 1 and 0 < budget.of(40_000) < 4_000


def test_rounds_of_so_much_an_event_settle_at_about_the_time_they_have() -> None:
    budget, per_event = AdaptiveBudget(), 40e-6
    for _ in range(20):
        took = budget.of(40_000) * per_event
        budget.record(took, ROUND_S, full=True)
    assert took == pytest.approx(ROUND_S, rel=0.01)


def rounds(
    rotation: FairRotation, now: float, *, waits: bool, round_s: float, left: list[int]
) -> tuple[int, float]:
    """How many rounds one call does that may find so many observations after each, and when it ends."""
    if not rotation.begin(now, waits=waits):
        return 0, now
    done = 0
    for still in left:
        now += round_s
        done += 1
        if not rotation.goes_on(now, waits=waits, unread=still):
            break
    rotation.end(now, unread=still)
    return done, now


def test_while_nothing_waits_rounds_go_on_until_their_time_is_up() -> None:
    done, now = rounds(FairRotation(), 100.0, waits=False, round_s=0.3, left=[50] * 20)
    assert done == 4 and now - 100.0 < BUDGET_S + 0.3


def test_while_batches_wait_one_round_is_enough_where_observations_become_fewer() -> None:
    rotation = FairRotation()
    rounds(rotation, 100.0, waits=True, round_s=0.3, left=[50])
    assert rounds(rotation, 102.0, waits=True, round_s=0.3, left=[40, 30, 20])[0] == 1
    assert rounds(rotation, 104.0, waits=True, round_s=0.3, left=[0, 0])[0] == 1


def test_under_lasting_load_watching_takes_half_of_the_time_and_no_more() -> None:
    rotation, now, worked, began = FairRotation(), 100.0, 0.0, 100.0
    rounds(rotation, now, waits=True, round_s=0.3, left=[9])
    for _ in range(200):  # a call as soon as it may be
        before = now
        _, now = rounds(rotation, now, waits=True, round_s=0.3, left=[10] * 20)
        worked += now - before
        now += 0.1 if now == before else 0.0
    assert 0.3 < worked / (now - began) < 0.6


def test_a_long_round_is_followed_by_as_long_a_rest_while_batches_wait() -> None:
    rotation = FairRotation()
    _, now = rounds(rotation, 100.0, waits=True, round_s=5.0, left=[10] * 3)
    assert now == 105.0
    assert not rotation.begin(109.0, waits=True)
    assert rotation.begin(109.0, waits=False)
    assert rotation.begin(110.0, waits=True)
