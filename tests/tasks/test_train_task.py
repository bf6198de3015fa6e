"""Working on requested trainings: small real trainings on the CPU, and everything that may cut one short."""

import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded
from opensearchpy import helpers
from polling import wait_until
from pool_devices import put_devices
from small_bundles import ONE, make_older, put, written

from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import ATTEMPTS, TrainingRequest, Trainings
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput, DeviceFailed, RedisUnavailable, SourceUnavailable
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.values import LeaseMode, PoolLease
from pipeline.marks.marks import State as MarkState
from pipeline.marks.marks import Target
from pipeline.messages.app import make_app
from pipeline.models import trainer
from pipeline.models.config import ModelConfig
from pipeline.models.fitting import TrainConfig
from pipeline.models.known.patterns import load_known
from pipeline.models.verdict import verdict_of
from pipeline.observe.events import read_events
from pipeline.opensearch.client import opensearch_client
from pipeline.records.batch import LearntFrom, Purpose
from pipeline.records.query import Query
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.records.versions import Live
from pipeline.redis.connection import connect
from pipeline.redis.leases import TRAINING, Leases, granted
from pipeline.service import trainings as training_service
from pipeline.service.gpu import served_rows
from pipeline.service.trainings import TrainingAsked, request_training
from pipeline.settings import Settings
from pipeline.settings.train_source import TrainSource
from pipeline.sinks.choose import parquet_of
from pipeline.tasks import periodic
from pipeline.tasks import train as task
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import WorkerProfile
from pipeline.training import documents, judging, training
from pipeline.training.judging import Judgement
from pipeline.workers import one_process

NOW = datetime(2026, 11, 20, tzinfo=UTC)
SMALL = TrainConfig(model=ModelConfig(hidden=48, feed_forward=96, layers=1), min_steps=120, max_steps=120)
QUICK = replace(SMALL, model=ModelConfig(hidden=32, feed_forward=64, layers=1), min_steps=5, max_steps=5)
MASKS = MaskSet.load()
SUBJECTS = ["queue", "cache", "lease", "worker", "batch", "socket", "index", "shard", "session", "cursor"]
VERBS = ["opened", "closed", "renewed", "flushed", "moved", "merged", "listed", "read", "sorted", "packed"]
STAGES = [TrainingState.FETCHING, TrainingState.TRAINING, TrainingState.JUDGING, TrainingState.PUBLISHING]


