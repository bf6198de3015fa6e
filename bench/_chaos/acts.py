"""The form of all faults: each is done to something, and healed when its time is over."""

import os
import random
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from bench._chaos.schedule import Fault

# Heals what a fault did; None when it was over at once.
Heal = Callable[[], None]
Act = Callable[[Fault, random.Random], tuple[Any, Heal | None]]


class Missed(Exception):
    """There is nothing to do it to."""


def signalled(pids: Mapping[str, int], number: signal.Signals) -> dict[str, int]:
    for pid in pids.values():
        os.kill(pid, number)
    return dict(pids)


def stopped(pids: Mapping[str, int]) -> tuple[Any, Heal]:
    """They stand still until the fault is healed."""

    def go_on() -> None:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return signalled(pids, signal.SIGSTOP), go_on


def healed_by(call: Callable[[], object]) -> Heal:
    """The heal that a call is, whatever it answers."""

    def heal() -> None:
        call()

    return heal
