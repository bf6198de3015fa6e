"""Workers that go deaf, hang or are told to end: real processes on a real Redis."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from polling import Clock, wait_until
from worker_process import begun

from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.submit import Submit
from pipeline.observe.presence import Pace, Presence
from pipeline.producer import Producer
from pipeline.records.delivery import Stage
from pipeline.redis.connection import connect
from pipeline.redis.leases import DRAIN, Lease
from pipeline.settings import Settings
from pipeline.tasks.context import Context
from pipeline.tasks.step import HUNG
from pipeline.workers.heartbeat import BEAT_S
from pipeline.workers.liveness import STALLED, Liveness, Progress
from pipeline.workers.stack.restarts import CALM_S, PAUSES_S, UNREADY, Restarts

# What wakes in a worker when its lines hold a word. Loaded before anything else.
SITE = textwrap.dedent(
    """
    import os, sys, time
    if "pipeline.workers.cpu" in sys.orig_argv:
        from pipeline import detect
        prepare_all = detect.prepare_all
        def moody(several, *rest):
            text = " ".join(line for records in several for line in records["raw"].to_list())
            if "HANG" in text:
                time.sleep(3600)
            if "SLOW" in text:
                open(os.environ["SLOW_FILE"], "w").close()
                time.sleep(1.5)
            return prepare_all(several, *rest)
        detect.prepare_all = moody
    """
)


class Worker:
    """A worker process as compose runs it, on the settings of a test."""

    def __init__(self, settings: Settings, role: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE)
        self.settings = settings
        self.log = folder / f"{role}.log"
        self.slow = folder / "slow"
        self.presence = Presence(connect(settings), settings)
        self.process = begun(settings, role, self.log, PYTHONPATH=str(folder), SLOW_FILE=str(self.slow))

    def ready(self) -> bool:
        return any(w.pid == self.process.pid for w in self.presence.live())

    def told(self) -> Pace:
        (view,) = self.presence.live()
        assert view.progress is not None
        return view.progress

    def end(self, within_s: float) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {within_s} s: {self.log.read_text()}")


Start = Callable[..., Worker]


@pytest.fixture
def start(settings: Settings, tmp_path: Path) -> Iterator[Start]:
    workers: list[Worker] = []

    def begin(role: str, **changes: object) -> Worker:
        worker = Worker(settings.replace(**changes), role, tmp_path / "site")  # type: ignore[arg-type]
        workers.append(worker)
        assert wait_until(worker.ready, timeout_s=40), worker.log.read_text()
        return worker

    yield begin
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        worker.process.wait(10)


def send(settings: Settings, batch_id: str, *lines: str) -> None:
    Producer.connect(settings).send(list(lines), workload="shop", batch_id=batch_id)


# ---- deciding ----------------------------------------------------------------------------------------


def looks(liveness: Liveness, clock: Clock, times: int) -> list[float]:
    """What so many looks say, each as much later as it is meant to be."""
    found = []
    for _ in range(times):
        clock.now += liveness.look_s
        found.append(liveness.look())
    return found


def test_work_that_is_not_taken_counts_as_a_stall_from_the_moment_it_was_seen(
    client: "redis.Redis", settings: Settings, clock: Clock
) -> None:
    progress = Progress()
    queues = [f"{settings.redis.key_prefix}:{name}" for name in ("drain", "drain.backfill")]
    liveness = Liveness(client, progress, queues, stall_s=8, clock=clock)
    assert looks(liveness, clock, 3) == [0, 0, 0]  # nothing waits
    client.lpush(queues[1], "x")
    assert looks(liveness, clock, 4) == [0, 2, 4, 6]
    progress.pulse()
    assert looks(liveness, clock, 3) == [0, 0, 2], "a message was taken in between"
    client.delete(queues[1])
    assert looks(liveness, clock, 1) == [0]


def test_neither_a_process_that_was_stopped_nor_a_redis_that_is_away_is_a_stall(
    client: "redis.Redis", settings: Settings, clock: Clock
) -> None:
    queue = f"{settings.redis.key_prefix}:drain"
    client.lpush(queue, "x")
    stopped = Liveness(client, Progress(), [queue], stall_s=8, clock=clock)
    looks(stopped, clock, 3)
    clock.now += 60
    assert stopped.look() == 0
    client.delete(queue)
    away = Liveness(
        redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None),
        Progress(),
        [],
        stall_s=8,
        clock=clock,
    )
    assert looks(away, clock, 6) == [0] * 6


def test_a_loop_that_does_not_come_round_any_more_is_stalled(client: "redis.Redis", clock: Clock) -> None:
    progress = Progress()
    liveness = Liveness(client, progress, [], stall_s=8, clock=clock)
    progress.pulse()
    assert looks(liveness, clock, 4) == [0, 0, 2, 4]


def test_restarts_wait_longer_after_every_death_and_a_calm_while_is_forgotten_with_them(clock: Clock) -> None:
    restarts = Restarts(clock=clock)
    waits = []
    for _ in range(len(PAUSES_S) + 2):
        restarts.died(ready=True)
        assert restarts.again_at is not None
        waits.append(restarts.again_at - clock.now)
        clock.now = restarts.again_at
        assert restarts.due
        restarts.started()
        clock.now += 1
    assert waits == [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1]] and not restarts.hopeless
    clock.now += CALM_S
    restarts.died(ready=True)
    assert restarts.again_at == clock.now


def test_only_what_dies_before_it_is_ready_again_and_again_is_hopeless(clock: Clock) -> None:
    restarts = Restarts(clock=clock)

    def dies(ready: bool | None) -> None:
        restarts.died(ready=ready)
        restarts.started()

    for _ in range(50):
        dies(True)
        dies(None)
    for _ in range(UNREADY - 1):
        dies(False)
    assert not restarts.hopeless
    dies(None)  # Redis was away: nobody knows
    assert not restarts.hopeless
    dies(False)
    assert restarts.hopeless


# ---- real processes ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("role", ["store", "infer-cpu"])
def test_a_worker_whose_consumer_went_deaf_ends_itself_and_its_successor_takes_what_waits(
    start: Start, settings: Settings, role: str, client: "redis.Redis"
) -> None:
    stage = Stage.STORE if role == "store" else Stage.INFER
    worker = start(role, stall_s=2.0)
    app = make_app(worker.settings)
    submit = Submit(app, client, worker.settings)
    queue = f"{settings.redis.key_prefix}:{'store' if role == 'store' else 'infer.cpu'}"
    assert submit.wake(stage, "unknown", backfill=False)
    assert wait_until(lambda: not client.llen(queue), timeout_s=10)  # it hears
    for name in (queue, f"{queue}.backfill"):
        app.control.cancel_consumer(name.partition(":")[2], reply=True, timeout=5)
    assert submit.wake(stage, "unknown", backfill=False)
    assert worker.end(within_s=20) == STALLED
    assert "worker.deaf" in worker.log.read_text()
    assert client.llen(queue) == 1, "what waits is still there for its successor"


@pytest.mark.long
def test_a_worker_tells_what_it_took_and_an_idle_one_is_left_alone(
    start: Start, client: "redis.Redis", settings: Settings
) -> None:
    worker = start("store", stall_s=2.0)
    idle = worker.told()
    assert (idle.busy, idle.stalled_s) == (False, 0)
    # Longer than the time after which work that waits is a stall.
    assert wait_until(lambda: worker.told().quiet_s > 2 * BEAT_S, timeout_s=60)
    assert worker.process.poll() is None
    Submit(make_app(settings), client, settings).wake(Stage.STORE, "unknown", backfill=False)
    assert wait_until(lambda: worker.told().quiet_s < 2 * BEAT_S, timeout_s=60)


@pytest.mark.long
def test_a_step_that_does_not_end_takes_its_process_and_the_batch_says_why(
    start: Start, settings: Settings
) -> None:
    worker = start("ingest", step_s=1.5)
    ledger = Ledger(connect(settings), settings)
    send(settings, "b", "HANG here")
    assert worker.end(within_s=20) == HUNG
    entry = ledger.client.hgetall(ledger.keys.batch("b"))
    assert entry[b"error"] == b"stage ingest did not end within 1.5 s"  # type: ignore[index]
    assert (entry[b"attempts"], entry[b"owner"], entry[b"state"]) == (b"1", b"", b"ingest")  # type: ignore[index]
    assert "step.hung" in worker.log.read_text()


@pytest.mark.long
def test_a_worker_that_is_told_to_end_in_mid_step_ends_the_step_first(
    start: Start, settings: Settings
) -> None:
    worker = start("ingest")
    ledger = Ledger(connect(settings), settings)
    send(settings, "slow", "SLOW one")
    assert wait_until(worker.slow.exists, timeout_s=15)
    send(settings, "next", "another one")
    os.kill(worker.process.pid, signal.SIGTERM)
    assert worker.end(within_s=15) == 0
    assert ledger.state("slow") == "drain", "its step was done"
    assert ledger.state("next") == "ingest", "and nothing else was begun"
    start("ingest")
    assert wait_until(lambda: ledger.state("next") == "drain", timeout_s=15), (
        "what waited is taken by the next"
    )


@pytest.mark.long
def test_what_a_dead_worker_had_taken_comes_back_after_the_visibility_timeout_and_does_no_harm(
    start: Start, settings: Settings, client: "redis.Redis"
) -> None:
    queue, held = f"{settings.redis.key_prefix}:store", f"{settings.redis.key_prefix}:unacked"
    assert Submit(make_app(settings), client, settings).wake(Stage.STORE, "finished", backfill=False)
    raw = client.lpop(queue)
    assert isinstance(raw, bytes)
    message = json.loads(raw)
    tag = message["properties"]["delivery_tag"]
    client.hset(held, tag, json.dumps([message, "", "store"]))
    client.zadd(f"{held}_index", {tag: time.time() - 3_700})
    worker = start("store")
    assert wait_until(lambda: not client.exists(held, f"{held}_index", queue), timeout_s=15)
    assert worker.process.poll() is None


@pytest.mark.long
def test_a_call_that_lets_no_thread_run_ends_the_process_with_its_traceback(tmp_path: Path) -> None:
    code = "from pipeline.workers.liveness import end_when_held; import re; end_when_held(1.0)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; re.match(r'(a+)+$', 'a' * 60 + 'b')"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "re" in done.stderr


# ---- several drain workers ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_second_drain_worker_hands_its_batch_back_at_once_and_takes_over_when_the_first_has_gone(
    start: Start, settings: Settings, client: "redis.Redis"
) -> None:
    first = Context(make_app(settings), settings)
    lease = first.leases.request(DRAIN, "the first")
    assert isinstance(lease, Lease)
    queue = f"{settings.redis.key_prefix}:drain"
    with first.leases.holding(lease):
        worker = start("drain")
        assert first.submit.wake(Stage.DRAIN, "unknown", backfill=False)
        assert wait_until(lambda: "drain.stands_by" in worker.log.read_text(), timeout_s=15)
        assert client.llen(queue) == 1, "the writer may take it"
        assert worker.told().stalled_s == 0
    assert wait_until(lambda: client.llen(queue) == 0, timeout_s=10)
    os.kill(worker.process.pid, signal.SIGTERM)
    assert worker.end(within_s=10) == 0
