"""The faults of a chaos run: the same for the same seed, dense, of every kind, and read back from a
history."""

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest

from bench._chaos.history import History
from bench._chaos.schedule import KINDS, POISON_BEFORE_END_S, Deck, kinds_of, one_by_one, replay, schedule


def test_the_same_seed_is_the_same_schedule_and_another_seed_another() -> None:
    assert schedule(7, 10) == schedule(7, 10)
    assert schedule(7, 10) != schedule(8, 10)


def test_the_schedule_of_one_machine_is_that_of_earlier_runs() -> None:
    said = repr([(f.n, f.at_s, f.kind, f.target, f.for_s) for f in schedule(201, 3)])
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "c79faa886d5ec896"


@pytest.mark.parametrize("store", ["file", "s3"])
def test_an_hour_of_many_machines_hits_each_of_them_with_every_kind(store: str) -> None:
    kinds = kinds_of(machines=3, store=store, sentinel=True)
    hour = schedule(1, 60, deck=Deck(kinds=kinds, machines=3))
    assert len(hour) > 1_000
    assert {fault.kind for fault in hour} == set(kinds) > {"store_away", "kill_replica", "stop_machine"}
    for kind in ("kill", "kill_stack", "kill_source", "break_intake"):
        assert {fault.machine for fault in hour if fault.kind == kind} == {0, 1, 2}


def test_a_world_knows_only_faults_of_what_it_has() -> None:
    assert kinds_of(machines=1, store="local", sentinel=False) == KINDS
    assert kinds_of(machines=1, store="local", sentinel=True).keys() - KINDS.keys() == {
        "kill_replica", "stop_replica", "kill_sentinel", "stop_sentinel",
    }  # fmt: skip
    assert kinds_of(machines=2, store="file", sentinel=False).keys() - KINDS.keys() == {
        "stop_machine", "store_away",
    }  # fmt: skip
    bucket = kinds_of(machines=1, store="s3", sentinel=False)
    assert "disk_full" not in bucket and {"store_errors", "store_full", "kill_store"} <= bucket.keys()


def test_of_several_machines_none_is_the_only_one() -> None:
    assert KINDS["kill_stack"].sole
    assert not kinds_of(machines=2, store="file", sentinel=False)["kill_stack"].sole


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
    planned = schedule(5, 2, deck=Deck(kinds=KINDS, machines=3))
    with History(tmp_path / "history.jsonl") as history:
        history.note("begin", seed=5, minutes=2.0, settings={})
        for fault in reversed(planned):  # they are noted in the order in which they were done
            history.note(
                "missed" if fault.n % 5 == 0 else "fault",
                n=fault.n, kind=fault.kind, target=fault.target, at_s=fault.at_s, for_s=fault.for_s,
                waits_for="", detail={}, machine=fault.machine,
            )  # fmt: skip
    assert replay(tmp_path / "history.jsonl") == (5, 2.0, planned)


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"t":0,"op":"end"}\n')
    with pytest.raises(ValueError, match="does not begin a run"):
        replay(path)
