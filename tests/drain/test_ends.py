"""How the waits of `logweir drain` and `logweir stop` end when something else ends first."""

import os
import time
from pathlib import Path

import pytest
from command_line import Verb
from polling import wait_until

from pipeline import cli
from pipeline.commands import drain
from pipeline.errors import NotDrained
from pipeline.ledger.ledger import Ledger
from pipeline.producer import Producer
from pipeline.settings import Settings
from pipeline.workers.stack.data_dir import holder, lock


def send(settings: Settings) -> None:
    Producer.connect(settings).send(["a line"], workload="shop", batch_id="b")


def test_a_wait_ends_soon_when_the_stack_has_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "GONE_S", 0.1)
    send(settings)
    lock(settings.data.dir).close()
    mine = drain.Drain.of(settings)
    with pytest.raises(NotDrained, match="the stack has ended meanwhile; nothing is lost"):
        mine.wait(None, ended=drain._ended(settings, os.getpid()))
    with lock(settings.data.dir):
        assert holder(settings.data.dir) == os.getpid()
        with pytest.raises(NotDrained, match=r"within 0\.3 s"):
            mine.wait(0.3, ended=drain._ended(settings, os.getpid()))


def test_a_redis_of_others_may_be_away_for_so_long(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "AWAY_S", 0.2)
    away = drain.Drain.of(settings.replace(redis_url=f"unix://{tmp_path}/none.sock"))
    with pytest.raises(NotDrained, match="Redis has not answered for"):
        away.wait(None, ended=None)


def test_a_process_that_took_the_number_of_the_stack_is_left_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it was signalled"))
    lock(settings.data.dir).close()
    drain._end(settings, 4711)
    with lock(settings.data.dir):
        drain._end(settings, 4711)


def test_a_door_that_stop_closed_opens_by_itself_and_one_that_drain_closed_does_not(
    settings: Settings, ledger: Ledger
) -> None:
    mine = drain.Drain.of(settings)
    with mine.closing(drain.STOPPED, leave_closed=False):
        assert 0 < int(ledger.client.pttl(ledger.keys.closed)) <= drain.DOOR_S * 1000
        ledger.intake.stay_paused("another", for_s=0.05)
        ledger.intake.stay_paused(drain.STOPPED, for_s=200)
        assert int(ledger.client.pttl(ledger.keys.closed)) > drain.DOOR_S * 1000
    with mine.closing(drain.DRAINED, leave_closed=True):
        assert ledger.intake.paused_because() == drain.DRAINED
    assert int(ledger.client.pttl(ledger.keys.closed)) == -1
    ledger.intake.resume()
    ledger.intake.pause(drain.STOPPED, for_s=0.05)
    assert wait_until(lambda: ledger.intake.paused_because() is None, timeout_s=5)


def test_off_a_terminal_a_long_wait_is_told_once_and_again_when_it_changes_in_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> None:
    told = drain.WaitReport()
    told.say("at once", ("ingest",))
    told.began = time.monotonic() - drain.QUIET_S - 1
    for text, kind in (("a", ("ingest",)), ("b", ("ingest",)), ("c", ("ingest", "store")), ("d", ("store",))):
        told.say(text, kind)
    assert capsys.readouterr().err.split() == ["a", "c", "d"]


def test_ctrl_c_says_what_goes_on(monkeypatch: pytest.MonkeyPatch, logweir: Verb) -> None:
    def broken_off(_args: object) -> int:
        with drain._saying("broken off; the stack runs on"):
            raise KeyboardInterrupt

    monkeypatch.setattr(drain, "main", broken_off)
    done = logweir("stop")
    assert (done.code, done.err) == (130, "logweir: broken off; the stack runs on\n")
    monkeypatch.setattr(drain, "main", lambda _args: (_ for _ in ()).throw(cli.Terminated()))
    assert (logweir("stop").code, logweir("stop").err) == (143, "logweir: stopped\n")
