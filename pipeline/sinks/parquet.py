"""Results as Parquet files, one per batch: `date=<day>/workload=<name>/<batch id>.parquet`.

A file is written under a temporary name, fsynced and renamed, so readers see whole files only. Writes are
idempotent, so delivery is exactly once in effect. `date` is the UTC day of the batch's first record.

A writer holds the folder's `.lock` and checks under the lock that it still owns the batch. So no writer
replaces or removes the files of another."""

import errno
import fcntl
import heapq
import os
import re
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import polars as pl

from pipeline.errors import SinkUnavailable
from pipeline.records.batch import digest
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks import results
from pipeline.sinks.sink import Last, at_once

TEMPORARY: Final = ".part"
LOCK: Final = ".lock"
# A rename takes milliseconds. A longer holder was stopped, or its disk hangs.
LOCK_WAIT_S: Final = 5.0
LOCK_POLL_S: Final = 0.01
BATCH_ID: Final = "logweir:batch_id"  # in the file itself, where its name does not tell it
# Polars raises several unrelated classes on damaged files, and its panics are no Exceptions.
_DAMAGED: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
_SAFE: Final = " !#$&()+,;@[]^"


class ParquetSink:
    """Writes to and reads back from one directory tree."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
        """Stores a batch's results (RESULT_SCHEMA); replaces earlier ones of this id.

        `last` is called under the folder's lock, before the rename. Raises SinkUnavailable for a full disk or
        a directory without write permission, and the errors of `last`; no temporary file stays."""
        path = self.path(batch_id, frame)
        metadata = {BATCH_ID: batch_id} if _batch_id(path.name) is None else None
        with self._explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = frame.select(list(RESULT_SCHEMA))
            with _written(path, rows, metadata) as temporary, _locked(path.parent):
                last()
                temporary.replace(path)
            _sync_directory(path.parent)

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results, None when there are none."""
        for day in self.root.glob("date=*"):
            path = day / f"workload={folder_part(workload)}" / _file_name(batch_id)
            if path.exists():
                # A workload may be called *, so Polars must take the path as it is.
                return pl.read_parquet(path, hive_partitioning=False, glob=False)
        return None

    def remove(self, batch_id: str, workload: str, *, last: Last = at_once) -> None:
        """Removes the results of a batch. `last` is called under the folder's lock.

        Raises SinkUnavailable and the errors of `last`."""
        for day in self.root.glob("date=*"):
            path = day / f"workload={folder_part(workload)}" / _file_name(batch_id)
            with self._explained(path):
                if not path.exists():
                    continue
                with _locked(path.parent):
                    last()
                    path.unlink(missing_ok=True)

    def latest(self, within_s: float, limit: int) -> list[tuple[str, str]]:
        """(file below the root, batch id) of the newest `limit` files, oldest first.

        Their age is at most `within_s` above the newest file's. Files without a batch id are omitted. Raises
        SinkUnavailable."""
        with self._explained(self.root):
            newest = sorted(heapq.nlargest(limit, self._newest(within_s)))
            after = newest[-1][0] - within_s if newest else 0.0
            found = [(str(path.relative_to(self.root)), _id_of(path)) for at, path in newest if at >= after]
        return [(name, batch_id) for name, batch_id in found if batch_id is not None]

    def _newest(self, within_s: float) -> Iterator[tuple[float, Path]]:
        """(time, file) of all files, less folders that nothing was written to lately.

        A folder's time is at least that of its newest file. A removal renews the folder's time too, so only
        the times of files count."""
        folders = [(p.stat().st_mtime, p) for p in self.root.glob("date=*/workload=*") if p.is_dir()]
        newest = 0.0
        for folder_at, folder in sorted(folders, reverse=True):
            if folder_at < newest - within_s:
                return
            for entry in os.scandir(folder):
                if entry.name.endswith(".parquet") and not entry.name.startswith("."):
                    at = entry.stat().st_mtime
                    newest = max(newest, at)
                    yield at, Path(entry.path)

    def by_age(self, names: Sequence[str]) -> list[str]:
        """These files, newest first, less those that are gone. Raises SinkUnavailable."""
        found = []
        for name in names:
            path = self.root / name
            with self._explained(path), suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, name))
        return [name for _, name in sorted(found, reverse=True)]

    def name(self, batch_id: str, frame: pl.DataFrame) -> str:
        """The file of a batch, below the root."""
        return str(self.path(batch_id, frame).relative_to(self.root))

    def record_ids(self, name: str) -> list[str]:
        """The records in a file, none when it is not there or damaged. Raises SinkUnavailable."""
        path = self.root / name
        with self._explained(path):
            if not path.exists():
                return []
            try:
                ids = pl.read_parquet(path, columns=["record_id"], hive_partitioning=False, glob=False)
            except _DAMAGED:  # readers of results report the damage
                return []
        return list(ids["record_id"])

    def take_out(self, name: str, record_ids: Collection[str] | None, *, last: Last = at_once) -> bool:
        """Removes these records (None: all) from a file; True if the file does not exist afterwards.

        A damaged file only goes as a whole. `last` is called under the folder's lock. Raises SinkUnavailable
        and the errors of `last`."""
        path = self.root / name
        with self._explained(path):
            if not path.parent.is_dir():
                return True
            with _locked(path.parent):  # a concurrent change must not be undone
                if not path.exists():
                    return True
                remaining = None if record_ids is None else _without(path, record_ids)
                if record_ids is not None and remaining is None:
                    return False
                last()
                if remaining is None or remaining.is_empty():
                    path.unlink(missing_ok=True)
                else:
                    batch_id = _id_of(path) if _batch_id(path.name) is None else None
                    metadata = {BATCH_ID: batch_id} if batch_id else None
                    with _written(path, remaining, metadata) as temporary:
                        temporary.replace(path)
                _sync_directory(path.parent)
                return remaining is None or remaining.is_empty()

    def scan(self) -> pl.LazyFrame:
        """All results, lazily; an empty frame when nothing is stored yet."""
        return results.scan(self.root)

    def sweep(self) -> int:
        """Remove what killed writers left behind. Only when no writer runs."""
        removed = 0
        for path in self.root.glob(f"date=*/workload=*/.*{TEMPORARY}"):
            path.unlink(missing_ok=True)
            removed += 1
        return removed

    def path(self, batch_id: str, frame: pl.DataFrame) -> Path:
        """Where a batch is stored: the day of its first record, its workload, its id."""
        first = frame["timestamp"][0]
        return (
            self.root
            / f"date={first:%Y-%m-%d}"
            / f"workload={folder_part(frame['workload'][0])}"
            / _file_name(batch_id)
        )

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, pl.exceptions.ComputeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            raise SinkUnavailable(
                f"results cannot be written to {path.parent} ({why}); free space or fix the rights there, "
                "nothing is lost and writing goes on by itself"
            ) from exc


