"""What a step does with the sink and the counters when its batch is given up or scored again."""

import os
import subprocess
import sys
import time
from typing import Any

import polars as pl
import pytest

from pipeline import detect
from pipeline.errors import ClaimLost, Rejected, SinkUnavailable
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Stage, half_ids
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.tasks import drain, frontend, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.frontend import Prepared
from pipeline.tasks.grouping.group_commit import committed_or_stage
from pipeline.tasks.step import HUNG, perform


@pytest.fixture
def context(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr("pipeline.drain.learner.PER_WORKLOAD", 1)
    return Context(make_app(settings), settings)


def stored_while_warming(context: Context) -> None:
    lines = ["first shape of a line", "another one", "and a third that is longer still"]
    Producer(context.ledger, context.submit, context.settings).send(lines, workload="shop", batch_id="b")
    for stage, module in ((Stage.INGEST, ingest), (Stage.DRAIN, drain), (Stage.STORE, store)):
        perform(context, stage, "b", module.step)


@pytest.mark.long
def test_a_batch_that_is_split_after_it_was_stored_is_not_stored_twice(context: Context) -> None:
    sink = context.sink(Purpose.SCORE)

    def dies_between_write_and_commit(context: Context, claim: Claim) -> None:
        work = context.ledger.work(claim.batch_id)
        (records,) = frontend.prepared_batches(context, [claim], [work]).records
        sink.write("b", detect.result_rows(records, work, claim.meta, claim.workload))
        raise ValueError("broken after the write")

    Producer(context.ledger, context.submit, context.settings).send(
        ["one", "two"], workload="shop", batch_id="b"
    )
    perform(context, Stage.INGEST, "b", ingest.step)
    perform(context, Stage.DRAIN, "b", drain.step)
    for _ in range(context.settings.internal.max_attempts):
        assert context.client.hset(context.ledger.keys.batch("b"), "not_before", 0) == 0
        perform(context, Stage.STORE, "b", dies_between_write_and_commit)
    assert context.client.hget(context.ledger.keys.batch("b"), "state") == b"split"
    assert sink.read("b", "shop") is None


def test_lines_past_the_template_limit_are_counted_once_when_they_are_scored_again(context: Context) -> None:
    stored_while_warming(context)
    first = context.ledger.backlog.totals()["shop"]
    assert (first["unclassified"], first["warming"]) == (2, 3)
    assert context.ledger.backlog.start_rescoring(10, has_model=lambda _: True) == ["b"]
    perform(context, Stage.INGEST, "b", ingest.step)  # no model yet after all: warming again
    again = context.ledger.backlog.totals()["shop"]
    assert (again["unclassified"], again["warming"], again["stored"]) == (2, 3, 3)


@pytest.mark.long
def test_burying_a_batch_that_is_scored_again_leaves_what_was_stored(context: Context) -> None:
    stored_while_warming(context)
    context.ledger.backlog.start_rescoring(10, has_model=lambda _: True)

    def fails(_context: Context, _claim: Claim) -> None:
        raise ValueError("no")

    for _ in range(context.settings.internal.max_attempts):
        context.client.hset(context.ledger.keys.batch("b"), "not_before", 0)
        perform(context, Stage.INGEST, "b", fails)
    assert context.client.hget(context.ledger.keys.batch("b"), "state") == b"dead"
    assert context.sink(Purpose.SCORE).read("b", "shop").height == 3
    totals = context.ledger.backlog.totals()["shop"]
    assert (totals["stored"], totals.get("dead", 0)) == (3, 0)


@pytest.mark.parametrize("stalls", ["before the write", "between write and commit"])
def test_a_worker_that_wakes_up_after_its_batch_was_split_stores_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch, stalls: str
) -> None:
    Producer(context.ledger, context.submit, context.settings).send(
        ["one", "two"], workload="shop", batch_id="b"
    )
    perform(context, Stage.INGEST, "b", ingest.step)
    perform(context, Stage.DRAIN, "b", drain.step)
    sink, entry = context.sink(Purpose.SCORE), context.ledger.keys.batch("b")
    claim = context.ledger.claim("b", Stage.STORE, "the one that stalls")
    assert isinstance(claim, Claim)

    def others_split_it() -> None:
        context.client.hset(entry, mapping={"deadline": 1, "attempts": 99})
        perform(context, Stage.STORE, "b", store.step)
        assert context.client.hget(entry, "state") == b"split"

    if stalls == "before the write":
        others_split_it()
    else:
        write = sink.write_all

        def slow(*args: Any, **more: Any) -> object:
            others_split_it()
            return write(*args, **more)

        monkeypatch.setattr(sink, "write_all", slow)
    prepared = detect.prepare(raw_frame(["one", "two"]), claim.meta, context.masks)
    batch, work = Prepared([claim], [prepared], None), detect.distinct(prepared, "warming")
    with pytest.raises(ClaimLost):
        ((_, found),) = ingest.unstored(context, [claim], batch, [work])
        committed_or_stage(context, claim, found)
    assert sink.read("b", "shop") is None


def everything(context: Context, batch_id: str) -> None:
    for stage, module in ((Stage.INGEST, ingest), (Stage.DRAIN, drain), (Stage.STORE, store)):
        perform(context, stage, batch_id, module.step)


