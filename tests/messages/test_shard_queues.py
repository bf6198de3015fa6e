"""Batches of stage drain find the queue of their shard, whatever the number of shards becomes; operators see
each queue."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from command_line import Verb, command_line
from polling import wait_until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from worker_process import working

from pipeline.commands import drain as drain_command
from pipeline.messages.app import make_app
from pipeline.messages.routing import BACKFILL, both
from pipeline.messages.submit import HANDED
from pipeline.records.batch import Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted, Stage
from pipeline.records.schema import raw_frame
from pipeline.redis.leases import granted
from pipeline.redis.shards import IDS, of_shard, shard_of
from pipeline.settings import MAX_SHARDS, Settings
from pipeline.tasks import drain, ingest, periodic
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from pipeline.workers.scrape import Scrape
from tests.redis.test_shards import of, texts


@pytest.fixture
def settings_of_three(settings: Settings) -> Settings:
    return settings.replace(drain_shards=3, overdue_ms=600_000)


@pytest.fixture
def context(settings_of_three: Settings) -> Iterator[Context]:
    app = make_app(settings_of_three)
    yield Context(app, settings_of_three, shard=1)
    app.close()


def accept(context: Context, name: str, workload: str, *, backfill: bool = False) -> None:
    """A batch that waits in stage drain."""
    batch = Batch(
        batch_id=name, workload=workload, source="push", source_key="k", purpose=Purpose.SCORE,
        arrived=utc_now(), formats=(), zone="UTC", records=raw_frame([f"line of {name}"]),
    )  # fmt: skip
    assert context.ledger.intake.accept(batch, backfill=backfill) == Accepted(batch_id=name)
    assert perform(context, Stage.INGEST, name, ingest.step) is None
    assert context.ledger.state(name) == "drain"


def lying(context: Context) -> dict[str, int]:
    prefix = context.settings.redis.key_prefix
    names = [of_shard("drain", n) + late for n in range(MAX_SHARDS) for late in ("", BACKFILL)]
    return {name: n for name in names if (n := int(context.client.llen(f"{prefix}:{name}")))}


def let_pass(context: Context, *names: str) -> None:
    context.client.zadd(context.ledger.keys.due, dict.fromkeys(names, 1))


def test_a_batch_waits_in_the_queue_of_its_shard_and_class(context: Context) -> None:
    for shard in range(3):
        accept(context, f"b{shard}", of(shard, 3), backfill=shard == 2)
    assert lying(context) == {"drain": 1, "drain.1": 1, "drain.2.backfill": 1}
    assert context.submit.waiting_ids(Stage.DRAIN) == {"b0", "b1"}
    assert context.submit.waiting_ids(Stage.DRAIN, backfill=True) == {"b2"}
    let_pass(context, "b0", "b1", "b2")
    assert periodic.sweep(context) == 0, "nothing is missing"


def test_the_sweeper_sends_a_lost_batch_to_its_shard(context: Context) -> None:
    for shard in range(3):
        accept(context, f"b{shard}", of(shard, 3))
    context.client.delete(*(f"{context.settings.redis.key_prefix}:{name}" for name in lying(context)))
    let_pass(context, "b0", "b1", "b2")
    assert periodic.sweep(context) == 3
    assert lying(context) == {"drain": 1, "drain.1": 1, "drain.2": 1}


def test_whoever_does_not_know_the_workload_asks_the_ledger(context: Context) -> None:
    accept(context, "b", of(2, 3))
    assert context.submit.wake(Stage.DRAIN, "b")
    assert lying(context) == {"drain.2": 2}


def test_a_batch_of_another_shard_is_handed_on_once(context: Context) -> None:
    accept(context, "b", of(2, 3), backfill=True)
    context.client.delete(f"{context.settings.redis.key_prefix}:drain.2.backfill")
    assert drain.run(context, "b") is None
    assert lying(context) == {"drain.2.backfill": 1}
    assert context.ledger.state("b") == "drain", "nobody has claimed it"
    assert context.leases.holder_of("drain.1") is None
    assert drain.run(context, "b", HANDED) is None
    assert context.ledger.state("b") == "store", (
        "whoever gets it so does it, whatever it thinks of the workload"
    )
    assert set(texts(context.client, context.settings)) == {IDS + 1}


def test_a_writer_that_stands_by_leaves_the_batch_in_the_queue_of_its_shard(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(context, "b", of(1, 3))
    context.client.delete(f"{context.settings.redis.key_prefix}:drain.1")
    other = context.leases.request("drain.1", "another")
    granted(other, "drain.1")
    monkeypatch.setattr(drain, "_stand_by", lambda _: None)
    assert drain.run(context, "b") is None
    assert lying(context) == {"drain.1": 1} and context.ledger.state("b") == "drain"
    context.leases.release(granted(other, "drain.1"))
    granted(context.leases.request("drain", "writer of shard 0"), "drain")
    assert drain.run(context, "b") is None
    assert context.ledger.state("b") == "store", "the writer of another shard is none of its business"


@pytest.mark.parametrize("served", [False, True])
def test_what_lies_in_the_queue_of_a_shard_that_is_gone_is_sent_to_the_one_it_has_now(
    context: Context, settings_of_three: Settings, *, served: bool
) -> None:
    accept(context, "b", workload := of(2, 3))
    assert lying(context) == {"drain.2": 1}
    if served:  # by settings from before
        context.presence.beat(name="w", role="drain", pid=1, queues=("drain.2", "drain.2.backfill"))
    fewer = Context(context.app, settings_of_three.replace(drain_shards=2))
    let_pass(fewer, "b")
    assert periodic.sweep(fewer) == 1
    now = of_shard("drain", shard_of(workload, 2))
    assert lying(fewer) == {now: 1} | ({"drain.2": 1} if served else {})
    assert fewer.submit.waiting_ids(Stage.DRAIN) == {"b"}


@pytest.mark.long
def test_what_waited_for_the_one_writer_is_handed_to_the_shards_that_there_are_now(
    settings: Settings, client: "redis.Redis", tmp_path: Path
) -> None:
    two = settings.replace(drain_shards=2)
    app = make_app(settings)
    before = Context(app, settings)
    names = {"first": of(0, 2), "other": of(1, 2)}  # what their lines say too: digits would be masked
    for name, workload in names.items():
        accept(before, name, workload)
    assert lying(before) == {"drain": 2}

    def learnt() -> bool:
        return all(before.ledger.state(name) == "store" for name in names)

    with working(two, "drain", tmp_path) as log, working(two, "drain.1", tmp_path) as other:
        assert wait_until(learnt, timeout_s=60), log.read_text() + other.read_text()
        assert {w.queues[0] for w in before.presence.live()} == {"drain", "drain.1"}
    assert log.read_text().count("drain.handed_on") == 1 and "drain.handed_on" not in other.read_text()
    assert set(texts(client, settings)) == {1, IDS + 1}
    app.close()


@pytest.mark.long
def test_a_shard_that_there_is_not_is_no_role(settings: Settings, tmp_path: Path) -> None:
    with working(settings.replace(drain_shards=2), "drain.2", tmp_path) as log:
        assert wait_until(lambda: "drain_shards = 2" in log.read_text(), timeout_s=60), log.read_text()


# ---- what operators see ------------------------------------------------------------------------------


def shown(context: Context) -> dict[tuple[str, str], float]:
    """(name, queue) of what the exporter says of queues and writers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(context.client, context.settings))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (s.name.removeprefix("logweir_"), s.labels.get("queue", "")): s.value
        for f in families
        for s in f.samples
    }