def folder_part(name: str) -> str:
    """A workload as one path component: no separators, never hidden, never longer than a file system takes.

    On a file system that ignores case, Shop and shop share a directory, but never a file.
    """
    quoted = quote(name, safe=_SAFE).replace("~", "%7E")
    quoted = re.sub(r"^\.", "%2E", quoted)
    return quoted if len(quoted) <= 200 else _short(quoted, name)


def _file_name(batch_id: str) -> str:
    # A leading dot would hide the file from readers.
    quoted = re.sub(r"^\.", "%2E", quote(batch_id, safe="-_").replace("~", "%7E"))
    plain = len(quoted) <= 200 and batch_id == batch_id.lower()
    return f"{quoted if plain else _short(quoted, batch_id)}.parquet"


def _batch_id(file_name: str) -> str | None:
    stem = file_name.removesuffix(".parquet")
    return None if "~" in stem else unquote(stem)


def _id_of(path: Path) -> str | None:
    """The batch of a file; None when neither its name nor the file tells it."""
    named = _batch_id(path.name)
    if named is not None:
        return named
    try:
        return pl.read_parquet_metadata(path).get(BATCH_ID)
    except (FileNotFoundError, *_DAMAGED):
        return None


def _without(path: Path, record_ids: Collection[str]) -> pl.DataFrame | None:
    """The other records of a file; None when it is damaged."""
    try:
        rows = pl.read_parquet(path, hive_partitioning=False, glob=False)
    except _DAMAGED:
        return None
    return rows.filter(~pl.col("record_id").is_in(list(record_ids)))


def _short(quoted: str, name: str) -> str:
    # Nothing else has a ~, so no other name can look like this one.
    return f"{quoted[:160]}~{digest(name)}"


@contextmanager
def _written(path: Path, frame: pl.DataFrame, metadata: dict[str, str] | None) -> Iterator[Path]:
    """The frame on disk under a name of its own beside `path`, to be renamed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    try:
        with temporary.open("wb") as out:
            frame.write_parquet(out, compression="zstd", compression_level=3, metadata=metadata)
            out.flush()
            os.fsync(out.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The exclusive lock of a folder. Raises OSError, also after LOCK_WAIT_S without the lock."""
    until = time.monotonic() + LOCK_WAIT_S
    path = folder / LOCK
    while True:
        # Not the folder itself: NFS locks only what is open for writing.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _takes(handle, path):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() >= until:
            why = f"another process has kept {LOCK} there for {LOCK_WAIT_S:g} s"
            raise TimeoutError(errno.ETIMEDOUT, why)
        time.sleep(LOCK_POLL_S)


def _takes(handle: int, path: Path) -> bool:
    """True if we hold the lock of the file at `path`; a cleaner of old days may have removed that file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
