"""At every limit the pipeline says so and loses nothing: the closed door, dead letters, full queues, long
backlogs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from polling import wait_until
from rich.console import Console

import pipeline.ledger.intake
from pipeline.commands.send.sender import Sender
from pipeline.ledger.ledger import Ledger
from pipeline.messages import queues, submit
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_INGEST
from pipeline.producer import Producer
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Full, Stage
from pipeline.records.schema import raw_frame
from pipeline.service import status
from pipeline.settings import Settings
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.tasks import periodic
from pipeline.tasks.context import Context
from pipeline.workers.stack.private_redis import PrivateRedis


def batch(batch_id: str, lines: list[str] | None = None) -> Batch:
    return Batch(
        batch_id=batch_id, workload="shop", source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=datetime(2026, 11, 20, tzinfo=UTC), formats=(), zone="UTC",
        records=raw_frame(lines if lines is not None else ["a", "b"]),
    )  # fmt: skip


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Ledger:
    return Ledger(client, settings)


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    own = settings.replace(overdue_ms=600_000)
    app = make_app(own)
    yield Context(app, own)
    app.close()


def take(ledger: Ledger, batch_id: str) -> Claim:
    claim = ledger.claim(batch_id, Stage.INGEST, "w")
    assert isinstance(claim, Claim), claim
    return claim


def finish(ledger: Ledger, batch_id: str) -> None:
    ledger.commit(take(ledger, batch_id), warming=False, outcomes={})


def refused(answer: Accepted | Full) -> str:
    assert isinstance(answer, Full), answer
    return answer.reason


# The door


def test_a_closed_door_lets_nothing_new_in_and_tells_a_repetition_that_it_is_in(ledger: Ledger) -> None:
    ledger.intake.accept(batch("in"))
    assert ledger.intake.paused_because() is None and not ledger.intake.resume()
    ledger.intake.pause("an operator asked for it")
    ledger.intake.pause("again")
    assert ledger.intake.paused_because() == "an operator asked for it"
    for skip in (False, True):
        assert refused(ledger.intake.accept(batch("new"), cursor_key="f", cursor="9", skip=skip)) == "closed"
    assert (ledger.intake.cursor("f"), ledger.state("new")) == (None, "")
    assert ledger.intake.accept(batch("in")) == Accepted(batch_id="in", duplicate=True)
    finish(ledger, "in")
    assert ledger.backlog.counts()["batches"] == 0, "what is in is worked off"
    assert ledger.intake.resume()
    assert ledger.intake.accept(batch("new")) == Accepted(batch_id="new")


def test_a_reason_that_somebody_wrote_by_hand_is_shown_as_it_is(ledger: Ledger) -> None:
    ledger.client.set(ledger.keys.closed, "maintenance")
    assert ledger.intake.paused_because() == "maintenance"
    assert refused(ledger.intake.accept(batch("new"))) == "closed"


# Dead letters


def noise(seed: int) -> list[str]:
    """Lines that do not compress: about 700 KiB packed."""
    return [
        f"{(seed * 7919 + i) * 2654435761 % 2**64:x}{(i * 40503 + seed) ** 7 % 2**128:x}"
        for i in range(30_000)
    ]


def bury(ledger: Ledger, batch_id: str) -> int:
    """Bury a batch whole; the bytes of its payload."""
    ledger.dead_letter(take(ledger, batch_id), "why")
    size = ledger.client.hget(ledger.keys.batch(batch_id), "bytes")
    return int(size or 0)


@pytest.mark.long
def test_dead_letters_fill_their_room_and_then_nothing_new_comes_in_until_one_goes(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings.replace(max_dead_mib=1))
    sizes = {}
    for name, seed in (("a", 1), ("b", 2)):
        assert ledger.intake.accept(batch(name, noise(seed))) == Accepted(batch_id=name)
        sizes[name] = bury(ledger, name)
    assert ledger.backlog.counts()["dead_bytes"] == sum(sizes.values()) > 2**20
    assert refused(ledger.intake.accept(batch("new"), cursor_key="f", cursor="9")) == "dead"
    assert ledger.intake.cursor("f") is None
    assert ledger.intake.accept(batch("a", noise(1))) == Accepted(batch_id="a", duplicate=True)
    assert ledger.dead_letters.retry("a")
    assert ledger.backlog.counts()["dead_bytes"] == sizes["b"]
    assert ledger.backlog.counts()["bytes"] == sizes["a"], "its payload waits again, and is counted there"
    assert ledger.intake.accept(batch("new")) == Accepted(batch_id="new")
    bury(ledger, "a")
    assert refused(ledger.intake.accept(batch("newer"))) == "dead"
    assert ledger.dead_letters.discard("a")
    assert ledger.dead_letters.discard("b")
    assert ledger.backlog.counts()["dead_bytes"] == 0
    assert ledger.intake.accept(batch("newer")) == Accepted(batch_id="newer")


def test_dead_letters_of_a_build_that_did_not_count_them_take_nothing_off(ledger: Ledger) -> None:
    for name in ("old", "new"):
        ledger.intake.accept(batch(name))
        bury(ledger, name)
    ledger.client.hdel(ledger.keys.batch("old"), "dead_bytes")
    ledger.client.hset(
        ledger.keys.counts, "dead_bytes", 7
    )  # of the new one, as if that build had discarded more
    assert ledger.dead_letters.discard("old")
    assert ledger.backlog.counts()["dead_bytes"] == 7
    assert ledger.dead_letters.retry("new")
    assert ledger.backlog.counts()["dead_bytes"] == 0, "with the last one gone nothing is counted"


# What is told


@contextmanager
def at_limit(ledger: Ledger, reason: str) -> Iterator[Ledger]:
    """A ledger that refuses for this reason."""
    changes: dict[str, Any] = {"batches": {"max_pending_batches": 1}, "bytes": {"max_pending_mib": 1}}
    own = Ledger(ledger.client, ledger.settings.replace(max_dead_mib=1, **changes.get(reason, {})))
    own.intake.accept(batch("first", noise(1) + noise(2) if reason in ("bytes", "dead") else None))
    if reason == "dead":
        bury(own, "first")
    if reason == "closed":
        own.intake.pause("an upgrade")
    yield own


@pytest.mark.long
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("batches", "the pipeline is full: 1 batch"),
        ("bytes", "the pipeline is full: 1 batch"),
        ("dead", "dead letters fill their room (max_dead_mib)"),
        ("closed", "the pipeline is being drained"),
    ],
)
def test_every_refusal_says_why_and_status_says_the_same(ledger: Ledger, reason: str, words: str) -> None:
    assert ledger.intake.full() is None
    with at_limit(ledger, reason) as own:
        answer = own.intake.accept(batch("new", ["x"]))
        assert refused(answer) == reason
        assert str(answer).startswith(words)
        told = own.intake.full()
        assert told is not None and (told.reason, str(told)) == (reason, str(answer))
        facts = status.read_status(own.settings)
        assert facts.full == str(answer)
        assert facts.closed == ("an upgrade" if reason == "closed" else None)
        assert facts.dead["batches"] == (1 if reason == "dead" else 0)
        assert (facts.dead["bytes"] > 2**20) is (reason == "dead")


def test_who_is_refused_again_and_again_asks_less_often_until_something_is_taken(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings.replace(max_pending_batches=1))
    ledger.intake.accept(batch("a"))
    pauses = []
    for _ in range(5):
        answer = ledger.intake.accept(batch("b"))
        assert isinstance(answer, Full)
        pauses.append((answer.refused, answer.retry_after_s))
    assert pauses == [(1, 0.5), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    finish(ledger, "a")
    ledger.intake.accept(batch("b"))
    answer = ledger.intake.accept(batch("c"))
    assert isinstance(answer, Full) and (answer.refused, answer.retry_after_s) == (1, 0.5)


def test_send_says_once_that_it_waits_and_goes_on_when_there_is_room(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.send.sender.SAY_EVERY_S", 0.1)
    monkeypatch.setattr(pipeline.ledger.intake, "RETRY_AFTER_S", {"batches": 0.01})
    own = settings.replace(max_pending_batches=1)
    app = make_app(own)
    ledger = Ledger(client, own)
    ledger.intake.accept(batch("in the way"))
    shown = StringIO()
    sender = Sender(
        Producer(ledger, submit.Submit(app, client, own), own), own, Console(file=shown, width=200)
    )
    sender.begin("c")
    chunk = Chunk(
        records=raw_frame(["x"]),
        start=0,
        cursor=Cursor(path="a", identity="1:2", offset=2),
        formats=(),
        position=2,
    )
    sending = threading.Thread(
        target=sender.send, args=(chunk,),
        kwargs={"workload": "w", "source": "a", "key": "k", "cursor_key": "c"},
    )  # fmt: skip
    sending.start()
    assert wait_until(lambda: "waiting:" in shown.getvalue(), timeout_s=5)
    assert wait_until(lambda: ledger.intake._refused > 12, timeout_s=5), "it tries on"
    assert sending.is_alive()
    finish(ledger, "in the way")
    sending.join(5)
    assert ledger.state("k-0") == "ingest"
    said = shown.getvalue().splitlines()
    assert said[0] == "waiting: the pipeline is full: 1 batch (0.0 MiB) waits"
    assert said[1].startswith("going on after ")
    app.close()


def test_a_redis_that_is_nearly_full_takes_no_more_in_and_can_still_work_off_what_it_has(
    tmp_path: Path,
) -> None:
    """Without it Redis would be filled to the last byte by what steps add, and then refuse to be emptied."""
    server = PrivateRedis(Settings(data_dir=tmp_path, redis_max_mib=32))
    process = server.start()
    try:
        own = Settings(redis_url=server.url, data_dir=tmp_path)
        ledger = Ledger(redis.Redis.from_url(server.url), own)
        assert ledger.intake.accept(batch("first")) == Accepted(batch_id="first")
        memory: Any = ledger.client.info("memory")
        for n in range(int(0.82 * memory["maxmemory"] - memory["used_memory"]) // 2**18 + 1):
            ledger.client.set(f"filler{n}", b"x" * 2**18)
        answer = ledger.intake.accept(batch("new"))
        assert refused(answer) == "memory"
        assert "four fifths of its memory" in str(answer)
        told = ledger.intake.full()
        assert told is not None and told.reason == "memory"
        finish(ledger, "first")
        assert ledger.intake.accept(batch("new")) == Accepted(batch_id="new"), (
            "where nothing waits, it would wait for ever"
        )
        ledger.client.close()
    finally:
        process.terminate()
        process.wait(20)


# Long backlogs


def overdue(context: Context, names: list[str]) -> None:
    pipe = context.client.pipeline()
    pipe.zadd(context.ledger.keys.due, dict.fromkeys(names, 1))
    pipe.execute()


def test_one_lost_message_in_a_long_backlog_is_sent_by_the_next_sweep(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"b{n:02}" for n in range(30)]
    for name in names:
        context.ledger.intake.accept(batch(name))
        if name != "b29":
            context.submit.wake(Stage.INGEST, name)
    overdue(context, names)
    look = context.ledger.backlog.overdue
    monkeypatch.setattr(context.ledger.backlog, "overdue", lambda **until: look(limit=7, **until))
    reads: list[Stage] = []
    waiting = context.submit.waiting_ids

    def counted(stage: Stage, *, backfill: bool = False) -> set[str] | None:
        reads.append(stage)
        return waiting(stage, backfill=backfill)

    monkeypatch.setattr(context.submit, "waiting_ids", counted)
    assert periodic.sweep(context) == 1
    assert len(reads) == 1, "the queue is read once, however many pages there are"
    assert len(context.submit.waiting_ids(Stage.INGEST) or ()) == 30


def test_what_a_queue_too_long_to_be_read_may_hold_is_not_sent_before_it_is_shorter(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "LOOK_AT_MOST", 3)
    names = [f"b{n}" for n in range(5)]
    for name in names:
        context.ledger.intake.accept(batch(name))
        if name != "b4":
            context.submit.wake(Stage.INGEST, name)
    old = batch("old")
    context.ledger.intake.accept(old, backfill=True)
    overdue(context, [*names, "old"])
    assert periodic.sweep(context) == 1, "the queue of the other class is short"
    queue = f"{context.settings.redis.key_prefix}:{QUEUE_INGEST}"
    context.client.rpop(queue)
    overdue(context, names)
    assert periodic.sweep(context) == 2, "b4, and b0 whose message was taken and lost"
    assert periodic.sweep(context) == 0


def test_a_sweep_sends_a_bounded_number_and_the_next_one_goes_on(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "SENT_AT_ONCE", 4)
    names = [f"b{n:02}" for n in range(10)]
    for name in names:
        context.ledger.intake.accept(batch(name))
    overdue(context, names)
    look = context.ledger.backlog.overdue
    monkeypatch.setattr(context.ledger.backlog, "overdue", lambda **until: look(limit=3, **until))
    assert [periodic.sweep(context) for _ in range(3)] == [6, 4, 0]
    assert context.submit.waiting_ids(Stage.INGEST) == set(names)


@pytest.mark.parametrize("name", ["plain", 'quo"te', "back\\slash", "ü €", 'x", "batch": "y', "\\"])
def test_a_message_is_found_by_the_id_that_it_carries(context: Context, name: str) -> None:
    context.submit.wake(Stage.INGEST, name, workload='"batch": "z"')
    queue = f"{context.settings.redis.key_prefix}:{QUEUE_INGEST}"
    raw: Any = context.client.lindex(queue, 0)
    assert json.loads(raw)["headers"]["batch"] == name
    assert queues.batches_of([raw]) == {name}
    assert queues.batches_of([b"", b"[]", b'"batch": 1', b'"batch": "\\u12"', b"\xff"]) == set()


def test_bytes_of_dead_letters_that_an_older_build_took_away_refuse_nobody(
    client: "redis.Redis", settings: Settings
) -> None:
    ledger = Ledger(client, settings.replace(max_dead_mib=1))
    ledger.client.hset(ledger.keys.counts, "dead_bytes", 2**30)
    assert ledger.intake.full() is None
    assert ledger.intake.accept(batch("a")) == Accepted(batch_id="a")
    bury(ledger, "a")
    assert refused(ledger.intake.accept(batch("b"))) == "dead", "there is one to look after"