def test_records_that_the_store_refuses_by_name_die_together_at_once_and_the_rest_is_stored(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = context.sink(Purpose.SCORE)
    write = sink.write_all

    def refuses(batches: list[tuple[str, pl.DataFrame]], **_: object) -> None:
        ((_, frame),) = batches
        bad = frame.filter(pl.col("message").str.contains("bad"))["record_id"].to_list()
        if bad:
            raise Rejected("the mapping does not take it", bad)
        write(batches)

    monkeypatch.setattr(sink, "write_all", refuses)
    lines = [f"line {n} is {'bad' if n in (1, 4, 5) else 'good'}" for n in range(8)]
    Producer(context.ledger, context.submit, context.settings).send(lines, workload="shop", batch_id="b")
    everything(context, "b")
    rest, apart = half_ids("b")
    everything(context, rest)
    everything(context, apart)
    stored = sink.read(rest, "shop")
    assert stored is not None and stored["line"].to_list() == [1, 3, 4, 7, 8]
    (letter,) = context.ledger.dead_letters.newest()
    assert (letter.batch_id, letter.lines, letter.reason) == (apart, 3, "the mapping does not take it")
    assert context.ledger.payload(apart)["line"].to_list() == [2, 5, 6]
    assert context.ledger.backlog.totals()["shop"]["stored"] == 5


def test_a_batch_that_a_store_refuses_as_a_whole_is_one_dead_letter(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = context.sink(Purpose.SCORE)

    def refuses(batches: list[tuple[str, pl.DataFrame]], **_: object) -> None:
        ((_, frame),) = batches
        raise Rejected("the mapping does not take it", frame["record_id"].to_list())

    monkeypatch.setattr(sink, "write_all", refuses)
    Producer(context.ledger, context.submit, context.settings).send(
        ["one", "two", "three"], workload="shop", batch_id="b"
    )
    everything(context, "b")
    (letter,) = context.ledger.dead_letters.newest()
    assert (letter.batch_id, letter.lines) == ("b", 3)


def test_a_store_that_is_away_while_a_batch_is_given_up_is_waited_for(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = context.sink(Purpose.SCORE)

    def away(*_: object, **_more: object) -> None:
        raise SinkUnavailable("the store is away")

    def refuses(batches: list[tuple[str, pl.DataFrame]], **_: object) -> None:
        ((_, frame),) = batches
        raise Rejected("no", frame["record_id"].to_list())

    monkeypatch.setattr(sink, "write_all", refuses)
    monkeypatch.setattr(sink, "remove", away)
    Producer(context.ledger, context.submit, context.settings).send(["one"], workload="shop", batch_id="b")
    everything(context, "b")
    assert context.ledger.state("b") == "store"
    trouble = context.presence.trouble()
    assert trouble is not None and trouble.reason == "the store is away"


@pytest.mark.long
def test_an_exhausted_batch_is_given_up_however_long_its_results_take_to_go(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(make_app(settings), settings.replace(claim_ttl_ms=1_000))
    Producer(context.ledger, context.submit, context.settings).send(["one"], workload="shop", batch_id="b")
    entry = context.ledger.keys.batch("b")
    context.client.hset(entry, "attempts", context.settings.internal.max_attempts)
    sink = context.sink(Purpose.SCORE)
    remove = sink.remove

    def slow(*args: Any, **more: Any) -> None:
        time.sleep(1.6)
        remove(*args, **more)

    monkeypatch.setattr(sink, "remove", slow)
    perform(context, Stage.INGEST, "b", ingest.step)
    assert context.ledger.state("b") == "dead"


STUCK = """
import sys, time
from pipeline.messages.app import make_app
from pipeline.records.delivery import Stage
from pipeline.records.batch import Purpose
from pipeline.settings import Settings
from pipeline.tasks import store
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

settings = Settings.load().replace(step_s=2.5)
context = Context(make_app(settings), settings)
context.masks

def stuck(*_: object, **__: object) -> None:
    time.sleep(60)

if sys.argv[1] == "sink":
    context.sink(Purpose.SCORE).write_all = stuck
perform(context, Stage.STORE, "b", store.step if sys.argv[1] == "sink" else stuck)
"""


@pytest.mark.long
@pytest.mark.parametrize(("where", "attempts"), [("sink", b"0"), ("step", b"1")])
def test_a_sink_that_does_not_answer_is_not_the_fault_of_its_batch(
    context: Context, where: str, attempts: bytes
) -> None:
    Producer(context.ledger, context.submit, context.settings).send(["one"], workload="shop", batch_id="b")
    perform(context, Stage.INGEST, "b", ingest.step)
    perform(context, Stage.DRAIN, "b", drain.step)
    environ = {**os.environ, **context.settings.to_environ()}
    ended = subprocess.run([sys.executable, "-c", STUCK, where], env=environ, timeout=60, check=False)
    assert ended.returncode == HUNG
    entry = context.ledger.keys.batch("b")
    assert context.client.hmget(entry, "state", "owner", "attempts") == [b"store", b"", attempts]
    trouble = context.presence.trouble()
    assert (trouble is not None and "look after their disk" in trouble.reason) == (where == "sink")


def test_halves_of_pushed_lines_keep_their_stack_traces_and_formats(context: Context) -> None:
    head = "2026-11-20T10:00:0{n}Z ERROR boom"
    trace = "Traceback (most recent call last):\n  File x\nValueError: no"
    lines = [text for n in range(2) for text in (head.format(n=n), trace)]
    Producer(context.ledger, context.submit, context.settings).send(lines, workload="shop", batch_id="b")
    for _ in range(context.settings.internal.max_attempts):
        claim = context.ledger.claim("b", Stage.INGEST, "w")
        assert isinstance(claim, Claim)
        assert (claim.lines, claim.meta.formats) == (8, ())
        context.ledger.release(claim, reason="it fails", delay_s=0.0, counted=True)
    perform(context, Stage.INGEST, "b", ingest.step)
    for number, half in enumerate(half_ids("b")):
        part = context.ledger.claim(half, Stage.INGEST, "w")
        assert isinstance(part, Claim)
        assert (part.lines, part.records, part.meta.formats) == (4, 1, ("iso",))
        assert context.ledger.payload(half).select("line", "lines").row(0) == (1 + 4 * number, 4)
