"""A process that the embedded stack has started: the rule it is started again by, its end, its last words."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from pipeline.errors import StackFailed
from pipeline.logs import logger
from pipeline.workers.stack.restarts import Crashes, Restarts

STOP_S: Final = 12.0

Rule = TypeVar("Rule", bound=Restarts | Crashes)


@dataclass(slots=True)
class Child(Generic[Rule]):
    """One supervised process."""

    name: str
    command: list[str]
    process: "subprocess.Popen[bytes]"
    log: Path
    deaths: Rule
    fds: tuple[int, ...] = ()  # files of this process that it inherits


def end(processes: "Sequence[subprocess.Popen[bytes]]", *, within_s: float = STOP_S) -> None:
    """A warm shutdown first, then by force."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger(pid=process.pid).warning("worker.killed", why=f"it did not end within {within_s:g} s")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session: pool children too
            process.wait()


def restart_dead(
    children: list[Child[Crashes]], start: "Callable[[Child[Crashes]], subprocess.Popen[bytes]]"
) -> list[Child[Crashes]]:
    """Starts dead ones again, and returns them. One that keeps dying is given up and leaves `children`."""
    dead = [child for child in children if child.process.poll() is not None]
    for child in dead:
        logger(worker=child.name).error("worker.died", code=child.process.returncode)
        child.deaths.died()
        try:
            if child.deaths.hopeless:
                raise StackFailed(f"{child.name} {child.deaths}: {last_line(child.log)}")
            child.process = start(child)
        except (StackFailed, OSError) as exc:
            logger(worker=child.name).error("worker.given_up", why=str(exc))
            children.remove(child)
    return dead


def last_line(log: Path) -> str:
    """The last line of a process's log."""
    try:
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    except OSError:
        return "it left no log"
    return lines[-1][:500] if lines else "it left no log"
