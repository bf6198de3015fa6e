"""Killed at every outside effect of every path: nothing lost, nothing doubled, nothing left behind."""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import structlog
from celery import Celery
from crash_points import Crash, Fault, Life, World, live, tireless
from small_bundles import ONE, TWO, written

from pipeline import detect
from pipeline.controller.training_status import TrainingState
from pipeline.controller.trainings import TrainingRequest
from pipeline.messages.app import make_app
from pipeline.models import trainer
from pipeline.producer import Producer
from pipeline.records.batch import SEVERAL, Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Known, RequestIdentity
from pipeline.records.pushed import PushedRecords
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.training import judging
from pipeline.training.judging import Judgement, ModelFigures

POISON = "poison: the line that nobody can parse"
LINES = ["GET /cart 200 in 12 ms", "disk sda1 is full"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Drawing the traceback of a poison line takes longer than a life. conftest.py sets logging back."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(autouse=True)
def _poison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_all = detect.prepare_all

    def fails(several: Any, *args: Any) -> Sequence[pl.DataFrame]:
        if any(POISON in records["raw"].to_list() for records in several):
            raise ValueError("it cannot be parsed")
        return prepare_all(several, *args)

    monkeypatch.setattr(detect, "prepare_all", fails)


@pytest.fixture(autouse=True)
def _trained_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that writes a bundle and a judge that lets it pass; reading, publishing and ending are the real
    ones."""

    def fit(_: Any, request: trainer.FitRequest) -> Iterator[Any]:
        yield SimpleNamespace(percent=1.0, remaining_s=1.0, epoch=1.0, loss=1.0)
        written(SimpleNamespace(path=lambda _: request.out), request.version, model=request.model)

    figures = ModelFigures(**{field.name: 0 for field in fields(ModelFigures)})
    verdict = Judgement(
        passed=True,
        reason="",
        candidate=figures,
        live=None,
        lines=1,
        seconds=0,
        seed=0,
    )
    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(judging.Examinee, "load", lambda *_, **__: None)
    monkeypatch.setattr(judging, "judge", lambda *_, **__: verdict)


def send(lines: list[str] = LINES, *, cursor: str = "", name: str = "b") -> Life:
    """A producer or source that says the same again until it is told that it was taken."""

    def accept(world: World) -> None:
        batch = Batch(
            batch_id=name, workload="shop", source="app.log", source_key="f", purpose=Purpose.SCORE,
            arrived=world.started, formats=("logfmt",), zone="UTC", records=raw_frame(lines),
        )  # fmt: skip
        process = world.now
        producer = Producer(process.ledger, process.submit, process.settings)
        assert isinstance(producer.accept(batch, cursor_key=cursor and "app.log", cursor=cursor), Accepted)

    return lambda world: world.act(accept)


# ---- the paths. Each ends with what must be true.


def warming(world: World) -> None:
    send()(world)
    world.act(World.work)
    assert world.now.ledger.backlog.warming() == 1
    world.check_end(stored=LINES)


def scored(world: World) -> None:
    world.model()
    send()(world)
    world.act(World.work)
    assert world.now.ledger.backlog.warming() == 0
    world.check_end(stored=LINES)


def merged(world: World) -> None:
    """Batches that wait behind one another are scored in one pass, and a line of several of them once."""
    world.model()
    many = {name: [*LINES, f"part {name} is up"] for name in ("b", "c", "d")}
    for name, lines in many.items():
        send(lines, name=name)(world)
    world.act(World.work)
    world.check_end(stored=[line for lines in many.values() for line in lines])


def rescored(world: World) -> None:
    send(LINES[:1])(world)
    world.act(World.work)
    world.model()
    world.act(World.work)
    world.act(World.work)
    assert world.now.ledger.backlog.warming() == 0
    world.check_end(stored=LINES[:1])
    totals = world.now.ledger.backlog.totals()["shop"]
    assert (totals["stored"], totals["warming"]) == (1, 0)
    assert totals.get("normal", 0) + totals.get("anomalous", 0) == 1


def window(*records: tuple[str, str]) -> Life:
    """An intake that takes the same records of several workloads in until it is told that they are."""

    def accept(world: World) -> None:
        workloads, messages = map(list, zip(*records, strict=True))
        batch = Batch(
            batch_id="w", workload=SEVERAL, source="intake", source_key="w", purpose=Purpose.SCORE,
            arrived=world.started, formats=(), zone="UTC",
            records=PushedRecords(list[str | None](messages), workloads=workloads),
        )  # fmt: skip
        process = world.now
        producer = Producer(process.ledger, process.submit, process.settings)
        answer = producer.accept_all([batch], [RequestIdentity(name="r")])
        assert isinstance(answer, Accepted) or answer == Known(duplicates=(0,))

    return lambda world: world.act(accept)


def several_workloads(world: World) -> None:
    """One is answered at once, one needs further stages, one has both sorts of lines."""
    world.model()
    send(LINES)(world)
    world.act(World.work)
    window(
        ("shop", LINES[0]), ("till", "no paper"), ("shop", LINES[1]), ("bank", LINES[0]), ("bank", "open")
    )(world)
    world.act(World.work)
    world.check_end(stored=[*LINES, *LINES, "no paper", LINES[0], "open"])
    stored = ParquetSink(world.settings.data.results).scan().collect()
    assert stored["record_id"].n_unique() == stored.height
    assert dict(stored.group_by("workload").len().iter_rows()) == {"shop": 4, "till": 1, "bank": 2}
    totals = world.now.ledger.backlog.totals()
    assert {name: t["stored"] for name, t in totals.items()} == {"shop": 4, "till": 1, "bank": 2}


def several_workloads_before_a_model(world: World) -> None:
    window(("shop", LINES[0]), ("till", LINES[0]))(world)
    world.act(World.work)
    world.model()
    world.act(World.work)
    world.act(World.work)
    assert world.now.ledger.backlog.warming() == 0
    world.check_end(stored=[LINES[0]] * 2)


def several_workloads_with_poison(world: World) -> None:
    world.model()
    window(("shop", LINES[0]), ("till", POISON), ("shop", LINES[1]))(world)
    world.act(World.work)
    world.check_end(stored=LINES, dead=[POISON])
    assert world.now.ledger.backlog.totals()["till"]["dead"] == 1


def from_a_source(world: World) -> None:
    send(cursor="behind it")(world)
    assert world.now.ledger.intake.cursor("app.log") == "behind it"
    world.act(World.work)
    world.check_end(stored=LINES)


def buried_and_retried(world: World) -> None:
    send([LINES[0], POISON])(world)
    world.act(World.work)
    world.check_end(stored=LINES[:1], dead=[POISON])

    def retry(world: World) -> None:
        for letter in world.now.ledger.dead_letters.newest():
            world.now.ledger.dead_letters.retry(letter.batch_id)

    world.act(retry)
    world.act(World.work)
    world.check_end(stored=LINES[:1], dead=[POISON])


def discarded(world: World) -> None:
    send([POISON])(world)
    world.act(World.work)

    def discard(world: World) -> None:
        for letter in world.now.ledger.dead_letters.newest():
            world.now.ledger.dead_letters.discard(letter.batch_id)

    world.act(discard)
    world.check_end(stored=[])
    assert world.now.ledger.backlog.totals()["shop"]["discarded"] == 1


def skipped(world: World) -> None:
    world.settings = world.settings.replace(unwatched="skip")
    world.now.settings = world.settings
    send()(world)
    world.check_end(stored=[])
    assert world.now.ledger.backlog.totals()["shop"]["skipped"] == 2


def trained(world: World) -> None:
    with world.crash.off():
        world.now.leases.clear_quarantine()  # this Redis was not restarted
    send(LINES * 10)(world)
    world.act(World.work)

    def ask(world: World) -> None:
        if not world.now.trainings.recent():
            world.now.trainings.request(TrainingRequest())
            world.now.submit.train()

    world.act(ask)
    world.act(World.work)
    done = world.now.trainings.recent()
    assert [s.state for s in done if s.published] == [TrainingState.COMPLETED], done
    assert all(s.ended for s in done)
    live = world.now.registry.current()
    assert live is not None
    assert (live.generation, live.version) == (1, next(s.version for s in done if s.published))
    world.act(World.work)
    world.act(World.work)
    assert world.now.ledger.backlog.warming() == 0
    world.check_end(stored=LINES * 10)


def operated(world: World) -> None:
    """What operators and beat do beside the batches."""
    with world.crash.off():
        for version in (ONE, TWO):
            written(world.now.registry, version)
            world.now.registry.put(version)

    def promote(version: str) -> Life:
        def act(world: World) -> None:
            registry = world.now.registry
            live = registry.current()
            if live is None or live.version != version:
                registry.promote(version, at=utc_now())

        return act

    def train_and_cancel(world: World) -> None:
        if not world.now.trainings.recent():
            world.now.trainings.request(TrainingRequest())
        for status in world.now.trainings.recent():
            if not status.ended:
                world.now.trainings.cancel(status.request_id)

    for act in (promote(ONE), promote(TWO), train_and_cancel):
        world.act(act)
    world.act(lambda world: world.now.watchlist.add("shop", "bank"))
    world.act(lambda world: world.now.watchlist.remove("bank"))
    live = world.now.registry.current()
    assert live is not None
    assert (live.version, live.generation, live.history) == (TWO, 2, (ONE, TWO))
    watched = world.now.watchlist.look()
    assert (watched.patterns, watched.version) == (("shop",), 2)
    assert [s.state for s in world.now.trainings.recent()] == [TrainingState.CANCELLED]
    assert not world.now.trainings.due()


LIVES: list[Life] = [
    warming, scored, merged, rescored, several_workloads, several_workloads_before_a_model,
    several_workloads_with_poison, from_a_source, buried_and_retried, discarded, skipped, trained, operated,
]  # fmt: skip


@pytest.fixture(scope="module")
def app(redis_url: str) -> Iterator[Celery]:
    """One for all worlds, which are emptied: making one takes longer than a life."""
    made = make_app(settings_of(redis_url))
    yield made
    made.close()


def settings_of(redis_url: str) -> Settings:
    return tireless(Settings(redis_url=redis_url, key_prefix="crashes"))


@pytest.fixture
def world_settings(redis_url: str, tmp_path: Path) -> Settings:
    return settings_of(redis_url).replace(data_dir=tmp_path)


FAULTS = list(Fault)
AT_ONCE = 2  # points of a life that one run strikes with one fault
_EFFECTS: dict[str, int] = {}


def effects_of(app: Celery, settings: Settings, life: Life) -> int:
    """How many outside effects an undisturbed life has."""
    if life.__name__ not in _EFFECTS:
        for _ in range(2):  # the first one has to load scripts too
            _EFFECTS[life.__name__] = live(app, settings, life, Crash(Fault.AFTER)).count
    return _EFFECTS[life.__name__]


def draw_of(request: pytest.FixtureRequest, life: Life, fault: Fault | None = None) -> random.Random:
    """Draws by the seed of this run. A failed test prints it, so that the same points can be struck again."""
    seed = request.config.getoption("randomly_seed", 0)
    print(f"strike the same points again with --randomly-seed={seed}")
    return random.Random(f"{seed} {life.__name__} {fault}")


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.lower())
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_a_fault_at_any_effect_loses_and_doubles_nothing(
    app: Celery, world_settings: Settings, life: Life, fault: Fault, request: pytest.FixtureRequest
) -> None:
    """At every effect with --nightly, else at some that each run draws anew."""
    points = range(1, effects_of(app, world_settings, life) + 1)
    if not request.config.getoption("--nightly"):
        points = draw_of(request, life, fault).sample(points, min(AT_ONCE, len(points)))
    for n, point in enumerate(points):
        assert live(app, world_settings, life, Crash(fault, (point,)), redeliver=bool(n % 2)).struck


@pytest.mark.long
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_two_crashes_in_one_life_lose_and_double_nothing(
    app: Celery, world_settings: Settings, life: Life, request: pytest.FixtureRequest
) -> None:
    """The second crash often strikes what repairs the first."""
    effects, draw = effects_of(app, world_settings, life), draw_of(request, life)
    for _ in range(AT_ONCE):
        fault, first = draw.choice(FAULTS), draw.randint(1, effects)
        pair = (first, first + draw.randint(1, effects))
        live(app, world_settings, life, Crash(fault, pair), redeliver=draw.random() < 0.5)
