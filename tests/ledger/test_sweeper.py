"""The sweeper on a real ledger and a real broker: it sends the difference between the two, no more and no
less."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from pool_devices import put_devices

from pipeline.errors import RedisUnavailable
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.values import LeaseMode, Need
from pipeline.messages.app import make_app
from pipeline.messages.routing import ALL_QUEUES, BACKFILL, QUEUE_CPU, QUEUE_GPU, QUEUE_INGEST, STAGE_TASK
from pipeline.messages.submit import Submit
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.tasks import infer, periodic
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import WorkerProfile


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    own = settings.replace(overdue_ms=600_000)
    app = make_app(own)
    yield Context(app, own)
    app.close()


def accept(context: Context, *names: str) -> None:
    for name in names:
        batch = Batch(
            batch_id=name, workload="shop", source="push", source_key="k", purpose=Purpose.SCORE,
            arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC", records=raw_frame(["a", "b"]),
        )  # fmt: skip
        assert context.ledger.intake.accept(batch) == Accepted(batch_id=name)


def let_pass(context: Context, *names: str) -> None:
    """As if nobody had taken these for longer than `overdue_ms`; a claim on them has expired."""
    ledger = context.ledger
    for name in names:
        ledger.client.zadd(ledger.keys.due, {name: 1})
        ledger.client.hset(ledger.keys.batch(name), "deadline", 1)


def take(context: Context, name: str, stage: Stage = Stage.INGEST) -> Claim:
    claim = context.ledger.claim(name, stage, "w")
    assert isinstance(claim, Claim), claim
    return claim


def messages(context: Context) -> dict[str, list[tuple[str, str]]]:
    """(task, batch) of every message, by queue; as a worker would find them."""
    found = {}
    for queue in ALL_QUEUES:
        raw: Any = context.client.lrange(f"{context.settings.redis.key_prefix}:{queue}", 0, -1)
        headers = [json.loads(item)["headers"] for item in raw]
        if headers:
            found[queue] = [(h["task"], h["batch"]) for h in headers]
    return found


def test_what_is_not_overdue_is_left_alone(context: Context) -> None:
    accept(context, "a")
    assert periodic.sweep(context) == 0
    assert messages(context) == {}


def test_a_batch_whose_message_was_lost_is_sent_again_once(context: Context) -> None:
    accept(context, "a", "b")
    context.submit.wake(Stage.INGEST, "b")
    let_pass(context, "a", "b")
    assert periodic.sweep(context) == 1
    expected = Counter({("logweir.ingest", "a"): 1, ("logweir.ingest", "b"): 1})
    assert Counter(messages(context)[QUEUE_INGEST]) == expected
    assert periodic.sweep(context) == 0
    let_pass(context, "a", "b")
    assert periodic.sweep(context) == 0, "a long backlog is not doubled"
    assert Counter(messages(context)[QUEUE_INGEST]) == expected


@pytest.mark.long
def test_a_backlog_longer_than_one_look_is_sent_whole_and_never_doubled(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"b{i}" for i in range(30)]
    accept(context, *names)
    look = context.ledger.backlog.overdue
    monkeypatch.setattr(context.ledger.backlog, "overdue", lambda **until: look(limit=7, **until))
    for _ in range(3):
        let_pass(context, *names)
        while periodic.sweep(context):
            pass
        assert Counter(name for _, name in messages(context)[QUEUE_INGEST]).most_common(1)[0][1] == 1
    for _ in range(6):
        let_pass(context, *names)
        for _ in range(6):
            periodic.sweep(context)
    assert sorted(name for _, name in messages(context)[QUEUE_INGEST]) == sorted(names)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_batch_of_a_dead_worker_is_sent_again_for_the_stage_it_is_in(
    context: Context, stage: Stage
) -> None:
    accept(context, "a")
    if stage is not Stage.INGEST:
        context.ledger.advance(take(context, "a"), stage)
    take(context, "a", stage)
    assert periodic.sweep(context) == 0, "a worker that renews its claim keeps it"
    let_pass(context, "a")
    assert periodic.sweep(context) == 1
    ((queue, found),) = messages(context).items()
    assert found == [(STAGE_TASK[stage], "a")]
    assert queue == {"infer": QUEUE_CPU}.get(stage.value, stage.value)
    assert take(context, "a", stage).attempts == 2


def test_finished_and_dead_batches_are_never_sent(context: Context) -> None:
    accept(context, "done", "dead")
    context.ledger.commit(take(context, "done"), warming=False, outcomes={})
    claim = take(context, "dead")
    context.ledger.dead_letter(claim, "why")
    let_pass(context, "done", "dead")  # a list that lags behind, as after a rollback
    context.client.zadd(context.ledger.keys.due, {"unknown": 1})
    assert periodic.sweep(context) == 0
    assert messages(context) == {}
    assert context.client.zcard(context.ledger.keys.due) == 0


def test_unknown_lines_go_to_a_live_gpu_worker_and_to_the_cpu_while_training_has_it(context: Context) -> None:
    put_devices(context.pool, n=1, mib=16_000)
    context.presence.beat(name="g", role="gpu", pid=1, queues=[QUEUE_GPU])
    for name, queue in (("a", QUEUE_GPU), ("b", QUEUE_CPU)):
        accept(context, name)
        context.ledger.advance(take(context, name), Stage.INFER)
        let_pass(context, name)
        for part in ("submit", "pool"):  # the pool answers from a snapshot for a moment
            context.__dict__.pop(part, None)
        periodic.sweep(context)
        assert ("logweir.infer", name) in messages(context)[queue]
        context.pool.request(Need(mode=LeaseMode.EXCLUSIVE), holder="trainer", request_id="its one lease")


def test_batches_queued_for_the_gpu_go_on_to_the_cpu_untouched_while_somebody_holds_it_alone(
    context: Context,
) -> None:
    worker = Context(context.app, context.settings, WorkerProfile(leased=True))
    put_devices(worker.pool, n=1, mib=16_000, node=this_node())
    worker.pool.request(Need(mode=LeaseMode.EXCLUSIVE), holder="trainer")
    accept(worker, "a", "b")
    for name in ("a", "b"):
        worker.ledger.advance(take(worker, name), Stage.INFER)
        assert infer.run(worker, name) is None
    assert {queue: sorted(found) for queue, found in messages(worker).items()} == {
        QUEUE_CPU: [("logweir.infer", "a"), ("logweir.infer", "b")]
    }
    assert take(worker, "a", Stage.INFER).attempts == 1, "nobody had claimed it"
    assert worker.share is not None
    worker.share.close()


def test_a_pool_that_cannot_be_swept_does_not_keep_batches_from_being_sent(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("a lease that nobody can read")

    monkeypatch.setattr(context.pool, "sweep", broken)
    accept(context, "a")
    let_pass(context, "a")
    assert periodic.sweep(context) == 1


def publish(context: Context) -> None:
    model = {"version": "m000001-0a1b2c3d", "generation": 1, "token": 1, "published": ""}
    context.client.hset(context.ledger.keys.model(), mapping=model)
    context.client.sadd(context.ledger.keys.model_names, "shared")


def test_rescoring_starts_when_a_model_is_there_and_every_batch_is_sent_once(context: Context) -> None:
    accept(context, "a", "b", "c")
    for name, warming in (("a", True), ("b", True), ("c", False)):
        context.ledger.commit(take(context, name), warming=warming, outcomes={})
    assert periodic.sweep(context) == 0
    assert context.ledger.backlog.warming() == 2
    publish(context)
    assert periodic.sweep(context) == 2
    assert Counter(messages(context)[QUEUE_INGEST + BACKFILL]) == {
        ("logweir.ingest", "a"): 1,
        ("logweir.ingest", "b"): 1,
    }
    assert periodic.sweep(context) == 0
    assert context.ledger.backlog.warming() == 0
    assert take(context, "a").rescore


def test_rescoring_goes_on_in_portions(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "RESCORE_AT_ONCE", 2)
    names = [f"b{i}" for i in range(5)]
    accept(context, *names)
    for name in names:
        context.ledger.commit(take(context, name), warming=True, outcomes={})
    publish(context)
    assert [periodic.sweep(context) for _ in range(4)] == [2, 2, 1, 0]
    assert sorted(name for _, name in messages(context)[QUEUE_INGEST + BACKFILL]) == names


def test_a_foreign_message_in_a_queue_does_not_stop_the_sweep(context: Context) -> None:
    accept(context, "a")
    key = f"{context.settings.redis.key_prefix}:{QUEUE_INGEST}"
    for junk in (b"\xff", b"[]", b"{}", b'{"headers": null}'):
        context.client.rpush(key, junk)
    let_pass(context, "a")
    assert periodic.sweep(context) == 1
    assert context.submit.waiting_ids(Stage.INGEST) == {"a"}


def test_a_sweep_without_redis_waits_for_the_next_one(context: Context) -> None:
    away = Context(context.app, context.settings)
    away.__dict__["client"] = redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None)
    with pytest.raises(RedisUnavailable):
        periodic.sweep(away)
    periodic.run(away)


def test_a_batch_that_waits_for_a_gpu_worker_that_left_is_sent_to_the_cpu(context: Context) -> None:
    accept(context, "a")
    context.ledger.advance(take(context, "a"), Stage.INFER)
    context.submit.wake(Stage.INFER, "a", queue=QUEUE_GPU)  # its worker has died since
    let_pass(context, "a")
    periodic.sweep(context)
    assert ("logweir.infer", "a") in messages(context).get(QUEUE_CPU, [])


def test_only_workloads_that_a_model_answers_are_scored_again(context: Context) -> None:
    own = context.settings.replace(own_models=("shop",))
    apart = Context(context.app, own)
    accept(context, "a")
    context.ledger.commit(take(context, "a"), warming=True, outcomes={})
    model = {"version": "m000001-0a1b2c3d", "generation": 1, "token": 1, "published": ""}
    for name in ("shop", "other"):
        context.client.hset(context.ledger.keys.model(name), mapping=model)
        context.client.sadd(context.ledger.keys.model_names, name)
        if name == "shop":
            assert periodic.sweep(context) == 0, (
                "its own model is off the settings, so it would only warm again"
            )
            assert context.ledger.backlog.warming() == 1
    assert periodic.sweep(apart) == 1
    assert take(context, "a").rescore


def test_rescoring_leaves_room_for_fresh_batches(settings: Settings) -> None:
    context = Context(make_app(settings), settings.replace(overdue_ms=600_000, max_pending_batches=5))
    names = [f"b{i}" for i in range(6)]
    for name in names:
        accept(context, name)
        context.ledger.commit(take(context, name), warming=True, outcomes={})
    publish(context)
    assert [periodic.sweep(context) for _ in range(2)] == [4, 0]
    accept(context, "fresh")
    for name in ("fresh", "b0", "b1"):
        context.ledger.commit(take(context, name), warming=False, outcomes={})
    assert periodic.sweep(context) == 2, "the rest follows as room comes"


@pytest.mark.parametrize("stage", [Stage.INGEST, Stage.INFER])
def test_a_wake_that_redis_does_not_hear_says_so(settings: Settings, stage: Stage) -> None:
    away = settings.replace(redis_url="unix:///nowhere/redis.sock")
    submit = Submit(make_app(away), connect(away), away)
    assert submit.wake(stage, "b") is False
