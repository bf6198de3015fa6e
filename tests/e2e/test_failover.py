"""A stack on a Redis that fails over: its workers go on by themselves."""

import signal
import threading
import time
from pathlib import Path

import pytest
import redis
from polling import wait_until
from sentinel_redis import TAKES_OVER_S, Group, close, sentinel_group

from pipeline.errors import RedisUnavailable
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted, Full
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

from .harness import Up, running, until

pytestmark = pytest.mark.long
LINES = 20  # of a push
KEYS = Keys("logweir")


def test_workers_go_on_by_themselves_when_the_master_is_killed(tmp_path: Path) -> None:
    with (
        sentinel_group(tmp_path, password="pw-redis", sentinel_password="pw-sentinel") as group,
        running({"REDIS_URL": group.url, "LOGWEIR_REDIS_REPLICAS_ACK": "1"}) as up,
    ):
        settings = Settings(redis_url=group.url, redis_replicas_ack=1)
        workers = _pids(up)
        producer = Producer.connect(settings)
        end, accepted = threading.Event(), list[str]()

        def push() -> None:
            while not end.is_set():
                batch_id = f"push-{len(accepted):05d}"
                lines = [f"2026-11-20T10:00:00Z INFO app: {batch_id} line {n}" for n in range(LINES)]
                # Also after the end: a batch whose answer was lost may be in.
                while (answer := _sent(producer, lines, batch_id)) is None:
                    time.sleep(0.05)
                assert isinstance(answer, Accepted)
                accepted.append(batch_id)
                time.sleep(0.1)

        thread = threading.Thread(target=push)
        thread.start()
        try:
            until(lambda: _count(group, "stored") >= 5 * LINES, within_s=60, what="pushes are stored")
            before, killed = group.master(), time.monotonic()
            before.send(signal.SIGKILL)
            assert wait_until(lambda: group.master() is not before, timeout_s=TAKES_OVER_S)
            stored = _count(group, "stored")
            until(lambda: _count(group, "stored") >= stored + LINES, within_s=60, what="workers go on")
            print(f"workers store again {time.monotonic() - killed:.1f} s after the kill")
        finally:
            end.set()
            thread.join(30)
            close(producer)
        lines = len(accepted) * LINES
        until(lambda: _count(group, "stored") == lines, within_s=60, what=f"{lines} lines are stored")
        assert _count(group, "accepted") == lines
        rows = up.rows("shop")
        assert rows.height == rows["record_id"].n_unique() == lines
        # None was restarted: a process that has begun anew has another pid.
        until(lambda: _pids(up) == workers, within_s=20, what="every worker is heard again")
        # A broadcast reaches every worker: a new model version is announced in this way.
        app = make_app(settings)
        until(lambda: len(app.control.ping(timeout=0.5)) >= 4, within_s=20, what="workers answer a broadcast")
        app.pool.force_close_all()
        app.close()
        assert up.logweir("doctor").returncode == 0
        assert up.stop() == 0


def _sent(producer: Producer, lines: list[str], batch_id: str) -> Accepted | Full | None:
    """None: it is not known whether the batch is in."""
    try:
        return producer.send(lines, workload="shop", batch_id=batch_id)
    except RedisUnavailable:
        return None


def _pids(up: Up) -> dict[str, int]:
    return {worker["name"]: worker["pid"] for worker in up.status()["workers"]}


def _count(group: Group, name: str) -> int:
    try:
        return int(group.master().client.hget(KEYS.totals("shop"), name) or 0)  # type: ignore[arg-type]
    except redis.ConnectionError:
        return 0
