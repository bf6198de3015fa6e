"""The controller on a real ledger: what it gathers, asks for, remembers and writes down."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from msgspec import msgpack
from small_bundles import AT, ONE, TWO, make_older, written

from pipeline.controller import tick as module
from pipeline.controller.facts import AttemptOutcome
from pipeline.controller.tick import MEMORIES, WINDOW, Controller, Memory, decisions
from pipeline.controller.training_status import TrainingState
from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.drain.templates import Template, pack_template
from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import TRAINING, Lease, Leases, granted
from pipeline.settings import Settings
from pipeline.tasks import tick as task
from pipeline.tasks.context import Context


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace(retrain_min_lines=20, retrain_lines=100, retrain_backoff_s=600.0)


@pytest.fixture
def controller(client: "redis.Redis", settings: Settings) -> Controller:
    return Controller(client, settings)


def store(ledger: Ledger, workload: str, lines: int, *, batch_id: str | None = None, **more: Any) -> None:
    """So many lines of a workload are stored."""
    name = batch_id or f"{workload}-{ledger.backlog.totals().get(workload, {}).get('commits', 0)}"
    batch = Batch(
        batch_id=name, workload=workload, source="push", source_key="k", purpose=Purpose.SCORE, arrived=AT, formats=(),
        zone="UTC", records=raw_frame([f"line {n}" for n in range(lines)]),
    )  # fmt: skip
    assert ledger.intake.accept(batch) == Accepted(batch_id=name)
    claim = ledger.claim(name, Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    ledger.commit(claim, warming=False, outcomes={}, **more)


def decision(controller: Controller, model: str = SHARED) -> dict[str, Any]:
    return decisions(controller.client, controller.keys)[model]


def train_lease(controller: Controller) -> Lease:
    leases = Leases(controller.client, controller.settings)
    return granted(leases.request(TRAINING, "t"), TRAINING)


def trained(
    controller: Controller,
    state: TrainingState,
    *,
    version: str = "",
    published: bool = False,
    stored: dict[str, int] | None = None,
) -> TrainingRequest:
    """The training that waits is worked on to this end; a version is published under its lease."""
    held = train_lease(controller)
    taken = controller.trainings.take(held)
    assert taken is not None
    status, request = taken
    if version:
        written(controller.registry, version, model=request.model, workloads=tuple(stored or {}))
    if published:
        controller.registry.publish(version, held, at=AT)
    status = replace(
        status, state=state, version=version, published=published, reason="why", stored=stored or {}
    )
    assert controller.trainings.end(status, held)
    Leases(controller.client, controller.settings).release(held)
    return request


def rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rest after a training were over."""
    monkeypatch.setattr("pipeline.controller.facts.REST", timedelta(0))


def test_without_a_watchlist_nothing_is_trained_and_the_remedy_is_said(controller: Controller) -> None:
    store(controller.ledger, "prod/a", 50)
    assert controller.tick() == []
    assert decision(controller)["decision"] == "wait"
    assert "logweir watch add" in decision(controller)["why"]


def test_a_watched_workload_with_lines_is_asked_for_once(controller: Controller) -> None:
    controller.watchlist.add("prod", "quiet/*")
    assert controller.tick() == []
    store(controller.ledger, "prod/a", 15)
    store(controller.ledger, "dev/b", 500)
    assert controller.tick() == []
    assert "15 lines of 1 watched workload stored, 20 are needed" in decision(controller)["why"]
    store(controller.ledger, "prod/b", 15)
    (asked,) = controller.tick()
    written_down = decision(controller)
    assert written_down["decision"] == "retrain"
    facts = written_down["facts"]
    assert (facts["workload_count"], facts["lines"], facts["silent"]) == (2, 30, ["quiet/*"])
    status = controller.trainings.status(asked)
    assert (status.state, status.asked_by, status.model) == (TrainingState.QUEUED, "controller", SHARED)
    assert status.why == written_down["reason"] and status.answers == tuple(written_down["causes"])
    for _ in range(3):
        assert controller.tick() == []
    assert controller.trainings.due() == 1
    assert decision(controller)["why"] == "a training of this model is queued or running"


def test_a_model_that_an_older_build_made_is_replaced_by_a_training(controller: Controller) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    assert controller.tick() == []
    make_older(controller.registry, ONE)
    (asked,) = Controller(controller.client, controller.settings).tick()
    assert "older build" in controller.trainings.status(asked).why
    assert decision(controller)["causes"] == ["outdated"]


