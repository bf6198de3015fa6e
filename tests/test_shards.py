"""Several writers of templates side by side: each learns its workloads, gives its own ids, and knows what the others know."""

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from polling import wait_until

from pipeline.app import make_app
from pipeline.batches import Accepted, Stage
from pipeline.drain.learner import Learner, read_templates
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadSetting, LeaseRefused
from pipeline.gpu.devices import DRAIN
from pipeline.gpu.leases import Leases, Mode, granted
from pipeline.keyspace import Keys
from pipeline.records import Batch, Purpose, Verdict, raw_frame, utc_now
from pipeline.routing import BACKFILL
from pipeline.settings import Settings
from pipeline.shards import IDS, MOST, ids_of, of_shard, shard_named, shard_of
from pipeline.tasks import drain, ingest, periodic
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from pipeline.tasks.submit import HANDED
from pipeline.workers.bootstrap import placed


def of(shard: int, shards: int, n: int = 0) -> str:
    """The n-th workload of a shard."""
    return [w for i in range(2_000) if shard_of(w := f"shop/app{i}", shards) == shard][n]


# ---- names and numbers -------------------------------------------------------------------------------


def test_a_workload_is_of_the_same_shard_in_every_process_and_build() -> None:
    assert [shard_of(name, 4) for name in ("shop", "bank", "prod/own/x", "", "größe", "\ud800")] == [
        2, 2, 3, 0, 1, 0,
    ]  # fmt: skip
    assert {shard_of(name, 1) for name in ("shop", "bank", "")} == {0}


def test_workloads_are_spread_evenly() -> None:
    for shards in (2, 3, 4, 16):
        found = Counter(shard_of(f"cluster-1/shop/service-{i}", shards) for i in range(shards * 200))
        assert set(found) == set(range(shards))
        assert max(found.values()) < 280


def test_a_shard_is_read_back_from_its_name_and_from_no_other() -> None:
    for shard in range(MOST):
        assert shard_named(of_shard("drain", shard), "drain") == shard
    for text in (
        "drain.0",
        "drain.01",
        "drain.64",
        "drain.999",
        "drain.",
        "drain.x",
        "drains",
        "drain.²",
        "store",
        "",
    ):
        assert shard_named(text, "drain") is None, text


def test_no_two_shards_give_the_same_id_and_every_reader_can_hold_them() -> None:
    every = [ids_of(shard) for shard in range(MOST)]
    assert every[0].start == 1, "0 is unclassified"
    for before, after in itertools.pairwise(every):
        assert before.stop <= after.start
    assert every[-1].stop < 2**53, "JSON readers have floats"


def test_a_worker_is_told_its_shard_by_its_role(settings: Settings) -> None:
    three = replace(settings, drain_shards=3)
    assert [placed(text, three) for text in ("store", "drain", "drain.2")] == [
        ("store", 0),
        ("drain", 0),
        ("drain", 2),
    ]
    for text, why in (
        ("drain.3", "drain_shards = 3"),
        ("drain.0", "not a worker role"),
        ("x", "not a worker role"),
    ):
        with pytest.raises(BadSetting, match=why):
            placed(text, three)


# ---- learning ----------------------------------------------------------------------------------------


def judge(row: Mapping[str, Any], template_id: int) -> Verdict:
    return Verdict(template_id=template_id, score=0.1, anomalous=False, reasons=())


def key_of(text: str) -> int:
    return hash(text) & (2**63 - 1)


class Writer:
    """A drain process of one shard."""

    def __init__(self, client: "redis.Redis", settings: Settings, shard: int = 0) -> None:
        self.leases, self.shard = Leases(client, settings), shard
        self.settings = settings
        self.verdicts = Verdicts(client, settings)
        self.learner = Learner(client, settings, self.verdicts, shard=shard)

    def lease(self) -> int:
        resource = of_shard(DRAIN, self.shard)
        return granted(self.leases.request(resource, Mode.EXCLUSIVE, f"w{id(self)}"), resource).token

    def learn(self, *lines: str, workload: str = "", token: int | None = None) -> list[int]:
        workload = workload or of(self.shard, self.settings.drain_shards)
        rows = [{"key": key_of(text), "masked": text, "severe": False} for text in lines]
        answers = self.learner.learn(
            rows,
            version="m1",
            workload=workload,
            token=self.lease() if token is None else token,
            judge=judge,
        )
        return [answers[row["key"]].template_id for row in rows]

    def end(self) -> None:
        self.leases.client.delete(self.leases.keys.lease(of_shard(DRAIN, self.shard)))


