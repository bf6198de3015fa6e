"""Two builds on one Redis: what the one before left behind is worked off, and what a newer one writes is left
to it."""

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from celery.contrib.testing.worker import start_worker
from polling import wait_until
from small_bundles import AT, ONE, TWO, make_older, written

import pipeline.ledger.ledger
import pipeline.records.delivery
from pipeline.controller.training_status import TrainingState
from pipeline.drain.learner import read_templates
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.errors import BadBundle
from pipeline.messages import routing
from pipeline.messages.app import make_app
from pipeline.models.bundle import Manifest
from pipeline.producer import Producer
from pipeline.records.batch import WIRE_VERSION, Purpose
from pipeline.records.delivery import Claim, Stage
from pipeline.records.verdict import Verdict
from pipeline.redis.leases import DRAIN, TRAINING, granted
from pipeline.settings import Settings
from pipeline.tasks import drain, infer, ingest, periodic, store
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import ModelPart, WorkerProfile
from pipeline.tasks.step import perform
from pipeline.workers.roles import ROLES, register

LEFT: dict[str, Any] = json.loads(Path(__file__).with_name("wire1.json").read_text())
SHOP = "shop/cart"
NEWER = WIRE_VERSION + 1


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    app = make_app(settings)
    yield Context(app, settings)
    app.close()


@pytest.fixture
def old(context: Context) -> Context:
    """A context on what the build with wire version 1 left, byte for byte."""
    client, prefix = context.client, context.settings.redis.key_prefix
    for name, (kind, value) in LEFT["redis"].items():
        key = (
            name.replace("{P}", "{" + prefix + "}")
            if "{P}" in name
            else f"{prefix}:{name.removeprefix('P:')}"
        )
        match kind:
            case "string":
                client.set(key, _bytes(value))
            case "hash":
                client.hset(key, mapping={_field(f): _bytes(v) for f, v in value.items()})
            case "zset":
                client.zadd(key, value)
            case "set":
                client.sadd(key, *value)
            case "list":
                client.rpush(key, *map(_bytes, value))
    for name, blob in LEFT["stored"].items():
        rows = pl.read_parquet(base64.b64decode(blob), hive_partitioning=False)
        context.sink(Purpose.SCORE).write(name, rows)
    return context


def _bytes(value: str | dict[str, str]) -> bytes:
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value.encode()


def _field(name: str) -> bytes:
    return bytes.fromhex(name[2:]) if name.startswith("0x") else name.encode()


@contextmanager
def worker(context: Context, *roles: str) -> Iterator[None]:
    """A real Celery worker of these roles, in this process."""
    for role in roles:
        register(context.app, context, ROLES[role])
    queues = [queue for role in roles for queue in ROLES[role].queues]
    context.app.finalize()
    with start_worker(
        context.app, pool="solo", concurrency=1, perform_ping_check=False, queues=queues, loglevel="ERROR"
    ):
        yield


def lying(context: Context) -> int:
    """Messages in all queues."""
    prefix = context.settings.redis.key_prefix
    return sum(int(context.client.llen(f"{prefix}:{queue}")) for queue in routing.ALL_QUEUES)


def sums(context: Context) -> dict[str, int]:
    totals = context.ledger.backlog.totals()[SHOP]
    return {name: totals.get(name, 0) for name in ("accepted", "stored", "dead", "discarded")}


def stored(context: Context, *names: str) -> list[list[str]]:
    frames = [context.sink(Purpose.SCORE).read(name, SHOP) for name in names]
    assert all(frame is not None for frame in frames)
    return [frame["message"].to_list() for frame in frames if frame is not None]


# What the build before left


def finish(context: Context, name: str) -> None:
    for stage, module in ((Stage.INGEST, ingest), (Stage.DRAIN, drain), (Stage.STORE, store)):
        perform(context, stage, name, module.step)


@pytest.mark.long
def test_a_dead_letter_of_the_build_before_is_listed_and_can_be_retried(old: Context) -> None:
    (letter,) = old.ledger.dead_letters.newest()
    assert (letter.batch_id, letter.source, letter.reason) == ("dead", "push", "ValueError: it failed")
    assert old.ledger.dead_letters.retry("dead")
    finish(old, "dead")
    assert stored(old, "dead") == [["one that dies"]]
    assert sums(old)["dead"] == 0
    assert min(old.ledger.backlog.counts().values()) >= 0, "it was counted in other sums than this build's"


def test_a_dead_letter_of_the_build_before_can_be_discarded(old: Context) -> None:
    assert old.ledger.dead_letters.discard("dead")
    assert sums(old) == {"accepted": 6, "stored": 1, "dead": 0, "discarded": 1}
    assert min(old.ledger.backlog.counts().values()) >= 0, "it was counted in other sums than this build's"


