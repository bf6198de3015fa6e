"""Processes of `ingest` come while batches wait and a core is idle, and go when nothing waits."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from polling import Clock, wait_until

from pipeline.producer import Producer
from pipeline.redis.attach import running
from pipeline.settings import Settings
from pipeline.workers.stack import more_ingest as module
from pipeline.workers.stack.child import Child, end
from pipeline.workers.stack.more_ingest import CALM_S, LATE_S, START_S, IngestNeed, MoreIngest, OldestBatch
from pipeline.workers.stack.restarts import CRASHES, Crashes
from pipeline.workers.stack.stack import Stack

IDLE = 1.0  # cores


@pytest.mark.parametrize(
    ("waits", "idle", "wanted"),
    [
        ([LATE_S, LATE_S], IDLE, 1),
        ([LATE_S], IDLE, 0),
        ([LATE_S, 0.0, LATE_S], IDLE, 0),  # a batch that was given back once
        ([LATE_S / 2] * 9, IDLE, 0),  # small passes wait so long
        ([LATE_S, LATE_S], 0.1, 0),  # no core is idle
    ],
)
def test_a_process_more_needs_a_late_batch_and_an_idle_core(
    clock: Clock, waits: list[float], idle: float, wanted: int
) -> None:
    need = IngestNeed(clock)
    assert sum(need.look(wait, idle, extra=0, most=3) for wait in waits) == wanted


def test_processes_start_apart_and_no_more_than_allowed(clock: Clock) -> None:
    need, extra, starts = IngestNeed(clock), 0, []
    for _ in range(100):
        clock.now += 0.5
        change = need.look(10.0, IDLE, extra=extra, most=2)
        extra += change
        if change:
            starts.append(clock.now)
    assert extra == len(starts) == 2
    assert starts[1] - starts[0] >= START_S


def test_a_process_goes_when_nothing_was_late_for_a_minute(clock: Clock) -> None:
    need = IngestNeed(clock)
    clock.now += CALM_S - 1
    assert need.look(0.6, IDLE, extra=2, most=3) == 0, "batches still wait now and then"
    clock.now += CALM_S - 1
    assert need.look(0.0, IDLE, extra=2, most=3) == 0
    clock.now += 1
    assert need.look(0.0, IDLE, extra=2, most=3) == -1
    clock.now += 1
    assert need.look(0.0, IDLE, extra=1, most=3) == 0, "one after the other"
    clock.now += CALM_S
    assert need.look(0.0, IDLE, extra=0, most=3) == 0, "the first stays"


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Waiting:
    """A queue whose oldest batch waits as long as a test says."""

    waits: float | None = 0.0

    def waits_s(self) -> float | None:
        return self.waits


@pytest.fixture
def more(clock: Clock, tmp_path: Path) -> "Iterator[tuple[MoreIngest, Waiting]]":
    """Its processes sleep; the idle time of the machine is that of one core."""

    command = [sys.executable, "-c", "import time; time.sleep(60)"]

    def start_again(child: Child[Crashes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(child.command)

    def spawn(name: str) -> Child[Crashes]:
        process = subprocess.Popen(command)
        return Child(
            name=name, command=command, process=process, log=tmp_path / f"{name}.log", deaths=Crashes()
        )

    waiting = Waiting()
    made = MoreIngest(waiting, spawn, start_again, most=3, clock=clock, idle=clock)  # type: ignore[arg-type]
    yield made, waiting
    end([*(child.process for child in made.children), *made.ending])


def looks(more: MoreIngest, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds)):
        clock.now += 1.0
        more.check()


def test_names_are_given_once(more: tuple[MoreIngest, Waiting], clock: Clock) -> None:
    processes, waiting = more
    waiting.waits = 5.0
    looks(processes, clock, 20)
    assert [child.name for child in processes.children] == ["ingest-2", "ingest-3"]
    processes.children[0].process.kill()
    processes.children[0].process.wait()
    processes.check()
    assert sorted(child.name for child in processes.children) == ["ingest-2", "ingest-3"], "started again"
    waiting.waits = 0.0
    looks(processes, clock, CALM_S + 1)
    left = [child.name for child in processes.children]
    waiting.waits = 5.0
    looks(processes, clock, 10)
    names = [child.name for child in processes.children]
    assert len(left) == 1 and len(set(names)) == 2
    assert len(processes.ending) <= 1, "those that have ended are forgotten"


def test_a_process_that_keeps_dying_is_given_up(more: tuple[MoreIngest, Waiting], clock: Clock) -> None:
    processes, waiting = more
    waiting.waits = 5.0
    looks(processes, clock, 3)
    for _ in range(CRASHES):
        (child,) = processes.children
        child.process.kill()
        child.process.wait()
        processes.check()
    assert processes.children == []
    looks(processes, clock, 20)
    assert processes.children == [], "the first does it all"


def test_nobody_is_started_or_ended_while_redis_is_away(
    more: tuple[MoreIngest, Waiting], clock: Clock
) -> None:
    processes, waiting = more
    waiting.waits = 5.0
    looks(processes, clock, 3)
    waiting.waits = None
    looks(processes, clock, 2 * CALM_S)
    assert len(processes.children) == 1


def test_the_age_of_the_oldest_batch_of_both_classes(settings: Settings, client: "redis.Redis") -> None:
    oldest = OldestBatch(client, settings)
    assert oldest.waits_s() == 0.0
    producer = Producer.connect(settings)
    producer.send(["one"], workload="w", batch_id="fresh")
    assert 0.0 <= (oldest.waits_s() or 0.0) < LATE_S
    producer.send(["two"], workload="w", batch_id="old", backfill=True)
    client.hincrby(producer.ledger.keys.batch("old"), "accepted_ms", -9_000)
    assert 9.0 <= (oldest.waits_s() or 0.0) < 9.0 + LATE_S
    away = OldestBatch(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    assert away.waits_s() is None


def test_a_stack_grows_while_its_first_process_does_not_keep_up_and_shrinks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is stopped by a signal, so that what is stored was done by the second.

    Redis gives one message to the first, which waits for it; the sweep sends that again."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    quick = {"sweep_s": 0.5, "overdue_ms": 1_000, "claim_ttl_ms": 3_000}
    settings = Settings(data_dir=tmp_path / "data", gpu_agent=False, reader_processes=0, **quick)
    with Stack(settings) as stack:
        assert stack.more_ingest is not None
        stack.more_ingest._idle = itertools.count().__next__  # this machine may have no idle core
        ledger = stack.producer().ledger
        first = next(child.process.pid for child in stack.children if child.name == "ingest-1")
        os.kill(first, signal.SIGSTOP)
        try:
            producer = stack.producer()
            for batch in range(5):
                producer.send([f"line {n}" for n in range(10)], workload="w", batch_id=f"b{batch}")

            def stored() -> bool:
                stack.check()
                return ledger.backlog.totals().get("w", {}).get("stored", 0) == 50

            assert wait_until(stored, timeout_s=60)
        finally:
            os.kill(first, signal.SIGCONT)
        assert [child.name for child in stack.more_ingest.children] == ["ingest-2"]
        assert "ingest-2" in (running(settings.data.dir) or {})["workers"]
        monkeypatch.setattr(module, "CALM_S", 1.0)
        second = stack.more_ingest.children[0].process

        def ended() -> bool:
            stack.check()
            return second.poll() is not None

        assert wait_until(ended, timeout_s=30)
        assert second.returncode == 0, "after its step, as a worker ends"
        assert "ingest-2" not in (running(settings.data.dir) or {})["workers"]