def test_templates_of_a_newer_build_are_left_for_it_to_tell(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("pipeline.opensearch.client.opensearch_client", lambda _settings: None)
    monkeypatch.setattr(
        "pipeline.sinks.template_index.write_templates",
        lambda _client, _settings, templates: told.extend(t.template_id for t in templates) or len(told),
    )
    context = Context(None, settings)
    keys = context.ledger.keys
    ours = pack_template(Template(template_id=1, text="a", severe=False, workload="w"))
    version, *rest = msgpack.decode(ours)
    client.hset(
        keys.templates, mapping={"1": ours, "2": msgpack.encode([version + 1, *rest]), "3": b"damaged"}
    )
    client.hset(keys.templates_untold, mapping={"1": 1, "2": 1, "3": 1})
    assert task.tell_templates(context) == 1
    assert told == [1]
    assert client.hkeys(keys.templates_untold) == [b"2"], "the newer build has to tell it"


def test_two_controllers_at_once_ask_for_one_training(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    other = Controller(controller.client, controller.settings)
    (asked,) = controller.tick()
    monkeypatch.setattr(other.trainings, "recent", lambda _limit: [])  # it looked before the first one asked
    assert other.tick() == []
    assert [s.request_id for s in controller.trainings.recent()] == [asked]


def test_what_a_training_answered_is_not_asked_for_again(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    request = trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    assert (request.model, request.workloads, request.patterns) == (SHARED, (), ()), (
        "what is watched when it begins"
    )
    for _ in range(2):
        assert controller.tick() == []
    facts = decision(controller)["facts"]
    assert (facts["last"]["outcome"], facts["new_lines"]) == ("completed", 0)
    store(controller.ledger, "prod/a", 60)
    assert controller.tick() == []
    store(controller.ledger, "prod/a", 60)
    assert controller.tick() == [] and "the next one is at" in decision(controller)["why"]
    rested(monkeypatch)
    assert len(controller.tick()) == 1
    assert decision(controller)["causes"] == ["volume"]


def test_an_added_workload_is_trained_and_a_removed_one_is_not(controller: Controller) -> None:
    controller.watchlist.add("prod")
    for name in ("prod/a", "prod/b", "dev/c"):
        store(controller.ledger, name, 30)
    controller.tick()
    trained(
        controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30, "prod/b": 30}
    )
    controller.watchlist.remove("prod")
    controller.watchlist.add("prod/a")
    assert controller.tick() == []
    controller.watchlist.add("dev")
    assert len(controller.tick()) == 1
    assert decision(controller)["reason"] == "1 workload was added: dev/c"
    assert decision(controller)["workloads"] == ["dev/c", "prod/a"]


@pytest.mark.parametrize(
    ("state", "published", "outcome"),
    [
        (TrainingState.COMPLETED, True, AttemptOutcome.COMPLETED),
        (TrainingState.COMPLETED, False, AttemptOutcome.CANDIDATE),
        (TrainingState.CANCELLED, False, AttemptOutcome.CANCELLED),
    ],
)
def test_the_end_of_a_training_goes_into_the_history_once(
    controller: Controller, state: TrainingState, published: bool, outcome: AttemptOutcome
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(
        controller,
        state,
        version=ONE if state is TrainingState.COMPLETED else "",
        published=published,
        stored={"prod/a": 30},
    )
    for _ in range(3):
        assert controller.tick() == []
    memory = controller._remembered(SHARED)
    assert memory.history.last is not None
    assert (memory.history.last.outcome, memory.history.last.lines) == (outcome, {"prod/a": 30})
    assert memory.history.failures == 0


def test_cancelling_what_the_controller_asked_for_is_an_answer(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    (asked,) = controller.tick()
    controller.trainings.cancel(asked)
    assert controller.tick() == []
    store(controller.ledger, "prod/a", 100)
    rested(monkeypatch)
    assert len(controller.tick()) == 1
    assert decision(controller)["causes"] == ["volume"]


def test_an_operators_training_that_was_cancelled_before_it_began_changes_nothing(
    controller: Controller,
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 200)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 200})
    controller.tick()
    before = controller._remembered(SHARED).history
    asked, _ = controller.trainings.request(TrainingRequest(workloads=("prod/a",)))
    controller.trainings.cancel(asked)
    assert controller.tick() == [], "its lines are not new again"
    assert controller._remembered(SHARED).history == before


def test_where_too_many_trainings_wait_the_controller_says_so_and_asks_at_a_later_tick(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.controller.trainings.MAX_WAITING", 0)
        assert controller.tick() == []
    assert decision(controller)["why"].startswith("0 trainings wait already, which is the limit")
    assert len(controller.tick()) == 1


def test_a_failure_is_counted_once_and_the_next_try_waits(controller: Controller) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.FAILED)
    for _ in range(3):
        assert controller.tick() == []
    memory = controller._remembered(SHARED)
    assert (memory.history.failures, memory.history.failure) == (1, "why")
    assert decision(controller)["why"].startswith("the last training failed: why; the next try is not before")
    assert memory.history.failed_at is not None
    until = datetime.fromisoformat(decision(controller)["until"])
    assert until == memory.history.failed_at + timedelta(seconds=600)


def test_a_version_that_was_rolled_back_is_noticed_once_and_not_replaced_at_once(
    controller: Controller,
) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    controller.trainings.request(TrainingRequest(workloads=("prod/a",)))
    trained(controller, TrainingState.COMPLETED, version=TWO, published=True, stored={"prod/a": 30})
    controller.tick()
    controller.registry.roll_back(at=AT)
    for _ in range(2):
        assert controller.tick() == []
    memory = controller._remembered(SHARED)
    assert memory.history.last is not None and memory.history.last.outcome is AttemptOutcome.ROLLED_BACK
    live = controller.registry.current()
    assert live is not None and memory.rolled_back_ms == live.published_ms
    controller.trainings.request(TrainingRequest())
    trained(controller, TrainingState.COMPLETED, version="m000003-0a1b2c3d", stored={"prod/a": 30})
    for _ in range(2):
        assert controller.tick() == []
    last = controller._remembered(SHARED).history.last
    assert last is not None and last.outcome is AttemptOutcome.CANDIDATE, (
        "what came later is not rolled back again"
    )


@pytest.mark.long
def test_models_of_their_own_are_decided_apart(client: "redis.Redis", settings: Settings) -> None:
    controller = Controller(client, settings.replace(own_models=("prod/own",)))
    controller.watchlist.add("prod")
    for name in ("prod/a", "prod/own/x", "prod/own/y"):
        store(controller.ledger, name, 30)
    asked = controller.tick()
    found = {controller.trainings.status(name).model for name in asked}
    assert found == {SHARED, "prod/own/x", "prod/own/y"}
    assert decision(controller)["workloads"] == ["prod/a"]
    assert decision(controller, "prod/own/x")["workloads"] == ["prod/own/x"]
    assert controller.tick() == []
    while controller.trainings.due():
        trained(controller, TrainingState.CANCELLED)
    assert controller.tick() == []


def test_drift_is_told_from_what_commits_measured(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.controller.tick.WINDOW_LINES", 1_000)
    monkeypatch.setattr("pipeline.controller.drift.REFERENCE", timedelta(0))
    controller = Controller(client, settings.replace(retrain_lines=10**9))
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    calm = {"lines": 1_000, "novel": 10, "words": 1_000, "unknown": 10, "bin0": 1_000}
    store(controller.ledger, "prod/a", 1, version=ONE, measured=calm)
    assert controller.tick() == []
    store(controller.ledger, "prod/a", 1, version=ONE, measured=calm | {"novel": 600})
    rested(monkeypatch)
    assert 0 < int(client.ttl(controller.keys.drift(ONE))) <= 30 * 86_400
    assert len(controller.tick()) == 1
    assert decision(controller)["causes"] == ["drift"]
    assert decision(controller)["facts"]["drift"]["novelty"] == pytest.approx(0.59)
    monkeypatch.undo()
    trained(controller, TrainingState.COMPLETED, version=TWO, stored={"prod/a": 32})
    assert controller.tick() == [] and decision(controller)["until"] is not None, "it rests"


def test_a_batch_counts_for_drift_once_and_under_its_own_version(controller: Controller) -> None:
    ledger = controller.ledger
    store(ledger, "prod/a", 1, version=ONE, measured={"lines": 1, "novel": 0, "bin3": 1})
    store(ledger, "prod/a", 1, version=TWO, measured={"lines": 1})
    raw = {k.decode(): int(v) for k, v in controller.client.hgetall(controller.keys.drift(ONE)).items()}
    assert raw == {"lines": 1, "bin3": 1}
    store(ledger, "prod/b", 3)
    assert not controller.client.exists(controller.keys.drift(""))


def test_a_drift_window_that_cannot_be_read_begins_anew(controller: Controller) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    store(controller.ledger, "prod/a", 1, version=ONE, measured={"lines": 1})
    key = controller.keys.drift(ONE)
    for text in ("nonsense", "{}", "[1]", '{"version": 1, "reference": 3, "marks": 4}'):
        controller.client.hset(key, WINDOW, text)
        controller.tick()
        assert decision(controller)["facts"]["drift"] is None
        controller.tick()
        assert decision(controller)["facts"]["drift"]["lines"] == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"5",
        b"[]",
        b"{}",
        b'{"history": [], "counted": "x", "rolled_back_ms": 0, "drift": null}',
    ],
)
def test_a_memory_that_cannot_be_read_is_made_anew(controller: Controller, text: bytes) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    controller.tick()
    good = controller._remembered(SHARED)
    controller.client.hset(controller.keys.controller, f"memory:{SHARED}", text)
    assert controller.tick() == [], "the trainings that are remembered give the history back"
    assert replace(controller._remembered(SHARED), recorded=good.recorded) == good


def test_a_memory_comes_back_as_it_was(controller: Controller) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.FAILED)
    controller.tick()
    memory = controller._remembered(SHARED)
    assert memory != Memory()
    assert MEMORIES.from_json(MEMORIES.to_json(memory)) == memory


