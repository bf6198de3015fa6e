"""Several workers per role under lines that kill or hang them; health, draining and stopping: one real
stack."""

import contextlib
import json
import os
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.harness import Up, novel, ordinary, running, sentence, until

# Loaded by every worker's interpreter before anything else: what kinds of line do to the parser.
SITE = textwrap.dedent(
    """
    import os, sys, time
    if "pipeline.workers.cpu" in sys.orig_argv and "ingest" in sys.orig_argv:
        from pipeline import detect
        prepare_all = detect.prepare_all
        def fragile(several, *rest):
            text = " ".join(line for records in several for line in records["raw"].to_list())
            if "KILLER" in text:
                os.kill(os.getpid(), 9)
            if "ENDLESS" in text:
                time.sleep(3600)
            return prepare_all(several, *rest)
        detect.prepare_all = fragile
    """
)
ENV = {
    "LOGWEIR_INGEST_PROCESSES": "2",
    "LOGWEIR_DRAIN_PROCESSES": "2",
    "LOGWEIR_STORE_PROCESSES": "2",
    "LOGWEIR_INTERNAL_CLAIM_TTL_MS": "1000",
    "LOGWEIR_STEP_S": "3",
    "LOGWEIR_INTERNAL_MAX_ATTEMPTS": "2",
    "LOGWEIR_INTERNAL_STALL_S": "6",
    "LOGWEIR_METRICS": "no",
    "LOGWEIR_READER_PROCESSES": "1",
}
WORKERS = {
    "ingest-1", "ingest-2", "infer-cpu", "drain", "drain-2", "store", "store-2", "reader", "train", "beat",
}  # fmt: skip


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One stack of all tests that leave it running: they come in any order."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    with running({**ENV, "PYTHONPATH": str(folder)}) as up:
        yield up


@pytest.fixture
def own() -> Iterator[Up]:
    """A stack that ends with its test, with one worker of each role."""
    with running() as up:
        yield up


def test_lines_that_kill_or_hang_their_workers_die_alone_and_the_others_are_stored_meanwhile(
    several: Up,
) -> None:
    killing, endless = ordinary(4), ordinary(2)
    killing[2] = "2026-11-20T10:00:00Z INFO app: KILLER line"
    endless[1] = "2026-11-20T10:00:00Z INFO app: ENDLESS line"
    for workload, bad in (("kill", killing), ("hang", endless)):
        done = several.logweir("send", several.write(bad), "--workload", workload)
        assert done.returncode == 0, done.stderr
    began = time.monotonic()
    several.send(novel(40, "good"), "good")
    meanwhile = time.monotonic() - began
    for workload, bad in (("kill", killing), ("hang", endless)):
        t = several.settled(workload, within_s=90)
        assert (t["accepted"], t["stored"], t["dead"]) == (len(bad), len(bad) - 1, 1)
    assert set(several.rows("kill")["line"]) == {1, 2, 4}
    assert set(several.rows("hang")["line"]) == {1}
    assert meanwhile < 40, "good lines did not wait for the bad ones to be found"
    dead = json.loads(several.logweir("dead", "list", "--json").stdout)
    reasons = {letter["workload"]: letter["reason"] for letter in dead}
    assert reasons == {
        "kill": "the worker died or hung in stage ingest",
        "hang": "stage ingest did not end within 3 s",
    }
    assert several.process.poll() is None
    # Two attempts at the batch, one at a half of two lines, two at the bad line.
    died = [json.loads(row) for row in several.err().splitlines() if '"event": "worker.died"' in row]
    codes = Counter(row["code"] for row in died if row["worker"].startswith("ingest"))
    assert codes == {-9: 5, 74: 4}
    with (
        several.client() as client
    ):  # what dead workers had taken: one message each, until the visibility timeout
        assert client.zcard("logweir:unacked_index") <= 9 + len(WORKERS)
    several.logweir("dead", "discard", "all")


def test_a_redis_that_dies_again_and_again_is_started_again_and_the_stack_goes_on(several: Up) -> None:
    killed: set[int] = set()

    def redis_process() -> int:
        with contextlib.suppress(OSError, ValueError, LookupError):
            (pid,) = json.loads((several.data / "stack.json").read_text())["redis"]
            return 0 if pid in killed else int(pid)
        return 0

    for _ in range(6):  # more often than a broken installation would be tried
        pid = until(redis_process, what="Redis is started again")
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
    until(redis_process, what="Redis is started again")  # a command that begins without one refuses
    several.send(ordinary(10, start=900), "after")
    assert several.totals("after")["stored"] == 10
    assert several.process.poll() is None


def test_health_says_of_every_worker_whether_it_is_well(several: Up) -> None:
    until(lambda: several.logweir("health").returncode == 0, within_s=60, what="all workers are well")
    assert {w["name"] for w in several.status()["workers"]} == WORKERS
    done = several.logweir("health", "beat", "--ready")
    assert done.returncode == 0 and "beat is well" in done.stdout, done.stderr
    said = sentence(several.logweir("health", "nobody"), code=1)
    assert "'nobody'" in said and "store" in said


def test_a_drain_lets_nothing_in_waits_for_the_rest_and_can_be_undone(several: Up, tmp_path: Path) -> None:
    with several.frozen("ingest-1", "ingest-2"):
        done = several.logweir("send", several.write(ordinary(30)), "--workload", "drained")
        assert done.returncode == 0, done.stderr
        said = sentence(several.logweir("drain", "--timeout", "0.5"), code=1)
        assert "1 batch left (ingest 1)" in said and "--now" in said
        # Its output must not be written over that of the stack.
        elsewhere = replace(several.logweir, cwd=tmp_path)
        send = elsewhere.start("send", several.write(ordinary(10, start=500)), "--workload", "late")
    drained = json.loads(several.logweir("drain", "--json").stdout)
    assert drained["drained"] and several.totals("drained")["stored"] == 30
    assert send.poll() is None and not several.totals("late"), "who sends waits"
    assert several.logweir("drain", "--undo").returncode == 0
    assert send.wait(30) == 0
    assert several.settled("late")["stored"] == 10


def test_ctrl_c_during_a_drain_opens_the_door_again_and_stop_ends_the_stack_when_all_is_stored(
    own: Up,
) -> None:
    with own.frozen("ingest-1"):
        assert own.logweir("send", own.write(ordinary(20)), "--workload", "last").returncode == 0
        drain = own.logweir.start("drain")
        with own.client() as client:
            until(lambda: client.exists("{logweir}:closed"), what="the door is closed")
            drain.send_signal(signal.SIGINT)
            assert drain.wait(60) == 130
            assert not client.exists("{logweir}:closed")
        assert "taken in again" in (own.folder / "err").read_text()
    assert json.loads(own.logweir("stop", "--json").stdout)["stopped"]
    own.process.wait(10)
    assert "no logweir stack runs" in sentence(own.logweir("stop"))
    again = Up(own.folder, {"LOGWEIR_DATA_DIR": str(own.data)}).wait_ready()
    assert again.totals("last")["stored"] == 20, "it was stored before the end"
    with again.client() as client:
        assert not client.exists("{logweir}:closed")
    assert again.logweir("stop", "--now").returncode == 0
    again.process.wait(10)