def test_a_batch_of_the_build_before_is_split_and_died_over_like_any_other(old: Context) -> None:
    claim = old.ledger.claim("waits", Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    for half in old.ledger.give_up(claim, "ValueError: it failed"):
        part = old.ledger.claim(half, Stage.INGEST, "w")
        assert isinstance(part, Claim)
        assert old.ledger.give_up(part, "ValueError: it failed") == []
    assert sums(old) == {"accepted": 6, "stored": 1, "dead": 3, "discarded": 0}


@pytest.mark.long
def test_what_the_build_before_stored_while_warming_is_scored_again_when_a_model_is_there(
    old: Context,
) -> None:
    assert old.ledger.backlog.start_rescoring(10, has_model=lambda _: True) == ["warm"]
    finish(old, "warm")  # no model after all: warming again
    assert stored(old, "warm") == [["a third shape of a line"]]
    assert (old.ledger.backlog.warming(), sums(old)["stored"]) == (1, 1)


def test_the_sweeper_sends_again_what_the_build_before_had_sent_and_redis_lost(old: Context) -> None:
    for queue in routing.ALL_QUEUES:
        old.client.delete(f"{old.settings.redis.key_prefix}:{queue}")
    periodic.sweep(old)
    assert old.submit.waiting_ids(Stage.INGEST) == {"waits"}
    assert old.submit.waiting_ids(Stage.DRAIN) == {"works"}


def test_templates_verdicts_watchlist_and_presence_of_the_build_before_are_read_and_bundles_refused(
    old: Context,
) -> None:
    (template,) = read_templates(old.client, old.ledger.keys)
    assert (template.template_id, template.text, template.workload) == (1, "a third shape of a line", SHOP)
    key = int.from_bytes(bytes.fromhex("a8a67ed5201a99fd"), "little")
    assert old.verdicts.lookup(WARMING_VERSION, [key]) == {
        key: Verdict(template_id=1, score=None, anomalous=None, reasons=("warming",))
    }
    watched = old.watchlist.look()
    assert (watched.version, watched.patterns) == (1, ("shop/*",))
    assert dict(old.presence.serving()["ingest"].versions) == {"shared": "m000001-0a1b2c3d"}
    old.presence.live()
    with pytest.raises(BadBundle, match="train again"):
        Manifest.from_json(json.dumps(LEFT["manifest"]))


def test_lines_are_stored_and_wait_for_a_training_where_the_build_before_made_the_model(
    context: Context,
) -> None:
    lease = granted(context.leases.request(TRAINING, "w"), "training")
    written(context.registry, ONE)
    context.registry.publish(ONE, lease, at=AT)
    make_older(context.registry, ONE)
    name = "fresh"
    send(context, name)
    finish(context, name)
    assert context.ledger.state(name) == "done"
    assert stored(context, name) == [["one", "two"]]
    assert context.ledger.backlog.warming() == 1
    periodic.sweep(context)
    assert context.ledger.backlog.warming() == 1, "it would come back for ever"
    written(context.registry, TWO)
    context.registry.publish(TWO, lease, at=AT)
    periodic.sweep(context)
    assert (context.ledger.backlog.warming(), context.ledger.state(name)) == (0, "ingest")


def test_a_batch_on_its_way_under_a_model_of_the_build_before_begins_again_without_one(
    context: Context,
) -> None:
    lease = granted(context.leases.request(TRAINING, "w"), "training")
    written(context.registry, ONE)
    context.registry.publish(ONE, lease, at=AT)
    name = "halfway"
    send(context, name)
    perform(context, Stage.INGEST, name, ingest.step)
    assert context.ledger.state(name) == "infer"
    make_older(context.registry, ONE)
    fresh = Context(context.app, context.settings, WorkerProfile(part=ModelPart.NETWORK))
    infer.run(fresh, name)
    assert context.ledger.state(name) == "ingest"
    finish(fresh, name)
    assert context.ledger.state(name) == "done" and context.ledger.backlog.warming() == 1


def test_a_training_that_the_build_before_queued_is_taken_and_ended(old: Context) -> None:
    lease = granted(old.leases.request(TRAINING, "w"), "training")
    taken = old.trainings.take(lease)
    assert taken is not None
    status, request = taken
    assert (request.workloads, request.why, status.state) == ((SHOP,), "because", TrainingState.FETCHING)
    assert old.trainings.end(replace(status, state=TrainingState.COMPLETED), lease)
    assert old.trainings.status(status.request_id).state is TrainingState.COMPLETED


# What a newer build writes


def send(context: Context, name: str, *, wire: int | None = None) -> str:
    """A batch; returns the name of its entry. `wire`: as if a newer build had accepted it."""
    Producer(context.ledger, context.submit, context.settings).send(
        ["one", "two"], workload=SHOP, batch_id=name
    )
    entry = context.ledger.keys.batch(name)
    if wire is not None:
        meta = json.loads(str(context.client.hget(entry, "meta"), "utf-8"))
        context.client.hset(
            entry, "meta", json.dumps(meta | {"wire": wire, "source": {"of": "another form"}})
        )
    return entry


def left_alone(context: Context, entry: str, stage: Stage) -> None:
    """Nothing of it was counted, and the sweeper will offer it again, soon."""
    state, attempts, owner, wait = context.client.hmget(entry, ["state", "attempts", "owner", "not_before"])
    assert (state, attempts, owner) == (stage.value.encode(), b"0", b"")
    assert 0 < int(wait) - context.ledger.store.now_ms() <= 2_000
    assert context.ledger.dead_letters.newest() == []
    due = context.client.zscore(context.ledger.keys.due, entry.rpartition(":")[2])
    assert due is not None and int(due) == int(wait)


@pytest.mark.long
def test_a_batch_of_a_newer_build_is_left_to_its_workers_uncounted_and_operators_are_told(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = send(context, "newer", wire=NEWER)
    for _ in range(2 * context.settings.internal.max_attempts):
        context.client.hset(entry, "not_before", 0)
        assert perform(context, Stage.INGEST, "newer", ingest.step) is None
        left_alone(context, entry, Stage.INGEST)
    trouble = context.presence.trouble()
    assert trouble is not None and "of a newer build" in trouble.reason
    context.client.hset(entry, "not_before", 0)
    meta = json.loads(str(context.client.hget(entry, "meta"), "utf-8")) | {"source": "push"}
    context.client.hset(entry, "meta", json.dumps(meta))
    monkeypatch.setattr(pipeline.records.delivery, "WIRE_VERSION", NEWER)  # a worker of that build
    finish(context, "newer")
    assert stored(context, "newer") == [["one", "two"]]


@pytest.mark.long
def test_a_worker_of_this_build_takes_the_message_of_a_newer_one_and_loses_nothing(context: Context) -> None:
    entry = send(context, "newer", wire=NEWER)
    send(context, "ours")
    with worker(context, "ingest", "drain", "store"):
        assert wait_until(lambda: context.ledger.state("ours") == "done", timeout_s=15)
        assert wait_until(lambda: lying(context) == 0, timeout_s=15)
    assert context.client.hget(entry, "state") == b"ingest"
    assert context.ledger.dead_letters.newest() == []


@pytest.mark.long
def test_work_that_a_newer_build_has_done_is_gone_on_with_by_that_build(context: Context) -> None:
    entry = send(context, "b")
    perform(context, Stage.INGEST, "b", ingest.step)
    context.client.hset(entry, "work_wire", NEWER)
    assert perform(context, Stage.DRAIN, "b", drain.step) is None
    left_alone(context, entry, Stage.DRAIN)


def test_a_batch_that_begins_again_is_ours_whatever_was_worked_out_before(context: Context) -> None:
    entry = send(context, "b")
    context.client.hset(entry, "work_wire", NEWER)
    assert isinstance(context.ledger.claim("b", Stage.INGEST, "w"), Claim)


def test_templates_of_a_newer_build_leave_the_batch_and_the_lease_to_its_learner(context: Context) -> None:
    entry = send(context, "b")
    perform(context, Stage.INGEST, "b", ingest.step)
    context.client.hset(context.ledger.keys.templates, "7", bytes([0x92, NEWER, 0x00]))
    for _ in range(2 * context.settings.internal.max_attempts):
        context.client.hset(entry, "not_before", 0)
        why = perform(context, Stage.DRAIN, "b", drain.step)
        assert why is not None and f"wire version {NEWER}" in why
    left_alone(context, entry, Stage.DRAIN)
    assert context.leases.holder_of(DRAIN) is None, "the newer learner can have it"


def test_a_stage_that_only_a_newer_build_knows_is_not_forgotten_by_our_sweeper(context: Context) -> None:
    entry = send(context, "b")
    context.client.hset(entry, "state", "sequence")
    context.client.zadd(context.ledger.keys.due, {"b": 1})
    periodic.sweep(context)
    assert context.client.zscore(context.ledger.keys.due, "b") is not None
    assert perform(context, Stage.INGEST, "b", ingest.step) is None
    assert context.client.hget(entry, "state") == b"sequence"


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(["b", "more", {"than": "we know"}], {}), (["b"], {"trace": "00-af"})],
    ids=["more arguments", "named ones"],
)
def test_a_message_that_says_more_than_this_build_knows_is_worked_on(
    context: Context, client: "redis.Redis", args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    send(context, "b")
    for queue in routing.ALL_QUEUES:
        client.delete(f"{context.settings.redis.key_prefix}:{queue}")
    context.app.send_task(routing.TASK_INGEST, args=args, kwargs=kwargs, queue=routing.QUEUE_INGEST)
    with worker(context, "ingest", "drain", "store"):
        assert wait_until(lambda: context.ledger.state("b") == "done", timeout_s=15)
