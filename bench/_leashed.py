"""A benchmark on a leash: the processes that it started end with it, however it ends.

Three processes, as for `logweir gpu run`: the keeper, which the user started; the guard; and the benchmark. A
keeper or a guard that is killed (-9) takes the benchmark and everything below it along
(pipeline/commands/gpu/supervised.py)."""

import multiprocessing
import os
import signal
import sys
import time
from types import FrameType
from typing import Final, NoReturn

from pipeline.commands.gpu.supervised import SupervisedProgram

NAME: Final = "BENCH_LEASHED"  # in the environment of the benchmark, and of nothing below it
GRACE_S: Final = 60.0  # a stack ends within this time, and its temporary directory is removed
POLL_S: Final = 1.0


def leashed() -> bool:
    """True in the process that shall measure. On a signal its pools end first, then its `with` blocks."""
    if os.environ.pop(NAME, "") != "yes":
        return False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    return True


def keep() -> int:
    """Start this command again on a leash, pass signals on and wait; its exit code."""
    latest: list[float] = []

    def end(number: int, _frame: FrameType | None) -> None:
        leash.signal(number)
        latest.append(time.monotonic() + GRACE_S)

    with SupervisedProgram([sys.executable, *sys.orig_argv[1:]], grace_s=GRACE_S) as leash:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)
        leash.begin({NAME: "yes"})
        while not leash.wait(POLL_S):
            if latest and time.monotonic() > latest[0]:
                leash.stop(0.0)
    return 1 if leash.code is None else leash.code


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    for process in multiprocessing.active_children():
        process.terminate()  # a pool would wait for the work in hand
    raise SystemExit(128 + number)
