"""The queue of trainings on a real Redis: merged, one at a time, ended once, retried, whatever dies."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeline.controller import trainings as module
from pipeline.controller.arguments import RequestArgs
from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import (
    ATTEMPTS,
    KEEP_S,
    REQUESTS,
    TrainingRequest,
    Trainings,
    backoff_s,
    next_attempt,
    query_of,
)
from pipeline.errors import BadInput, BadPayload, Cancelled, RedisUnavailable, StaleToken, TrainingsFull
from pipeline.records.query import Query
from pipeline.redis.arguments import named_arguments
from pipeline.redis.leases import TRAINING, Lease, Leases, Refused, granted
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def trainings(client: "redis.Redis", settings: Settings) -> Trainings:
    return Trainings(client, settings.replace(retrain_backoff_s=10.0))


@pytest.fixture
def leases(client: "redis.Redis", settings: Settings) -> Leases:
    return Leases(client, settings)


def lease(leases: Leases, holder: str = "trainer") -> Lease:
    return granted(leases.request(TRAINING, holder), TRAINING)


def expire(leases: Leases) -> None:
    leases.client.hset(leases.keys.lease(TRAINING), "deadline", 1)


def let_pause_pass(trainings: Trainings) -> None:
    key = trainings.keys.training_queue
    for name in trainings.client.zrange(key, 0, -1):
        trainings.client.zadd(key, {name: 1}, xx=True)


def begun(
    trainings: Trainings, leases: Leases, request: TrainingRequest | None = None
) -> tuple[Status, TrainingRequest, Lease]:
    trainings.request(request or TrainingRequest())
    held = lease(leases)
    taken = trainings.take(held)
    assert taken is not None
    return *taken, held


def never(_version: str) -> bool:
    return False


def test_a_request_comes_back_from_redis_as_it_was() -> None:
    query = Query(
        store="opensearch", workloads=("a/ü",), since=NOW, until=NOW + timedelta(days=1), exclude_words=("x",),
        exclude_anomalous=True,
    )  # fmt: skip
    request = TrainingRequest(
        model="prod/a", workloads=("prod/a",), patterns=("p*",), query=query, asked_by="controller", why="a\nb",
        answers=("age:1",), attempt=2, retry_of="r",
    )  # fmt: skip
    assert REQUESTS.from_json(REQUESTS.to_json(request)) == request
    for text in (
        "",
        "[]",
        "5",
        "{}",
        '{"model": 1}',
        REQUESTS.to_json(request).replace('"attempt":2', '"attempt":"x"'),
    ):
        with pytest.raises(BadPayload, match="training request is not readable"):
            REQUESTS.from_json(text)


def test_equal_requests_are_one_while_the_first_waits_whoever_asks(trainings: Trainings) -> None:
    first, new = trainings.request(TrainingRequest(patterns=("prod/*",), why="by hand"))
    assert new
    assert trainings.request(TrainingRequest(patterns=("prod/*",), asked_by="controller", why="drift")) == (
        first,
        False,
    )
    for other in (
        TrainingRequest(),
        TrainingRequest(model="prod/a", patterns=("prod/*",)),
        TrainingRequest(workloads=("prod/*",)),
        TrainingRequest(patterns=("prod/*",), query=Query(exclude_anomalous=True)),
    ):
        assert trainings.request(other)[1], other
    assert trainings.due() == 5
    assert trainings.status(first).why == "by hand"


def test_requests_of_a_moving_span_are_merged_when_they_follow_each_other(settings: Settings) -> None:
    daily = settings.replace(train_span_s=86_400.0)
    queries = [query_of(daily, NOW + timedelta(seconds=s)) for s in range(0, 3_600, 60)]
    assert len({q.key for q in queries}) <= 6, "an hour holds five hundredths of a day"
    for q, s in zip(queries, range(0, 3_600, 60), strict=True):
        assert q.since is not None
        reach = (NOW + timedelta(seconds=s) - q.since).total_seconds()
        assert 86_400 <= reach <= 86_400 * 1.01
    assert query_of(settings, NOW).since is None
    brief = query_of(settings.replace(train_span_s=1.0), NOW + timedelta(microseconds=7)).since
    assert brief == NOW - timedelta(seconds=1)


def test_an_equal_request_waits_beside_the_one_that_runs(trainings: Trainings, leases: Leases) -> None:
    status, _, _ = begun(trainings, leases)
    second, new = trainings.request(TrainingRequest())
    assert new and second != status.request_id
    assert {s.state for s in trainings.recent()} == {TrainingState.QUEUED, TrainingState.FETCHING}
    assert trainings.now().request_id == status.request_id


def test_a_training_goes_through_its_states_and_leaves_its_figures(
    trainings: Trainings, leases: Leases
) -> None:
    assert trainings.now() == Status()
    asked, _ = trainings.request(TrainingRequest(model="prod/a", why="age", answers=("age:1",)))
    assert trainings.status(asked).state is TrainingState.QUEUED
    held = lease(leases)
    taken = trainings.take(held)
    assert taken is not None
    status, request = taken
    assert (status.state, status.running, request.model) == (TrainingState.FETCHING, True, "prod/a")
    for state in (TrainingState.TRAINING, TrainingState.JUDGING, TrainingState.PUBLISHING):
        status = replace(
            status, state=state, percent=50.0, elapsed_s=1.5, remaining_s=2.5, epoch=3, loss=0.5, lines=10,
            patterns=4, workloads={"prod/a": 10}, stored={"prod/a": 12}, version="m000001-0a1b2c3d", device="cpu",
        )  # fmt: skip
        trainings.show(status, held)
        shown = trainings.status(asked)
        assert replace(shown, created_ms=0, started_ms=0, not_before_ms=0) == replace(
            status, created_ms=0, started_ms=0, not_before_ms=0
        )
    done = replace(status, state=TrainingState.COMPLETED, percent=100.0, published=True)
    assert trainings.end(done, held)
    ended = trainings.now()
    assert (ended.state, ended.published, ended.answers, ended.why) == (
        TrainingState.COMPLETED,
        True,
        ("age:1",),
        "age",
    )
    assert ended.created_ms <= ended.started_ms <= ended.ended_ms
    assert 0 < int(trainings.client.ttl(trainings.keys.training(asked))) <= KEEP_S
    assert not trainings.client.exists(
        trainings.keys.training_now, trainings.keys.training_keys, trainings.keys.training_queue
    )
    assert trainings.take(held) is None


def test_the_longest_waiting_is_taken_first_and_one_in_its_pause_not_at_all(
    trainings: Trainings, leases: Leases
) -> None:
    names = [trainings.request(TrainingRequest(workloads=(f"w{n}",)))[0] for n in range(3)]
    for n, name in enumerate(reversed(names)):
        trainings.client.zadd(trainings.keys.training_queue, {name: n + 1})
    held = lease(leases)
    order = []
    while taken := trainings.take(held):
        order.append(taken[0].request_id)
        trainings.end(replace(taken[0], state=TrainingState.CANCELLED), held)
    assert order == names[::-1]
    trainings.request(TrainingRequest())
    for name in trainings.client.zrange(trainings.keys.training_queue, 0, -1):
        trainings.client.zadd(trainings.keys.training_queue, {name: 2**45})
    assert (trainings.due(), trainings.take(held)) == (0, None)


@pytest.mark.parametrize("lost", ["expired", "given back", "stranger", "older token"])
def test_only_the_live_holder_of_the_lease_begins_a_training(
    trainings: Trainings, leases: Leases, lost: str
) -> None:
    asked, _ = trainings.request(TrainingRequest())
    held = lease(leases)
    if lost == "expired":
        expire(leases)
    elif lost == "given back":
        leases.release(held)
    elif lost == "stranger":
        held = replace(held, holder="x")
    else:
        held = replace(held, token=held.token - 1)
    assert trainings.take(held) is None
    assert trainings.status(asked).state is TrainingState.QUEUED


def test_a_trainer_that_died_is_not_forgotten_by_the_next_one(trainings: Trainings, leases: Leases) -> None:
    """The next lease holder may be quicker than the sweep."""
    dead, _, _ = begun(trainings, leases, TrainingRequest(workloads=("a",)))
    expire(leases)
    waiting, _ = trainings.request(TrainingRequest(workloads=("b",)))
    second = lease(leases, "second")
    assert trainings.take(second) is None, "the one before has not been ended"
    ended = trainings.end_lost(published=never)
    assert ended is not None
    assert (ended.request_id, ended.state, ended.reason) == (
        dead.request_id, TrainingState.FAILED, "the trainer died while fetching; it is tried again",
    )  # fmt: skip
    taken = trainings.take(second)
    assert taken is not None
    assert taken[0].request_id == waiting


def test_what_the_sweep_finds_alive_it_leaves_alone(trainings: Trainings, leases: Leases) -> None:
    assert trainings.end_lost(published=never) is None
    status, _, held = begun(trainings, leases)
    assert trainings.end_lost(published=never) is None
    assert trainings.status(status.request_id).running
    trainings.end(replace(status, state=TrainingState.COMPLETED), held)
    expire(leases)
    assert trainings.end_lost(published=never) is None


def test_a_dead_trainer_is_retried_with_a_growing_pause_and_given_up_after_the_last_attempt(
    trainings: Trainings, leases: Leases
) -> None:
    first, _ = trainings.request(TrainingRequest(why="age"))
    pauses = []
    for attempt in range(1, ATTEMPTS + 1):
        taken = trainings.take(lease(leases, f"t{attempt}"))
        assert taken is not None
        assert (taken[0].attempt, taken[1].why) == (attempt, "age")
        expire(leases)
        ended = trainings.end_lost(published=never)
        assert ended is not None and ended.state is TrainingState.FAILED
        following = trainings.status(ended.request_id).retried_as
        if following:
            queued = trainings.status(following)
            pauses.append(queued.not_before_ms - queued.created_ms)
            assert (queued.state, queued.retry_of) == (TrainingState.QUEUED, ended.request_id)
            assert trainings.take(lease(leases, "early")) is None
            let_pause_pass(trainings)
            expire(leases)
    assert pauses == [10_000, 20_000]
    assert trainings.due() == 0
    last = trainings.followed(first)
    assert (last.state, last.attempt) == (TrainingState.FAILED, ATTEMPTS)
    assert "as 2 times before; the log of train says why" in last.reason


def test_a_trainer_that_died_after_it_published_has_done_its_work(
    trainings: Trainings, leases: Leases
) -> None:
    status, _, held = begun(trainings, leases)
    version = "m000001-0a1b2c3d"
    trainings.show(replace(status, state=TrainingState.PUBLISHING, version=version), held)
    expire(leases)
    ended = trainings.end_lost(published=lambda v: v == version)
    assert ended is not None
    shown = trainings.status(status.request_id)
    assert (shown.state, shown.published, shown.version, shown.retried_as) == (
        TrainingState.COMPLETED,
        True,
        version,
        "",
    )
    assert trainings.due() == 0


def test_a_retry_joins_an_equal_request_that_already_waits(trainings: Trainings, leases: Leases) -> None:
    status, request, held = begun(trainings, leases)
    equal, _ = trainings.request(TrainingRequest(asked_by="controller"))
    trainings.end(
        replace(status, state=TrainingState.FAILED, reason="x"),
        held,
        retry=next_attempt(request, status.request_id),
    )
    assert trainings.status(status.request_id).retried_as == equal
    assert trainings.followed(status.request_id).request_id == equal
    assert trainings.due() == 1


def test_cancelling_what_waits_ends_it_at_once(trainings: Trainings, leases: Leases) -> None:
    asked, _ = trainings.request(TrainingRequest())
    assert trainings.cancel(asked) == "cancelled"
    status = trainings.status(asked)
    assert (status.state, status.reason) == (
        TrainingState.CANCELLED,
        "an operator cancelled it before it began",
    )
    assert (trainings.due(), trainings.take(lease(leases))) == (0, None)
    assert int(trainings.client.ttl(trainings.keys.training(asked))) > 0
    again_asked, new = trainings.request(TrainingRequest())
    assert new and again_asked != asked, "what was cancelled does not swallow the next request"


def test_cancelling_what_runs_is_told_at_its_next_step(trainings: Trainings, leases: Leases) -> None:
    status, _, held = begun(trainings, leases)
    assert trainings.cancel(status.request_id) == "asked"
    with pytest.raises(Cancelled, match="an operator cancelled it"):
        trainings.show(replace(status, state=TrainingState.TRAINING), held)
    assert trainings.end(
        replace(status, state=TrainingState.CANCELLED, reason="an operator cancelled it"), held
    )
    assert trainings.status(status.request_id).state is TrainingState.CANCELLED


def test_a_trainer_that_dies_after_it_was_cancelled_is_not_tried_again(
    trainings: Trainings, leases: Leases
) -> None:
    status, _, _ = begun(trainings, leases)
    trainings.cancel(status.request_id)
    expire(leases)
    ended = trainings.end_lost(published=never)
    assert ended is not None and ended.state is TrainingState.CANCELLED
    assert trainings.due() == 0


def test_cancelling_what_waits_for_another_try_ends_that_one(trainings: Trainings, leases: Leases) -> None:
    status, request, held = begun(trainings, leases)
    trainings.end(
        replace(status, state=TrainingState.FAILED), held, retry=next_attempt(request, status.request_id)
    )
    assert trainings.cancel(status.request_id) == "cancelled"
    assert trainings.followed(status.request_id).state is TrainingState.CANCELLED
    assert trainings.active() == []


def test_trainings_that_ended_are_numbered_in_their_order(trainings: Trainings, leases: Leases) -> None:
    held, names = lease(leases), []
    for n in range(3):
        names.append(trainings.request(TrainingRequest(workloads=(f"w{n}",)))[0])
        taken = trainings.take(held)
        assert taken is not None
        assert [s.request_id for s in trainings.active()] == [names[-1]]
        trainings.end(replace(taken[0], state=TrainingState.COMPLETED), held)
    found = trainings.ended_after(0)
    assert [status.request_id for _, status in found] == names
    numbers = [number for number, _ in found]
    assert numbers == sorted(set(numbers))
    assert [status.request_id for _, status in trainings.ended_after(numbers[1])] == names[2:]
    assert trainings.ended_after(numbers[2]) == []


def test_cancelling_what_has_ended_or_never_was_says_so(trainings: Trainings, leases: Leases) -> None:
    status, _, held = begun(trainings, leases)
    trainings.end(replace(status, state=TrainingState.COMPLETED), held)
    with pytest.raises(BadInput, match=r"has ended already; `logweir train --list`"):
        trainings.cancel(status.request_id)
    with pytest.raises(BadInput, match=r"'nobody' is not known; `logweir train --list`"):
        trainings.cancel("nobody")


def test_a_zombie_changes_nothing(trainings: Trainings, leases: Leases) -> None:
    status, request, zombie = begun(trainings, leases)
    expire(leases)
    trainings.end_lost(published=never)
    let_pause_pass(trainings)
    second = lease(leases, "second")
    taken = trainings.take(second)
    assert taken is not None
    before = trainings.recent()
    for own in (status, taken[0]):
        with pytest.raises(StaleToken, match="nothing is published"):
            trainings.show(replace(own, state=TrainingState.PUBLISHING, percent=99.0), zombie)
        assert not trainings.end(
            replace(own, state=TrainingState.COMPLETED, published=True),
            zombie,
            retry=next_attempt(request, own.request_id),
        )
    assert trainings.recent() == before


SCRIPTS = ("training/request", "training/take", "training/cancel", "training/end", "training/show")


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every script runs twice and its first answer is lost: what redis-py does when a connection breaks."""
    ran: list[str] = []
    once = Scripts.run

    def run(self: Scripts, name: str, keys: list[str], args: list[Any]) -> Any:
        if name in SCRIPTS:
            ran.append(name)
            once(self, name, keys, args)
        return once(self, name, keys, args)

    monkeypatch.setattr(Scripts, "run", run)
    return ran