def test_the_metrics_show_every_queue_and_miss_the_writer_of_a_shard_with_work(context: Context) -> None:
    accept(context, "b", of(2, 3))
    at = shown(context)
    assert {q for name, q in at if name == "queue_messages" and q.startswith("drain")} == {
        "drain", "drain.backfill", "drain.1", "drain.1.backfill", "drain.2", "drain.2.backfill",
    }  # fmt: skip
    assert at["queue_messages", "drain.2"] == 1 and at["drain_leader", ""] == 0
    granted(context.leases.request("drain.1", "w"), "drain.1")
    assert shown(context)["drain_leader", ""] == 0, "it has nothing to do, and the other one nobody"
    granted(context.leases.request("drain.2", "w"), "drain.2")
    context.client.delete(context.leases.keys.lease("drain.1"))
    assert shown(context)["drain_leader", ""] == 1, "a shard without work needs no writer"


def beating(context: Context, *roles: str) -> None:
    for role in roles:
        name = "drain" if role.startswith("drain") else role
        context.presence.beat(name=f"{role}@host", role=name, pid=1, queues=both(role))


@pytest.fixture
def verb(
    settings_of_three: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> Iterator[Verb]:
    with command_line(settings_of_three, monkeypatch, capsys, columns=400) as found:
        yield found


def test_health_and_status_miss_a_shard_that_nobody_serves(context: Context, verb: Verb) -> None:
    served = ("ingest", "infer-cpu", "store", "beat", "drain", "drain.2")
    beating(context, *served)
    accept(context, "b", of(1, 3))
    done = verb("health")
    assert done.code == 1 and done.err.startswith("logweir: missing: drain.1; ")
    assert verb("health", "drain").code == 1
    assert verb("health", "drain.2").code == 0 and verb("health", "drain.1").code == 1
    assert "drain     drain 0, drain.1 1 (nobody serves it), drain.2 0\n" in verb("status").out
    beating(context, *served, "drain.1")  # five verbs on a busy machine outlast a beat
    assert verb("health").code == verb("health", "drain").code == verb("health", "drain.1").code == 0
    assert "drain     drain 0, drain.1 1, drain.2 0\n" in verb("status").out
    facts = json.loads(verb("status", "--json").out)["drain_shards"]
    assert facts[1] == {"queue": "drain.1", "messages": 1, "served": True}


def test_with_one_shard_status_says_nothing_of_shards(settings: Settings, logweir: Verb) -> None:
    assert "drain " not in logweir("status").out
    assert [s["queue"] for s in json.loads(logweir("status", "--json").out)["drain_shards"]] == ["drain"]


@pytest.mark.long
def test_draining_names_the_stage_when_a_shard_with_work_is_not_served(
    context: Context, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_command, "UNSERVED_S", 0.3)
    accept(context, "b", of(1, 3))
    beating(context, "ingest", "drain", "drain.2")
    done = verb("drain")
    assert done.code == 1 and "1 batch left (drain 1), and no worker serves drain; " in done.err
    context.client.delete(f"{context.settings.redis.key_prefix}:drain.1")
    done = verb("drain", "--timeout", "1")
    assert done.code == 1 and "not drained within 1 s" in done.err, "a shard without work needs no worker"
