"""Power cuts on the real stack: what was accepted is stored once, whatever Redis and the disks still have."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import redis

from e2e.harness import Up, end, environment, nothing_left, running, until

SMALL_BATCHES = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "20"}


def aof(up: Up) -> Path:
    folder = up.data / "redis"
    files = sorted((folder / "appendonlydir").glob("*.incr.aof"), key=lambda p: p.stat().st_mtime)
    return files[-1] if files else folder / "appendonly.aof"


def kill_redis(up: Up, back_to: int) -> None:
    """SIGKILL, and the AOF as it was before its supervisor starts it again; waits until it has."""
    server = int(up.client().info("server")["process_id"])
    up.process.send_signal(signal.SIGSTOP)
    try:
        psutil.Process(server).kill()
        until(lambda: psutil.Process(server).status() == psutil.STATUS_ZOMBIE, what="Redis is dead")
        with aof(up).open("r+b") as file:
            file.truncate(back_to)
    finally:
        up.process.send_signal(signal.SIGCONT)

    def answers() -> bool:
        with suppress(redis.RedisError):
            return up.client().ping() is True
        return False

    until(answers, what="Redis is back")


def numbered(first: int, last: int) -> list[str]:
    """Known by their number; long enough for two of them to tell one file from another."""
    return [
        f"2026-11-20T10:00:00Z INFO app: order {n} {'was packed ' * 12}n{n}" for n in range(first, last + 1)
    ]


def numbers(up: Up, workload: str) -> list[int]:
    rows = up.rows(workload)
    return sorted(int(m.rpartition("n")[2]) for m in rows["message"]) if "message" in rows.columns else []


def add(path: Path, first: int, last: int) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in numbered(first, last))


@contextmanager
def following(up: Up, path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "pipeline.cli", "send", "--follow", str(path), "--workload", "live"]
    log = up.folder / "follow.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment(up.mark, {"LOGWEIR_DATA_DIR": str(up.data)}),
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        print(log.read_text(errors="replace")[-2000:])  # shown when a test fails


@pytest.fixture(scope="module")
def stack() -> Iterator[Up]:
    """One for both tests; each leaves it running."""
    with running(SMALL_BATCHES) as up:
        yield up


def test_a_followed_file_is_stored_once_when_redis_loses_its_last_seconds(stack: Up) -> None:
    up = stack
    path = up.folder / "live.log"
    add(path, 1, 5)
    with following(up, path) as first:
        until(lambda: numbers(up, "live") == list(range(1, 6)), what="the first lines are stored")
        up.settled("live")
        before = aof(up).stat().st_size
        for last in (10, 15):  # two batches that are stored and then forgotten
            add(path, last - 4, last)
            until(lambda last=last: numbers(up, "live") == list(range(1, last + 1)), what="more is stored")
        kill_redis(up, before)
        add(path, 16, 20)
        until(lambda: numbers(up, "live") == list(range(1, 21)), what="every line is stored once")
        assert up.settled("live")["stored"] == 20
        # And once more, with a follower that dies too: the next one reads in other pieces.
        before = aof(up).stat().st_size
        for last in (25, 30):
            add(path, last - 4, last)
            until(lambda last=last: numbers(up, "live") == list(range(1, last + 1)), what="more is stored")
        first.kill()
        first.wait(10)
        kill_redis(up, before)
    with following(up, path):
        until(lambda: up.settled("live").get("stored") == 30, what="all is stored again")
        until(lambda: numbers(up, "live") == list(range(1, 31)), what="every line is stored once")
    assert up.rows("live")["record_id"].is_unique().all()


def test_a_file_is_stored_once_when_everything_dies_while_it_is_sent(stack: Up) -> None:
    up = stack
    path = up.folder / "app.log"
    add(path, 1, 6_000)
    done = up.logweir("send", up.write(["x"], "warm.log"), "--workload", "warm", "--wait")
    assert done.returncode == 0, done.stderr
    sending = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "send", str(path), "--workload", "app"],
        env=environment(up.mark, {"LOGWEIR_DATA_DIR": str(up.data), **SMALL_BATCHES}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: up.totals("app").get("accepted", 0) >= 200, what="the first lines are accepted")
    before = aof(up).stat().st_size
    until(lambda: len(numbers(up, "app")) >= 200, what="some lines are stored")
    assert sending.poll() is None, "the file is too short: it was sent already"
    end(up.mark)  # SIGKILL for every process, the sender's and Redis' too
    up.process.wait(10)
    sending.wait(10)
    nothing_left(up.mark)
    assert 0 < len(numbers(up, "app")) < 6_000
    with aof(up).open("r+b") as file:
        file.truncate(before - 3)  # in the middle of a command: a power cut chooses no place
    up.facts = {}
    up.process = up.logweir.start("up", "--json")
    up.wait_ready()
    done = up.logweir("send", path, "--workload", "app", "--wait")
    assert done.returncode == 0, done.stderr
    assert up.settled("app")["stored"] == 6_000
    assert numbers(up, "app") == list(range(1, 6_001))
