"""How much a round of the watcher does, and when it leaves its process to the batches."""

import pytest

from pipeline.watching.time_budget import (
    ALL,
    BUDGET_S,
    CATCH_UP_S,
    HALF,
    LATE_S,
    LEAST,
    PATIENCE_S,
    REST_S,
    ROUND_S,
    AdaptiveBudget,
    FairRotation,
    ObservationAge,
    flood_share,
)


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
    assert budget.of(1) == 1 and 0 < budget.of(40_000) <= 5_000


def test_rounds_of_so_much_an_event_settle_at_about_the_time_they_have() -> None:
    budget, per_event = AdaptiveBudget(), 40e-6
    for _ in range(20):
        took = budget.of(40_000) * per_event
        budget.record(took, ROUND_S, full=True)
    assert took == pytest.approx(ROUND_S, rel=0.01)


def rounds(
    rotation: FairRotation, now: float, *, share: float, round_s: float, left: list[int]
) -> tuple[int, float]:
    """How many rounds one call does that may find so many observations after each, and when it ends."""
    if not rotation.begin(now, share=share):
        return 0, now
    done = 0
    for still in left:
        now += round_s
        done += 1
        if not rotation.goes_on(now, share=share, unread=still):
            break
    rotation.end(now, unread=still)
    return done, now


def test_while_nothing_waits_rounds_go_on_until_their_time_is_up() -> None:
    done, now = rounds(FairRotation(), 100.0, share=ALL, round_s=0.3, left=[0] * 20)
    assert done == 4 and now - 100.0 < BUDGET_S + 0.3
    done, now = rounds(FairRotation(), 100.0, share=ALL, round_s=0.3, left=[50] * 20)
    assert done == 6 and now - 100.0 < CATCH_UP_S + 0.3, "observations wait"


def test_while_batches_wait_one_round_is_enough_where_observations_become_fewer() -> None:
    rotation = FairRotation()
    rounds(rotation, 100.0, share=HALF, round_s=0.3, left=[50])
    assert rounds(rotation, 102.0, share=HALF, round_s=0.3, left=[40, 30, 20])[0] == 1
    assert rounds(rotation, 104.0, share=HALF, round_s=0.3, left=[0, 0])[0] == 1


def test_under_lasting_load_watching_takes_half_of_the_time_and_no_more() -> None:
    rotation, now, worked, began = FairRotation(), 100.0, 0.0, 100.0
    rounds(rotation, now, share=HALF, round_s=0.3, left=[9])
    for _ in range(200):  # a call as soon as it may be
        before = now
        _, now = rounds(rotation, now, share=HALF, round_s=0.3, left=[10] * 20)
        worked += now - before
        now += 0.1 if now == before else 0.0
    assert 0.3 < worked / (now - began) < 0.6


def test_a_long_round_is_followed_by_as_long_a_rest_while_batches_wait() -> None:
    rotation = FairRotation()
    _, now = rounds(rotation, 100.0, share=HALF, round_s=5.0, left=[10] * 3)
    assert now == 105.0
    assert not rotation.begin(109.0, share=HALF)
    assert rotation.begin(109.0, share=ALL)
    assert rotation.begin(110.0, share=HALF)


@pytest.mark.parametrize("share", [LEAST, 0.25])
def test_in_a_flood_watching_takes_its_share_and_always_some(share: float) -> None:
    rotation, now, worked = FairRotation(), 100.0, 0.0
    while now < 700.0:
        done, after = rotation_call(rotation, now, share)
        worked += after - now
        assert done <= 1
        now = max(after, now + 2.0)
    assert share / 2 < worked / 600.0 <= share


def test_a_slow_round_in_a_flood_is_followed_by_a_rest_that_those_who_wait_for_the_watcher_bear() -> None:
    rotation = FairRotation()
    for begun, took, rest in ((100.0, 2.0, REST_S), (200.0, 9.0, 9.0)):
        _, now = rounds(rotation, begun, share=LEAST, round_s=took, left=[10])
        assert not rotation.begin(now + rest - 0.1, share=LEAST)
        assert rotation.begin(now + rest, share=LEAST)


def rotation_call(rotation: FairRotation, now: float, share: float) -> tuple[int, float]:
    return rounds(rotation, now, share=share, round_s=0.5, left=[10] * 3)


def test_the_share_in_a_flood_grows_with_the_age_of_what_waits_and_with_its_memory() -> None:
    ages = [flood_share(age_s=age, full=0.0) for age in (0.0, PATIENCE_S, 20.0, 30.0, LATE_S, 3_600.0)]
    assert ages == sorted(ages) and (ages[0], ages[1], ages[-2], ages[-1]) == (LEAST, LEAST, HALF, HALF)
    assert flood_share(age_s=0.0, full=0.1) > LEAST
    assert flood_share(age_s=0.0, full=0.5) == flood_share(age_s=0.0, full=1.0) == HALF


def test_the_age_of_the_oldest_observation_is_known_from_their_numbers() -> None:
    age = ObservationAge()
    assert age.note(100.0, taken=5, waiting=0) == 0.0
    assert age.note(102.0, taken=5, waiting=3) == 0.0, "first seen now"
    assert age.note(110.0, taken=5, waiting=9) == 8.0
    assert age.note(111.0, taken=8, waiting=9) == 1.0, "the first three are taken"
    assert age.note(120.0, taken=13, waiting=4) == 10.0
    assert age.note(121.0, taken=17, waiting=0) == 0.0
    assert age.note(130.0, taken=2, waiting=2) == 0.0, "Redis lost its last moments"
    assert age.note(133.0, taken=2, waiting=2) == 3.0
