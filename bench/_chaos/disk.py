"""The disk of the results in a chaos run: a small tmpfs that is really filled, or a limit that looks like it.

Mounting takes root; `unshare` gives that to others where the kernel allows it. Where neither works, processes
get a limit on the size of a file, and every write past it fails."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped] # it publishes no types

UNSHARED: Final = "LOGWEIR_CHAOS_UNSHARED"  # set once we have tried
PIECE: Final = 1 << 20
FILE_LIMIT: Final = 1_024


def become_root() -> None:
    """Run this program again as root of a user namespace, where it is not root and that is possible."""
    if os.geteuid() == 0 or os.environ.pop(UNSHARED, ""):
        return
    tried = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)
    if tried.returncode == 0:
        os.environ[UNSHARED] = "1"
        os.execvp("unshare", ["unshare", "-Urm", *sys.orig_argv])


class Disk:
    """The directory of the results. `kind` says which of the two it is, once it is mounted."""

    def __init__(self, path: Path, *, mib: int, processes: Callable[[], list[int]]) -> None:
        self.path = path
        self.mib = mib
        self.processes = processes
        self.kind = ""
        self._limited: dict[int, tuple[int, int]] = {}

    def mount(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.mib}m", "tmpfs", str(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
            self.kind = "tmpfs" if done.returncode == 0 else "limit"
        except OSError:
            self.kind = "limit"

    def unmount(self) -> None:
        if self.kind == "tmpfs":
            # Lazily: whoever still looks into it must not keep it here.
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
            self.kind = ""

    @property
    def _ballast(self) -> Path:
        return self.path / ".ballast"

    def fill(self) -> None:
        """From now on nothing can be written there."""
        if self.kind == "tmpfs":
            with self._ballast.open("ab", buffering=0) as file:
                for piece in (bytes(PIECE), bytes(4_096), bytes(1)):
                    with contextlib.suppress(OSError):
                        while file.write(piece):
                            pass
            return
        for pid in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                self._limited.setdefault(pid, process.rlimit(psutil.RLIMIT_FSIZE))
                process.rlimit(psutil.RLIMIT_FSIZE, (FILE_LIMIT, self._limited[pid][1]))

    def free(self) -> None:
        """There is room again."""
        self._ballast.unlink(missing_ok=True)
        for pid, limits in self._limited.items():
            with contextlib.suppress(psutil.Error, OSError):
                psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, limits)
        self._limited.clear()
