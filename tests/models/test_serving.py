"""Which version a process answers under: the live one once it was read, the one before while that is
damaged."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
import redis
from small_bundles import (
    AT,
    ONE,
    THREE,
    TWO,
    artifact_of,
    damage,
    make_older,
    manifest_of,
    put,
    repair,
    written,
)

from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.errors import BadBundle, ModelUnavailable, StoreUnavailable
from pipeline.messages.app import make_app
from pipeline.models import bundle
from pipeline.models import registry as registry_module
from pipeline.models import serving as module
from pipeline.models.registry import Registry
from pipeline.models.serving import Serving
from pipeline.models.verdict import Knowledge
from pipeline.producer import Producer
from pipeline.records.delivery import Stage
from pipeline.redis.leases import Lease, Leases, granted
from pipeline.settings import Settings
from pipeline.tasks.context import Context
from pipeline.tasks.ingest import step
from pipeline.tasks.loaded import LOADED_MODELS, ModelPart, WorkerProfile
from pipeline.tasks.reload import Hint
from pipeline.tasks.step import perform
from pipeline.workers.reloader import IDLE_AFTER_S, IDLE_POLL_S, POLL_S, Reloader


@pytest.fixture
def registry(client: "redis.Redis", settings: Settings) -> Registry:
    return Registry(client, settings)


@pytest.fixture
def held(client: "redis.Redis", settings: Settings) -> Lease:
    return granted(Leases(client, settings).request("training", "t"), "training")


def publish(registry: Registry, held: Lease, *versions: str, model: str = "shared") -> None:
    for version in versions:
        written(registry, version, model=model)
        registry.publish(version, held, at=AT)


def process(registry: Registry) -> Serving:
    """Another process on the same registry and the same disk."""
    return Serving(registry, registry.manifest)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that could not be read may be tried again at once."""
    monkeypatch.setattr(module, "RETRY_S", -1.0)


def test_there_is_no_version_before_the_first_model(registry: Registry) -> None:
    serving = process(registry)
    assert serving.version() is None
    assert serving.versions() == {}


def test_the_live_version_serves_from_the_next_question_on(registry: Registry, held: Lease) -> None:
    serving = process(registry)
    for version in (ONE, TWO):
        publish(registry, held, version)
        assert serving.version() == version
    registry.roll_back(at=AT)
    assert serving.version() == ONE
    assert serving.versions() == {"shared": ONE}


def test_a_version_is_read_once_however_often_it_is_asked_for(registry: Registry, held: Lease) -> None:
    read: list[str] = []
    serving = Serving(registry, read.append)
    publish(registry, held, ONE)
    for _ in range(3):
        serving.version()
    publish(registry, held, TWO)
    for _ in range(3):
        serving.version()
    assert read == [ONE, TWO]


@pytest.mark.parametrize("how", ["missing", "altered", "no manifest", "empty manifest"])
def test_while_the_live_version_cannot_be_read_the_one_before_serves_and_the_fault_is_seen(
    registry: Registry, held: Lease, at_once: None, how: str
) -> None:
    publish(registry, held, ONE)
    serving = process(registry)
    assert serving.version() == ONE
    publish(registry, held, TWO)
    registry.stored.forget(TWO)  # as on a machine that has to fetch it
    weights, manifest = artifact_of(registry, TWO, bundle.WEIGHTS), manifest_of(registry, TWO)
    path = weights if how in ("missing", "altered") else manifest
    content = path.read_bytes()
    path.unlink()
    if how in ("altered", "empty manifest"):
        path.write_bytes(b"altered" if how == "altered" else b"")
    for _ in range(3):
        assert serving.version() == ONE
    (fault,) = registry.faults()
    assert (fault.version, fault.machine) == (TWO, registry.machine)
    assert fault.reason
    path.write_bytes(content)
    assert serving.version() == TWO
    assert registry.faults() == []


