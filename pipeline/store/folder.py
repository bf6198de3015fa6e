"""A store in a folder: on this machine's disk, or on a network disk that all machines mount.

A file is written under a temporary name, synced, and then linked (create) or renamed (put, swap) to its own
name, so a power cut leaves a whole object or none. A swap holds a lock beside the object while it compares.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from pipeline.errors import StoreUnavailable
from pipeline.store.objects import Found, checked

TEMPORARY: Final = ".part"
LEFT_BEHIND_S: Final = 86_400.0  # a temporary file of this age belongs to a writer that was killed
# A compared rename takes milliseconds. A longer holder was stopped, or its disk hangs.
LOCK_WAIT_S: Final = 5.0
LOCK_POLL_S: Final = 0.002


class Folder:
    """Objects as files below one folder, which is made with the first object."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()

    def get(self, key: str) -> bytes | None:
        with self._explained("read"):
            try:
                return (self.root / checked(key)).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def fetch(self, key: str, to: Path, *, max_bytes: int) -> bool:
        with self._explained("read"):
            try:
                source = (self.root / checked(key)).open("rb")
            except (FileNotFoundError, NotADirectoryError):
                return False
            with source, to.open("wb") as out:
                remaining = max_bytes + 1
                while remaining > 0 and (piece := source.read(min(remaining, 1 << 20))):
                    out.write(piece)
                    remaining -= len(piece)
        return True

    def create(self, key: str, content: bytes | Path) -> bool:
        with self._explained("written"), self._written(key, content) as (temporary, place):
            try:
                os.link(temporary, place)
            except FileExistsError:
                return False
        return True

    def put(self, key: str, content: bytes | Path) -> None:
        with self._explained("written"), self._written(key, content) as (temporary, place):
            temporary.replace(place)

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        content = self.get(key)
        return None if content is None else (content, _tag(content))

    def swap(self, key: str, content: bytes, tag: str | None) -> str | None:
        with self._explained("written"), self._written(key, content) as (temporary, place), _locked(place):
            found = place.read_bytes() if place.exists() else None
            if (None if found is None else _tag(found)) != tag:
                return None
            temporary.replace(place)
        return _tag(content)

    def look(self, key: str) -> Found | None:
        with self._explained("read"):
            try:
                info = (self.root / checked(key)).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return Found(key=key, size=info.st_size, changed=info.st_mtime)

    def found(self, prefix: str) -> Iterator[Found]:
        with self._explained("read"):
            for folder, _, names in os.walk(self.root / checked(prefix.rstrip("/")), onerror=_raised):
                for name in names:
                    path = Path(folder) / name
                    if not name.startswith("."):
                        with suppress(FileNotFoundError):  # removed meanwhile
                            info = path.stat()
                            key = path.relative_to(self.root).as_posix()
                            yield Found(key=key, size=info.st_size, changed=info.st_mtime)

    def delete(self, key: str) -> None:
        with self._explained("written"):
            (self.root / checked(key)).unlink(missing_ok=True)

    def sweep(self, prefix: str) -> int:
        """Removes what killed writers left below a prefix; returns the number of files."""
        removed = 0
        with self._explained("written"):
            for path in (self.root / checked(prefix.rstrip("/"))).rglob(f".*{TEMPORARY}"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - LEFT_BEHIND_S:
                        path.unlink()
                        removed += 1
        return removed

    @contextmanager
    def _written(self, key: str, content: bytes | Path) -> Iterator[tuple[Path, Path]]:
        """(file with this content on disk, the place of the object beside it); the directory is synced
        afterwards."""
        place = self.root / checked(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{uuid4().hex[:12]}{TEMPORARY}")
        try:
            with temporary.open("xb") as out:
                if isinstance(content, bytes):
                    out.write(content)
                else:
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
            yield temporary, place
            _sync(place.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StoreUnavailable(
                f"the store {self.url} cannot be {action} ({exc.strerror or exc}); free space, fix the "
                "rights, or mount it there"
            ) from exc


def _raised(exc: OSError) -> None:
    """A folder that is not there holds nothing; one that cannot be read is a fault."""
    if not isinstance(exc, FileNotFoundError | NotADirectoryError):
        raise exc


def _tag(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """The exclusive lock of an object. Raises OSError, also after LOCK_WAIT_S without the lock."""
    until = time.monotonic() + LOCK_WAIT_S
    path = place.with_name(f".{place.name}.lock")
    while True:
        # A file of its own: NFS locks only what is open for writing, and a rename replaces the object itself.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _takes(handle, path):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() >= until:
            why = f"another process has kept {path.name} there for {LOCK_WAIT_S:g} s"
            raise TimeoutError(errno.ETIMEDOUT, why)
        time.sleep(LOCK_POLL_S)


def _takes(handle: int, path: Path) -> bool:
    """True if we hold the lock of the file at `path`; somebody may have removed that file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