def test_a_live_version_whose_files_are_gone_does_not_stop_the_controller(controller: Controller) -> None:
    controller.watchlist.add("prod")
    store(controller.ledger, "prod/a", 30)
    controller.tick()
    trained(controller, TrainingState.COMPLETED, version=ONE, published=True, stored={"prod/a": 30})
    controller.registry.stored.remove(ONE)
    assert Controller(controller.client, controller.settings).tick() == []
    assert decision(controller)["decision"] == "wait"


def test_decisions_are_written_down_with_their_inputs_once_each_and_only_so_many(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries() -> list[dict[str, Any]]:
        return [json.loads(e) for e in controller.client.lrange(controller.keys.decisions, 0, -1)]

    controller.watchlist.add("prod")
    for _ in range(3):
        controller.tick()
    assert len(entries()) == 1, "the same decision again says nothing new"
    store(controller.ledger, "prod/a", 30)
    for _ in range(3):
        controller.tick()
    assert [e["decision"] for e in entries()] == ["wait", "retrain", "wait"]
    for entry in entries():
        assert {"at", "model", "decision", "facts"} <= set(entry)
        assert datetime.fromisoformat(entry["at"]).tzinfo == UTC
    assert entries()[1]["facts"]["lines"] == 30
    assert decisions(controller.client, controller.keys, "retrain")[SHARED] == entries()[1]
    monkeypatch.setattr(module, "SAME_S", -1.0)
    monkeypatch.setattr(module, "KEEP", 4)
    for _ in range(4):
        controller.tick()
    assert len(entries()) == 4
    assert entries()[0] == decision(controller)


def test_decisions_of_models_that_nothing_watched_belongs_to_are_forgotten(
    client: "redis.Redis", settings: Settings
) -> None:
    controller = Controller(client, settings.replace(own_models=("prod/own",)))
    controller.watchlist.add("prod/own/x")
    store(controller.ledger, "prod/own/x", 30)
    controller.tick()
    assert set(decisions(client, controller.keys)) == {SHARED, "prod/own/x"}
    controller.watchlist.remove("prod/own/x")
    controller.tick()
    assert set(decisions(client, controller.keys)) == {SHARED}


def test_a_decision_that_cannot_be_read_hides_no_other(controller: Controller) -> None:
    controller.tick()
    for name, text in (("a", b"\xff"), ("b", b"5"), ("c", b"")):
        controller.client.hset(controller.keys.controller, f"decision:{name}", text)
    assert set(decisions(controller.client, controller.keys)) == {SHARED}


def test_a_controller_without_redis_says_so(settings: Settings) -> None:
    away = Controller(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    with pytest.raises(RedisUnavailable, match="does not answer"):
        away.tick()


# The task


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    app = make_app(settings)
    yield Context(app, settings)
    app.close()


def test_however_many_beats_ask_one_training_is_asked_for_and_the_trainer_wakes(context: Context) -> None:
    context.watchlist.add("prod")
    store(context.ledger, "prod/a", 30)
    asked = [task.tick(context) for _ in range(5)]
    assert [len(a) for a in asked] == [1, 0, 0, 0, 0]
    assert context.submit.training_waits()
    assert Trainings(context.client, context.settings).due() == 1


def test_a_tick_without_redis_waits_for_the_next_one(context: Context) -> None:
    away = Context(context.app, context.settings)
    away.__dict__["client"] = redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None)
    task.run(away)