def test_scripts_whose_answers_were_lost_do_everything_once(
    trainings: Trainings, leases: Leases, twice: list[str]
) -> None:
    first, new = trainings.request(TrainingRequest(workloads=("a",)))
    assert new
    second, _ = trainings.request(TrainingRequest(workloads=("b",)))
    assert trainings.due() == 2
    trainings.client.zadd(trainings.keys.training_queue, {first: 1, second: 2})
    held = lease(leases)
    taken = trainings.take(held)
    assert taken is not None
    status, request = taken
    assert status.request_id == first
    assert trainings.status(second).state is TrainingState.QUEUED, "the second run must not take another one"
    trainings.show(replace(status, state=TrainingState.TRAINING), held)
    trainings.end(
        replace(status, state=TrainingState.FAILED, reason="x"), held, retry=next_attempt(request, first)
    )
    assert [s.state for s in trainings.recent()].count(TrainingState.QUEUED) == 2
    assert trainings.cancel(second) == "cancelled"
    assert set(twice) == set(SCRIPTS)


def test_a_request_that_was_taken_before_its_answer_arrived_is_not_queued_again(
    trainings: Trainings, leases: Leases
) -> None:
    request, k = TrainingRequest(), trainings.keys
    keys = [k.training("r"), k.training_queue, k.training_keys, k.trainings]
    asked = RequestArgs(request_id="r", key=request.key, request=REQUESTS.to_json(request), most=1)
    args = [named_arguments(asked)]
    trainings.scripts.run("training/request", keys, args)
    assert trainings.take(lease(leases)) is not None
    trainings.scripts.run("training/request", keys, args)
    assert trainings.status("r").state is TrainingState.FETCHING
    assert trainings.due() == 0


