"""The thread that does all stages of a small run is waited for, and what is tried again is no traceback."""

import threading
import time

import pytest
from polling import wait_until

from pipeline.errors import RedisUnavailable
from pipeline.settings import Settings
from pipeline.tasks import train
from pipeline.workers.one_process import OneProcess


def test_a_run_in_a_hurry_waits_for_its_step_which_cannot_be_killed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def run(_: object) -> None:
        begun.set()
        time.sleep(0.5)  # native code, which looks at nothing
        ended.set()

    monkeypatch.setattr(train, "run", run)
    with OneProcess(settings) as stack:
        stack.stop_s = 0.01
        stack.producer().submit.train()
        assert begun.wait(20)
    assert ended.is_set()


def test_a_training_that_waits_for_redis_is_one_line_of_the_log_and_no_traceback(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def run(_: object) -> None:
        tries.append(1)
        raise RedisUnavailable("Redis refuses to work (MISCONF)")

    monkeypatch.setattr(train, "run", run)
    with OneProcess(settings) as stack:
        for count in (1, 2):
            stack.producer().submit.train()
            assert wait_until(lambda count=count: len(tries) >= count, timeout_s=20)
        stack.check()
    assert caplog.text.count("one_process.task_waits") == 2 and "MISCONF" in caplog.text
    assert "Traceback" not in caplog.text
