"""Limits of this machine that a stack would otherwise meet in the middle of its work."""

import contextlib
import resource
import shutil
from pathlib import Path
from typing import Final

from pipeline.errors import BadInput

# Redis keeps 32 descriptors for itself and needs one for each connection: 82 were counted for 6 processes,
# each of which had up to 31 open itself.
FILES_BASE: Final = 64
FILES_PER_PROCESS: Final = 32
# Some libraries walk through all possible descriptors, so the limit is raised no further than this.
FILES_MOST: Final = 4_096
MIB: Final = 2**20


def check_files(processes: int) -> None:
    """Raise the limit of open files for this process and its children. Raises BadInput when it is too low."""
    needed = FILES_BASE + FILES_PER_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = FILES_MOST if hard == unlimited else min(hard, max(FILES_MOST, needed))
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != unlimited and soft < needed:
        who = (
            f"{processes} processes with their Redis need"
            if processes
            else "one process with its Redis needs"
        )
        raise BadInput(
            f"a process may open only {soft} files here, and {who} {needed}; raise the limit with "
            f"`ulimit -n {needed}` (root, or nofile in /etc/security/limits.conf)"
        )


def check_disk(directory: Path, needed_bytes: int) -> None:
    """Raises BadInput when the file system of this directory, made or not, has less room for this user."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        raise BadInput(
            f"{directory} has {free / MIB:,.1f} MiB of free space, and about {needed_bytes / MIB:,.0f} MiB "
            "are needed; free space there or choose another directory"
        )