@pytest.fixture
def two(settings: Settings) -> Settings:
    """Two shards, and a tree whose answers can be foretold."""
    return replace(settings, drain_shards=2, drain_similarity=0.5, drain_depth=4)


def texts(client: "redis.Redis", settings: Settings) -> dict[int, str]:
    return {t.template_id: t.text for t in read_templates(client, Keys(settings.key_prefix))}


def test_each_shard_gives_ids_of_its_own(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    assert first.learn("alpha", "beta") == [1, 2]
    assert second.learn("gamma", "delta") == [IDS + 1, IDS + 2]
    assert first.learn("epsilon") == [3]
    assert second.learner.newest_id == IDS + 2
    second.end()
    again = Writer(client, two, 1)
    assert again.learn("zeta", "gamma") == [IDS + 3, IDS + 1]
    assert len(texts(client, two)) == 6


def test_a_line_that_one_shard_knows_has_its_id_in_all_of_them(client: "redis.Redis", two: Settings) -> None:
    """Under a new model the cache is empty, and whichever shard meets a line first answers it for all workloads."""
    first, second = Writer(client, two), Writer(client, two, 1)
    assert second.learn("gamma") == [IDS + 1], "it has read everything that there is"
    assert first.learn("job one done", "job two done", "alpha") == [1, 1, 2]
    assert second.learn("job one done", "job six done", "alpha") == [1, 1, 2]
    counts: Any = client.hgetall(Keys(two.key_prefix).template_counts)
    assert counts == {of(0, 2).encode(): b"2", of(1, 2).encode(): b"1"}


def test_a_shard_never_widens_what_is_of_another_one(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    second.learn("gamma")
    assert first.learn("job one done") == [1]
    assert second.learn("job two done") == [IDS + 2], "it is alike, but not covered"
    assert second.learn("job six done") == [IDS + 2]
    assert texts(client, two) == {1: "job one done", IDS + 1: "gamma", IDS + 2: "job <*> done"}
    assert first.learn("job ten done") == [IDS + 2], "and the other way round"
    assert first.learn("job one done") == [1]


def test_twins_of_one_moment_are_one_from_the_next_batch_on(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    first.learn("one"), second.learn("two")
    # Neither has seen what the other does: as if both wrote within one batch.
    follow = second.learner._follow
    second.learner._follow = lambda: None  # type: ignore[method-assign]
    assert first.learn("started in time") == [2]
    assert second.learn("started in time") == [IDS + 2]
    second.learner._follow = follow  # type: ignore[method-assign]
    for _ in range(2):
        assert first.learn("started in time") == second.learn("started in time") == [2]
        second.end()
        second = Writer(client, two, 1)


def test_with_one_shard_nobody_is_told_of_changes(client: "redis.Redis", settings: Settings) -> None:
    Writer(client, settings).learn("alpha")
    assert not client.exists(Keys(settings.key_prefix).template_changes)


def test_the_token_of_another_shard_opens_nothing(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    token = first.lease()
    for _ in range(3):  # tokens of the two leases are counted apart; none of these is the one of shard 1
        with pytest.raises(LeaseRefused, match="taken over"):
            second.learn("gamma", token=token + 1)
    second.end()
    with pytest.raises(LeaseRefused, match="taken over"):
        second.learn("gamma", token=token)
    assert texts(client, two) == {}
    assert second.verdicts.lookup("m1", [key_of("gamma")]) == {}
    assert first.learn("alpha", token=token) == [1], "the other shard goes on"


def test_more_or_fewer_shards_change_no_id_and_give_none_twice(
    client: "redis.Redis", settings: Settings
) -> None:
    own = replace(settings, drain_similarity=0.5, drain_depth=4)
    workloads = [f"shop/app{i}" for i in range(12)]
    given: dict[tuple[str, str], int] = {}
    fresh: set[int] = set()
    for round_, shards in enumerate((1, 3, 2, 64, 1)):
        now = replace(own, drain_shards=shards)
        writers = {shard: Writer(client, now, shard) for shard in range(shards)}
        for workload in workloads:
            writer = writers[shard_of(workload, shards)]
            for (whose, text), before in given.items():
                if whose == workload:
                    assert writer.learn(text, workload=workload) == [before], (shards, workload, text)
            text = "abcdefghijkl"[workloads.index(workload)] * 3 + "pqrst"[round_]
            (new,) = writer.learn(text, workload=workload)
            assert new in ids_of(writer.shard) and new not in fresh
            given[workload, text] = new
            fresh.add(new)
        for writer in writers.values():
            writer.end()
    assert set(texts(client, own)) == fresh
    counts: Any = client.hgetall(Keys(own.key_prefix).template_counts)
    assert counts == {workload.encode(): b"5" for workload in workloads}


# ---- queues ------------------------------------------------------------------------------------------


@pytest.fixture
def settings_of_three(settings: Settings) -> Settings:
    return replace(settings, drain_shards=3, overdue_ms=600_000)


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
    assert context.ledger.accept(batch, backfill=backfill) == Accepted(batch_id=name)
    assert perform(context, Stage.INGEST, name, ingest.step) is None
    assert context.ledger.state(name) == "drain"


def lying(context: Context) -> dict[str, int]:
    prefix = context.settings.key_prefix
    names = [of_shard("drain", n) + late for n in range(MOST) for late in ("", BACKFILL)]
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
    context.client.delete(*(f"{context.settings.key_prefix}:{name}" for name in lying(context)))
    let_pass(context, "b0", "b1", "b2")
    assert periodic.sweep(context) == 3
    assert lying(context) == {"drain": 1, "drain.1": 1, "drain.2": 1}


def test_whoever_does_not_know_the_workload_asks_the_ledger(context: Context) -> None:
    accept(context, "b", of(2, 3))
    assert context.submit.wake(Stage.DRAIN, "b")
    assert lying(context) == {"drain.2": 2}


def test_a_batch_of_another_shard_is_handed_on_once(context: Context) -> None:
    accept(context, "b", of(2, 3), backfill=True)
    context.client.delete(f"{context.settings.key_prefix}:drain.2.backfill")
    assert drain.run(context, "b") is None
    assert lying(context) == {"drain.2.backfill": 1}
    assert context.ledger.state("b") == "drain", "nobody has claimed it"
    assert context.leases.look("drain.1").exclusive is None
    assert drain.run(context, "b", HANDED) is None
    assert context.ledger.state("b") == "store", (
        "whoever gets it so does it, whatever it thinks of the workload"
    )
    assert set(texts(context.client, context.settings)) == {IDS + 1}


def test_a_writer_that_stands_by_leaves_the_batch_in_the_queue_of_its_shard(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(context, "b", of(1, 3))
    context.client.delete(f"{context.settings.key_prefix}:drain.1")
    other = context.leases.request("drain.1", Mode.EXCLUSIVE, "another")
    granted(other, "drain.1")
    monkeypatch.setattr(drain, "_stand_by", lambda _: None)
    assert drain.run(context, "b") is None
    assert lying(context) == {"drain.1": 1} and context.ledger.state("b") == "drain"
    context.leases.release(granted(other, "drain.1"))
    granted(context.leases.request("drain", Mode.EXCLUSIVE, "writer of shard 0"), "drain")
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
    fewer = Context(context.app, replace(settings_of_three, drain_shards=2))
    let_pass(fewer, "b")
    assert periodic.sweep(fewer) == 1
    now = of_shard("drain", shard_of(workload, 2))
    assert lying(fewer) == {now: 1} | ({"drain.2": 1} if served else {})
    assert fewer.submit.waiting_ids(Stage.DRAIN) == {"b"}


@contextmanager
def working(settings: Settings, role: str, folder: Path) -> Iterator[Path]:
    """A real worker process, as compose starts it; its log."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")} | settings.to_environ()
    log = folder / f"{role}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.cpu", role, role], env=env, stdout=out, stderr=out
        )
    try:
        yield log
    finally:
        process.kill()
        process.wait(10)


def test_what_waited_for_the_one_writer_is_handed_to_the_shards_that_there_are_now(
    settings: Settings, client: "redis.Redis", tmp_path: Path
) -> None:
    two = replace(settings, drain_shards=2)
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


def test_a_shard_that_there_is_not_is_no_role(settings: Settings, tmp_path: Path) -> None:
    with working(replace(settings, drain_shards=2), "drain.2", tmp_path) as log:
        assert wait_until(lambda: "drain_shards = 2" in log.read_text(), timeout_s=60), log.read_text()
