"""Fresh batches come before backfill: which class a batch is of, and what real workers take first."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from polling import wait_until
from worker_process import working

from pipeline import cli, detect
from pipeline.detect import WORK_SCHEMA
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.routing import ALL_QUEUES, BACKFILL, QUEUE_CPU, QUEUE_GPU, QUEUE_INGEST, both
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Full, Stage
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.pushed import framed
from pipeline.tasks import periodic
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from pipeline.workers.roles import ROLES

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def producer(client: "redis.Redis", settings: Settings) -> Iterator[Producer]:
    app = make_app(settings)
    submit = Submit(app, client, settings)
    yield Producer(Ledger(client, settings), submit, settings, clock=lambda: NOW)
    app.close()


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    app = make_app(settings)
    yield Context(app, settings)
    app.close()


def queued(settings: Settings, client: "redis.Redis") -> dict[str, list[str]]:
    """Batch ids by queue, the next one first."""
    found = {}
    for queue in ALL_QUEUES:
        raw: Any = client.lrange(f"{settings.redis.key_prefix}:{queue}", 0, -1)
        if raw:
            found[queue] = [json.loads(item)["headers"]["batch"] for item in reversed(raw)]
    return found


def record(age_s: float) -> dict[str, Any]:
    return {"message": "m", "timestamp": NOW - timedelta(seconds=age_s)}


def chunk(*lines: str) -> Chunk:
    cursor = Cursor(path="a.log", identity="1:2", offset=9)
    return Chunk(records=raw_frame(list(lines)), start=0, cursor=cursor, formats=("iso",), position=9)


# Which class


@pytest.mark.parametrize(
    ("items", "said", "backfill"),
    [
        ([record(3_700)], None, True),
        ([record(9_999), record(3_500)], None, False),
        ([record(9_999), {"message": "no time is known"}], None, False),
        (["2019-01-01T00:00:00Z a raw line is not read before it is accepted"], None, False),
        ([record(0)], True, True),
        ([record(9_999)], False, False),
    ],
    ids=["old", "its newest is not", "one unknown", "raw", "as said", "not as said"],
)
def test_a_push_is_backfill_when_all_of_it_is_known_to_be_old_or_when_its_sender_says_so(
    producer: Producer, client: "redis.Redis", items: Any, said: bool | None, backfill: bool
) -> None:
    producer.send(items, workload="shop", batch_id="b", backfill=said)
    assert queued(producer.settings, client) == {QUEUE_INGEST + BACKFILL * backfill: ["b"]}
    claim = producer.ledger.claim("b", Stage.INGEST, "w")
    assert isinstance(claim, Claim) and claim.backfill is backfill


@pytest.mark.parametrize(
    ("lines", "backfill"),
    [
        (["2026-11-21T11:59:00Z fresh", "2026-11-21T10:59:00Z old"], True),
        (["2019-01-01T00:00:00Z old", "2026-11-21T11:59:00Z fresh"], False),
        (["2019-01-01T00:00:00Z old", "and a line without a time"], False),
    ],
    ids=["ends old", "ends fresh", "ends without a time"],
)
def test_what_a_source_read_is_of_the_class_of_its_last_line(
    producer: Producer, client: "redis.Redis", lines: list[str], backfill: bool
) -> None:
    producer.send_chunk(chunk(*lines), workload="shop", source="a.log", source_key="k", cursor_key="c")
    assert list(queued(producer.settings, client)) == [QUEUE_INGEST + BACKFILL * backfill]


@pytest.mark.parametrize("word", [None, "--no-backfill", "--backfill"])
def test_send_takes_the_class_from_its_flag_and_else_from_the_lines(
    settings: Settings,
    client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    word: str | None,
) -> None:
    log = tmp_path / "a.log"
    log.write_text("2019-01-01T00:00:00Z INFO an old line\n")
    for name, value in settings.to_environ().items():
        monkeypatch.setenv(name, value)
    assert cli.main(["send", str(log), *filter(None, [word])]) == 0
    assert list(queued(settings, client)) == [QUEUE_INGEST + BACKFILL * (word != "--no-backfill")]


def test_backfill_leaves_a_fifth_of_the_room_to_fresh_batches(
    client: "redis.Redis", settings: Settings
) -> None:
    app = make_app(settings)
    own = settings.replace(max_pending_batches=10)
    producer = Producer(Ledger(client, own), Submit(app, client, own), own)
    taken = [producer.send(["x"], workload="w", batch_id=f"old{n}", backfill=True) for n in range(10)]
    assert [isinstance(answer, Accepted) for answer in taken] == [True] * 8 + [False] * 2
    taken = [producer.send(["x"], workload="w", batch_id=f"new{n}") for n in range(3)]
    assert [isinstance(answer, Accepted) for answer in taken] == [True] * 2 + [False]
    assert isinstance(taken[-1], Full) and taken[-1].reason == "batches"
    app.close()


# Which stays what it is


def work_of(context: Context, batch_id: str) -> pl.DataFrame:
    claim = context.ledger.claim(batch_id, Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    prepared = detect.prepare(framed(context.ledger.payload(batch_id))[0], claim.meta, context.masks)
    work = detect.distinct(prepared, WARMING_VERSION)
    context.ledger.release(claim, reason="", delay_s=0, counted=False)
    return work


@pytest.mark.parametrize("backfill", [False, True])
def test_a_batch_keeps_its_class_through_stages_parts_retries_and_the_sweeper(
    context: Context, backfill: bool
) -> None:
    ledger, settings = context.ledger, context.settings
    end = BACKFILL * backfill
    records = raw_frame(["a", "b"])
    batch = Batch(
        batch_id="b", workload="shop", source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=NOW, formats=(), zone="UTC", records=records,
    )  # fmt: skip
    ledger.intake.accept(batch, backfill=backfill)
    ledger.client.zadd(ledger.keys.due, {"b": 1})
    periodic.sweep(context)
    assert queued(settings, context.client) == {QUEUE_INGEST + end: ["b"]}, "sent by the sweeper"
    ledger.client.zadd(ledger.keys.due, {"b": 1})
    assert periodic.sweep(context) == 0, "found where it waits"
    work = work_of(context, "b")

    def hand_on(context: Context, claim: Claim) -> Stage:
        context.ledger.advance(claim, Stage.INFER, work)
        return Stage.INFER

    assert perform(context, Stage.INGEST, "b", hand_on) is None
    assert queued(settings, context.client)[QUEUE_CPU + end] == ["b"], "handed on"
    claim = ledger.claim("b", Stage.INFER, "w")
    assert isinstance(claim, Claim) and claim.backfill is backfill
    for half in ledger.give_up(claim, "bad"):
        claim = ledger.claim(half, Stage.INGEST, "w")
        assert isinstance(claim, Claim) and claim.backfill is backfill, "a part"
        ledger.give_up(claim, "bad")
        assert ledger.dead_letters.retry(half)
        assert (ledger.backlog.backfills([half]) == {half}) is backfill, "a dead letter"


def test_a_batch_of_a_build_without_classes_is_fresh(context: Context) -> None:
    batch = Batch(
        batch_id="b", workload="shop", source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=NOW, formats=(), zone="UTC", records=raw_frame(["a", "b"]),
    )  # fmt: skip
    ledger = context.ledger
    ledger.intake.accept(batch, backfill=True)
    ledger.client.hdel(ledger.keys.batch("b"), "backfill")
    ledger.client.zadd(ledger.keys.due, {"b": 1})
    periodic.sweep(context)
    assert queued(context.settings, context.client) == {QUEUE_INGEST: ["b"]}
    claim = ledger.claim("b", Stage.INGEST, "w")
    assert isinstance(claim, Claim) and not claim.backfill
    assert len(ledger.give_up(claim, "bad")) == 2


def test_what_is_scored_again_is_backfill_whatever_it_was(context: Context) -> None:
    ledger = context.ledger
    batch = Batch(
        batch_id="b", workload="shop", source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=NOW, formats=(), zone="UTC", records=raw_frame(["a"]),
    )  # fmt: skip
    ledger.intake.accept(batch)
    claim = ledger.claim("b", Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    ledger.commit(claim, warming=True, outcomes={})
    assert ledger.backlog.start_rescoring(1, has_model=lambda _: True) == ["b"]
    assert ledger.backlog.backfills(["b"]) == {"b"}


def test_backfill_goes_to_the_cpu_while_the_gpu_worker_is_of_a_build_without_classes(
    context: Context,
) -> None:
    context.presence.beat(name="old", role="gpu", pid=1, queues=[QUEUE_GPU])
    submit = context.submit
    assert (submit.gpu().workers, submit.gpu(backfill=True).workers) == (1, 0)
    context.presence.beat(name="new", role="gpu", pid=2, queues=both(QUEUE_GPU))
    assert (submit.gpu().workers, submit.gpu(backfill=True).workers) == (2, 1)


# What workers do


def patient(context: Context) -> Settings:
    """No batch is overdue meanwhile, so that each is taken as it was sent."""
    return context.settings.replace(overdue_ms=600_000)


def told(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{") and event in line]
    return [said for said in map(json.loads, lines) if said.get("event") == event]


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "stage"),
    [("ingest", Stage.INGEST), ("infer-cpu", Stage.INFER)],
    ids=["solo", "prefork"],
)
def test_a_worker_takes_every_fresh_batch_before_any_backfill(
    context: Context, tmp_path: Path, role: str, stage: Stage
) -> None:
    assert ROLES[role].pool == ("solo" if role == "ingest" else "prefork")
    names = [f"old{n}" for n in range(5)] + [f"new{n}" for n in range(5)]
    producer = Producer(context.ledger, context.submit, context.settings)
    for name in names:
        backfill = name.startswith("old")
        producer.send([f"{name} a line"], workload="shop", batch_id=name, backfill=backfill)
        if stage is Stage.INFER:
            # Nothing is unknown, so that no model is needed.
            known = pl.lit(1).cast(WORK_SCHEMA["template_id"]).alias("template_id")
            work = work_of(context, name).with_columns(known)
            claim = context.ledger.claim(name, Stage.INGEST, "w")
            assert isinstance(claim, Claim)
            context.ledger.advance(claim, Stage.INFER, work)
            context.submit.wake(Stage.INFER, name, backfill=backfill)
    with working(patient(context), role, tmp_path) as log:
        assert wait_until(lambda: len(told(log, "batch.step")) >= len(names), timeout_s=40), log.read_text()
        order = [said["batch"] for said in told(log, "batch.step")]
    assert order == [*names[5:], *names[:5]], "each class in the order it came, fresh ones first"


@pytest.mark.long
def test_a_sweep_comes_before_the_batches_that_wait_to_be_stored(context: Context, tmp_path: Path) -> None:
    ledger = context.ledger
    producer = Producer(ledger, context.submit, context.settings)
    for name in ("lost", *(f"b{n}" for n in range(5))):
        producer.send([f"{name} a line"], workload="shop", batch_id=name)
        work = work_of(context, name)
        claim = ledger.claim(name, Stage.INGEST, "w")
        assert isinstance(claim, Claim)
        ledger.advance(claim, Stage.STORE, work)
        if name != "lost":
            context.submit.wake(Stage.STORE, name)
    ledger.client.zadd(ledger.keys.due, {"lost": 1})
    context.app.send_task(periodic.NAME, queue="periodic")
    with working(patient(context), "store", tmp_path) as log:
        # A step is told a moment after its batch has left the ledger.
        assert wait_until(lambda: len(told(log, "batch.step")) >= 6, timeout_s=40), log.read_text()
        events = [
            said["event"]
            for said in map(json.loads, filter(lambda x: x[:1] == "{", log.read_text().splitlines()))
        ]
    seen = [event for event in events if event in ("sweep.sent", "batch.step")]
    assert seen == ["sweep.sent", *["batch.step"] * 6]
