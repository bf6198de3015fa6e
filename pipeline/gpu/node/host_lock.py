"""A file lock per device on one host: the second line behind the lease, freed by the kernel. See flock(2).

Redis may be wiped, or serve another deployment with the same GPUs. The lock still keeps an exclusive holder
alone among all processes of the host that see the same directory. The kernel drops it with the last process
that has the file open, also after SIGKILL.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import LeaseRefused
from pipeline.logs import logger

# The same for every stack of a host, so neither the data directory nor one of a user. A container has its own
# unless this path is mounted into it. Whoever can open a file there can hold the device, so it is for the
# accounts of one group (docs/decisions/0047-who-may-hold-a-device.md), and links there are not followed.
HOST_DIRECTORY: Final = Path("/tmp/logweir-gpu")  # noqa: S108 - see above
MODE: Final = 0o3770  # new files get the group of the directory; sticky, so none removes another's file
WAIT_S: Final = 2.0  # the holder before us may be a process that is just ending
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLock:
    """A lock that is held. `fd` is None when the host offers no place for one.

    A child holds it too by `subprocess.Popen(..., pass_fds=lock.fds)`, until both have closed it. Otherwise
    it is closed on exec. A forked child shares it.
    """

    uuid: str
    exclusive: bool
    fd: int | None

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self.fd is None else (self.fd,)


@contextmanager
def host_lock(directory: Path, uuid: str, *, exclusive: bool, wait_s: float = WAIT_S) -> Iterator[HostLock]:
    """Hold the device on this host: alone, or together with other shared holders.

    Raises LeaseRefused when another process holds it in a conflicting way for longer than `wait_s`. On a host
    without a directory for the file, a warning is logged and the lease in Redis stands alone.
    """
    fd: int | None = None
    try:
        fd = _take(directory, uuid, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, wait_s)
    except OSError as exc:
        logger(device=uuid).warning("gpu.no_host_lock", directory=str(directory), why=exc.strerror)
    try:
        yield HostLock(uuid=uuid, exclusive=exclusive, fd=fd)
    finally:
        if fd is not None:
            # Closed, never unlocked: LOCK_UN would take the lock from a child with the same open file.
            with suppress(OSError):
                os.close(fd)


def _take(directory: Path, uuid: str, how: int, wait_s: float) -> int:
    """The open file with the lock on it. Raises LeaseRefused, OSError."""
    deadline = time.monotonic() + wait_s
    while True:
        fd = _open(directory, uuid)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            if _is_named(directory, uuid, fd):
                return fd
            os.close(fd)  # the file was replaced meanwhile: our lock is on one that no process will open
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            if time.monotonic() >= deadline:
                raise LeaseRefused(
                    f"{uuid} is in use on this host{holder} though the pool leased it; end that process first"
                ) from None
            time.sleep(POLL_S)
        except OSError:
            os.close(fd)
            raise


def _open(directory: Path, uuid: str) -> int:
    """The file of a device, created if need be; symbolic links are not followed. Raises OSError."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        directory.chmod(MODE)  # whatever the umask
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_accounts(directory, os.fstat(folder))
        name, plain = _name(uuid), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            # Not O_CREAT on what is there: the kernel forbids that for another user's file in a sticky
            # directory (fs.protected_regular). To read is enough for flock.
            try:
                fd = os.open(name, plain, dir_fd=folder)
                break
            except FileNotFoundError:
                with suppress(FileExistsError):
                    fd = os.open(name, plain | os.O_CREAT | os.O_EXCL, 0o660, dir_fd=folder)
                    os.fchmod(fd, 0o660)
                    break
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, f"{directory / name} is no plain file; remove it")
        return fd
    finally:
        os.close(folder)


def _check_accounts(directory: Path, info: os.stat_result) -> None:
    """Raises OSError for a directory in which accounts of no group of ours could hold a device."""
    ours = info.st_uid in (0, os.geteuid()) or info.st_gid in (os.getegid(), *os.getgroups())
    if not ours or info.st_mode & stat.S_IWOTH:
        raise OSError(errno.EPERM, f"others may write in {directory}")


def _name(uuid: str) -> str:
    """A safe file name for any uuid."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in uuid).lstrip(".") + ".lock"


def _is_named(directory: Path, uuid: str, fd: int) -> bool:
    try:
        return os.path.samestat((directory / _name(uuid)).lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _holder(fd: int) -> str:
    """by process 4711", as far as /proc/locks tells; for the message only."""
    info = os.fstat(fd)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        rows = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    found = [row.split() for row in rows if " FLOCK " in row and f" {place} " in row and "->" not in row]
    return f" by process {found[0][4]}" if found and found[0][4].isdigit() else ""
