"""A round that fails loses the input of the part that failed, counted, and nothing of the other parts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis
from watching.test_watching import BAD, FAULT, GOOD, OPEN, WORK, Faults, World

from pipeline.errors import RedisUnavailable
from pipeline.service.status import read_status
from pipeline.settings import Settings
from pipeline.tasks import watch as task
from pipeline.watching.callbacks import passes
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.observation import Observation
from pipeline.watching.rate_round import RateRound
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.session_round import SessionRound
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.table import ObservedTable


@pytest.fixture
def world(settings: Settings) -> World:
    return World(settings)


def rounds(world: World, *, end: bool = False) -> list[str]:
    """Kinds of what is found until nothing is left to do."""
    found: list[str] = []
    for _ in range(12):
        told = world.round(end=end)
        found += [item.kind for item in told.found]
        if not told.more:
            return found
    raise AssertionError("the rounds never end")


def failed(world: World) -> dict[str, int]:
    status = read_status(world.settings, world.client)
    by_workload = {name: one.failed for name, one in status.left_out.items()}
    assert status.watching["failed"] >= sum(by_workload.values())
    return by_workload


def broken_anomaly(world: World, at: int) -> None:
    """The observation at this place of the list names a time that no calendar has."""
    key = world.keys.watching("observations")
    seen = Observation.unpack(world.client.lindex(key, at))
    wrong = dict(seen.anomalies.columns) | {"first": [1 << 60] * seen.anomalies.height}
    seen = replace(seen, anomalies=ObservedTable(seen.anomalies.schema, wrong))
    world.client.lset(key, at, seen.pack())


def test_of_a_broken_observation_only_what_is_broken_is_lost(world: World) -> None:
    world.stored(*GOOD)
    world.stored(*BAD, anomalous=True, workload="bank")
    world.stored(("z", 9, FAULT))
    broken_anomaly(world, 1)
    assert sorted(rounds(world, end=True)) == ["session-event", "session-event"]
    assert failed(world) == {"bank": 2}, "two anomalous templates, which are in no incident"
    pulses = world.client.hgetall(world.keys.watching("pulses"))
    assert set(pulses) == {b"shop", b"bank"}, "its lines are in the rates"


def test_marks_that_cannot_be_read_lose_no_observation_and_no_finding(world: World) -> None:
    def broken(*_: object) -> set[int]:
        raise ValueError("a mark that nobody can read")

    world.watcher.callbacks = replace(world.watcher.callbacks, normal=broken)
    world.stored(*BAD)
    world.round()
    world.later(70)
    found = []
    for n in range(5):
        world.stored((f"good-{n}", 100 + n, OPEN))
        found += world.round().found
    assert [item.kind for item in found] == ["session-event"]
    assert (world.open(), world.waits(), failed(world)) == (5, 0, {})


def test_a_due_session_that_no_round_can_close_is_given_up_and_what_came_since_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*BAD)
    world.round()
    world.later(70)
    within = SessionRound._within_budget

    def broken(self: SessionRound, closed: Any, *more: Any) -> Any:
        if closed:
            raise ValueError("a session that cannot be weighed")
        return within(self, closed, *more)

    monkeypatch.setattr(SessionRound, "_within_budget", broken)
    for n in range(3):
        world.stored((f"good-{n}", 100 + n, OPEN), workload="bank")
        rounds(world)
    assert (world.open(), world.waits()) == (3, 0)
    assert failed(world) == {"shop": 1}


def test_a_fault_of_the_rates_costs_no_session_and_one_of_sessions_no_rates(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = MinuteCounts.observe

    def broken(self: MinuteCounts, seen: Observation, *, judged: bool) -> None:
        if seen.workload == "odd":
            raise ValueError("counts that cannot be added")
        observe(self, seen, judged=judged)

    monkeypatch.setattr(MinuteCounts, "observe", broken)
    world.stored(*GOOD)
    world.stored(*BAD, workload="odd")
    world.stored(("z", 9, FAULT), (None, 10, WORK))
    assert sorted(rounds(world, end=True)) == ["session-event", "session-event"]
    assert failed(world) == {"odd": 2}
    counts = MinuteCounts.unpack(world.client.hget(world.keys.watching("pulses"), "shop"))
    assert counts.newest_ms > 0


def test_a_workload_whose_rates_cannot_be_judged_loses_its_counts_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RateRound, "_rates", lambda *_: 1 / 0)
    world.stored(*GOOD)
    rounds(world, end=True)
    assert failed(world) == {"shop": 3}


def test_of_sessions_that_a_model_cannot_judge_the_others_are_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Choosy(Faults):
        def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
            if any(WORK in session for session in sessions):
                raise ValueError("no")
            return super().judge(sessions)

    rules = Choosy()
    world.watcher.callbacks = replace(world.watcher.callbacks, session_model=lambda *_: ("m1", rules))
    for n in range(9):
        world.stored((f"bad-{n}", n, OPEN), (f"bad-{n}", n, FAULT))
    world.stored(*GOOD)
    assert rounds(world, end=True) == ["session-event"] * 9
    assert failed(world) == {"shop": 3}, "the events of one session"


def test_incidents_that_fail_count_their_events(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.stored(*BAD, anomalous=True)
    with monkeypatch.context() as broken:
        broken.setattr(Incidents, "add", lambda *_: 1 / 0)
        assert rounds(world, end=True) == ["session-event"]
    assert failed(world) == {"shop": 3}, "two anomalous templates and a finding"


# ---- what Redis refuses --------------------------------------------------------------------------


def refusing(world: World, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., bool]) -> list[object]:
    """The changes that the step is asked for; it refuses some."""
    change, asked = world.watcher.state.change, list[object]()

    def watched(changes: Any, **more: Any) -> bool:
        asked.append(changes)
        if refuses(changes):
            raise redis.ResponseError("ERR too many results to unpack")
        return change(changes, **more)

    monkeypatch.setattr(world.watcher.state, "change", watched)
    return asked


def test_a_step_that_redis_refuses_for_ever_is_not_tried_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*GOOD)
    asked = refusing(world, monkeypatch, lambda changes: bool(changes.sessions))
    rounds(world)
    assert len(asked) <= 4
    assert (world.open(), world.waits()) == (0, 0)
    assert failed(world)["shop"] >= 3
    world.stored((None, 5, WORK))
    rounds(world)
    assert world.waits() == 0


def test_where_redis_refuses_every_step_the_observations_stay_and_the_call_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*GOOD)
    asked = refusing(world, monkeypatch, lambda _: True)
    told = world.round()
    assert (told.more, told.unread, world.waits()) == (False, 1, 1)
    assert len(asked) <= 4


def test_watching_that_could_write_nothing_is_not_done(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.messages.app import make_app
    from pipeline.tasks.context import Context

    world = World(settings)
    world.leases.release(world.lease)
    context = Context(make_app(settings), settings)
    world.stored(*GOOD)
    refuse = redis.ResponseError("ERR too many results to unpack")
    with monkeypatch.context() as broken:
        broken.setattr(context.watcher.state, "change", lambda *_, **__: (_ for _ in ()).throw(refuse))
        assert not task.watch_stored(context)
    assert world.waits() == 1
    assert task.watch_stored(context)
    assert world.waits() == 0


@pytest.mark.parametrize(
    ("failure", "heals"),
    [
        (redis.ResponseError("ERR too many results to unpack"), False),
        (redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
        (redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'."), True),
        (redis.ConnectionError("cut"), True),
        (RedisUnavailable("away"), True),
        (OSError(28, "No space left on device"), True),
        (ValueError("no"), False),
    ],
)
def test_a_refusal_of_redis_heals_and_a_wrong_command_does_not(failure: Exception, heals: bool) -> None:
    assert passes(failure) is heals
