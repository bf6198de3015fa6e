"""Sessions that close for want of room are blamed for nothing that may still come, and are counted."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from watching.test_watching import CLOSE, FAULT, OPEN, WORK, Faults, World

from pipeline.service.status import read_status
from pipeline.settings import Settings
from pipeline.watching import observation, session_round
from pipeline.watching.sessions import growing
from pipeline.watching.sessions.model import NORMAL, SessionVerdict

ROOM = 20


class Counts(Faults):
    """A session without OPEN or CLOSE lacks it; an event FAULT is in no normal session."""

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        self.judged += map(tuple, sessions)
        return [self._verdict(session) for session in sessions]

    @staticmethod
    def _verdict(session: Sequence[int]) -> SessionVerdict:
        for wrong, reason in (
            (FAULT in session, "session-event:9"),
            (len({OPEN, CLOSE} & set(session)) < 2, "session-counts:3/0/1"),
        ):
            if wrong:
                cause = reason.partition("/")[0]
                return SessionVerdict(
                    anomalous=True, score=0.9, p_value=0.001, reasons=(reason,), cause=cause
                )
        return NORMAL


@pytest.fixture
def world(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(session_round, "MAX_OPEN", ROOM)
    world = World(settings)
    world.rules = Counts()
    world.watcher = world.another()
    return world


def fill(world: World) -> None:
    """As many sessions as there is room for, and ten more."""
    world.stored(*((f"s{i}", 5, WORK) for i in range(ROOM + 9)))


def kinds(world: World) -> list[str]:
    return [item.kind for item in world.round().found]


def cut(world: World) -> int:
    return read_status(world.settings, world.client).left_out["shop"].session_events


def test_a_session_whose_end_was_not_read_yet_gets_no_verdict(world: World) -> None:
    world.stored(("a", 0, OPEN))
    world.round()
    fill(world)
    world.stored(("a", 1, WORK), ("a", 2, CLOSE))
    world.watcher.max_observations = 1
    assert kinds(world) == []
    assert (world.rules.judged, cut(world)) == ([], 1)
    world.watcher.max_observations = 100
    assert kinds(world) == []
    assert (world.open(), cut(world)) == (ROOM, 11)
    world.later(70)
    assert kinds(world) == [], "what came later has no beginning"
    assert (WORK, CLOSE) in world.rules.judged


def test_where_all_is_read_only_what_no_later_event_can_change_is_reported(world: World) -> None:
    world.stored(("a", 0, OPEN), ("b", 0, FAULT))
    world.round()
    world.later(1)
    fill(world)
    assert kinds(world) == ["session-event"]
    assert {(OPEN,), (FAULT,)} <= set(world.rules.judged)
    assert cut(world) == 2


def test_sessions_that_are_due_are_judged_as_complete_also_where_there_is_no_room(world: World) -> None:
    world.stored(("a", 0, OPEN))
    world.round()
    world.later(70)
    fill(world)
    assert kinds(world) == ["session-counts"]
    world.round()
    assert (world.open(), cut(world)) == (ROOM, 9)


def test_after_a_while_missing_events_count_again(world: World) -> None:
    fill(world)
    world.round()
    world.round()
    assert cut(world) == 9
    minutes_ago = world.ledger.store.now_ms() - 200_000
    assert world.client.hset(world.keys.watching(), "unkept shop", minutes_ago) == 0, "it was noted"
    world.later(70)
    assert set(kinds(world)) == {"session-counts"}


def test_events_past_the_most_of_a_session_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "MAX_SESSION_EVENTS", 3)
    world.stored(*(("a", i, WORK) for i in range(5)))
    world.stored(*(("a", i, WORK) for i in range(5, 7)))
    world.round()
    assert cut(world) == 4
    (sentence,) = read_status(world.settings, world.client).left_out["shop"].sentences
    assert sentence.startswith("4 events of sessions had no room")


def test_events_past_the_most_of_a_batch_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "MAX_EVENTS", 3)
    world.stored(*((f"s{i}", i, WORK) for i in range(8)))
    world.round()
    assert (world.open(), cut(world)) == (3, 5)


def test_at_the_end_no_session_counts_as_closed_early(world: World) -> None:
    fill(world)
    world.watcher.callbacks = replace(world.watcher.callbacks)
    told = world.watcher.round(world.lease.token, end=True)
    assert {item.kind for item in told.found} == {"session-counts"}
    assert "shop" not in read_status(world.settings, world.client).left_out
