"""Many small batches in one pass of the model, and what is promised of each of them all the same."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from crash_points import check_sums, snapshot
from polling import wait_until
from pool_devices import put_devices
from small_bundles import ONE, TWO, written

from pipeline.errors import BadBundle
from pipeline.messages.app import make_app
from pipeline.messages.routing import QUEUE_CPU, QUEUE_GPU, of_class
from pipeline.models.evidence import Evidence
from pipeline.producer import Producer
from pipeline.records.delivery import Claim, Stage
from pipeline.settings import Settings
from pipeline.tasks import drain, infer, ingest
from pipeline.tasks import share as share_module
from pipeline.tasks.context import Context
from pipeline.tasks.grouping import merging
from pipeline.tasks.loaded import WorkerProfile
from pipeline.tasks.step import HUNG, perform


class Worker(Context):
    """A scoring process whose network says the same of every line, and which remembers what it was asked at
    once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: list[list[str]] = []
        setattr(self.models, "scorer", lambda version: self)  # noqa: B010 - mypy refuses a method's assignment

    def score(self, masked: Sequence[str]) -> list[Evidence]:
        self.passes.append(list(masked))
        if any("poison" in line for line in masked):
            raise ValueError("it cannot be scored")
        return [Evidence(surprisal=1.0, tokens=3) for _ in masked]


@pytest.fixture
def worker(settings: Settings) -> Iterator[Worker]:
    made = make(settings)
    written(made.registry, ONE)
    live(made, ONE)
    yield made
    made.app.close()


def make(settings: Settings, *profile: WorkerProfile) -> Worker:
    return Worker(make_app(settings), settings, *profile)


def live(context: Context, version: str) -> None:
    pointer = {"version": version, "generation": 1, "token": 1, "published": "", "history": f'["{version}"]'}
    context.client.hset(context.ledger.keys.model(), mapping=pointer)
    context.client.sadd(context.ledger.keys.model_names, "shared")


