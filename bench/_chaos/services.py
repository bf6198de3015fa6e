"""Commands that are started again when they end, as a service manager does it.

They end with the block, and with this process, whatever way that ends. Only Linux has what that takes."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil  # type: ignore[import-untyped] # it publishes no types

from bench._chaos.history import History

PR_SET_CHILD_SUBREAPER: Final = 36
RESTART_S: Final = 0.5  # RestartSec= of our service manager
READY_S: Final = 180.0  # machines that run tests are busy
POLL_S: Final = 0.1
REAP_S: Final = 1.0  # it reads all of /proc
STOP_S: Final = 40.0
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Service:
    """A command that is started again when it ends."""

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    wanted: bool = False
    not_before: float = 0.0  # monotonic
    starts: int = 0


class Services:
    """Use it from the main thread; its methods may be called from any."""

    def __init__(self, folder: Path, history: History) -> None:
        self.folder = folder
        self.history = history
        self.all: dict[str, Service] = {}
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise RuntimeError("this kernel adopts no orphans; run it on Linux")
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join(STOP_S)
        # The last ones: servers, and processes that outlived their parent.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._reap()

    def add(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        self.all[name] = Service(
            name=name, command=command, log=self.folder / f"{name}.log", env={**os.environ, **env}
        )

    def start(self, name: str) -> None:
        self.all[name].wanted = True

    def stop(self, name: str) -> None:
        """As a service manager does: ask, then force."""
        service = self.all.get(name)
        if service is None:
            return
        with self._lock:
            service.wanted, process = False, service.process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def hold(self, name: str, seconds: float) -> None:
        """Do not start it again before so long has passed."""
        self.all[name].not_before = time.monotonic() + seconds

    def running(self, name: str) -> "subprocess.Popen[bytes] | None":
        """The process of a service, None while it does not run."""
        service = self.all.get(name)
        process = service.process if service is not None else None
        return process if process is not None and process.poll() is None else None

    def kill(self, name: str) -> bool:
        """SIGKILL the service itself; False when it does not run."""
        process = self.running(name)
        if process is None:
            return False
        process.kill()
        return True

    def starts(self, prefix: str) -> int:
        """How often services of this name, with or without a number, were started."""
        return sum(s.starts for s in self.all.values() if s.name.partition("-")[0] == prefix)

    def wait(self, done: Any, what: str) -> None:
        """Raises RuntimeError when it is not so within READY_S."""
        deadline = time.monotonic() + READY_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {READY_S:.0f} s: {what}; see the logs in {self.folder}")
            time.sleep(POLL_S)

    def _keep(self) -> None:
        """The service manager. Its children end with this thread (PR_SET_PDEATHSIG), so it starts all of
        them."""
        reaped = 0.0
        while not self._ending.wait(POLL_S):
            if time.monotonic() - reaped > REAP_S:
                reaped = time.monotonic()
                self._reap()
            for service in list(self.all.values()):
                with self._lock:
                    self._look_after(service)

    def _look_after(self, service: Service) -> None:
        now = time.monotonic()
        if service.process is not None and (code := service.process.poll()) is not None:
            service.process = None
            service.not_before = max(service.not_before, now + RESTART_S)
            self.history.note(
                "ended", who=service.name, code=code, wanted=service.wanted, why=_tail(service.log)
            )
        if service.process is None and service.wanted and now >= service.not_before:
            service.starts += 1
            tether = [sys.executable, "-m", "pipeline.workers.tethered", str(os.getpid())]
            with service.log.open("ab") as out:
                service.process = subprocess.Popen(
                    [*tether, *service.command],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(service.env), cwd=ROOT,
                )  # fmt: skip
            self.history.note("started", who=service.name, times=service.starts)

    def _reap(self) -> None:
        """Orphans become our children; nobody else waits for them."""
        own = {s.process.pid for s in self.all.values() if s.process is not None}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        return lines[-1][:300] if lines else ""
    return ""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
