"""Sessions that fall silent and go on: judged with all that came before, told once, kept within bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgpack
import pytest

from pipeline.commands.run import plan as run
from pipeline.commands.run.inputs import RunPlan
from pipeline.settings import Settings
from pipeline.watching import rate_round, session_round
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.follow_ups import FollowUps
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.time_budget import AdaptiveBudget
from tests.watching.test_watching import BAD, CLOSE, FAULT, OPEN, WORK, World, said

HOUR_S, DAY_S = 3_600, 86_400


@pytest.fixture
def world(settings: Settings) -> World:
    made = World(settings)
    made.rules.stateful = True
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
    once = World(settings.replace(key_prefix=f"{settings.redis.key_prefix}-once"))
    once.rules.stateful = True
    once.stored(*(event for step in steps for event in step))
    once.round(end=True)
    assert sorted(once.rules.judged) == sorted(world.rules.judged)
    assert once.sink.rows()["record_id"].to_list() == world.sink.rows()["record_id"].to_list()
    once.client.delete(*once.client.scan_iter(f"*{once.settings.redis.key_prefix}*"))


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
    world.rules.stateful = False
    world.stored(("a", HOUR_S, WORK))
    passes(world, 70)
    assert world.rules.judged == [(OPEN,), (WORK,)] and kept(world) == 0


def test_at_the_end_a_past_is_not_judged_again(world: World) -> None:
    world.stored(*BAD)
    passes(world, 70)
    world.round(end=True)
    assert world.sink.writes == 1 and world.rules.judged == [(OPEN, FAULT)]


def test_past_the_limit_the_oldest_pasts_are_forgotten_and_no_open_session_is_closed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.watching.session_round.MAX_OPEN", 100)
    world = World(settings)
    world.rules.stateful = True
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
    monkeypatch.setattr(session_round, "MAX_HISTORY_EVENTS", 100)
    for i in range(10):
        world.stored(*((f"s{i}", i * HOUR_S + j, WORK) for j in range(30)))
        passes(world, 70)
    assert world.numbers()["past_events"] == 30 * kept(world) <= 130


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


def test_a_past_with_a_number_that_cannot_be_is_begun_anew(world: World) -> None:
    world.stored(("a", 0, OPEN))
    passes(world, 70)
    pasts, name = world.keys.watching("pasts"), "shop\0a"
    fields = msgpack.unpackb(world.client.hget(pasts, name))
    fields[1][2] = float("inf")
    world.client.hset(pasts, name, msgpack.packb(fields))
    world.stored(("a", HOUR_S, WORK), ("b", HOUR_S, WORK))
    passes(world, 70)
    assert sorted(world.rules.judged) == [(OPEN,), (WORK,), (WORK,)] and world.open() == 0


def test_a_session_that_is_silent_all_the_time_is_judged_in_bounds_and_told_once(world: World) -> None:
    world.stored(*(("x", at * 300, FAULT if at == 700 else WORK) for at in range(2_000)))
    world.round(end=True)
    assert sum(map(len, world.rules.judged)) <= 20_000 and len(world.rules.judged[-1]) == 2_000
    assert world.sink.rows().height == 1


def test_what_one_round_has_no_room_to_judge_stays_open_until_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_round, "MAX_JUDGED", 10)
    monkeypatch.setattr(session_round, "MAX_PER_CALL", 4)
    monkeypatch.setattr(AdaptiveBudget, "of", lambda _budget, most: most)  # however fast this machine is
    world.stored(*((f"s{i}", at, WORK) for i in range(5) for at in range(4)))
    world.round()
    world.later(70)
    rounds = [world.round() for _ in range(3)]
    assert [told.judged for told in rounds] == [2, 2, 1]
    assert [told.more for told in rounds] == [True, True, False]
    assert (world.open(), kept(world), world.numbers()["events"]) == (0, 5, 0)


def test_at_the_end_what_one_round_has_no_room_for_is_judged_in_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_round, "MAX_JUDGED", 10)
    monkeypatch.setattr(AdaptiveBudget, "of", lambda _budget, most: most)
    world.stored(*((f"s{i}", at, WORK) for i in range(5) for at in range(4)))
    told = world.round(end=True)
    assert (told.judged, told.more, world.open(), world.numbers()["events"]) == (2, True, 3, 12)
    world.round(end=True)
    told = world.round(end=True)
    assert (told.judged, told.more, world.open(), world.numbers()["events"]) == (1, False, 0, 0)


def test_sessions_may_stay_open_for_longer_than_a_silence_and_are_cut_at_it(settings: Settings) -> None:
    world = World(settings.replace(session_open_s=DAY_S))
    world.rules.stateful = True
    world.stored(("a", 0, OPEN), ("a", 2, WORK), ("b", 0, OPEN))
    passes(world, 100)
    # The same second of another file, which is read later; and what comes an hour after.
    world.stored(("a", 1, 7), ("b", HOUR_S, WORK))
    passes(world, 100)
    assert world.rules.judged == []
    world.round(end=True)
    assert sorted(world.rules.judged) == [(OPEN,), (OPEN, WORK), (OPEN, 7, WORK)]


class Whole:
    """What is not whole is anomalous: OPEN, WORK, CLOSE in order; a fault, too, and that whatever came
    before."""

    ends = frozenset[int]()
    per_day = 1.0
    stateful = True
    places: Mapping[int, tuple[str, int]] = {}
    follow_ups = FollowUps()
    shape = TraceShape()

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        return [self.verdict(tuple(session)) for session in sessions]

    def verdict(self, session: tuple[int, ...]) -> SessionVerdict:
        if FAULT in session:
            return said(True)
        why = "session-order:3-first"
        wrong = session not in {(OPEN, WORK), (OPEN, WORK, CLOSE)}
        return replace(said(wrong), reasons=(why,), cause=why) if wrong else said(False)


@pytest.fixture
def strict(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("pipeline.watching.session_round.MAX_OPEN", 100)
    made = World(settings)
    made.rules = Whole()  # type: ignore[assignment]
    made.watcher = made.another()
    return made


def _past_the_limit(world: World) -> None:
    for k in range(0, 200, 50):
        world.stored(*((f"b{i}", k, e) for i in range(k, k + 50) for e in (OPEN, WORK)))
        passes(world, 70)


def test_what_goes_on_without_a_past_for_which_there_was_no_room_is_not_blamed_for_that(
    strict: World,
) -> None:
    _past_the_limit(strict)
    assert kept(strict) == 100
    strict.stored(*((f"b{i}", HOUR_S, CLOSE) for i in range(200)))
    strict.stored(("b0", HOUR_S + 1, FAULT))
    passes(strict, 70)
    assert strict.sink.rows()["reasons"].to_list() == [["session-event:9"]], (
        "what no normal session has is told"
    )
    # What is kept of these is not whole either.
    strict.stored(*((f"b{i}", 2 * HOUR_S, WORK) for i in range(20)))
    passes(strict, 70)
    assert strict.sink.rows().height == 1


def test_a_day_after_pasts_were_lost_what_is_not_whole_is_told(strict: World) -> None:
    _past_the_limit(strict)
    lost = strict.client.hget(strict.keys.watching(), "lost shop")
    assert lost is not None
    strict.client.hset(strict.keys.watching(), "lost shop", int(lost) - DAY_S * 1000 - 1)
    strict.stored(("new", HOUR_S, CLOSE))
    passes(strict, 70)
    assert strict.sink.rows().height == 1


@pytest.mark.parametrize("before", ["rules that judge parts", "no rules"])
def test_what_goes_on_after_rules_came_that_carry_is_not_blamed_for_what_was_not_kept(
    strict: World, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Whole()
    rules.stateful = False
    parts = strict.watcher.callbacks
    known = None if before == "no rules" else ("m0", rules)
    strict.watcher.callbacks = replace(parts, session_model=lambda *_: known)
    strict.stored(("a", 0, OPEN), ("a", 1, WORK))
    passes(strict, 70)
    strict.watcher.callbacks = parts
    strict.stored(("a", HOUR_S, CLOSE), ("b", HOUR_S, FAULT))
    passes(strict, 70)
    assert strict.sink.rows()["reasons"].to_list() == [["session-event:9"]]
    assert kept(strict) == 2


def test_the_moment_is_forgotten_with_its_workload(strict: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _past_the_limit(strict)
    assert "lost shop" in strict.numbers()
    monkeypatch.setattr(rate_round, "MAX_WORKLOADS", 0)
    strict.round()
    assert "lost shop" not in strict.numbers()


def test_pasts_are_not_forgotten_while_what_was_accepted_before_waits_or_is_open(strict: World) -> None:
    strict.stored(("a", 0, OPEN), ("a", 1, WORK))
    passes(strict, 70)
    batch = strict.accept(1)
    strict.client.hincrby(strict.keys.batch(batch), "accepted_ms", -2 * DAY_S * 1000)
    passes(strict, DAY_S + 3_600)
    assert kept(strict) == 1, "a batch of that time is in flight"
    strict.commit(batch, strict.rows([("a", HOUR_S, CLOSE)]), ["a"])
    strict.stored(("c", 0, OPEN), ("c", 1, WORK))
    passes(strict, 0)
    assert kept(strict) == 1, "it is open again"
    passes(strict, 3 * DAY_S)
    assert strict.sink.rows().height == 0


def test_an_older_log_with_the_same_keys_is_of_other_sessions(strict: World) -> None:
    strict.stored(("a", 30 * DAY_S, OPEN), ("a", 30 * DAY_S + 1, WORK))
    passes(strict, 70)
    strict.stored(("a", 0, OPEN), ("a", 1, WORK))
    passes(strict, 70)
    assert strict.sink.rows().height == 0


def test_of_what_came_before_its_past_ended_no_order_is_told(strict: World) -> None:
    strict.stored(("a", 10, OPEN), ("a", 20, CLOSE))
    passes(strict, 70)
    assert strict.sink.rows().height == 1
    strict.stored(("b", 10, OPEN), ("b", 20, WORK))
    passes(strict, 70)
    strict.stored(("b", 15, OPEN), ("b", 16, WORK))
    passes(strict, 70)
    assert strict.sink.rows().height == 1


def test_a_run_holds_sessions_open_for_a_day_and_cuts_them_at_the_silence_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def stack(settings: Settings) -> None:
        raise Seen(settings.internal.session_open_s, settings.watch.session_timeout_s)

    monkeypatch.setattr(run, "Stack", stack)
    plan = RunPlan(inputs=(), baseline=(), out=tmp_path / "out", workload=None, report=None)
    with pytest.raises(Seen) as seen:
        run.run(plan, Settings(session_timeout_s=90.0, one_process_kib=0), lambda *_: None)
    assert seen.value.args == (DAY_S, 90.0)