def test_a_damaged_copy_on_a_machine_is_fetched_again_and_is_no_fault(
    registry: Registry, held: Lease
) -> None:
    publish(registry, held, ONE)
    for spoil in (
        lambda path: (path / bundle.WEIGHTS).write_bytes(b"altered"),
        lambda path: (path / bundle.WEIGHTS).unlink(),
        lambda path: (path / bundle.MANIFEST).write_bytes(b"{"),
        lambda path: (path / bundle.MANIFEST).unlink(),
        shutil.rmtree,
    ):
        spoil(registry.path(ONE))
        assert process(registry).version() == ONE
        assert registry.faults() == []
        assert bundle.load_manifest(registry.path(ONE)).version == ONE


def test_a_process_that_begins_while_the_live_version_is_damaged_serves_the_newest_that_can_be_read(
    registry: Registry, held: Lease
) -> None:
    publish(registry, held, ONE, TWO, THREE)
    for version in (TWO, THREE):
        damage(registry, version)
    assert process(registry).version() == ONE
    assert {fault.version for fault in registry.faults()} == {TWO, THREE}


def test_a_version_that_another_process_of_the_machine_cannot_read_is_begun_by_none_there(
    registry: Registry, held: Lease, at_once: None
) -> None:
    publish(registry, held, ONE)
    first, second = process(registry), process(registry)
    assert (first.version(), second.version()) == (ONE, ONE)
    publish(registry, held, TWO)
    assert second.version() == TWO
    damage(registry, TWO)
    assert first.version() == ONE
    assert second.version() == ONE, "the other could not finish what it begins"
    repair(registry, TWO)
    assert first.version() == TWO
    assert second.version() == TWO


def test_a_fault_of_another_machine_bars_no_version_here(
    registry: Registry, held: Lease, settings: Settings
) -> None:
    publish(registry, held, ONE, TWO)
    other = Registry(registry.client, settings.replace(data_dir=settings.data.dir / "other"))
    other.report_fault(TWO, "the store is away from there")
    assert process(registry).version() == TWO
    assert [(f.version, f.machine) for f in registry.faults()] == [(TWO, other.machine)]
    registry.report_fault(TWO, "here too")
    assert len(registry.faults()) == 2, "each machine is shown"
    assert process(registry).version() == ONE


def test_a_machine_fetches_what_it_lacks_from_the_store_before_it_reports_a_fault(
    registry: Registry, held: Lease, settings: Settings
) -> None:
    publish(registry, held, ONE)
    store_url = settings.data.store
    other = Registry(
        registry.client, settings.replace(data_dir=settings.data.dir / "other", store_url=store_url)
    )
    assert not other.path(ONE).exists()
    assert process(other).version() == ONE
    assert bundle.load_manifest(other.path(ONE)) == bundle.load_manifest(registry.path(ONE))
    assert registry.faults() == []


