"""Processes that end with their parent, whatever way it goes.

`tether` is for Python processes, which watch their parent in a thread. `python -m pipeline.workers.tethered
PARENT COMMAND...` runs any other program, such as Redis. On Linux the kernel sends SIGTERM when the parent
dies, and this process becomes the program. Elsewhere this process stays between the two and watches."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Final

from pipeline.upkeep import start_thread

PR_SET_PDEATHSIG: Final = 1


def tether(parent: int, *, grace_s: float) -> None:
    """End this process when `parent` is its parent no more: told to first, where it has `grace_s` to do
    so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if grace_s:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(70)  # a task that does not end must not keep an orphan alive

    start_thread("tether", watch)


def tether_to_supervisor(*, grace_s: float) -> None:
    """`tether` to the supervisor of the embedded stack, where it has started this process.

    Raises BadInput."""
    from pipeline.settings import Settings  # Redis is started through this module, and needs none

    if supervisor := Settings.load().internal.supervisor_pid:
        tether(supervisor, grace_s=grace_s)


def main(argv: list[str]) -> int:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0:
        if os.getppid() != parent:  # it died before the call above
            return 1
        os.execv(command[0], command)  # noqa: S606 - an argument list, no shell
    return _watch(parent, command)


def _watch(parent: int, command: list[str]) -> int:
    with subprocess.Popen(command) as child:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _frame: child.send_signal(n))
        while child.poll() is None:
            if os.getppid() != parent:
                child.terminate()
                child.wait()
            time.sleep(0.2)
        return child.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
