"""The data directory belongs to one process: its lock, the end of an earlier stack, the state file of a
stack."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.errors import BadInput
from pipeline.logs import logger
from pipeline.redis.attach import state_file
from pipeline.workers.stack.child import STOP_S


def lock(data_dir: Path) -> IO[str]:
    """Lock a data directory until the file is closed. Raises BadInput if another process has the lock.

    A directory that is made here is this user's alone, because its files hold log lines; the rights of an
    existing one stay."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = _lock_file(data_dir)
    except OSError as exc:
        raise BadInput(
            f"the data directory {data_dir} cannot be used ({exc.strerror}); choose another directory"
        ) from exc
    if not _try_lock(handle):
        handle.seek(0)
        pid = handle.read().strip() or "?"
        handle.close()
        raise BadInput(
            f"a logweir (process {pid}) already works in {data_dir}; stop it or choose another directory"
        )
    handle.seek(0)
    handle.truncate()
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def holder(data_dir: Path) -> int | None:
    """The id of the process that has the lock; None if it is free, 0 if its holder has not written its id
    yet.

    Raises OSError.
    """
    with _lock_file(data_dir) as handle:
        if _try_lock(handle):
            return None
        handle.seek(0)
        pid = handle.read().strip()
        return int(pid) if pid.isdecimal() else 0


def _lock_file(data_dir: Path) -> IO[str]:
    return (data_dir / "lock").open("a+", encoding="utf-8")


def _try_lock(handle: IO[str]) -> bool:
    """Take the lock; False when another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def outlive(data_dir: Path) -> None:
    """After a supervisor that was killed: its children end by themselves, and only then ours may start."""
    try:
        state = json.loads(state_file(data_dir).read_text(encoding="utf-8"))
        others = (
            pid
            for name in ("redis", "flower_pids", "metrics_pids", "api_pids")
            for pid in state.get(name, [])
        )
        old = {int(pid) for pid in (*state["workers"].values(), *others)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    deadline = time.monotonic() + STOP_S
    while old and time.monotonic() < deadline:
        old = {pid for pid in old if _works_in(pid, data_dir)}
        if old and all(_is_stopped(pid) for pid in old):
            break  # a stopped process takes no signal
        time.sleep(0.05)
    for pid in old:
        logger(pid=pid).warning("worker.killed", why="it outlived the stack it belonged to")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def write_state(data_dir: Path, state: Mapping[str, object]) -> None:
    """Write the state file that `redis/attach.py` reads. Raises OSError."""
    path = state_file(data_dir)
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    # The URL may hold a password: nobody else may read it, not for a moment.
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
        json.dump(state, out)
    temporary.replace(path)


def _works_in(pid: int, data_dir: Path) -> bool:
    """A process of an earlier stack of this directory, and not a stranger who got its number."""
    try:
        return Path(psutil.Process(pid).cwd()).is_relative_to(data_dir)
    except (psutil.Error, OSError):
        return False


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
