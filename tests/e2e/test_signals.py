"""Processes that are killed: restarted, without a line lost or doubled, and never an orphan."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
from intake_process import free_port

from e2e.harness import Up, is_redis, marked, nothing_left, novel, ordinary, running, until, varied
from e2e.lab import Lab, flip_a_byte, stopping
from pipeline.controller.training_status import TrainingState

ROLES = ("ingest-1", "infer-cpu", "drain", "store", "train", "beat", "redis")


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack of its own with a model, small batches, and so work in every stage."""
    site = stopping(tmp_path_factory.mktemp("site"))
    with running({"LOGWEIR_INTERNAL_BATCH_RECORDS": "10"} | site) as up:
        up.send(varied(200), "base")
        done = up.logweir("train", "--json")
        assert done.returncode == 0, done.stderr
        yield up


def kill(up: Up, role: str) -> None:
    """kill -9 of the process and of its pool children."""
    if role == "redis":
        found = [p for p in marked(up.mark) if is_redis(p)]
    else:
        found = [p for p in marked(up.mark) if _is_worker(p.cmdline(), role)]
    assert found, role
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _is_worker(command: list[str], role: str) -> bool:
    return any(part.startswith("pipeline.workers.") for part in command) and role in command


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_is_restarted_and_every_line_is_stored_once(busy: Up, role: str) -> None:
    workload = f"kill-{role}"
    path = busy.write([*novel(250, role.replace("-", "")), *ordinary(50)])
    log = busy.folder / f"{role}.sent"
    with log.open("wb") as out:
        send = subprocess.Popen(
            [*busy.process.args[:3], "send", str(path), "--workload", workload],  # type: ignore[index]
            env={**os.environ, "LOGWEIR_DATA_DIR": str(busy.data), "LOGWEIR_INTERNAL_BATCH_RECORDS": "10"},
            stdout=out,
            stderr=out,
        )
    until(lambda: _stored(busy, workload) > 0, what="the first lines are stored")
    kill(busy, role)
    assert send.wait(90) == 0, log.read_text()
    t = busy.settled(workload, within_s=90)
    assert (t["accepted"], t["stored"], t.get("dead", 0)) == (300, 300, 0)
    rows = busy.rows(workload)
    assert rows["line"].to_list() == list(range(1, 301))
    assert rows["record_id"].n_unique() == 300
    until(lambda: len(busy.status()["workers"]) == 6, what="all six workers are back")
    assert busy.process.poll() is None


def _stored(up: Up, workload: str) -> int:
    return up.totals(workload).get("stored", 0)


def test_a_trainer_that_is_killed_at_work_begins_again_and_the_training_ends(busy: Up) -> None:
    before = busy.status()["model"]["version"]
    with Lab(busy).stops_at(TrainingState.TRAINING) as stopped:
        train = busy.logweir.start("train", "--json")
        until(stopped, what="the training works")
        kill(busy, "train")
    assert train.wait(100) == 0, (busy.folder / "err").read_text()
    status = json.loads((busy.folder / "out").read_text())
    assert (status["state"], status["attempt"]) == ("completed", 2) and status["version"] > before


def test_when_every_model_is_damaged_on_disk_lines_wait_until_another_one_is_trained(busy: Up) -> None:
    live = busy.status()["model"]["version"]
    # All versions, else the one before would serve; in the store too, else a copy would be fetched again.
    for weights in (
        *(busy.data / "models").glob("m*/model.safetensors"),
        *(busy.data / "artifacts").glob("*/*"),
    ):
        flip_a_byte(weights)
    kill(busy, "infer-cpu")  # the next one has to load the model
    path = busy.write(novel(20, "damage"))
    assert busy.logweir("send", path, "--workload", "damage").returncode == 0

    def told() -> bool:  # another one may stand there from before
        trouble = busy.status()["trouble"]
        return bool(trouble) and live in trouble["reason"]

    until(told, within_s=40, what="the trouble is told")
    assert busy.totals("damage").get("dead", 0) == 0
    assert busy.logweir("train").returncode == 0
    assert busy.settled("damage")["stored"] == 20
    rows = busy.rows("damage")
    assert rows.height == 20 and rows["score"].null_count() == 0
    assert rows["model_version"].unique().to_list() == [busy.status()["model"]["version"]] != [live]


def test_a_kill_and_signals_end_every_process_and_the_next_stack_stores_what_was_accepted() -> None:
    # With ports of its own, which the processes of a killed stack still hold when the next one begins.
    api, intake = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    env = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "10", "LOGWEIR_API": api, "LOGWEIR_INTAKE": intake}
    sent = 0
    old: set[int] = set()
    with running(env) as first:
        up = first
        for number, code in (
            (signal.SIGKILL, -signal.SIGKILL),
            (signal.SIGTERM, 143),  # as SIGHUP, which tests/commands/test_commands.py sends
            (signal.SIGINT, 0),
        ):
            if sent:
                up = Up(up.folder, env).wait_ready()
                # After a kill it came at once, while the old workers still ended: it waited for them.
                assert not {p.pid for p in marked(up.mark)} & old
                assert up.settled("w")["stored"] == sent
                assert up.rows("w")["record_id"].n_unique() == up.rows("w").height == sent
            lines = ordinary(600, start=sent) if sent else novel(600, "kill")
            done = up.logweir("send", up.write(lines, f"{number.name}.log"), "--workload", "w")
            assert done.returncode == 0, done.stderr
            sent += 600
            old = {p.pid for p in marked(up.mark)} - {up.process.pid}
            assert len(old) >= 7
            if number is signal.SIGKILL:
                up.process.kill()
                assert up.process.wait(10) == code
            else:
                assert up.stop(number) == code, number
                assert not list(up.data.rglob("*.part"))
                assert not (up.data / "stack.json").exists()
                assert "Traceback" not in up.err()


def test_a_worker_that_keeps_dying_ends_the_stack_with_its_name_and_no_orphan() -> None:
    with running() as up:
        deadline = time.monotonic() + 150
        while up.process.poll() is None and time.monotonic() < deadline:
            for process in marked(up.mark):
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[-1] == "beat":
                        process.kill()
            time.sleep(0.2)
        assert up.process.wait(30) == 1
        nothing_left(up.mark, within_s=2)
        last = up.err().strip().splitlines()[-1]
        assert last.startswith("logweir: beat died 5 times"), up.err()
        assert "Traceback" not in up.err()