def word(n: int) -> str:
    """A word without digits, which masks would take out."""
    return "".join(chr(97 + n // 26**k % 26) for k in range(4))


def sent(context: Context, name: str, lines: Sequence[str], *, backfill: bool = False) -> None:
    """A batch that waits to be scored, with its message."""
    producer = Producer(context.ledger, context.submit, context.settings)
    producer.send(list(lines), workload="shop", batch_id=name, backfill=backfill)
    taken(context, "ingest", backfill=backfill)
    perform(context, Stage.INGEST, name, ingest.step)
    assert context.ledger.state(name) == "infer"


def small(context: Context, count: int, *, of: int = 10) -> list[str]:
    """Batches of lines that nobody knows, half of them in every batch."""
    names = [f"b{n}" for n in range(count)]
    for n, name in enumerate(names):
        own = [f"module {word(1_000 + n * of + k)} starts" for k in range(of // 2)]
        sent(context, name, [*own, *(f"part {word(k)} is up" for k in range(of - len(own)))])
    return names


def taken(context: Context, queue: str, *, backfill: bool = False) -> str | None:
    """The batch id of the message that a worker would get next; the message is gone then."""
    raw: Any = context.client.rpop(
        f"{context.settings.redis.key_prefix}:{of_class(queue, backfill=backfill)}"
    )
    return None if raw is None else json.loads(base64.b64decode(json.loads(raw)["body"]))[0][0]


def worked(context: Context, *, queue: str = QUEUE_CPU, most: int = 1_000) -> list[str]:
    """Give the messages that wait to the worker, one after another."""
    done: list[str] = []
    while len(done) < most:
        name = taken(context, queue) or taken(context, queue, backfill=True)
        if name is None:
            break
        done.append(name)
        infer.run(context, name)
    return done


def field(context: Context, name: str, what: str) -> str:
    return (context.client.hget(context.ledger.keys.batch(name), what) or b"").decode()


def states(context: Context, names: Sequence[str]) -> set[str]:
    return {context.ledger.state(name) for name in names}


def expired(context: Context, *names: str) -> None:
    for name in names:
        context.client.hset(context.ledger.keys.batch(name), mapping={"deadline": 1, "not_before": 0})


def test_what_waits_behind_a_batch_is_scored_in_its_pass_and_every_line_once(worker: Worker) -> None:
    names = small(worker, 20)
    assert infer.run(worker, taken(worker, QUEUE_CPU) or "") is None
    assert states(worker, names) == {"drain"}
    (lines,) = worker.passes
    assert len(lines) == len(set(lines)) == 20 * 5 + 5
    for name in names:
        work = worker.ledger.work(name)
        assert work.height == 10
        assert work["surprisal"].to_list() == [1.0] * 10
        assert work["pattern_id"].n_unique() == 10, "each its own lines"
        assert (field(worker, name, "attempts"), field(worker, name, "owner")) == ("0", "")
    left = worked(worker)
    assert left == names[1:], "their messages were not taken away"
    assert len(worker.passes) == 1, "and whoever gets them leaves the batches alone"
    assert worker.submit.next_ids("drain", 100) == names
    check_sums(snapshot(worker.client, worker.settings.redis.key_prefix))


def test_a_pass_is_full_at_some_number_of_lines_and_of_batches(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PASS_LINES", {"cpu": 20})
    names = small(worker, 8)
    infer.run(worker, taken(worker, QUEUE_CPU) or "")
    assert [worker.ledger.state(name) for name in names] == ["drain"] * 3 + ["infer"] * 5, (
        "10, 15 and 20 lines"
    )
    monkeypatch.setattr(merging, "PASS_LINES", {"cpu": 5})
    infer.run(worker, names[3])
    assert worker.ledger.state(names[4]) == "infer", "one that fills a pass goes alone"
    monkeypatch.setattr(merging, "PASS_LINES", {"cpu": 1_000})
    monkeypatch.setattr(merging, "PASS_BATCHES", 2)
    assert [taken(worker, QUEUE_CPU) for _ in range(4)] == names[1:5]
    infer.run(worker, names[4])
    assert [worker.ledger.state(name) for name in names[5:]] == ["drain", "drain", "infer"]


def test_fresh_batches_take_no_backfill_along_nor_the_other_way_round(worker: Worker) -> None:
    for n in range(3):
        sent(worker, f"fresh{n}", [f"line {word(n)}"])
        sent(worker, f"late{n}", [f"other line {word(n)}"], backfill=True)
    infer.run(worker, "fresh0")
    assert [len(lines) for lines in worker.passes] == [3]
    assert states(worker, ["late0", "late1", "late2"]) == {"infer"}
    infer.run(worker, "late0")
    assert [len(lines) for lines in worker.passes] == [3, 3]
    assert states(worker, ["late0", "late1", "late2"]) == {"drain"}


@pytest.mark.long
def test_a_line_that_fails_costs_only_its_own_batch_an_attempt(worker: Worker) -> None:
    names = small(worker, 6)
    sent(worker, "bad", [f"poison {word(7)}", "a line beside it"])
    names.append("bad")
    first = taken(worker, QUEUE_CPU)
    assert first == "b0"
    infer.run(worker, first)
    assert states(worker, names[:-1]) == {"drain"}, "each went on alone"
    assert [len(lines) for lines in worker.passes] == [5 + 6 * 5 + 2, 10, *[5] * 5, 2], (
        "each alone, and what is known is not scored again"
    )
    assert (worker.ledger.state("bad"), field(worker, "bad", "attempts")) == ("infer", "1")
    for _ in range(2):
        expired(worker, "bad")
        infer.run(worker, "bad")
    assert worker.ledger.state("bad") == "split"
    check_sums(snapshot(worker.client, worker.settings.redis.key_prefix))


@pytest.mark.long
def test_the_batch_whose_turn_it_is_counts_when_it_is_the_one_at_fault(worker: Worker) -> None:
    sent(worker, "bad", [f"poison {word(7)}"])
    names = small(worker, 3)
    assert infer.run(worker, "bad") == "ValueError: it cannot be scored"
    assert field(worker, "bad", "attempts") == "1"
    assert {field(worker, name, "attempts") for name in names} == {"0"}


def test_what_has_failed_before_neither_takes_others_along_nor_is_taken(worker: Worker) -> None:
    names = small(worker, 4)
    claim = worker.ledger.claim("b1", Stage.INFER, "it dies")
    assert isinstance(claim, Claim)
    expired(worker, "b1")
    infer.run(worker, "b0")
    assert states(worker, ["b0", "b2", "b3"]) == {"drain"}
    assert (worker.ledger.state("b1"), field(worker, "b1", "attempts")) == ("infer", "1")
    sent(worker, "later", ["one more"])
    infer.run(worker, "b1")
    assert (worker.ledger.state("b1"), worker.ledger.state("later")) == ("drain", "infer")
    assert names


@pytest.mark.long
def test_parts_of_a_batch_that_was_given_up_go_alone(worker: Worker) -> None:
    sent(worker, "bad", [f"poison {word(7)}", "good line"])
    for _ in range(worker.settings.internal.max_attempts):
        expired(worker, "bad")
        infer.run(worker, "bad")
    worker.client.delete(f"{worker.settings.redis.key_prefix}:{QUEUE_CPU}")
    for half in ("bad~0", "bad~1"):
        perform(worker, Stage.INGEST, half, ingest.step)
    sent(worker, "later", ["one more"])
    worker.passes.clear()
    infer.run(worker, "later")
    assert worker.passes == [["one more"]]
    sent(worker, "last", ["and another"])
    infer.run(worker, "bad~1")
    assert worker.passes[1:] == [["good line"]]
    assert worker.ledger.state("last") == "infer"


def test_where_one_attempt_must_do_nothing_is_taken_along(worker: Worker) -> None:
    small(worker, 2)
    strict = make(worker.settings.replace(max_attempts=1))
    infer.run(strict, "b0")
    assert (worker.ledger.state("b0"), worker.ledger.state("b1")) == ("drain", "infer")
    strict.app.close()


@pytest.mark.parametrize("lost", ["b0", "b2"])
def test_a_claim_that_is_lost_meanwhile_loses_only_its_own_batch(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    names = small(worker, 4)
    score = worker.score

    def slow(masked: Sequence[str]) -> list[Evidence]:
        expired(worker, lost)
        assert isinstance(worker.ledger.claim(lost, Stage.INFER, "another one"), Claim)
        return score(masked)

    monkeypatch.setattr(worker, "score", slow)
    infer.run(worker, "b0")
    assert states(worker, [name for name in names if name != lost]) == {"drain"}
    assert (worker.ledger.state(lost), field(worker, lost, "owner")) == ("infer", "another one")
    assert worker.ledger.work(lost)["surprisal"].null_count() == 10


def test_every_batch_is_scored_under_the_version_it_began_with(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(worker.models, "scorer", lambda version: asked.append(version) or worker)
    small(worker, 2)
    written(worker.registry, TWO)
    live(worker, TWO)
    sent(worker, "new", [f"part {word(0)} is up", "a new line"])
    sent(worker, "old", ["one of the version before"])
    changed = worker.ledger.work("old").with_columns(version=pl.lit(ONE))
    claim = worker.ledger.claim("old", Stage.INFER, "x")
    assert isinstance(claim, Claim)
    worker.ledger.advance(claim, Stage.INFER, changed)
    infer.run(worker, "new")
    assert asked == [TWO, ONE], "its own first"
    assert [len(lines) for lines in worker.passes] == [2, 16], "a line is another one under another version"
    assert states(worker, ["b0", "b1", "new", "old"]) == {"drain"}
    assert set(worker.ledger.work("b0")["version"]) == {ONE}


def test_a_version_that_cannot_be_read_keeps_only_its_own_batches_waiting(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(version: str) -> Worker:
        if version == ONE:
            raise BadBundle("its weights are no numbers")
        return worker

    monkeypatch.setattr(worker.models, "scorer", damaged)
    small(worker, 2)
    written(worker.registry, TWO)
    live(worker, TWO)
    sent(worker, "new", ["a new line"])
    infer.run(worker, "b0")
    assert worker.ledger.state("new") == "drain"
    assert states(worker, ["b0", "b1"]) == {"ingest"}, "they begin again under the live one"
    assert worker.client.llen(f"{worker.settings.redis.key_prefix}:ingest") == 2


def test_work_that_cannot_be_read_counts_against_its_own_batch(worker: Worker) -> None:
    names = small(worker, 3)
    worker.client.set(worker.ledger.keys.work("b1"), b"no Arrow file")
    infer.run(worker, "b0")
    assert states(worker, ["b0", "b2"]) == {"drain"}
    assert (worker.ledger.state("b1"), field(worker, "b1", "attempts")) == ("infer", "1")
    assert names


def test_an_entry_that_is_damaged_harms_nobody_before_it_in_the_queue(worker: Worker) -> None:
    names = small(worker, 4)
    worker.client.hdel(worker.ledger.keys.batch("b3"), "not_before")
    infer.run(worker, taken(worker, QUEUE_CPU) or "")
    assert states(worker, names[:3]) == {"drain"}
    assert worker.ledger.state("b3") == "infer"


def test_a_pass_takes_no_more_along_than_its_works_have_room(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PASS_BYTES", 1)
    names = small(worker, 3)
    infer.run(worker, taken(worker, QUEUE_CPU) or "")
    assert [worker.ledger.state(name) for name in names] == ["drain", "infer", "infer"]


def test_the_words_of_a_line_are_measured_once_however_many_batches_have_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"b{n}" for n in range(5)]
    for name in names:
        sent(worker, name, ["alpha beta gamma delta epsilon"])
    infer.run(worker, taken(worker, QUEUE_CPU) or "")
    monkeypatch.setattr(worker.models, "knowledge", lambda _version: None)
    for name in names:
        assert perform(worker, Stage.DRAIN, name, drain.step) is None
    counted = [worker.ledger.work(name)["tokens"].is_not_null().sum() for name in names]
    assert counted == [1, 0, 0, 0, 0]


def test_a_worker_of_the_gpu_takes_along_what_waits_for_the_gpu(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(share_module, "HOST_DIRECTORY", tmp_path / "locks")
    on_gpu = make(worker.settings.replace(gpu_infer_mib=2_000), WorkerProfile(leased=True))
    put_devices(on_gpu.pool, n=1, mib=8_000, node=share_module.this_node())
    monkeypatch.setattr(on_gpu.models, "begin", lambda lease: setattr(on_gpu.models, "place", "cuda:0"))
    monkeypatch.setattr(on_gpu.models, "prepare", lambda: None)
    small(worker, 4)
    for name in ("b0", "b1"):
        worker.submit.wake(Stage.INFER, name, queue=QUEUE_GPU)
    infer.run(on_gpu, taken(worker, QUEUE_GPU) or "")
    assert [worker.ledger.state(f"b{n}") for n in range(4)] == ["drain", "drain", "infer", "infer"]
    assert [len(lines) for lines in on_gpu.passes] == [15]
    assert on_gpu.share is not None
    on_gpu.share.close()
    on_gpu.app.close()


PROCESS = """
import os, signal, sys, time
from dataclasses import replace
from pipeline.messages.app import make_app
from pipeline.models.threshold import Evidence
from pipeline.settings import Settings
from pipeline.tasks import infer
from pipeline.tasks.context import Context

class Worker(Context):
    def score(self, masked):
        if any("deadly" in line for line in masked):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("endless" in line for line in masked):
            time.sleep(60)
        return [Evidence(surprisal=1.0, tokens=3) for _ in masked]

settings = Settings.load()
worker = Worker(make_app(settings), settings)
worker.models.scorer = lambda version: worker
infer.run(worker, sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.parametrize(("what", "code"), [("deadly", -signal.SIGKILL), ("endless", HUNG)])
def test_a_line_that_kills_or_hangs_its_worker_takes_the_others_with_it_once(
    worker: Worker, what: str, code: int
) -> None:
    """With real processes: a pass of four batches, one of which ends the process."""
    names = small(worker, 3)
    sent(worker, "bad", [f"{what} line {word(3)}"])
    quick = worker.settings.replace(claim_ttl_ms=1_000, step_s=2.0)
    environ = {**os.environ, **quick.to_environ()}

    def run(name: str) -> int:
        command = [sys.executable, "-c", PROCESS, name]
        return subprocess.run(command, env=environ, timeout=60, check=False).returncode

    assert run("b0") == code
    everyone = [*names, "bad"]
    assert {field(worker, name, "attempts") for name in everyone} == {"1"}
    assert states(worker, everyone) == {"infer"}
    now = worker.ledger.store.now_ms()
    ready = [
        n for n in everyone if n != "b0" or what == "deadly"
    ]  # the first of a hung pass rests for as long as it took
    assert wait_until(
        lambda: all(
            int(field(worker, n, "deadline"))
            <= worker.ledger.store.now_ms()
            >= int(field(worker, n, "not_before"))
            for n in ready
        ),
        timeout_s=10,
    ), now
    expired(worker, "b0")
    for name in names:
        assert run(name) == 0
        assert worker.ledger.state(name) == "drain", "alone it goes on"
    for _ in range(2):
        expired(worker, "bad")
        assert run("bad") == code
    expired(worker, "bad")
    run("bad")
    assert [letter.batch_id for letter in worker.ledger.dead_letters.newest()] == ["bad"]
    assert {letter.lines for letter in worker.ledger.dead_letters.newest()} == {1}
    check_sums(snapshot(worker.client, worker.settings.redis.key_prefix))


@pytest.mark.long
def test_one_thread_renews_all_claims_of_a_pass(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = make(worker.settings.replace(claim_ttl_ms=1_000))
    names = small(quick, 30)
    score = quick.score

    def slow(masked: Sequence[str]) -> list[Evidence]:
        first = {name: int(field(quick, name, "deadline")) for name in names}
        renewed = wait_until(
            lambda: all(int(field(quick, name, "deadline")) > first[name] + 500 for name in names),
            timeout_s=10,
        )
        assert renewed
        return score(masked)

    monkeypatch.setattr(quick, "score", slow)
    infer.run(quick, "b0")
    assert states(quick, names) == {"drain"}
    quick.app.close()


def test_the_end_of_the_queue_is_read_in_the_order_in_which_it_is_taken(worker: Worker) -> None:
    names = small(worker, 5)
    assert worker.submit.next_ids(QUEUE_CPU, 3) == names[:3]
    worker.submit.wake(Stage.INFER, "b1", queue=QUEUE_CPU)
    assert worker.submit.next_ids(QUEUE_CPU, 100) == names, "a second message of a batch says nothing new"
    assert worker.submit.next_ids(QUEUE_CPU, 100, backfill=True) == []
    assert [taken(worker, QUEUE_CPU) for _ in range(3)] == names[:3]
