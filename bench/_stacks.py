"""The processes of a running stack as seen from outside: their memory and processor time; and commands of
ours beside it."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench._load import environment
from bench._running import cpu_seconds, memory, resident
from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.redis.attach import running
from pipeline.redis.connection import connect
from pipeline.settings import Settings

COMMAND_S: Final = 1_800.0
SETTLE_S: Final = 300.0
LOOK_S: Final = 0.5
# Shared pages are told apart where so much more is resident than before: each time takes 41 ms.
WORTH_MEASURING: Final = 1.01
STORED_LOOK_S: Final = 0.1  # one question to Redis


def roots_of(settings: Settings) -> dict[str, psutil.Process]:
    """The processes of the stack of this data directory by name; "supervisor" has all others for children."""
    state: dict[str, Any] = running(settings.data.dir) or {}
    roots = {name: psutil.Process(pid) for name, pid in state["workers"].items()}
    return roots | {"redis": psutil.Process(state["redis"][0]), "supervisor": psutil.Process(state["pid"])}


@dataclass(slots=True)
class Seen:
    """What the processes of a stack and a command beside it took: highest memory in MiB, processor seconds by
    role."""

    rss: float = 0.0
    pss: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stored_cpu_s: float = 0.0  # of all of them, when the last batch was stored
    stored_at: float = 0.0  # monotonic clock in seconds, when the last batch was stored
    sender: "subprocess.Popen[bytes] | None" = None  # a command that takes part while it runs


@contextmanager
def watched(settings: Settings) -> Iterator[Seen]:
    roots = roots_of(settings)
    seen, done = Seen(), threading.Event()
    sender: dict[int, float] = {}

    def look() -> None:
        while not done.wait(LOOK_S):
            looked_at = [roots["supervisor"]]  # with all its children
            with contextlib.suppress(psutil.Error):  # a command may end meanwhile
                if (beside := seen.sender) is not None and beside.poll() is None:
                    process = psutil.Process(beside.pid)
                    sender.update(cpu_seconds(process))
                    looked_at.append(process)
                if sum(map(resident, looked_at)) > seen.rss * WORTH_MEASURING:
                    both = [memory(process) for process in looked_at]
                    seen.rss = max(seen.rss, sum(rss for rss, _ in both))
                    seen.pss = max(seen.pss, sum(pss for _, pss in both))

    def look_for_stored() -> None:
        ledger = Ledger(connect(settings), settings)
        waited = False
        while not done.wait(STORED_LOOK_S):
            with contextlib.suppress(RedisUnavailable, psutil.Error):
                if waits := any(ledger.backlog.pending()):
                    seen.stored_at = time.monotonic() + STORED_LOOK_S
                elif waited:
                    seen.stored_cpu_s = sum(spent_since_then().values()) + sum(sender.values())
                waited = waits

    def spent_since_then() -> dict[str, float]:
        now = _spent_s(roots_of(settings))  # with what was started meanwhile
        return {name: spent - before.get(name, 0.0) for name, spent in now.items()}

    before = _spent_s(roots)
    threads = [threading.Thread(target=target, daemon=True) for target in (look, look_for_stored)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        done.set()
        for thread in threads:
            thread.join()
        seen.cpu_s |= spent_since_then()
        seen.cpu_s["send"] = sum(sender.values())


def _spent_s(roots: dict[str, psutil.Process]) -> dict[str, float]:
    """Processor seconds by role, with those of what it started; the supervisor's are its own."""
    return {
        name: cpu_seconds(process).get(process.pid, 0.0)
        if name == "supervisor"
        else sum(cpu_seconds(process).values())
        for name, process in roots.items()
    }


def settled(settings: Settings) -> None:
    """Until nothing waits, for a model neither. Raises RuntimeError when that takes too long."""
    ledger = Ledger(connect(settings), settings)
    until = time.monotonic() + SETTLE_S
    while any(ledger.backlog.pending()):
        if time.monotonic() > until:
            raise RuntimeError(f"batches wait that nobody works on: {ledger.backlog.counts()}")
        time.sleep(0.2)


def command(
    folder: Path, *verb: str, extra: Mapping[str, str] | None = None, seen: Seen | None = None
) -> None:
    """A command of ours as users run it. Raises CalledProcessError with what it said."""
    words = [sys.executable, "-m", "pipeline.cli", *verb]
    process = subprocess.Popen(
        words,
        env=environment(folder) | dict(extra or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    if seen is not None:
        seen.sender = process
    try:
        _, said = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, stderr=said.decode()[-2000:])