def test_a_training_too_many_is_refused_and_an_equal_one_is_merged_all_the_same(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.controller.trainings.MAX_WAITING", 2)
    first, _ = trainings.request(TrainingRequest(workloads=("a",)))
    trainings.request(TrainingRequest(workloads=("b",)))
    with pytest.raises(TrainingsFull, match="2 trainings wait already"):
        trainings.request(TrainingRequest(workloads=("c",)))
    assert trainings.request(TrainingRequest(workloads=("a",))) == (first, False)
    trainings.cancel(first)
    assert trainings.request(TrainingRequest(workloads=("c",)))[1]


@pytest.mark.parametrize("text", ["not json", "{}", '{"model": "of a later build"}'])
def test_a_request_that_cannot_be_read_fails_and_does_not_stop_the_others(
    trainings: Trainings, leases: Leases, text: str
) -> None:
    bad, _ = trainings.request(TrainingRequest(workloads=("bad",)))
    good, _ = trainings.request(TrainingRequest(workloads=("good",)))
    trainings.client.hset(trainings.keys.training(bad), "request", text)
    trainings.client.zadd(trainings.keys.training_queue, {bad: 1, good: 2})
    taken = trainings.take(lease(leases))
    assert taken is not None
    assert taken[0].request_id == good
    status = trainings.status(bad)
    assert status.state is TrainingState.FAILED
    assert status.reason.startswith("a training request is not readable")


def test_what_a_newer_build_wrote_stops_neither_the_list_nor_the_others(trainings: Trainings) -> None:
    asked, _ = trainings.request(TrainingRequest())
    newer, _ = trainings.request(TrainingRequest(workloads=("a",)))
    trainings.client.hset(
        trainings.keys.training(newer),
        mapping={"state": "pondering", "status": '{"percent": 5, "mood": "calm"}'},
    )
    found = {s.request_id: s for s in trainings.recent()}
    assert (found[newer].state, found[newer].percent) == (TrainingState.NONE, 5)
    assert found[asked].state is TrainingState.QUEUED


def test_an_entry_that_has_gone_does_not_stop_the_others(trainings: Trainings, leases: Leases) -> None:
    trainings.client.zadd(trainings.keys.training_queue, {"gone": 1})
    asked, _ = trainings.request(TrainingRequest())
    taken = trainings.take(lease(leases))
    assert taken is not None
    assert taken[0].request_id == asked


def test_of_many_that_wait_the_one_that_runs_is_shown(trainings: Trainings, leases: Leases) -> None:
    status, _, held = begun(trainings, leases)
    names = [trainings.request(TrainingRequest(workloads=(f"w{n}",)))[0] for n in range(30)]
    assert trainings.now().request_id == status.request_id
    trainings.end(replace(status, state=TrainingState.COMPLETED), held)
    assert trainings.now().request_id in names
    assert trainings.now().state is TrainingState.QUEUED


def test_ended_trainings_are_forgotten_past_a_number_and_those_that_wait_never(
    trainings: Trainings, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP", 3)
    waiting, _ = trainings.request(TrainingRequest(workloads=("waits",)))
    trainings.client.zadd(trainings.keys.training_queue, {waiting: 2**45})
    held, ended = lease(leases), []
    for n in range(4):
        asked, _ = trainings.request(TrainingRequest(workloads=(f"w{n}",)))
        taken = trainings.take(held)
        assert taken is not None
        trainings.end(replace(taken[0], state=TrainingState.COMPLETED), held)
        cancelled, _ = trainings.request(TrainingRequest(workloads=(f"c{n}",)))
        trainings.cancel(cancelled)
        ended += [asked, cancelled]
    assert {s.request_id for s in trainings.recent(100)} == {waiting, *ended[-3:]}
    assert len(trainings.recent(2)) == 2


def test_asking_for_what_waits_for_another_try_begins_it_now(trainings: Trainings, leases: Leases) -> None:
    status, request, held = begun(trainings, leases)
    trainings.end(
        replace(status, state=TrainingState.FAILED), held, retry=next_attempt(request, status.request_id)
    )
    assert (trainings.due(), trainings.take(held)) == (0, None)
    found, new = trainings.request(TrainingRequest(why="now, please"))
    assert (found, new, trainings.due()) == (trainings.status(status.request_id).retried_as, False, 1)
    taken = trainings.take(held)
    assert taken is not None and taken[1].attempt == 2


def test_the_pause_doubles_up_to_an_hour() -> None:
    assert [backoff_s(n, 30.0) for n in (0, 1, 2, 3, 8, 10_000)] == [0.0, 30.0, 60.0, 120.0, 3600.0, 3600.0]


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Trainings(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    held = Lease(resource=TRAINING, holder="x", token=1, ttl_ms=1)
    calls: list[Callable[[], object]] = [
        lambda: away.request(TrainingRequest()), lambda: away.cancel("x"), lambda: away.status("x"), away.recent, away.now,
        away.due, lambda: away.take(held), lambda: away.show(Status(), held), lambda: away.end(Status(), held),
        lambda: away.end_lost(published=never),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RedisUnavailable, match="does not answer"):
            call()


class Ids:
    """Ids that rise, so that a run can be repeated."""

    given = 0

    @classmethod
    def uuid4(cls) -> uuid.UUID:
        cls.given += 1
        return uuid.UUID(int=cls.given)


class Trainers(RuleBasedStateMachine):
    """Three trainers and some operators, against a model of what must be true."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        Ids.given = 0
        settings = Settings(key_prefix=f"t{uuid.uuid4().hex[:12]}", retrain_backoff_s=900.0)
        self.trainings, self.leases = Trainings(self.client, settings), Leases(self.client, settings)
        self.held: dict[int, Lease] = {}  # what each trainer believes
        self.works: dict[int, tuple[Status, TrainingRequest]] = {}
        self.states: dict[str, TrainingState] = {}  # what must be true
        self.requests: dict[str, str] = {}  # id -> key
        self.attempts: dict[str, int] = {}
        self.runner: tuple[str, int] | None = None  # what runs, under which token
        self.owner: int | None = None  # token of the live lease
        self.asked_to_stop: set[str] = set()
        self.retried: dict[str, str] = {}  # id -> what it was tried again as

    def teardown(self) -> None:
        keys = list(self.client.scan_iter(f"{{{self.trainings.keys.prefix}}}*"))
        if keys:
            self.client.delete(*keys)
        self.client.close()

    @rule(which=st.integers(0, 2))
    def ask(self, which: int) -> None:
        request = TrainingRequest(workloads=(f"w{which}",))
        waiting = [
            i
            for i, key in self.requests.items()
            if key == request.key and self.states[i] is TrainingState.QUEUED
        ]
        found, new = self.trainings.request(request)
        assert new == (not waiting)
        if new:
            assert found not in self.states
            self.states[found], self.requests[found], self.attempts[found] = (
                TrainingState.QUEUED,
                request.key,
                1,
            )
        else:
            assert [found] == waiting

    @rule(who=st.integers(0, 2))
    def lease(self, who: int) -> None:
        answer = self.leases.request(TRAINING, f"t{who}")
        if isinstance(answer, Refused):
            assert self.owner is not None
            return
        assert self.owner in (None, answer.token)
        self.held[who], self.owner = answer, answer.token

    @rule()
    def a_lease_expires(self) -> None:
        expire(self.leases)
        self.owner = None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held.pop(who)
        assert self.leases.release(held) in (True, False)
        if held.token == self.owner:
            self.owner = None

    @rule()
    def pauses_pass(self) -> None:
        let_pause_pass(self.trainings)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[who]
        taken = self.trainings.take(held)
        may = held.token == self.owner and (self.runner is None)
        if taken is None:
            assert not may or self.trainings.due() == 0
            return
        assert may
        status, request = taken
        assert self.states[status.request_id] is TrainingState.QUEUED
        assert (request.attempt, status.attempt) == (self.attempts[status.request_id],) * 2
        self.works[who] = taken
        self.states[status.request_id] = TrainingState.FETCHING
        self.runner = (status.request_id, held.token)

    @precondition(lambda self: set(self.works) & set(self.held))
    @rule(
        data=st.data(),
        state=st.sampled_from([TrainingState.TRAINING, TrainingState.JUDGING, TrainingState.PUBLISHING]),
    )
    def show(self, data: st.DataObject, state: TrainingState) -> None:
        who = data.draw(st.sampled_from(sorted(set(self.works) & set(self.held))))
        status, held = replace(self.works[who][0], state=state), self.held[who]
        try:
            self.trainings.show(status, held)
            assert self.runner == (status.request_id, held.token)
            assert status.request_id not in self.asked_to_stop
            self.states[status.request_id] = state
        except Cancelled:
            assert self.runner == (status.request_id, held.token)
            assert status.request_id in self.asked_to_stop
        except StaleToken:
            assert self.runner != (status.request_id, held.token)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = name = data.draw(st.sampled_from(sorted(self.states)))
        while name in self.retried:
            name = self.retried[name]
        state = self.states[name]
        if state in (TrainingState.COMPLETED, TrainingState.FAILED):
            with pytest.raises(BadInput):
                self.trainings.cancel(asked)
            return
        answer = self.trainings.cancel(asked)
        assert answer == (
            "cancelled" if state in (TrainingState.QUEUED, TrainingState.CANCELLED) else "asked"
        )
        if state is TrainingState.QUEUED:
            self.states[name] = TrainingState.CANCELLED
        elif state is not TrainingState.CANCELLED:
            self.asked_to_stop.add(name)

    @precondition(lambda self: set(self.works) & set(self.held))
    @rule(
        data=st.data(),
        state=st.sampled_from([TrainingState.COMPLETED, TrainingState.FAILED, TrainingState.CANCELLED]),
    )
    def end(self, data: st.DataObject, state: TrainingState) -> None:
        who = data.draw(st.sampled_from(sorted(set(self.works) & set(self.held))))
        (status, request), held = self.works[who], self.held[who]
        retry = next_attempt(request, status.request_id) if state is TrainingState.FAILED else None
        ours = self.runner == (status.request_id, held.token)
        assert self.trainings.end(replace(status, state=state), held, retry=retry) == ours
        if ours:
            self._ended(status.request_id, state, retry)

    @rule()
    def sweep(self) -> None:
        ended = self.trainings.end_lost(published=never)
        lost = self.runner is not None and self.runner[1] != self.owner
        assert (ended is not None) == lost
        if ended is None or self.runner is None:
            return
        name = self.runner[0]
        assert ended.request_id == name
        stopped = name in self.asked_to_stop
        assert ended.state is (TrainingState.CANCELLED if stopped else TrainingState.FAILED)
        more = not stopped and self.attempts[name] < ATTEMPTS
        retry = TrainingRequest(attempt=self.attempts[name] + 1) if more else None
        self._ended(name, ended.state, retry)

    def _ended(self, name: str, state: TrainingState, retry: TrainingRequest | None) -> None:
        self.states[name], self.runner = state, None
        following = self.trainings.status(name).retried_as
        assert bool(following) == (retry is not None)
        if not following or retry is None:
            return
        assert name not in self.retried, "queued once"
        self.retried[name] = following
        if following in self.states:
            assert (
                self.states[following] is TrainingState.QUEUED
                and self.requests[following] == self.requests[name]
            )
        else:
            self.states[following], self.requests[following] = TrainingState.QUEUED, self.requests[name]
            self.attempts[following] = retry.attempt

    @invariant()
    def redis_agrees(self) -> None:
        found = {s.request_id: s for s in self.trainings.recent(1_000)}
        assert {name: s.state for name, s in found.items()} == self.states
        running = [name for name, s in found.items() if s.running]
        assert running == ([self.runner[0]] if self.runner else [])
        queued = sorted(name for name, state in self.states.items() if state is TrainingState.QUEUED)
        assert (
            sorted(n.decode() for n in self.client.zrange(self.trainings.keys.training_queue, 0, -1))
            == queued
        )
        keys = [self.requests[name] for name in queued]
        assert len(set(keys)) == len(keys), "of equal requests one waits"
        for name, s in found.items():
            ttl = int(self.client.ttl(self.trainings.keys.training(name)))
            assert (ttl > 0) == s.ended
        assert int(self.client.hlen(self.trainings.keys.training_keys)) == len(queued)


@pytest.mark.long
def test_trainers_and_operators_agree_with_the_model_whatever_happens(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainers.url = redis_url
    monkeypatch.setattr(module, "uuid", Ids)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Trainers,
        settings=examples(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
