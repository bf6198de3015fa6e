"""`logweir drain` and `logweir stop` where nobody works; tests/e2e/test_workers.py has them on a real
stack."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import redis
from command_line import Verb, command_line
from polling import wait_until

from pipeline.commands import drain
from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.delivery import Full, Stage
from pipeline.redis.connection import connect
from pipeline.settings import Settings


def send(settings: Settings, batch_id: str) -> object:
    return Producer.connect(settings).send(["a line"], workload="shop", batch_id=batch_id)


def test_an_empty_pipeline_is_drained_at_once_and_takes_nothing_in_until_it_is_opened(
    logweir: Verb, settings: Settings, ledger: Ledger
) -> None:
    done = logweir("drain", "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["drained"], facts["dead_batches"]) == (0, True, 0)
    answer = send(settings, "b")
    assert isinstance(answer, Full) and answer.reason == "closed"
    assert logweir("drain", "--undo").out == "open again\n"
    assert logweir("drain", "--undo").out == "it was open already\n"
    assert ledger.intake.paused_because() is None


def test_work_that_nobody_serves_is_said_after_a_while_and_stays_accepted(
    logweir: Verb, settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "UNSERVED_S", 0.3)
    send(settings, "b")
    done = logweir("drain")
    assert done.code == 1
    assert "1 batch left (ingest 1), and no worker serves ingest; " in done.err and "--now" in done.err
    assert ledger.state("b") == "ingest"
    assert ledger.intake.paused_because() == drain.DRAINED, "the operator wanted it closed"


def test_a_drain_ends_when_the_last_batch_is_stored(
    logweir: Verb, settings: Settings, ledger: Ledger, client: "redis.Redis"
) -> None:
    send(settings, "b")
    Presence(client, settings).beat(name="w", role="ingest", pid=1, queues=("ingest",))

    def work() -> None:
        assert wait_until(lambda: ledger.intake.paused_because() is not None, timeout_s=20)
        claim = ledger.claim("b", Stage.INGEST, "w")
        ledger.commit(claim, warming=False, outcomes={"stored": 1})  # type: ignore[arg-type]

    worker = threading.Thread(target=work)
    worker.start()
    done = logweir("drain")
    worker.join()
    assert done.code == 0 and "everything that was accepted is stored" in done.out


def test_a_door_that_somebody_closed_stays_closed_when_a_drain_is_broken_off(
    settings: Settings, ledger: Ledger
) -> None:
    ledger.intake.pause("an upgrade of the disks")
    mine = drain.Drain.of(settings)
    with pytest.raises(KeyboardInterrupt), mine.closing(drain.STOPPED, leave_closed=False):
        raise KeyboardInterrupt
    assert ledger.intake.paused_because() == "an upgrade of the disks"
    ledger.intake.resume()
    with pytest.raises(KeyboardInterrupt), mine.closing(drain.STOPPED, leave_closed=False):
        raise KeyboardInterrupt
    assert ledger.intake.paused_because() is None


def test_stop_without_a_stack_says_so(logweir: Verb, settings: Settings) -> None:
    done = logweir("stop")
    assert done.code == 2 and "no logweir stack runs on" in done.err
    settings.data.dir.mkdir(parents=True)
    state = {"pid": 1, "redis_url": settings.redis.url, "key_prefix": settings.redis.key_prefix}
    (settings.data.dir / "stack.json").write_text(json.dumps(state))
    done = logweir("stop", "--now")
    assert done.code == 2 and "no logweir stack runs on" in done.err, "process 1 is a stranger"


# A stack that does not end when it is told to: it holds the lock of its directory.
DEAF = """
import fcntl, json, os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else signal.SIG_DFL)
place = pathlib.Path(sys.argv[1])
place.mkdir(parents=True, exist_ok=True)
lock = (place / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid()))
lock.flush()
state = {"pid": os.getpid(), "redis_url": sys.argv[3], "key_prefix": sys.argv[4]}
(place / "stack.json").write_text(json.dumps(state))
print("up", flush=True)
time.sleep(120)
"""


@contextmanager
def stack(settings: Settings, how: str) -> Iterator["subprocess.Popen[str]"]:
    words = [str(settings.data.dir), how, settings.redis.url or "", settings.redis.key_prefix]
    process = subprocess.Popen([sys.executable, "-c", DEAF, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def test_a_stack_on_a_shared_redis_is_ended_and_the_door_of_the_others_stays_open(
    logweir: Verb, settings: Settings, ledger: Ledger
) -> None:
    send(settings, "b")
    with stack(settings, "well") as process:
        stop = logweir("stop")
        assert process.wait(10) == -signal.SIGTERM
    assert stop.code == 0 and "its Redis is shared" in stop.out, stop
    assert ledger.intake.paused_because() is None
    assert ledger.state("b") == "ingest", "others work on it"


def test_a_stack_that_does_not_end_takes_lines_in_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> None:
    monkeypatch.setattr(drain, "END_S", 0.5)
    # The session's server is the private one of this directory.
    folder = Path(unquote(urlsplit(settings.redis.url or "").path)).parents[1]
    own = settings.replace(data_dir=folder)
    with command_line(own, monkeypatch, capsys, columns=400) as logweir, stack(own, "deaf"):
        stop = logweir("stop")
    (folder / "stack.json").unlink()
    assert stop.code == 1 and "did not end" in stop.err, stop
    assert Ledger(connect(own), own).intake.paused_because() is None
