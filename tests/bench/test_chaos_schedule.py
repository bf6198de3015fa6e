"""The faults of a chaos run: the same for the same seed, dense, of every kind, and read back from a
history."""

from itertools import pairwise
from pathlib import Path

import pytest

from bench._chaos.history import History
from bench._chaos.schedule import KINDS, POISON_BEFORE_END_S, one_by_one, replay, schedule


def test_the_same_seed_is_the_same_schedule_and_another_seed_another() -> None:
    assert schedule(7, 10) == schedule(7, 10)
    assert schedule(7, 10) != schedule(8, 10)


def test_a_longer_run_of_a_seed_begins_as_a_shorter_one_does() -> None:
    early = [f for f in schedule(7, 3) if f.at_s < 3 * 60 - POISON_BEFORE_END_S]
    assert schedule(7, 60)[: len(early)] == tuple(early)


@pytest.mark.parametrize("seed", range(20))
def test_an_hour_holds_over_a_thousand_faults_of_all_kinds_and_three_minutes_forty(seed: int) -> None:
    hour = schedule(seed, 60)
    assert len(hour) > 1_100
    assert {fault.kind for fault in hour} == set(KINDS)
    assert {f.target for f in hour if f.kind == "poison"} == {"kill", "hang", "corrupt"}
    assert len(schedule(seed, 3)) >= 50
    assert [fault.n for fault in hour] == list(range(1, len(hour) + 1))
    assert all(a.at_s < b.at_s for a, b in pairwise(hour))


def test_poison_leaves_time_to_be_buried() -> None:
    assert all(f.at_s < 3 * 60 - POISON_BEFORE_END_S for f in schedule(3, 3) if f.kind == "poison")


@pytest.mark.parametrize("seed", range(5))
def test_one_by_one_every_kind_comes_once_before_any_comes_again_and_poison_last(seed: int) -> None:
    faults = one_by_one(seed, 6)
    rounds = [faults[n : n + len(KINDS)] for n in range(0, len(faults), len(KINDS))]
    assert len(rounds) > 4
    assert all({fault.kind for fault in one} == set(KINDS) for one in rounds[:-1])
    assert all(one[-1].kind == "poison" for one in rounds[:-1])
    assert faults == one_by_one(seed, 6) != one_by_one(seed + 1, 6)
    assert [fault.n for fault in faults] == list(range(1, len(faults) + 1))


def test_a_history_gives_back_the_faults_that_were_planned_whatever_became_of_them(tmp_path: Path) -> None:
    planned = schedule(5, 2)
    with History(tmp_path / "history.jsonl") as history:
        history.note("begin", seed=5, minutes=2.0, settings={})
        for fault in reversed(planned):  # they are noted in the order in which they were done
            history.note(
                "missed" if fault.n % 5 == 0 else "fault",
                n=fault.n, kind=fault.kind, target=fault.target, at_s=fault.at_s, for_s=fault.for_s,
                waits_for="", detail={},
            )  # fmt: skip
    assert replay(tmp_path / "history.jsonl") == (5, 2.0, planned)


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"t":0,"op":"end"}\n')
    with pytest.raises(ValueError, match="does not begin a run"):
        replay(path)
