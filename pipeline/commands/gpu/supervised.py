"""A supervised subprocess: it ends, with all its descendants, when its lease or its supervisor ends.

The keeper (`logweir gpu run`) holds the lease and one end of a socket. The guard (this file as a program)
holds the other end and is the parent of the program. If the keeper dies, the kernel closes its end, and the
guard ends the program. If the guard is killed, the kernel kills the program; the keeper inherits the
program's children and ends them. On Linux detached processes do not escape: both are subreapers of their
descendants (prctl PR_SET_CHILD_SUBREAPER).

The guard imports the standard library and psutil only: it runs in the user's directory, with the user's
environment.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import psutil  # type: ignore[import-untyped] # it publishes no types

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.2  # a dead process is noticed so late where no signal tells
REMOVED_S: Final = 30.0  # for an engine to remove a container
KILLED_S: Final = 5.0  # for the kernel to end what SIGKILL was sent to; longer only in a hung driver
NOT_FOUND: Final = 127  # as shells answer
NOT_STARTED: Final = 126


class SupervisedProgram:
    """The keeper's end. On leaving, all descendants of the program have ended, except `survivors`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace_s: float,
        alone_s: float | None = None,
        fds: Sequence[int] = (),
        removal: Sequence[str] = (),
    ) -> None:
        """Start the guard, not yet the program. `fds` (locks) stay open in both while they live.

        `alone_s`: the grace when this process dies, since the lease is no longer renewed then; None:
        `grace_s`. `removal`: the command starts a container, which this one ends and removes. The command
        alone is asked to end then, because it passes that on. Without this process the guard removes the
        container; else that is up to the caller.
        """
        self.removal = list(removal)
        self.command, self.grace_s, self.fds = list(command), grace_s, tuple(fds)
        self.alone_s = grace_s if alone_s is None else min(grace_s, alone_s)
        self.code: int | None = None  # exit code of the program, 128 + n when signal n ended it
        self.failed = ""  # why it could not be started
        self.program_pid: int | None = None
        self.survivors: tuple[int, ...] = ()
        self._heard = b""
        self._others = {p.pid for p in psutil.Process().children()}
        _adopt_orphans(True)
        keeper_end, guard_end = socket.socketpair()
        self._line = keeper_end
        with guard_end:
            number = guard_end.fileno()
            # By its file and with -P: nothing in the user's directory can take the place of a module.
            guard = [sys.executable, "-P", __file__, str(number)]
            self.guard = subprocess.Popen(guard, pass_fds=(number, *fds), start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(self.grace_s + 2 * KILLED_S)
        self.survivors = _kill(self._descendants)
        _adopt_orphans(False)
        if self.guard.poll() is None:
            self.guard.returncode = (
                -signal.SIGKILL
            )  # it waits for what the kernel cannot end; nobody waits for it

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the program with these names set in the environment that we have ourselves."""
        self._say(
            environment=dict(environment),
            command=self.command,
            grace_s=self.grace_s,
            alone_s=self.alone_s,
            fds=self.fds,
            removal=self.removal,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the program and its group."""
        self._say(signal=number)

    def stop(self, within_s: float | None = None) -> None:
        """SIGTERM now, SIGKILL to everything it started after `within_s` (its grace)."""
        self._say(stop=self.grace_s if within_s is None else within_s)

    def wait(self, timeout_s: float) -> bool:
        """True when the program has ended or was never started; only `survivors` still run."""
        ready, _, _ = select.select([self._line], [], [], timeout_s)
        if not ready:
            return False
        try:
            data = self._line.recv(65536)
        except ConnectionError:
            data = b""
        if not data and self.code is None:  # the guard was killed, and the kernel killed the program with it
            self.code = 128 + signal.SIGKILL
        self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            self.program_pid = message.get("started", self.program_pid)
            self.failed = message.get("failed", self.failed)
            self.code = message.get("code", self.code)
        return self.code is not None

    def pids(self) -> tuple[int, ...]:
        """The program and everything it started, as far as it lives now."""
        return tuple(p.pid for p in self._descendants() if p.pid != self.guard.pid)

    def _descendants(self) -> "list[psutil.Process]":
        """The processes below the guard, or inherited from it; not the other children of this process."""
        return [
            p
            for child in _children(psutil.Process())
            if child.pid not in self._others
            for p in _family(child)
        ]

    def _say(self, **order: Any) -> None:
        with contextlib.suppress(OSError):  # a guard that has gone is noticed in wait()
            self._line.sendall(json.dumps(order).encode() + b"\n")


class Guard:
    """The guard's end: starts the program, passes signals on, and ends everything below itself at the end."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.program: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.grace_s = 0.0
        self.alone_s = 0.0
        self.kill_at: float | None = None
        self.removal: list[str] = []
        self.alone = False  # the keeper has gone
        self._heard = b""

    def run(self) -> None:
        """Until the program has ended, or before it began when the keeper has gone."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the program shall inherit that
                signal.signal(number, lambda n, _frame: self._pass_on(n))
        while self.code is None:
            remaining_s = (
                POLL_S if self.kill_at is None else max(0.0, min(POLL_S, self.kill_at - time.monotonic()))
            )
            ready, _, _ = select.select([wake] if self.alone else [self.line, wake], [], [], remaining_s)
            if wake in ready:
                wake.recv(4096)
            if self.line in ready and not self._listen():
                return
            self._reap()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                _kill(_below)
        self._end_the_rest()
        if self.alone and self.removal:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    self.removal, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    timeout=REMOVED_S, check=False,
                )  # fmt: skip
        self._say(code=self.code)

    def _listen(self) -> bool:
        """Do what the keeper says; False when there is nothing to guard."""
        try:
            data = self.line.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.alone = True
            if self.program is not None:
                self._stop(self.alone_s)
            return self.program is not None
        self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            if "command" in order:
                self._start(order)
            elif "signal" in order:
                self._pass_on(int(order["signal"]))
            else:
                self._stop(float(order["stop"]))
        return True

    def _start(self, order: dict[str, Any]) -> None:
        self.grace_s, self.alone_s = float(order["grace_s"]), float(order["alone_s"])
        self.removal = order["removal"]
        for name, value in order["environment"].items():
            os.putenv(name, value)  # other variables of the environment reach the program unread
        try:
            # A group of its own, so that a signal reaches all of it; preexec_fn is safe with one thread.
            self.program = subprocess.Popen(
                order["command"],
                process_group=0,
                pass_fds=order["fds"],
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509
            )
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            self.code = NOT_FOUND if isinstance(exc, FileNotFoundError) else NOT_STARTED
            self._say(failed=why, code=self.code)
        else:
            self._say(started=self.program.pid)

    def _pass_on(self, number: int) -> None:
        if self.program is not None and self.code is None:
            with contextlib.suppress(OSError):
                os.killpg(self.program.pid, number)

    def _stop(self, within_s: float) -> None:
        """SIGTERM to everything; what was stopped by hand goes on, so that it can end."""
        group = 0 if self.program is None else self.program.pid
        self._pass_on(signal.SIGTERM)
        self._pass_on(signal.SIGCONT)
        for process in () if self.removal else _below():
            with contextlib.suppress(OSError, psutil.Error):
                if self.code is not None or os.getpgid(process.pid) != group:
                    process.terminate()
        latest = time.monotonic() + within_s
        self.kill_at = latest if self.kill_at is None else min(self.kill_at, latest)

    def _reap(self) -> None:
        """Take in every descendant that ended: orphans come to us."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if self.program is not None and pid == self.program.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.program.returncode = code
                    self.code = code if code >= 0 else 128 - code

    def _end_the_rest(self) -> None:
        """The lease ends with the program, so what it left running must not go on using the device."""
        if not _below():
            return
        self._stop(self.alone_s if self.alone else self.grace_s)
        while _below() and self.kill_at is not None and time.monotonic() < self.kill_at:
            # The lease can be lost, and the keeper die, now as well.
            ready, _, _ = select.select([] if self.alone else [self.line], [], [], 0.02)
            if ready:
                self._listen()
            self._reap()
        _kill(_below)
        self._reap()

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps(message).encode() + b"\n")


def _children(process: psutil.Process) -> "list[psutil.Process]":
    try:
        return list(process.children())
    except psutil.Error:
        return []


def _family(process: psutil.Process) -> "list[psutil.Process]":
    """A process and everything below it, as far as it still runs."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
    return found


def _below() -> "list[psutil.Process]":
    """Everything below this process that still runs."""
    return _family(psutil.Process())[1:]


def _kill(find: "Callable[[], list[psutil.Process]]") -> tuple[int, ...]:
    """SIGKILL, again for what is born meanwhile; the pids of those that the kernel cannot end in time."""
    deadline = time.monotonic() + KILLED_S
    while (found := find()) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)
    return tuple(process.pid for process in found)


def _adopt_orphans(yes: bool) -> None:
    """Ask the kernel to give us the orphans among our descendants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes))


def _die_with(guard: int) -> Any:
    """Parent-death watch: before it starts, the program asks the kernel to be killed when the guard dies."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded here: after the fork nothing should be

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)

    return ask


def main(argv: list[str]) -> int:
    _adopt_orphans(True)
    with socket.socket(fileno=int(argv[0])) as line:
        Guard(line).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