@pytest.fixture
def context(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(trainer, "TrainConfig", lambda: QUICK)
    own = settings.replace(retrain_backoff_s=100.0, own_models=("prod/own",))
    app = make_app(own)
    made = Context(app, own)
    made.leases.clear_quarantine()
    yield made
    app.close()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge looks, and lets everything pass: these networks have learnt next to nothing."""
    judge = judging.judge

    def lenient(*args: Any, **more: Any) -> Judgement:
        return replace(judge(*args, **more), passed=True, reason="")

    monkeypatch.setattr(judging, "judge", lenient)


def store(
    context: Context,
    workload: str = "prod/a",
    *,
    lines: int = 100,
    each: int = 10,
    level: str = "info",
    purpose: Purpose = Purpose.SCORE,
) -> None:
    """So many different lines of a workload are stored, each so many times."""
    words = itertools.islice(itertools.product(SUBJECTS, VERBS), lines)
    texts = [f"{subject} was {verb} after {n} ms" for n, (subject, verb) in enumerate(words)]
    masked = MASKS.mask(pl.Series(texts))["masked"].to_list()
    rows = [
        dict.fromkeys(RESULT_SCHEMA)
        | {
            "message": text, "workload": workload, "timestamp": NOW, "level": level, "lines": 1, "line": n + 1,
            "record_id": f"{workload}-{n}", "pattern_id": pattern_ids([m])[0], "template_id": n + 1,
        }
        for n, (text, m) in enumerate(zip(texts * each, masked * each, strict=True))
    ]  # fmt: skip
    parquet_of(context.settings, purpose).write(f"b-{workload}", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    context.client.sadd(context.ledger.keys.workloads, workload)
    context.client.hset(context.ledger.keys.totals(workload), "stored", lines * each)


def asked(context: Context, request: TrainingRequest | None = None) -> str:
    return context.trainings.request(request or TrainingRequest())[0]


def now_live(context: Context, model: str = "shared") -> Live:
    live = context.registry.current(model)
    assert live is not None
    return live


def before_showing(
    context: Context, monkeypatch: pytest.MonkeyPatch, state: TrainingState, act: Callable[[Status], None]
) -> None:
    """Do something once, just before the trainer first says that it is in this state."""
    show, done = context.trainings.show, []

    def shows(status: Status, lease: Any) -> None:
        if status.state is state and not done:
            done.append(status)
            act(status)
        show(status, lease)

    monkeypatch.setattr(context.trainings, "show", shows)


def expire(context: Context) -> None:
    context.client.hset(context.leases.keys.lease(TRAINING), "deadline", 1)


def free(context: Context) -> bool:
    return context.leases.holder_of(TRAINING) is None


@pytest.mark.long
def test_a_training_makes_a_model_that_is_judged_published_and_described(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "TrainConfig", lambda: SMALL)
    store(context)
    store(context, "prod/own/x", lines=5)
    shown: list[Status] = []
    show = context.trainings.show
    monkeypatch.setattr(context.trainings, "show", lambda s, lease: (shown.append(s), show(s, lease)))
    request_id = asked(context)
    assert task.run(context) is None
    status = context.trainings.status(request_id)
    assert (status.state, status.published, status.percent, status.reason) == (
        TrainingState.COMPLETED,
        True,
        100.0,
        "",
    )
    assert (status.lines, status.patterns, status.workloads) == (1_000, 100, {"prod/a": 1_000})
    assert (status.stored, status.device) == ({"prod/a": 1_000}, "cpu")
    live = now_live(context)
    assert live.version == status.version
    manifest = context.registry.manifest(live.version)
    assert (manifest.model, manifest.workloads, manifest.held_out != ()) == ("shared", ("prod/a",), True)
    assert manifest.query["workloads"] == ["prod/a"]
    assert manifest.learnt_from == status.learnt_from == {"prod/a": LearntFrom.RESULTS}
    note = context.registry.note(live.version)
    assert note is not None and note.state == "published" and note.judgement["passed"] is True
    assert list(dict.fromkeys(s.state for s in shown)) == STAGES
    percents = [s.percent for s in shown]
    assert percents == sorted(percents)
    assert max(s.epoch for s in shown) > 0 and max(s.loss for s in shown) > 0
    assert free(context) and not context.trainings.due()


def test_an_encoder_that_is_not_usable_fails_the_training_and_leaves_the_live_model(
    context: Context, passing: None, tmp_path: Path
) -> None:
    store(context)
    asked(context)
    assert task.run(context) is None
    live = now_live(context)
    context.settings = context.settings.replace(model_edition="transformer", encoder=tmp_path / "absent")
    request_id = asked(context)
    why = f"encoder {tmp_path / 'absent'} is no directory; name one that save_pretrained has written"
    assert task.run(context) == why
    status = context.trainings.status(request_id)
    assert (status.state, status.reason, status.retried_as) == (TrainingState.FAILED, why, "")
    assert now_live(context) == live
    with pytest.raises(BadInput, match="is no directory"):
        request_training(context.client, context.settings, TrainingAsked(), by="test")


def test_what_people_said_of_lines_is_used_in_the_next_training(
    context: Context, monkeypatch: pytest.MonkeyPatch, passing: None
) -> None:
    store(context)
    bad, rare = (pattern_ids([f"queue was {verb} after <NUM> ms"])[0] for verb in VERBS[:2])
    context.marks.put(Target.pattern(bad), MarkState.ANOMALOUS, text="")
    context.marks.put(Target.template(2), MarkState.NORMAL, text="")  # that of the other one
    context.marks.put(Target.template(3), MarkState.ANOMALOUS, text="", lasts=timedelta(milliseconds=1))
    trusted: list[frozenset[int]] = []
    fit = trainer.fit
    monkeypatch.setattr(
        trainer, "fit", lambda frame, request: (trusted.append(request.known_normal), fit(frame, request))[1]
    )
    while len(context.marks.look().holding) > 2:  # a millisecond
        pass
    asked(context)
    assert task.run(context) is None
    version = now_live(context).version
    known = load_known(context.registry.path(version))
    assert known.count(bad) == 0 and known.count(rare) == 10
    assert trusted == [frozenset({rare})]
    manifest = context.registry.manifest(version)
    assert manifest.query["marked"] == 2 and manifest.stats.distinct == 99


def test_a_known_error_of_a_baseline_stays_known_when_a_service_without_one_appears(
    context: Context, passing: None
) -> None:
    store(context, lines=40, level="error", purpose=Purpose.BASELINE)
    store(context, lines=60, level="error")  # results of a workload with a baseline teach nothing
    store(context, "prod/new", level="error")
    request_id = asked(context)
    assert task.run(context) is None
    status = context.trainings.status(request_id)
    assert status.learnt_from == {"prod/a": LearntFrom.BASELINE, "prod/new": LearntFrom.RESULTS}
    assert status.workloads == {"prod/a": 400, "prod/new": 1_000}
    version = now_live(context).version
    assert context.registry.manifest(version).learnt_from == status.learnt_from
    model = judging.Examinee.load(context.registry.path(version))
    ids = pattern_ids([f"{s} was {v} after <NUM> ms" for s, v in itertools.product(SUBJECTS, VERBS)])
    known = model.knowledge.known
    assert [known.in_baseline(number) for number in ids] == [True] * 40 + [False] * 60
    unsure = {"severe": True, "level": "error", "surprisal": 9.0, "words": [], "unseen": [], "novelty": 1.0}
    rows = [unsure | {"pattern_id": n, "prior": 2.0, "severity": None, "tokens": 6} for n in ids]
    flags = [verdict_of(row, n + 1, model.knowledge).anomalous for n, row in enumerate(rows)]
    assert flags == [False] * 40 + [True] * 60


def test_a_baseline_counts_whatever_span_was_asked_for(context: Context, passing: None) -> None:
    store(context, purpose=Purpose.BASELINE)
    late = Query(since=NOW + timedelta(seconds=1), until=NOW + timedelta(seconds=2))
    request_id = asked(context, TrainingRequest(query=late))
    assert task.run(context) is None
    assert context.trainings.status(request_id).learnt_from == {"prod/a": LearntFrom.BASELINE}


def test_a_judgement_says_that_there_was_a_live_model_that_could_not_be_read(
    context: Context, passing: None
) -> None:
    lease = granted(context.leases.request(TRAINING, "before"), TRAINING)
    written(context.registry, ONE)
    context.registry.publish(ONE, lease, at=NOW)
    context.leases.release(lease)
    make_older(context.registry, ONE)
    store(context)
    asked(context)
    assert task.run(context) is None
    note = context.registry.note(now_live(context).version)
    assert note is not None
    assert (
        note.judgement["reason"]
        == f"; the live model {ONE} cannot be read, so it could not serve as a measure"
    )


def test_a_model_of_its_own_learns_from_its_workload_alone(context: Context, passing: None) -> None:
    store(context)
    store(context, "prod/own/x", lines=40)
    asked(context, TrainingRequest(model="prod/own/x"))
    assert task.run(context) is None
    live = now_live(context, "prod/own/x")
    assert context.registry.manifest(live.version).workloads == ("prod/own/x",)
    assert context.registry.current() is None
    assert (context.version("prod/own/x"), context.version("prod/a")) == (live.version, None)


def test_what_the_judge_turns_down_is_kept_with_the_reason_and_can_be_promoted(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    asked(context)
    task.run(context)
    before = now_live(context)
    judge = judging.judge
    monkeypatch.setattr(
        judging,
        "judge",
        lambda *a, **more: replace(judge(*a, **more), passed=False, reason="alerts too often"),
    )
    second = asked(context)
    assert task.run(context) is None
    status = context.trainings.status(second)
    assert (status.state, status.published, status.reason) == (
        TrainingState.COMPLETED,
        False,
        "alerts too often",
    )
    assert now_live(context) == before
    (told,) = read_events(context.client, context.settings, types=["model.rejected"]).events
    assert told.data == {
        "version": status.version, "model": "shared", "reason": "alerts too often", "training": second
    }  # fmt: skip
    note = context.registry.note(status.version)
    assert note is not None
    assert (note.state, note.reason) == ("candidate", "alerts too often")
    assert note.judgement["candidate"]["version"] == status.version
    assert note.judgement["live"]["version"] == before.version
    assert context.registry.promote(status.version, at=NOW).version == status.version


def test_a_live_model_that_cannot_be_read_keeps_no_new_one_back(context: Context, passing: None) -> None:
    store(context)
    asked(context)
    task.run(context)
    first = now_live(context)
    (context.registry.path(first.version) / "manifest.json").unlink()
    asked(context)
    assert task.run(context) is None
    live = now_live(context)
    assert live.version != first.version and live.previous == first.version


def test_what_waits_is_worked_on_one_after_the_other_each_in_a_task_of_its_own(
    context: Context, passing: None
) -> None:
    store(context)
    names = [asked(context), asked(context, TrainingRequest(workloads=("prod/a",)))]
    assert task.run(context) is None
    assert context.trainings.due() == 1 and context.submit.training_waits()
    assert task.run(context) is None
    assert task.run(context) is None, "a message too many finds nothing to do"
    found = [context.trainings.status(name) for name in names]
    assert all(s.state is TrainingState.COMPLETED for s in found)
    first, second = sorted(found, key=lambda s: s.started_ms)
    assert first.ended_ms <= second.started_ms
    assert now_live(context).history == (first.version, second.version)
    assert now_live(context).generation == 2


def test_old_versions_are_retired_after_a_training(context: Context, passing: None) -> None:
    store(context)
    old = [f"m00000{n}-00000000" for n in range(3)]
    put(context.registry, *old)
    context.registry.keep = 1
    asked(context)
    task.run(context)
    assert context.registry.versions() == [old[2], now_live(context).version]


# What cannot give a model


@pytest.mark.parametrize(
    ("stored", "request_", "words"),
    [
        ({}, TrainingRequest(), "no line of any workload is stored; send logs first"),
        ({}, TrainingRequest(workloads=("gone",)), "no line of gone is stored; send logs first"),
        (
            {"prod/a": (3, 5)},
            TrainingRequest(),
            r"3 distinct lines in 15 records; at least 2 distinct lines and 20 records",
        ),
        (
            {"prod/a": (1, 50)},
            TrainingRequest(),
            r"1 distinct lines in 50 records; at least 2 distinct lines and 20 records",
        ),
        (
            {"prod/a": (5, 5)},
            TrainingRequest(patterns=("dev",)),
            "no workload with logs matches dev; send logs first",
        ),
        ({"prod/own/x": (5, 5)}, TrainingRequest(), r"every workload has a model of its own \(own_models\)"),
        (
            {"prod/a": (5, 5)},
            TrainingRequest(query=Query(since=datetime.now(UTC) + timedelta(days=1))),
            "the time range begins at .*in the future",
        ),
    ],
)
def test_too_little_to_learn_from_fails_at_once_and_says_what_is_needed(
    context: Context, stored: dict[str, tuple[int, int]], request_: TrainingRequest, words: str
) -> None:
    for workload, (lines, each) in stored.items():
        store(context, workload, lines=lines, each=each)
    request_id = asked(context, request_)
    why = task.run(context)
    status = context.trainings.status(request_id)
    assert (status.state, status.reason, status.retried_as) == (TrainingState.FAILED, why, "")
    assert why is not None and re.search(words, why), why
    assert free(context) and context.registry.versions() == []


def test_a_watchlist_that_matches_no_logs_does_not_train_on_the_others(context: Context) -> None:
    store(context)
    context.watchlist.add("quiet/*")
    asked(context)
    why = task.run(context)
    assert why is not None and why.startswith("no workload with logs matches quiet/*")


def raising(error: Exception) -> Callable[..., Any]:
    def pages(*_: Any) -> Any:
        raise error

    return pages


def test_a_store_that_is_down_is_tried_again_with_a_growing_pause_and_then_given_up(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    monkeypatch.setattr(
        training.StoredLines, "pages", raising(SourceUnavailable("the store is down; it is tried again"))
    )
    first, pauses = asked(context), []
    for _ in range(task.PATIENT_ATTEMPTS):
        assert task.run(context) == "the store is down; it is tried again"
        latest = context.trainings.followed(first)
        if latest.state is TrainingState.QUEUED:
            pauses.append((latest.not_before_ms - latest.created_ms) // 1000)
            assert task.run(context) is None, "not before the pause is over"
            context.client.zadd(context.trainings.keys.training_queue, {latest.request_id: 1})
    assert pauses == [100, 200, 400, 800, 1600, 3200, 3600, 3600, 3600]
    last = context.trainings.followed(first)
    assert (last.state, last.attempt, last.retried_as) == (TrainingState.FAILED, task.PATIENT_ATTEMPTS, "")


@pytest.mark.long
def test_a_fault_of_ours_is_tried_again_a_few_times(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    monkeypatch.setattr(training.StoredLines, "pages", raising(ValueError("broken")))
    first = asked(context)
    for _ in range(ATTEMPTS):
        assert task.run(context) == "ValueError: broken"
        for name in context.client.zrange(context.trainings.keys.training_queue, 0, -1):
            context.client.zadd(context.trainings.keys.training_queue, {name: 1})
    last = context.trainings.followed(first)
    assert (last.state, last.attempt) == (TrainingState.FAILED, ATTEMPTS)
    assert not context.trainings.due() and free(context)


def test_a_training_goes_on_where_it_was_asked_for_again_after_the_store_came_back(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    with monkeypatch.context() as down:
        down.setattr(training.StoredLines, "pages", raising(SourceUnavailable("down")))
        first = asked(context)
        task.run(context)
    retry = context.trainings.followed(first)
    context.client.zadd(context.trainings.keys.training_queue, {retry.request_id: 1})
    assert task.run(context) is None
    assert context.trainings.followed(first).state is TrainingState.COMPLETED


# What cuts one short


@pytest.mark.parametrize("state", STAGES)
def test_a_cancelled_training_ends_at_its_next_step_and_publishes_nothing(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch, state: TrainingState
) -> None:
    store(context)
    before_showing(context, monkeypatch, state, lambda s: context.trainings.cancel(s.request_id) and None)
    request_id = asked(context)
    assert task.run(context) is None
    status = context.trainings.status(request_id)
    assert (status.state, status.reason, status.retried_as) == (
        TrainingState.CANCELLED,
        "an operator cancelled it",
        "",
    )
    assert context.registry.current() is None
    assert free(context) and not context.trainings.due()
    for version in context.registry.versions():
        note = context.registry.note(version)
        assert note is not None and note.state == "candidate"
    assert bool(context.registry.versions()) == (state in (TrainingState.JUDGING, TrainingState.PUBLISHING))


def test_a_run_that_ends_stops_its_training_though_redis_takes_no_word_of_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk. A process that ends while torch computes in another thread is aborted."""
    monkeypatch.setattr(trainer, "TrainConfig", lambda: replace(SMALL, min_steps=10**6, max_steps=10**6))
    stopping = threading.Event()
    submit = one_process.LocalSubmit(connect(settings), settings)
    context = one_process._LocalContext(settings, submit, lambda _: None, stopping)
    context.leases.clear_quarantine()
    store(context)
    request_id = asked(context)

    def show(status: Status, _lease: object) -> None:
        if status.state is TrainingState.TRAINING:
            stopping.set()
        raise RedisUnavailable("Redis refuses writes")

    monkeypatch.setattr(context.trainings, "show", show)
    task.run(context)
    status = context.trainings.status(request_id)
    assert (status.state, status.reason) == (TrainingState.CANCELLED, "the run ends")


@pytest.mark.parametrize("state", STAGES)
def test_a_training_that_was_given_to_another_process_changes_nothing_more(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch, state: TrainingState
) -> None:
    store(context)

    def taken_over(_: Status) -> None:
        expire(context)
        periodic.end_lost(context)

    before_showing(context, monkeypatch, state, taken_over)
    request_id = asked(context)
    task.run(context)
    status = context.trainings.status(request_id)
    assert status.state is TrainingState.FAILED and "the trainer died while" in status.reason
    assert context.registry.current() is None
    waiting = [s for s in context.trainings.recent() if s.state is TrainingState.QUEUED]
    assert [s.request_id for s in waiting] == [status.retried_as]


def test_a_lease_that_expires_just_before_publishing_publishes_nothing_and_is_tried_again(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    publish = context.registry.publish

    def late(*args: Any, **kwargs: Any) -> int:
        expire(context)
        return publish(*args, **kwargs)

    monkeypatch.setattr(context.registry, "publish", late)
    request_id = asked(context)
    why = task.run(context)
    assert why is not None and "was lost" in why and "is not published" in why
    status = context.trainings.status(request_id)
    assert status.state is TrainingState.FAILED and status.retried_as
    assert context.registry.current() is None


def test_a_redis_away_for_a_moment_does_not_cost_the_training(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    calls = itertools.count()
    run = context.trainings.scripts.run

    def flaky(name: str, keys: list[str], args: list[Any]) -> Any:
        if name == "training/show" and next(calls) % 2 == 0:
            raise RedisUnavailable("away")
        return run(name, keys, args)

    monkeypatch.setattr(context.trainings.scripts, "run", flaky)
    asked(context)
    assert task.run(context) is None
    assert now_live(context).generation == 1


def test_while_another_trainer_holds_the_lease_nothing_is_taken(
    context: Context, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    request_id = asked(context)
    other = granted(Leases(context.client, settings).request(TRAINING, "other"), TRAINING)
    imported = []
    monkeypatch.setattr(task.training, "load_fitting", lambda: imported.append(free(context)))
    assert task.run(context) is None
    assert not imported, "a trainer that waits needs no torch"
    assert context.trainings.status(request_id).state is TrainingState.QUEUED
    assert not periodic.revive(context), "the other one takes what waits when it is done"
    context.leases.release(other)
    assert periodic.revive(context)
    assert context.submit.training_waits()
    assert not periodic.revive(context), "a message lies there already"
    assert task.run(context) is None
    assert imported == [True], "an import of seconds under the lease could cost the lease"


def test_a_trainer_without_a_gpu_leaves_a_training_for_a_while_to_one_with_a_gpu(context: Context) -> None:
    request_id = asked(context)

    def state() -> TrainingState:
        return context.trainings.status(request_id).state

    context.presence.beat(name="train-gpu@b", role="train-gpu", pid=1, queues=("train",))
    assert task.run(context) is None and state() is TrainingState.QUEUED
    trouble = context.presence.trouble()
    assert trouble is not None
    assert trouble.reason == "a training is left to train-gpu@b, which has a GPU, for 30 s at most"
    queue = context.trainings.keys.training_queue
    context.client.zincrby(queue, -1000 * task.GPU_FIRST_S, request_id)
    assert context.trainings.waited_s() > task.GPU_FIRST_S
    assert task.run(context) is not None and state() is TrainingState.FAILED  # there is nothing to learn from


def test_a_trainer_without_a_gpu_takes_a_training_at_once_where_no_other_lives(context: Context) -> None:
    request_id = asked(context)
    context.presence.beat(name="train@b", role="train", pid=1, queues=("train",))
    task.run(context)
    assert context.trainings.status(request_id).state is TrainingState.FAILED


def test_the_next_training_ends_the_one_whose_trainer_died_before_it(
    context: Context, settings: Settings, passing: None
) -> None:
    store(context)
    dead = asked(context)
    other = granted(Leases(context.client, settings).request(TRAINING, "other"), TRAINING)
    assert context.trainings.take(other) is not None
    expire(context)
    second = asked(context, TrainingRequest(workloads=("prod/a",)))
    assert task.run(context) is None
    assert context.trainings.status(second).state is TrainingState.COMPLETED
    status = context.trainings.status(dead)
    assert status.state is TrainingState.FAILED
    assert context.trainings.status(status.retried_as).state is TrainingState.QUEUED
    assert context.trainings.now().request_id == status.retried_as


def test_the_sweep_revives_the_training_of_a_dead_trainer_once(context: Context, settings: Settings) -> None:
    store(context)
    dead = asked(context)
    other = granted(Leases(context.client, settings).request(TRAINING, "other"), TRAINING)
    assert context.trainings.take(other) is not None
    assert not periodic.revive(context)
    expire(context)
    assert not periodic.revive(context), "it is in its pause"
    retry = context.trainings.status(dead).retried_as
    context.client.zadd(context.trainings.keys.training_queue, {retry: 1})
    assert [periodic.revive(context) for _ in range(3)] == [True, False, False]


def test_trainers_without_redis_say_so(context: Context) -> None:
    away = Context(context.app, context.settings)
    away.__dict__["client"] = redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None)
    with pytest.raises(RedisUnavailable):
        task.run(away)


def test_when_the_pointer_moves_while_the_judge_looks_it_judges_again_against_what_is_live_then(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    for _ in range(2):
        asked(context)
        assert task.run(context) is None
    second = now_live(context)
    judge, against = judging.judge, []

    def looks(candidate: Any, live: Any, *rest: Any, **more: Any) -> Any:
        against.append(live.version)
        if len(against) == 1:
            context.registry.roll_back(at=datetime(2026, 11, 20, tzinfo=UTC))
        return judge(candidate, live, *rest, **more)

    monkeypatch.setattr(judging, "judge", looks)
    asked(context)
    assert task.run(context) is None
    assert against == [second.version, second.previous], "an operator's rollback is not undone unseen"
    assert now_live(context).history == (second.previous, now_live(context).version)


def test_a_publication_whose_answer_was_lost_is_a_training_that_completed(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)
    publish = context.registry.publish

    def lost(*args: Any, **kwargs: Any) -> int:
        publish(*args, **kwargs)
        raise RedisUnavailable("the answer was lost")

    monkeypatch.setattr(context.registry, "publish", lost)
    request_id = asked(context)
    assert task.run(context) is None
    status = context.trainings.status(request_id)
    assert (status.state, status.published, status.retried_as) == (TrainingState.COMPLETED, True, "")
    assert now_live(context).version == status.version


def test_a_training_past_its_time_limit_says_where_it_was(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(context)

    def too_long(_status: Status) -> None:
        raise SoftTimeLimitExceeded

    before_showing(context, monkeypatch, TrainingState.TRAINING, too_long)
    asked(context)
    why = task.run(context)
    assert why is not None and "longer than its time limit" in why and "training" in why


def pooled(context: Context) -> Context:
    """As a trainer on a GPU works, but for the arithmetic."""
    made = Context(context.app, context.settings, WorkerProfile(leased=True))
    made.leases.clear_quarantine()
    return made


def test_a_training_has_its_gpu_for_itself_from_the_fit_until_it_has_published(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_ = pooled(context)
    put_devices(trainer_.pool, n=1, mib=16_000, node=this_node())
    store(trainer_)
    asked(trainer_)
    seen: dict[TrainingState, list[PoolLease]] = {}
    models: list[dict[str, Any]] = []
    before_showing(
        trainer_,
        monkeypatch,
        TrainingState.TRAINING,
        lambda _: models.extend(served_rows(trainer_.client, trainer_.settings)),
    )
    for state in (
        TrainingState.FETCHING,
        TrainingState.TRAINING,
        TrainingState.JUDGING,
        TrainingState.PUBLISHING,
    ):
        before_showing(
            trainer_,
            monkeypatch,
            state,
            lambda s: seen.update({s.state: list(trainer_.pool.snapshot().leases)}),
        )
    assert task.run(trainer_) is None
    assert seen[TrainingState.FETCHING] == [], "reading needs no GPU"
    for state in (TrainingState.TRAINING, TrainingState.JUDGING, TrainingState.PUBLISHING):
        (lease,) = seen[state]
        assert (lease.need.mode, lease.parts[0].memory_mib) == (LeaseMode.EXCLUSIVE, 16_000)
    [shown] = models
    assert (shown["model"].split()[0], shown["state"], shown["memory_mib"]) == (
        "training", "ready", 16_000 - trainer_.settings.internal.gpu_context_mib,
    )  # fmt: skip
    assert served_rows(trainer_.client, trainer_.settings) == [], "its entry ended with its lease"
    assert trainer_.pool.snapshot().leases == ()
    assert now_live(trainer_).version


def test_a_training_whose_gpu_is_taken_away_publishes_nothing_and_is_queued_again(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_ = pooled(context)
    put_devices(trainer_.pool, n=1, mib=16_000, node=this_node())
    store(trainer_)
    asked(trainer_)
    losses: list[threading.Event] = []
    device = task._device

    @contextmanager
    def noted(*args: Any) -> Iterator[training.Workplace]:
        with device(*args) as place:
            assert place.lost is not None
            losses.append(place.lost)
            yield place

    monkeypatch.setattr(task, "_device", noted)

    def take_away(_: Status) -> None:
        (lease,) = trainer_.pool.snapshot().leases
        trainer_.pool.revoke(lease.lease_id, "the operator needs it")
        assert wait_until(losses[0].is_set, timeout_s=10), "its renewal says so"

    before_showing(trainer_, monkeypatch, TrainingState.JUDGING, take_away)
    why = task.run(trainer_)
    assert why is not None
    assert "GPU was lost" in why
    assert trainer_.registry.current() is None
    assert [status.state for status in trainer_.trainings.active()] == [TrainingState.QUEUED]


def test_a_trainer_whose_machine_has_no_usable_gpu_trains_on_its_cpu(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_ = pooled(context)
    put_devices(trainer_.pool, n=1, mib=16_000, node=this_node())

    def broken(_: PoolLease) -> None:
        raise DeviceFailed("CUDA does not start")

    monkeypatch.setattr(trainer_.models, "begin", broken)
    store(trainer_)
    asked(trainer_)
    assert task.run(trainer_) is None
    assert now_live(trainer_).version
    assert trainer_.pool.snapshot().leases == ()


@pytest.mark.long
def test_a_trainer_on_a_machine_without_a_gpu_in_the_pool_trains_on_its_cpu(
    context: Context, passing: None
) -> None:
    trainer_ = pooled(context)
    store(trainer_)
    asked(trainer_)
    assert task.run(trainer_) is None
    assert now_live(trainer_).version


def test_a_trainer_whose_gpu_is_not_healthy_does_not_wait_for_it(context: Context, passing: None) -> None:
    trainer_ = pooled(context)
    put_devices(trainer_.pool, n=1, mib=16_000, node=this_node(), why="XID 79")
    store(trainer_)
    asked(trainer_)
    assert task.run(trainer_) is None
    assert now_live(trainer_).version


@pytest.mark.long
def test_a_training_from_documents_goes_on_when_its_trainer_was_killed(
    context: Context, passing: None, monkeypatch: pytest.MonkeyPatch, opensearch: str
) -> None:
    """The trainer dies between two pages; its retry reads the others, and the model knows every message."""
    own = context.settings.replace(
        opensearch_url=opensearch, opensearch_fields=("time", "log", "level"),
        opensearch_workload_fields=("namespace_name",), retrain_backoff_s=0.1,
    )  # fmt: skip
    index = f"docs-{uuid.uuid4().hex[:10]}"
    search = opensearch_client(own)
    words = itertools.product(SUBJECTS, VERBS)
    helpers.bulk(
        search,
        (
            {"_index": index, "log": f"{subject} was {verb} after {n} ms", "namespace_name": "shop", "level": "ERROR" if n < 50 else "INFO"}
            for n, (subject, verb) in enumerate([*words] * 10)
        ),
        refresh=True,
    )  # fmt: skip
    store(context)  # the judge compares on what the pipeline has stored
    context.settings, context.trainings = own, Trainings(context.client, own)
    asked_for = TrainingAsked(source=TrainSource(store="opensearch", index=index, level_not=("error",)))
    monkeypatch.setattr(training_service, "app_of", lambda _: context.app)
    request_id, _ = training_service.request_training(context.client, own, asked_for, by="a test")
    read: list[int] = []
    pages = documents.DocumentReader.pages

    def counted(reader: documents.DocumentReader) -> Iterator[pl.DataFrame]:
        reader.size = reader.together = 100
        for page in pages(reader):
            read.append(page.height)
            if len(read) == 5:
                raise KeyboardInterrupt  # as a kill: nothing of the task's own runs any more
            yield page

    monkeypatch.setattr(documents.DocumentReader, "pages", counted)
    with pytest.raises(KeyboardInterrupt):
        task.run(context)
    expire(context)
    periodic.end_lost(context)
    assert wait_until(lambda: context.trainings.due() == 1, timeout_s=10)
    task.run(context)
    status = context.trainings.followed(request_id)
    assert (status.state, status.published, status.attempt) == (TrainingState.COMPLETED, True, 2), status
    assert sum(read[5:]) == 950  # the retry reads all of them again
    manifest = context.registry.manifest(status.version)
    assert manifest.query["documents"]["index"] == index
    assert manifest.query["documents"]["level_not"] == ["error"]
    assert manifest.workloads == ("shop",)
    with pytest.raises(BadInput, match=r"no document of .* is selected"):
        training_service.request_training(
            context.client, own, replace(asked_for, until=NOW, since=NOW - timedelta(days=1)), by="a test"
        )
    search.indices.delete(index=index)
    search.close()
