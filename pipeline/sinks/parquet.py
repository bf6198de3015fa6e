"""Results as Parquet files, one per batch: `date=<day>/workload=<name>/<batch id>.parquet`.

A file is written to a temporary name, fsynced and renamed, so a reader never sees half a file and writing a
batch again replaces it: that is what makes delivery exactly once in effect. `date` is the UTC day of the
batch's first record.
"""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import polars as pl

from pipeline import results
from pipeline.errors import SinkUnavailable
from pipeline.records import RESULT_SCHEMA, digest

TEMPORARY: Final = ".part"
_SAFE: Final = " !#$&()+,;@[]^"


class ParquetSink:
    """Writes to and reads back from one directory tree."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, batch_id: str, frame: pl.DataFrame) -> None:
        """Store a batch's results (RESULT_SCHEMA), replacing what was there under this id.

        Raises SinkUnavailable when the disk is full or the directory cannot be written; nothing half-written stays.
        """
        path = self.path(batch_id, frame)
        with self._explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
            try:
                with temporary.open("wb") as out:
                    frame.select(list(RESULT_SCHEMA)).write_parquet(
                        out, compression="zstd", compression_level=3
                    )
                    out.flush()
                    os.fsync(out.fileno())
                temporary.replace(path)
                _sync_directory(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def read(self, batch_id: str, workload: str) -> pl.DataFrame | None:
        """A batch's stored results, None when there are none."""
        for day in self.root.glob("date=*"):
            path = day / f"workload={folder_part(workload)}" / _file_name(batch_id)
            if path.exists():
                # A workload may be called *, so Polars must take the path as it is.
                return pl.read_parquet(path, hive_partitioning=False, glob=False)
        return None

    def remove(self, batch_id: str, workload: str) -> None:
        """Take back what was stored under this id: its records will be stored under other ids, or not at all."""
        for day in self.root.glob("date=*"):
            path = day / f"workload={folder_part(workload)}" / _file_name(batch_id)
            with self._explained(path):
                path.unlink(missing_ok=True)

    def scan(self) -> pl.LazyFrame:
        """All results, lazily; an empty frame when nothing is stored yet."""
        return results.scan(self.root)

    def sweep(self) -> int:
        """Remove what killed writers left behind. Only when no writer runs."""
        gone = 0
        for path in self.root.glob(f"date=*/workload=*/.*{TEMPORARY}"):
            path.unlink(missing_ok=True)
            gone += 1
        return gone

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

    Where the file system does not tell Shop from shop they share a directory, which does no harm: batches do not share files.
    """
    quoted = quote(name, safe=_SAFE).replace("~", "%7E")
    quoted = re.sub(r"^\.", "%2E", quoted)
    return quoted if len(quoted) <= 200 else _short(quoted, name)


def _file_name(batch_id: str) -> str:
    # A leading dot would hide the file from whoever reads the results.
    quoted = re.sub(r"^\.", "%2E", quote(batch_id, safe="-_").replace("~", "%7E"))
    plain = len(quoted) <= 200 and batch_id == batch_id.lower()
    return f"{quoted if plain else _short(quoted, batch_id)}.parquet"


def _short(quoted: str, name: str) -> str:
    # Nothing else has a ~, so no other name can look like this one.
    return f"{quoted[:160]}~{digest(name)}"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
