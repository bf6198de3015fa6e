"""Stage drain in several shards, as processes: their number changes over one data directory, and a writer is
killed."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from e2e.harness import Up, end, novel, ordinary, sentence, until
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN, Lease, Leases
from pipeline.redis.shards import IDS, ids_of, of_shard, shard_of
from pipeline.settings import Settings

WORKLOADS = [f"app{i}" for i in range(5)]
LETTERS = "abcde"


Start = Callable[..., Up]


@pytest.fixture
def up() -> Iterator[Start]:
    """Starts a stack with so many shards, all of one test on one data directory."""
    folder = Path(tempfile.mkdtemp(prefix="logweir-e2e-"))
    stacks: list[Up] = []

    def start(shards: int, **env: str) -> Up:
        stacks.append(Up(folder, {"LOGWEIR_DRAIN_SHARDS": str(shards), **env}))
        return stacks[-1].wait_ready()

    yield start
    end(str(folder))
    for stack in stacks:
        stack.process.wait(10)
    shutil.rmtree(folder, ignore_errors=True)


def settings_of(stack: Up) -> Settings:
    return attached(Settings(data_dir=stack.data))


def send(stack: Up, workload: str, lines: list[str], name: str, *, wait: bool = True) -> None:
    path = stack.write(lines, f"{name}-{workload.replace('/', '-')}.log")
    done = stack.logweir("send", path, "--workload", workload, "--json")
    assert done.returncode == 0, done.stderr
    if wait:
        stack.settled(workload)


def lines_of(number: int, word: str) -> list[str]:
    """What all workloads say, and what only this one does."""
    return [*ordinary(20), *novel(12, word + LETTERS[number])]


def ids(stack: Up) -> dict[tuple[str, int], int]:
    """The template of every pattern of every workload: one, however often it was stored."""
    found = pl.concat(
        [stack.rows(w).select("workload", "pattern_id", "template_id") for w in WORKLOADS]
    ).unique()
    assert found.height == found.select("workload", "pattern_id").n_unique(), "a line has two templates"
    assert found["template_id"].null_count() == 0
    return {(w, p): t for w, p, t in found.iter_rows()}


def holder(stack: Up, shard: int) -> int:
    """The process that was the writer of a shard last; 0 when there was none."""
    settings = settings_of(stack)
    raw: Any = connect(settings).hget(Keys(settings.redis.key_prefix).lease(of_shard(DRAIN, shard)), "holder")
    return int(raw.decode().split(":")[1]) if raw else 0  # host:pid:chance (tasks/context.py)


@pytest.mark.timeout(400)
def test_the_number_of_shards_may_change_and_no_line_is_lost_and_no_id_changes(up: Start) -> None:
    stack = up(1)
    assert not any("drain." in w["name"] for w in stack.status()["workers"])
    for number, workload in enumerate(WORKLOADS):
        send(stack, workload, lines_of(number, "first"), "one")
    first = ids(stack)
    assert max(first.values()) < IDS
    assert stack.stop() == 0

    stack = up(3)
    queues = {q for w in stack.status()["workers"] for q in w["queues"]}
    assert {"drain", "drain.1", "drain.2", "drain.2.backfill"} <= queues
    # Under the first model the cache is empty: every line comes to a writer once more, and those of `one` are
    # judged again. A training of three seconds may fail on a busy machine; this test is not about trainings.
    train = ("train", "--workload", WORKLOADS[0], "--json")
    until(lambda: stack.logweir(*train).returncode == 0, what="there is a model")
    for number, workload in enumerate(WORKLOADS):
        send(stack, workload, lines_of(number, "second"), "two")
    for workload in WORKLOADS:
        until(lambda w=workload: stack.totals(w).get("warming", 0) == 0, what="warming lines are judged")  # type: ignore[misc]
    second = ids(stack)
    assert {key: second[key] for key in first} == first
    for (workload, _), given in second.items():
        if (workload, _) not in first:
            assert given in ids_of(shard_of(workload, 3)), workload
    assert {given // IDS for given in second.values()} == {0, 1, 2}

    # What waits for the writer of a shard that is gone afterwards.
    settings = settings_of(stack)
    leases = Leases(connect(settings), settings)
    lost = [w for w in WORKLOADS if shard_of(w, 3) == 2]

    def ours() -> Lease | None:
        answer = leases.request("drain.2", "a test")
        return answer if isinstance(answer, Lease) else None

    lease = until(ours, what="nobody holds the lease of shard 2")
    assert lease is not None
    with leases.holding(lease):
        for workload in lost:
            send(stack, workload, lines_of(WORKLOADS.index(workload), "third"), "three", wait=False)
        until(
            lambda: stack.status()["stages"].get("drain") == len(lost),
            what="all wait for the writer of shard 2",
        )
        said = stack.logweir("status").stdout
        assert "drain.2 " in said and "nobody serves it" not in said
        assert stack.stop() == 0

    stack = up(2)
    for number, workload in enumerate(WORKLOADS):
        send(stack, workload, lines_of(number, "fourth"), "four")
    third = ids(stack)
    assert {key: third[key] for key in second} == second
    for workload in WORKLOADS:
        rows, batches = stack.rows(workload), 4 if workload in lost else 3
        assert rows.height == rows["record_id"].n_unique() == batches * 32
        t = stack.totals(workload)
        assert (t["accepted"], t["stored"], t.get("dead", 0)) == (batches * 32, batches * 32, 0)
    client = connect(settings_of(stack))
    until(
        lambda: not client.exists("logweir:drain.2"), what="the queue of the shard that is gone is forgotten"
    )
    assert stack.stop() == 0


def test_a_killed_writer_is_replaced_while_the_other_shards_go_on(up: Start) -> None:
    # Long enough that the writer still has its lease when it is killed, so that the other one has to wait for
    # it.
    stack = up(2, LOGWEIR_DRAIN_PROCESSES="2", LOGWEIR_INTERNAL_LEASE_TTL_MS="15000")
    names = {w["name"] for w in stack.status()["workers"]}
    assert {"drain", "drain-2", "drain.1", "drain.1-2"} <= names
    mine = [next(w for w in WORKLOADS if shard_of(w, 2) == shard) for shard in (0, 1)]
    for workload, word in zip(mine, ("calm", "still"), strict=True):
        send(stack, workload, novel(30, word), "calm")
    pid = until(lambda: holder(stack, 1), what="shard 1 has a writer")
    stays = until(lambda: holder(stack, 0), what="shard 0 has a writer")
    assert pid != stays
    os.kill(pid, signal.SIGKILL)
    send(stack, mine[1], novel(30, "after"), "after", wait=False)
    send(stack, mine[0], novel(30, "meanwhile"), "meanwhile")
    stack.settled(mine[1])
    assert holder(stack, 1) not in (0, pid)
    assert holder(stack, 0) in (stays, stack.pid("drain"), stack.pid("drain-2"))
    for shard, workload in enumerate(mine):
        rows = stack.rows(workload)
        assert rows.height == rows["record_id"].n_unique() == 60
        assert all(t in ids_of(shard) or t in ids_of(0) for t in rows["template_id"])
    shown = {s["queue"]: s["served"] for s in stack.status()["drain_shards"]}
    assert shown == {"drain": True, "drain.1": True}
    assert stack.logweir("health", "drain").returncode == 0
    assert stack.logweir("health", "drain.1").returncode == 0
    for name in ("drain.1", "drain.1-2"):
        os.kill(stack.pid(name), signal.SIGSTOP)
    said = until(
        lambda: (done := stack.logweir("health", "drain")).returncode == 1 and sentence(done, code=1),
        what="health misses shard 1",
    )
    assert "drain.1" in str(said), said
    until(
        lambda: (
            {s["queue"]: s["served"] for s in stack.status()["drain_shards"]}
            == {"drain": True, "drain.1": False}
        ),
        what="status misses it too",
    )
    assert "nobody serves it" in stack.logweir("status").stdout