def test_a_fault_that_its_process_took_to_the_grave_is_forgotten(
    registry: Registry, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(registry, held, ONE, TWO)
    registry.report_fault(TWO, "a disk that is not mounted there")
    serving = process(registry)
    assert serving.version() == ONE
    monkeypatch.setattr(registry_module, "FAULT_TTL_S", 0)
    assert serving.version() == TWO


def test_when_no_version_can_be_read_batches_wait_and_are_told_why(
    registry: Registry, held: Lease, at_once: None
) -> None:
    publish(registry, held, ONE, TWO)
    for version in (ONE, TWO):
        damage(registry, version)
    serving = process(registry)
    for _ in range(2):
        with pytest.raises(
            ModelUnavailable, match=r"no version of the shared model can be read .*`logweir train`"
        ):
            serving.version()
    repair(registry, ONE)
    assert serving.version() == ONE


def test_a_damaged_version_is_not_read_again_with_every_batch(registry: Registry, held: Lease) -> None:
    tried: list[str] = []

    def prepare(version: str) -> None:
        tried.append(version)
        if version == TWO:
            raise BadBundle("damaged")

    serving = Serving(registry, prepare)
    publish(registry, held, ONE, TWO)
    assert [serving.version() for _ in range(5)] == [ONE] * 5
    assert tried == [TWO, ONE]


def test_a_fault_of_a_version_that_is_replaced_does_not_matter_any_more(
    registry: Registry, held: Lease
) -> None:
    publish(registry, held, ONE, TWO)
    damage(registry, TWO)
    serving = process(registry)
    assert serving.version() == ONE
    publish(registry, held, THREE)
    assert serving.version() == THREE


def test_models_serve_side_by_side_and_fail_alone(registry: Registry, held: Lease) -> None:
    publish(registry, held, ONE)
    publish(registry, held, TWO, THREE, model="prod/a")
    serving = process(registry)
    damage(registry, THREE)
    assert (serving.version(), serving.version("prod/a"), serving.version("other")) == (ONE, TWO, None)
    assert serving.versions() == {"shared": ONE, "prod/a": TWO}


def test_a_live_version_that_an_older_build_made_is_no_model_until_a_training(
    registry: Registry, held: Lease, at_once: None
) -> None:
    publish(registry, held, ONE)
    make_older(registry, ONE)
    first, second = process(registry), process(registry)
    assert (first.version(), second.version()) == (None, None)
    assert first.versions() == {}
    (fault,) = registry.faults()
    assert fault.version == ONE and "an older build made it" in fault.reason
    assert registry.path(ONE).exists(), "a whole copy is not fetched again"
    assert [live.version for live in registry.outdated()] == [ONE]
    publish(registry, held, TWO)
    assert (first.version(), second.version()) == (TWO, TWO)
    assert registry.outdated() == []


def test_an_earlier_version_that_can_be_read_serves_instead_of_one_of_an_older_build(
    registry: Registry, held: Lease
) -> None:
    publish(registry, held, ONE, TWO)
    make_older(registry, TWO)
    assert process(registry).version() == ONE


def test_a_version_of_an_older_build_is_told_from_its_copy_while_the_store_is_away(
    registry: Registry, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(registry, held, ONE)
    make_older(registry, ONE)
    monkeypatch.setattr(registry.stored, "_manifest_text", raising(StoreUnavailable("away")))
    assert process(registry).version() is None
    shutil.rmtree(registry.path(ONE))
    again = Registry(registry.client, registry.settings)
    monkeypatch.setattr(again.stored, "_manifest_text", raising(StoreUnavailable("away")))
    with pytest.raises(ModelUnavailable):
        process(again).version()


def raising(error: Exception) -> Callable[[str], bytes]:
    def text(version: str) -> bytes:
        raise error

    return text


# A whole process


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    own = settings.replace(own_models=("prod/own",))
    app = make_app(own)
    yield Context(app, own)
    app.close()


def test_a_workload_is_answered_by_its_own_model_once_it_has_one(context: Context, held: Lease) -> None:
    assert context.version("prod/own/x") is None
    publish(context.registry, held, ONE)
    assert context.version("prod/own/x") == ONE, "until it has one, by the one that is shared"
    publish(context.registry, held, TWO, model="prod/own/x")
    assert [context.version(w) for w in ("prod/own/x", "prod/own/y", "prod/a")] == [TWO, ONE, ONE]
    damage(context.registry, TWO)
    fresh = Context(context.app, context.settings)
    assert fresh.version("prod/own/x") == ONE, "while its own cannot be read, the shared one answers"
    other = Context(context.app, context.settings.replace(own_models=()))
    assert other.version("prod/own/x") == ONE


def test_a_process_keeps_the_versions_it_used_last(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    most = LOADED_MODELS
    names = [f"m{n:06d}-0a1b2c3d" for n in range(most + 1)]
    put(context.registry, *names)
    monkeypatch.setattr("pipeline.tasks.loaded.load_known", lambda path: path.name)
    first = context.models.knowledge(names[0])
    assert isinstance(first, Knowledge)
    for name in names[1:-1]:
        context.models.knowledge(name)
    assert context.models.knowledge(names[0]) is first, "asked for again, so it stays"
    context.models.knowledge(names[-1])
    assert context.models.knowledge(names[0]) is first
    damage(context.registry, names[1])
    with pytest.raises(BadBundle):
        context.models.knowledge(names[1])
    assert len(context.models._knowledge) == most


def test_a_batch_waits_uncounted_while_no_version_can_be_read(context: Context, held: Lease) -> None:
    publish(context.registry, held, ONE)
    damage(context.registry, ONE)
    Producer(context.ledger, context.submit, context.settings).send(["a"], workload="prod/a", batch_id="b")
    why = perform(context, Stage.INGEST, "b", step)
    assert why is not None and "no version of the shared model can be read" in why
    assert context.client.hget(context.ledger.keys.batch("b"), "attempts") == b"0"
    trouble = context.presence.trouble()
    assert trouble is not None and trouble.reason == why
    assert context.ledger.state("b") == "ingest"


def test_the_reloader_says_what_is_served_when_it_changes(context: Context, held: Lease) -> None:
    reloader = Reloader(context, "w1")
    reloader.look()
    assert context.presence.serving() == {}
    publish(context.registry, held, ONE)
    publish(context.registry, held, TWO, model="prod/own/x")
    reloader.look()
    said = context.presence.serving()["w1"]
    assert said.versions == {"shared": ONE, "prod/own/x": TWO}
    reloader.look()
    assert context.presence.serving()["w1"] == said, "nothing changed, so nothing is said"
    publish(context.registry, held, THREE)
    damage(context.registry, THREE)
    reloader.look()
    assert context.presence.serving()["w1"] == said
    context.presence.leave("w1")
    assert context.presence.serving() == {}


def test_the_reloader_goes_on_when_a_model_has_no_version_that_can_be_read(
    context: Context, held: Lease
) -> None:
    publish(context.registry, held, ONE)
    publish(context.registry, held, TWO, model="prod/own/x")
    damage(context.registry, ONE)
    reloader = Reloader(context, "w1")
    reloader.look()
    assert context.presence.serving()["w1"].versions == {"prod/own/x": TWO}
    trouble = context.presence.trouble()
    assert trouble is not None and "no version of the shared model" in trouble.reason


def test_the_reloader_takes_back_what_a_killed_process_of_its_name_served(
    context: Context, held: Lease
) -> None:
    publish(context.registry, held, ONE)
    make_older(context.registry, ONE)
    context.presence.serves("w1", {"shared": ONE})
    Reloader(context, "w1").look()
    assert context.presence.serving() == {}
    trouble = context.presence.trouble()
    assert trouble is not None and trouble.reason == (
        f"an older build made the live model, {ONE}, and this one cannot read it; lines are stored without a "
        "verdict until `logweir train` has learnt a new one"
    )


def test_the_reloader_looks_often_while_its_process_works_and_rarely_while_it_does_not(
    context: Context,
) -> None:
    reloader = Reloader(context, "w1")
    assert reloader.poll_s() == POLL_S
    reloader.worked -= IDLE_AFTER_S
    assert reloader.poll_s() == IDLE_POLL_S > POLL_S
    reloader.works()
    assert reloader.poll_s() == POLL_S


def test_a_scoring_process_reads_torch_when_a_training_is_asked_for_and_not_before(
    context: Context, settings: Settings, client: "redis.Redis"
) -> None:
    scoring = Context(make_app(settings), settings, WorkerProfile(part=ModelPart.NETWORK))
    reloader = Reloader(scoring, "w1")
    reloader.look()
    assert reloader.imports
    Trainings(client, settings).request(TrainingRequest(asked_by="test", why="test"))
    reloader.look()
    assert not reloader.imports
    assert not Reloader(context, "w2").imports, "nobody else needs it"


def test_a_hint_is_heard_in_the_process_and_in_one_forked_from_it_and_only_once() -> None:
    hint = Hint()
    hint.set()
    hint.open()
    assert not hint.wait(0), "before it was open nobody was there to hear it"
    for _ in range(100_000):  # more than the pipe holds; the sender never waits
        hint.set()
    while hint.wait(0):
        pass
    child = os.fork()
    if not child:
        os._exit(7 if hint.wait(20) else 1)
    hint.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not hint.wait(0)
