"""Sessions that fall silent and go on: judged with all that came before, told once, kept within bounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import msgpack
import pytest
from test_watching import BAD, CLOSE, FAULT, OPEN, WORK, World, said

from pipeline.models.sequences import SessionVerdict
from pipeline.settings import Settings
from pipeline.watching import watcher as module

HOUR_S, DAY_S = 3_600, 86_400


@pytest.fixture
def world(settings: Settings) -> World:
    made = World(settings)
    made.rules.carried = True
    return made


def passes(world: World, seconds: float) -> None:
    """What is stored is seen, and so much time goes by with nothing new."""
    world.round()
    world.later(seconds)
    key = world.keys.watching("past_due")
    for name, at in cast("list[tuple[bytes, float]]", world.client.zrange(key, 0, -1, withscores=True)):
        world.client.zadd(key, {name: at - seconds * 1000})
    world.round()


def kept(world: World) -> int:
    """Pasts; what says how many events they have and when they are forgotten goes with them."""
    pasts = int(world.client.hlen(world.keys.watching("pasts")))
    assert world.client.zcard(world.keys.watching("past_due")) == pasts
    assert (world.numbers()["past_events"] > 0) is (pasts > 0)
    return pasts


def test_what_comes_after_a_silence_is_judged_with_all_that_came_before(world: World) -> None:
    world.stored(("a", 0, OPEN), ("a", 1, WORK))
    passes(world, 70)
    assert world.rules.judged == [(OPEN, WORK)] and (world.open(), kept(world)) == (0, 1)
    world.watcher = world.another()
    world.stored(("a", HOUR_S, WORK), ("a", HOUR_S + 1, WORK))
    passes(world, 70)
    assert world.rules.judged[1:] == [(OPEN, WORK, WORK, WORK)]
    assert world.sink.batches == {} and world.numbers()["past_events"] == 4 and kept(world) == 1


def test_a_cause_is_told_once_of_a_session_and_another_one_as_well(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        why = [f"session-event:{50 if 50 in s else FAULT}" for s in sessions]
        return [replace(said(FAULT in s), reasons=(w,), cause=w) for s, w in zip(sessions, why, strict=True)]

    monkeypatch.setattr(world.rules, "judge", judge)
    world.stored(*BAD)
    passes(world, 70)
    world.stored(("x", HOUR_S, WORK))
    passes(world, 70)
    assert world.sink.rows().height == 1
    world.stored(("x", 2 * HOUR_S, 50))
    passes(world, 70)
    first, second = world.sink.rows().sort("timestamp").to_dicts()
    assert first["record_id"] != second["record_id"]
    assert second["message"].startswith(
        "T50 is in no normal session: session x, 4 events in 7,200 s from line 1"
    )
    assert second["raw"].startswith("... 3 events until ")


def test_whether_a_session_closes_at_every_silence_or_once_changes_nothing_of_what_is_told(
    world: World, settings: Settings
) -> None:
    steps = [(("x", 0, OPEN),), (("x", HOUR_S, FAULT), ("a", HOUR_S, OPEN)), (("x", 2 * HOUR_S, WORK),)]
    for step in steps:
        world.stored(*step)
        passes(world, 70)
    once = World(replace(settings, key_prefix=f"{settings.key_prefix}-once"))
    once.rules.carried = True
    once.stored(*(event for step in steps for event in step))
    once.round(end=True)
    assert sorted(once.rules.judged) == sorted(world.rules.judged)
    assert once.sink.rows()["record_id"].to_list() == world.sink.rows()["record_id"].to_list()
    once.client.delete(*once.client.scan_iter(f"*{once.settings.key_prefix}*"))


def test_a_key_that_comes_again_after_a_day_is_another_session(world: World) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    world.stored(("a", DAY_S + 60, WORK))
    passes(world, 70)
    assert world.rules.judged == [(OPEN,), (WORK,)]


def test_after_a_day_without_an_event_the_past_is_forgotten_and_nothing_is_judged_again(world: World) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    passes(world, DAY_S - 60)
    assert kept(world) == 1
    passes(world, 200)
    assert kept(world) == 0
    assert world.rules.judged == [(OPEN,)]


def test_of_a_session_that_ended_nothing_is_kept(world: World) -> None:
    world.stored(("a", 0, OPEN), ("b", 0, OPEN), ("b", 1, CLOSE))
    passes(world, 70)
    assert kept(world) == 1
    world.stored(("a", HOUR_S, CLOSE))
    passes(world, 70)
    assert kept(world) == 0 and world.rules.judged[-1] == (OPEN, CLOSE)


def test_a_model_that_learnt_from_parts_judges_parts_and_keeps_nothing(world: World) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    world.rules.carried = False
    world.stored(("a", HOUR_S, WORK))
    passes(world, 70)
    assert world.rules.judged == [(OPEN,), (WORK,)] and kept(world) == 0


def test_at_the_end_a_past_is_not_judged_again(world: World) -> None:
    world.stored(*BAD)
    passes(world, 70)
    world.round(end=True)
    assert world.sink.writes == 1 and world.rules.judged == [(OPEN, FAULT)]


def test_past_the_limit_the_oldest_pasts_are_forgotten_and_no_open_session_is_closed(
    settings: Settings,
) -> None:
    world = World(replace(settings, max_open_sessions=100))
    world.rules.carried = True
    for hour in range(2):
        world.stored(*((f"k{hour}-{i}", hour * HOUR_S + i, WORK) for i in range(60)))
        passes(world, 70)
    assert kept(world) == 100 and world.numbers()["past_events"] == 100
    names = cast("list[bytes]", world.client.hkeys(world.keys.watching("pasts")))
    assert sum(name.startswith(b"shop\0k1-") for name in names) == 60
    world.stored(*((f"o{i}", 3 * HOUR_S + i, OPEN) for i in range(90)))
    world.round()
    assert world.open() == 90


def test_events_in_pasts_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PAST_EVENTS", 100)
    for i in range(10):
        world.stored(*((f"s{i}", i * HOUR_S + j, WORK) for j in range(30)))
        passes(world, 70)
    assert world.numbers()["past_events"] == 30 * kept(world) <= 130


def test_watchers_that_know_of_no_pasts_read_what_is_open(world: World) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    world.stored(("a", HOUR_S, WORK))
    world.round()
    (blob,) = cast("list[bytes]", world.client.hvals(world.keys.watching("sessions")))
    version, *fields = msgpack.unpackb(blob)
    assert version == 1 and fields[-1] == [WORK]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_a_session_falls_silent_tells_it_once(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    world.stored(*BAD)
    world.round()
    world.later(70)
    change = world.watcher.state.change

    def dies(*args: object, **more: object) -> bool:
        if when == "after":
            change(*args, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "change", dies)
        with pytest.raises(KeyboardInterrupt):
            world.round()
    world.watcher = world.another()
    world.round()
    world.stored(("x", HOUR_S, WORK))
    passes(world, 70)
    assert world.sink.rows().height == 1 and world.rules.judged[-1] == (OPEN, FAULT, WORK)


@pytest.mark.parametrize("damage", [lambda blob: b"\xc1", lambda blob: blob[:-3], lambda _: b"\x91\x09"])
def test_a_past_that_cannot_be_read_is_begun_anew(world: World, damage: Callable[[bytes], bytes]) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    pasts, name = world.keys.watching("pasts"), "shop\0a"
    world.client.hset(pasts, name, damage(world.client.hget(pasts, name)))  # type: ignore[arg-type]
    world.stored(("a", HOUR_S, WORK))
    passes(world, 70)
    assert world.rules.judged == [(OPEN,), (WORK,)]
