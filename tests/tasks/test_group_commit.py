"""Small batches in one commit of the results, and what is promised of each of them all the same."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from crash_points import check_sums, snapshot

from pipeline.errors import SinkUnavailable
from pipeline.messages.app import make_app
from pipeline.messages.spent import spent
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Meta, Stage
from pipeline.records.payload import pack_pushed
from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.tasks import drain, frontend, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.grouping import group_commit
from pipeline.tasks.step import perform

KNOWN = ["user logged in", "disk checked"]


@pytest.fixture
def context(settings: Settings) -> Iterator[Context]:
    """A process that knows the lines of KNOWN."""
    made = Context(make_app(settings), settings)
    Producer(made.ledger, made.submit, settings).send(KNOWN, workload="shop", batch_id="first")
    for stage, module in ((Stage.INGEST, ingest), (Stage.DRAIN, drain), (Stage.STORE, store)):
        perform(made, stage, "first", module.step)
    made.client.delete(f"{settings.redis.key_prefix}:ingest")
    yield made
    made.app.close()


def sent(context: Context, *names: str, lines: list[str] | None = None, workload: str = "shop") -> None:
    producer = Producer(context.ledger, context.submit, context.settings)
    for name in names:
        producer.send(lines or KNOWN, workload=workload, batch_id=name)


def commits(context: Context) -> list[set[str]]:
    """The batches of each commit after the first."""
    sink = parquet_of(context.settings)
    return [{one.batch_id for one in sink.batches(part)} for part in sink.parts()[1:]]


def states(context: Context, *names: str) -> list[str]:
    return [context.ledger.state(name) for name in names]


def test_what_waits_behind_a_batch_is_stored_in_its_commit(context: Context) -> None:
    sent(context, "a", "b")
    sent(context, "c", workload="bank")
    assert ingest.run(context, "a") is None
    assert commits(context) == [{"a", "b", "c"}]
    assert states(context, "a", "b", "c") == ["done"] * 3
    totals = context.ledger.backlog.totals()
    assert (totals["shop"]["stored"], totals["bank"]["stored"]) == (6, 2)
    check_sums(snapshot(context.client, context.settings.redis.key_prefix))
    assert context.submit.next_ids("ingest", 10) == ["a"], "the other messages are taken away"
    for name in ("b", "c"):
        ingest.run(context, name)
    assert len(commits(context)) == 1, "a message that was on its way finds its batch done"
    assert not any(spent.take("ingest", name) for name in ("a", "b", "c"))


def test_a_message_that_is_on_its_way_is_dropped_later(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(context, "a", "b", "c")
    look = context.submit.next_ids

    def received_meanwhile(queue: str, limit: int, *, backfill: bool = False) -> list[str]:
        ids = look(queue, limit, backfill=backfill)
        key = context.ledger.keys.kombu("ingest")
        assert context.client.rpop(key) and context.client.rpop(key)  # those of a and b
        return ids

    monkeypatch.setattr(context.submit, "next_ids", received_meanwhile)
    ingest.run(context, "a")
    assert states(context, "a", "b", "c") == ["done"] * 3
    assert context.client.llen(context.ledger.keys.kombu("ingest")) == 0
    assert [name for name in ("a", "b", "c") if spent.take("ingest", name)] == ["b"]


def test_batches_with_unknown_lines_leave_the_group(context: Context) -> None:
    sent(context, "a")
    sent(context, "b", lines=["nobody knows this"])
    sent(context, "c")
    ingest.run(context, "a")
    assert commits(context) == [{"a", "c"}]
    assert states(context, "a", "b", "c") == ["done", "drain", "done"]


def test_the_stage_that_stores_scored_batches_groups_them_too(context: Context) -> None:
    sent(context, "a", "b", lines=["nobody knows this"])
    ingest.run(context, "a")
    for name in ("a", "b"):
        perform(context, Stage.DRAIN, name, drain.step)
    store.run(context, "a")
    assert commits(context) == [{"a", "b"}]
    assert states(context, "a", "b") == ["done", "done"]


def test_a_baseline_is_stored_apart_from_results_of_the_same_pass(context: Context) -> None:
    sent(context, "a", "calm", "b")
    key = context.ledger.keys.batch("calm")
    meta = Meta.load((context.client.hget(key, "meta") or b"").decode(), "calm")
    context.client.hset(key, "meta", replace(meta, purpose=Purpose.BASELINE).dump())
    ingest.run(context, "a")
    assert commits(context) == [{"a", "b"}]
    assert parquet_of(context.settings, Purpose.BASELINE).read("calm", "shop") is not None


def test_a_group_ends_with_enough_records_and_the_step_goes_on_with_the_next_while_it_is_stored(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GROUP_RECORDS", 4)
    sent(context, "a", "b", "c", "d", "e")
    sink: Any = context.sink(Purpose.SCORE)
    write_all, prepared, another = sink.write_all, frontend.prepared_batches, threading.Event()
    stored: list[tuple[list[str], bool]] = []  # of each commit: its batches, and whether another group began
    passes: list[list[str]] = []

    def begins(context: Context, claims: Any, works: Any) -> Any:
        passes.append([claim.batch_id for claim in claims])
        if len(passes) > 1:
            another.set()
        return prepared(context, claims, works)

    def slow(batches: Any, **more: Any) -> None:
        names = [name for name, _ in batches]
        stored.append((names, "e" in names or another.wait(20)))
        another.clear()
        write_all(batches, **more)

    monkeypatch.setattr(frontend, "prepared_batches", begins)
    monkeypatch.setattr(sink, "write_all", slow)
    assert ingest.run(context, "a") is None
    assert passes == [["a", "b"], ["c", "d"], ["e"]]
    assert stored == [(["a", "b"], True), (["c", "d"], True), (["e"], True)]
    assert commits(context) == [{"a", "b"}, {"c", "d"}, {"e"}]
    assert states(context, "a", "b", "c", "d", "e") == ["done"] * 5
    check_sums(snapshot(context.client, context.settings.redis.key_prefix))
    assert context.submit.next_ids("ingest", 10) == ["a"], "the other messages are taken away"
    assert not any(spent.take("ingest", name) for name in "abcde")


def test_a_step_begins_no_group_after_its_time_and_none_of_backfill_while_fresh_batches_wait(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GROUP_RECORDS", 2)
    sent(context, "a", "b")
    monkeypatch.setattr(group_commit, "CHAIN_S", 0.0)
    ingest.run(context, "a")
    assert states(context, "a", "b") == ["done", "ingest"]
    monkeypatch.setattr(group_commit, "CHAIN_S", 60.0)
    producer = Producer(context.ledger, context.submit, context.settings)
    for name in ("old-1", "old-2"):
        producer.send(KNOWN, workload="shop", batch_id=name, backfill=True)
    ingest.run(context, "old-1")
    assert states(context, "old-1", "old-2") == ["done", "ingest"], "the message of b waits"
    context.client.delete(f"{context.settings.redis.key_prefix}:ingest")
    ingest.run(context, "old-2")
    assert states(context, "b", "old-2") == ["ingest", "done"]


def test_a_group_that_cannot_be_stored_waits_uncounted_and_the_next_one_is_stored(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GROUP_RECORDS", 4)
    sent(context, "a", "b", "c")
    sink: Any = context.sink(Purpose.SCORE)
    write_all = sink.write_all

    def full(batches: Any, **more: Any) -> None:
        if [name for name, _ in batches] == ["a", "b"]:
            raise SinkUnavailable("no space left; free space")
        write_all(batches, **more)

    monkeypatch.setattr(sink, "write_all", full)
    assert "no space left" in (ingest.run(context, "a") or "")
    assert states(context, "a", "b", "c") == ["ingest", "ingest", "done"]
    for name in ("a", "b"):
        assert context.client.hget(context.ledger.keys.batch(name), "attempts") == b"0"


def test_a_worker_killed_in_the_commit_of_a_group_leaves_the_next_one_to_another(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GROUP_RECORDS", 4)
    sent(context, "a", "b", "c")

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    commit = context.ledger.commit_all
    monkeypatch.setattr(context.ledger, "commit_all", dies)
    with pytest.raises(KeyboardInterrupt):
        ingest.run(context, "a")
    monkeypatch.setattr(context.ledger, "commit_all", commit)
    assert states(context, "a", "b", "c") == ["ingest"] * 3
    for name in "abc":
        context.client.hset(context.ledger.keys.batch(name), mapping={"deadline": 1, "not_before": 0})
    for name in "abc":
        assert ingest.run(context, name) is None
    assert states(context, "a", "b", "c") == ["done"] * 3
    rows = parquet_of(context.settings).scan().collect()
    assert rows.height == rows["record_id"].n_unique() == 8


def test_a_claim_that_is_lost_before_the_commit_leaves_the_group(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(context, "a", "b", "c")
    sink: Any = context.sink(Purpose.SCORE)
    write_all = sink.write_all

    def slow(batches: Any, **more: Any) -> None:
        monkeypatch.setattr(sink, "write_all", write_all)
        context.client.hset(context.ledger.keys.batch("b"), "deadline", 1)
        other = context.ledger.claim("b", Stage.INGEST, "another")
        assert isinstance(other, Claim)
        write_all(batches, **more)

    monkeypatch.setattr(sink, "write_all", slow)
    ingest.run(context, "a")
    assert commits(context) == [{"a", "c"}]
    assert states(context, "a", "b", "c") == ["done", "ingest", "done"]
    assert sink.read("b", "shop") is None


@pytest.mark.parametrize("workloads", [None, []])
def test_a_batch_without_records_fails_alone_and_says_why(
    context: Context, workloads: list[str] | None
) -> None:
    sent(context, "a", "empty")
    blob = pack_pushed(PushedRecords([], workloads=workloads))
    context.client.set(context.ledger.keys.payload("empty"), blob)
    assert ingest.run(context, "a") is None
    assert "has no records" in (ingest.run(context, "empty") or "")
    assert states(context, "a", "empty") == ["done", "ingest"]


def test_a_sink_that_is_away_makes_all_of_them_wait_uncounted(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(context, "a", "b")

    def full(*_: Any, **__: Any) -> None:
        raise SinkUnavailable("no space left; free space")

    monkeypatch.setattr(context.sink(Purpose.SCORE), "write_all", full)
    assert "no space left" in (ingest.run(context, "a") or "")
    for name in ("a", "b"):
        assert context.client.hmget(context.ledger.keys.batch(name), "state", "attempts") == [b"ingest", b"0"]


def test_a_batch_that_spoils_the_group_is_found_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(context, "a", "poison", "c")
    sink: Any = context.sink(Purpose.SCORE)
    write_all = sink.write_all

    def checked(batches: Any, **more: Any) -> None:
        if any(name == "poison" for name, _ in batches):
            raise ValueError("it cannot be stored")
        write_all(batches, **more)

    monkeypatch.setattr(sink, "write_all", checked)
    assert ingest.run(context, "a") is None
    assert states(context, "a", "poison", "c") == ["done", "ingest", "done"], "each was stored alone"
    entry = context.client.hmget(context.ledger.keys.batch("poison"), "attempts", "error")
    assert entry[0] == b"1" and b"it cannot be stored" in (entry[1] or b"")


def test_a_worker_killed_between_the_commits_of_a_group_is_made_good(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(context, "a", "b")
    commit = context.ledger.commit_all

    def dies(claim: Claim, *ends: Any, **more: Any) -> None:
        if claim.batch_id == "b":
            raise KeyboardInterrupt
        commit(claim, *ends, **more)

    monkeypatch.setattr(context.ledger, "commit_all", dies)
    with pytest.raises(KeyboardInterrupt):
        ingest.run(context, "a")
    monkeypatch.setattr(context.ledger, "commit_all", commit)
    assert states(context, "a", "b") == ["done", "ingest"]
    context.client.hset(context.ledger.keys.batch("b"), mapping={"deadline": 1, "not_before": 0})
    assert ingest.run(context, "b") is None
    assert states(context, "b") == ["done"]
    rows = parquet_of(context.settings).scan().collect()
    assert rows.height == rows["record_id"].n_unique() == 6
