"""Sidecars of a stack: Flower and the metrics. The stack goes on without them."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.logs import logger
from pipeline.workers import sockets
from pipeline.workers.stack.child import Child, last_line
from pipeline.workers.stack.restarts import Crashes


@dataclass(slots=True)
class Sidecar:
    """One process. Its socket stays open while it is restarted, so its port stays and readers wait."""

    name: str
    listener: socket.socket
    child: Child[Crashes] | None = None


class Sidecars:
    """The sidecars of one stack."""

    def __init__(
        self, logs: Path, start: "Callable[[list[str], Path, tuple[int, ...]], subprocess.Popen[bytes]]"
    ) -> None:
        """`start` is called with a command, its log and the file descriptors it inherits."""
        self._logs = logs
        self._start = start
        self._sidecars: list[Sidecar] = []

    def add(self, name: str, opened: socket.socket) -> None:
        """`name` is that of its module, `opened` the socket that `show` hands over to it."""
        self._sidecars.append(Sidecar(name, opened))

    def show(self) -> None:
        """Start them; one that does not start is given up."""
        for sidecar in list(self._sidecars):
            self._show(sidecar)

    def check(self) -> bool:
        """Restart dead sidecars; give up those that keep dying. True if anything changed."""
        changed = False
        for sidecar in list(self._sidecars):
            child = sidecar.child
            if child is None or (code := child.process.poll()) is None:
                continue
            changed = True
            logger(worker=sidecar.name).error("worker.died", code=code)
            child.deaths.died()
            if child.deaths.hopeless:
                self._give_up(sidecar, f"{sidecar.name.capitalize()} {child.deaths}: {last_line(child.log)}")
            else:
                self._show(sidecar)
        return changed

    def url(self, name: str) -> str | None:
        """Where one is looked at; None when it is off or was given up."""
        return next(
            (sockets.url(sidecar.listener) for sidecar in self._sidecars if sidecar.name == name), None
        )

    def pids(self, name: str) -> list[int]:
        return [child.process.pid for child in self._children() if child.name == name]

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [child.process for child in self._children()]

    def close(self) -> None:
        """Close their sockets, after their processes have ended."""
        for sidecar in self._sidecars:
            sidecar.listener.close()
        self._sidecars = []

    def _children(self) -> list[Child[Crashes]]:
        return [sidecar.child for sidecar in self._sidecars if sidecar.child is not None]

    def _show(self, sidecar: Sidecar) -> None:
        """Start it, or start it again."""
        log = self._logs / f"{sidecar.name}.log"
        fd = sidecar.listener.fileno()
        command = [sys.executable, "-m", f"pipeline.workers.{sidecar.name}", f"--fd={fd}"]
        try:
            process = self._start(command, log, (fd,))
        except OSError as exc:
            self._give_up(sidecar, str(exc))
            return
        with contextlib.suppress(psutil.Error):
            psutil.Process(process.pid).nice(10)  # looking must not slow the work
        if sidecar.child is None:
            sidecar.child = Child(
                name=sidecar.name, command=command, process=process, log=log, deaths=Crashes()
            )
        else:
            sidecar.child.process = process

    def _give_up(self, sidecar: Sidecar, why: str) -> None:
        logger(worker=sidecar.name).error("worker.given_up", why=why)
        sidecar.listener.close()
        self._sidecars.remove(sidecar)
