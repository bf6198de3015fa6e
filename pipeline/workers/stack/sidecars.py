"""What shows a stack beside its work: Flower, the metrics. Nothing of it is vital: the stack goes on without it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.logs import logger
from pipeline.workers import sockets as door
from pipeline.workers.stack.child import Child, tail
from pipeline.workers.stack.restarts import Crashes


@dataclass(slots=True)
class Window:
    """One process. Its socket stays open while it is restarted, so its port stays and readers wait."""

    name: str
    door: socket.socket
    child: Child[Crashes] | None = None


class Windows:
    """Those of one stack."""

    def __init__(
        self, logs: Path, start: "Callable[[list[str], Path, tuple[int, ...]], subprocess.Popen[bytes]]"
    ) -> None:
        """`start` is called with a command, its log and the file descriptors it inherits."""
        self._logs = logs
        self._start = start
        self._open: list[Window] = []

    def add(self, name: str, opened: socket.socket) -> None:
        """`name` is that of its module, `opened` the socket that `show` hands over to it."""
        self._open.append(Window(name, opened))

    def show(self) -> None:
        """Start them; what does not start is given up."""
        for window in list(self._open):
            self._show(window)

    def check(self) -> bool:
        """Restart what died; of what keeps dying say so once and go on without it. Returns whether anything changed."""
        changed = False
        for window in list(self._open):
            child = window.child
            if child is None or (code := child.process.poll()) is None:
                continue
            changed = True
            logger(worker=window.name).error("worker.died", code=code)
            child.deaths.died()
            if child.deaths.hopeless:
                self._give_up(window, f"{window.name.capitalize()} {child.deaths}: {tail(child.log)}")
            else:
                self._show(window)
        return changed

    def url(self, name: str) -> str | None:
        """Where one is looked at; None when it is off or was given up."""
        return next((door.url(window.door) for window in self._open if window.name == name), None)

    def pids(self, name: str) -> list[int]:
        return [child.process.pid for child in self._children() if child.name == name]

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [child.process for child in self._children()]

    def close(self) -> None:
        """Close their sockets, after their processes have ended."""
        for window in self._open:
            window.door.close()
        self._open = []

    def _children(self) -> list[Child[Crashes]]:
        return [window.child for window in self._open if window.child is not None]

    def _show(self, window: Window) -> None:
        """Start it, or start it again."""
        log = self._logs / f"{window.name}.log"
        fd = window.door.fileno()
        command = [sys.executable, "-m", f"pipeline.workers.{window.name}", f"--fd={fd}"]
        try:
            process = self._start(command, log, (fd,))
        except OSError as exc:
            self._give_up(window, str(exc))
            return
        with contextlib.suppress(psutil.Error):
            psutil.Process(process.pid).nice(10)  # looking must not slow the work
        if window.child is None:
            window.child = Child(
                name=window.name, command=command, process=process, log=log, deaths=Crashes()
            )
        else:
            window.child.process = process

    def _give_up(self, window: Window, why: str) -> None:
        logger(worker=window.name).error("worker.given_up", why=why)
        window.door.close()
        self._open.remove(window)
