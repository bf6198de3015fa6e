"""DuckDB over lists of Parquet files: memory, threads, temporary files and time are bounded.

It reads the folders that it was given and nothing else, and keeps no state between questions. A question runs
inside `question()`, and `cancel()` of another thread ends it. Values reach SQL as parameters.
"""

import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import duckdb
import polars as pl

from pipeline.errors import AnswerCancelled, BadInput, BadPayload, SinkUnavailable
from pipeline.sinks.answers.bounds import LIMIT_S, MEMORY
from pipeline.sinks.part_files import MESSAGE_AT
from pipeline.sinks.results import damaged_file
from pipeline.upkeep import start_thread

THREADS: Final = 2
SPILL: Final = "4GB"  # temporary files of sorts and groups beyond MEMORY
# The newest so many rows are found by their keys first, and then read as a intact.
KEYS_FIRST: Final = 10_000
STALE_S: Final = 86_400.0  # no question takes so long: its temporary files are those of a killed process
_AGAIN_S: Final = 0.01  # an interrupt between two statements ends neither

_TYPES: Final = {
    pl.String: "VARCHAR",
    pl.UInt64: "UBIGINT",
    pl.UInt32: "UINTEGER",
    pl.Int64: "BIGINT",
    pl.Float64: "DOUBLE",
    pl.Boolean: "BOOLEAN",
    pl.Datetime: "TIMESTAMPTZ",
    pl.List: "VARCHAR[]",
}

KEPT: Final = "kept_message"
SEARCHED: Final = (KEPT, MESSAGE_AT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """A Parquet file, and the sorted row ranges [start, stop) of it that are no results any more.

    `elided`: messages that end their `raw` are left out of it."""

    path: Path
    dropped: tuple[tuple[int, int], ...] = ()
    elided: bool = False


class Engine:
    """One in-memory database. One question at a time; only `cancel` may come from another thread.

    `folders`: where files may be read. `cache`: where temporary files may lie; without it a question that
    needs more than MEMORY fails. `limit_s`: seconds for one question, None for no limit."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        cache: Path | None = None,
        limit_s: float | None = LIMIT_S,
        memory: str = MEMORY,
    ) -> None:
        self.limit_s = limit_s
        self.memory = memory
        self._place = folders[0] if folders else "no folder"
        self._files: dict[str, list[RowFile]] = {}  # of the views, for the name of a damaged one
        self._tables: set[str] = set()
        self._cancelled = False
        self._alarm: threading.Event | None = None  # of the question that runs
        self._spill = None if cache is None else _spill_folder(cache)
        self._connection = duckdb.connect(
            config={
                "memory_limit": memory,
                "threads": THREADS,
                "temp_directory": "" if self._spill is None else str(self._spill),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        # A session's own, and not for configuration: on a terminal it would stand among the answers.
        self._connection.execute("SET enable_progress_bar = false")
        for name, value in (
            ("max_temp_directory_size", SPILL),
            ("TimeZone", "UTC"),
            ("parquet_metadata_cache", True),  # files of parts never change
            ("late_materialization_max_rows", KEYS_FIRST),
            ("allowed_directories", [f"{folder.absolute()}/" for folder in folders]),
            ("enable_external_access", False),
            ("lock_configuration", True),
        ):
            self._connection.execute(f"SET GLOBAL {name} = $value", {"value": value})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees its memory and removes its temporary files."""
        self._connection.close()
        if self._spill is not None:
            shutil.rmtree(self._spill, ignore_errors=True)

    def cancel(self) -> None:
        """Ends the question that runs, if any: it raises AnswerCancelled. From any thread."""
        alarm = self._alarm
        if alarm is not None:
            self._cancelled = True
            alarm.set()

    @contextmanager
    def question(self) -> Iterator[None]:
        """Around the statements of one question. Raises AnswerCancelled when it was cancelled or takes longer
        than the limit, BadInput when it needs more memory than there is, and BadPayload that names a damaged
        file."""
        if self._alarm is not None:  # a question that is part of another one
            yield
            return
        self._cancelled = False
        self._alarm, over = threading.Event(), threading.Event()
        watch = start_thread("answer-limit", self._watch, self._alarm, over)
        try:
            yield
        except duckdb.InterruptException as exc:
            raise AnswerCancelled(
                "the question was cancelled"
                if self._cancelled
                else f"the answer takes longer than {self.limit_s:g} s; ask for a shorter span, or for fewer "
                "workloads"
            ) from exc
        except duckdb.OutOfMemoryException as exc:
            raise BadInput(
                f"the answer needs more than {self.memory} of memory and {SPILL} of temporary files; ask for a "
                "shorter span, or for fewer lines"
            ) from exc
        except duckdb.Error as exc:
            raise self._damage(exc) from exc
        finally:
            over.set()
            self._alarm.set()
            watch.join()
            self._alarm = None
            self._files.clear()
            while self._tables:
                self._connection.execute(f"DROP TABLE IF EXISTS {self._tables.pop()}")

    def view(
        self,
        name: str,
        files: Sequence[RowFile],
        schema: Mapping[str, Any],
        *,
        numbered: bool = False,
        searched: bool = False,
    ) -> None:
        """Gives the rows of these files a name, in the columns of `schema`; without files it has no rows.

        `numbered` adds the columns `file` and `row`, which name a row. `searched` adds those of SEARCHED: the
        message where it is kept, and where it begins in the raw text if it is the end of that."""
        self._files[name] = list(files)
        sources: list[tuple[str, str, str]] = []  # the columns, the number of the file, and its rows
        count = 0
        for elided in (False, True):
            columns = ", ".join(_column(column, elided=elided) for column in schema)
            if searched:
                columns += (
                    f', "message" AS {KEPT}, {MESSAGE_AT if elided else "NULL::UINTEGER"} AS {MESSAGE_AT}'
                )
            some = [file for file in files if file.elided is elided]
            intact = [_text(file.path) for file in some if not file.dropped]
            if intact:
                rows = (
                    f"read_parquet([{', '.join(intact)}], hive_partitioning = false, file_row_number = true)"
                )
                sources.append((columns, f"(file_index + {count})::BIGINT", rows))
                count += len(intact)
            for file in some:
                if file.dropped:
                    sources.append((columns, f"{count}", _less_dropped(file)))
                    count += 1
        if not sources:
            columns = ", ".join(
                f'NULL::{_TYPES[_kind(kind)]} AS "{column}"' for column, kind in schema.items()
            )
            columns += f", NULL::VARCHAR AS {KEPT}, NULL::UINTEGER AS {MESSAGE_AT}" if searched else ""
            sources = [(columns, "0", "(SELECT 0 AS file_row_number) WHERE false")]
        place = ", {} AS file, file_row_number AS row" if numbered else ""
        every = " UNION ALL ".join(
            f"SELECT {columns}{place.format(number)} FROM {rows}" for columns, number, rows in sources
        )
        self.run(f"CREATE OR REPLACE TEMP VIEW {name} AS {every}")

    def run(self, statement: str, parameters: Mapping[str, object] | None = None) -> None:
        """Runs a statement, and nothing once the question was cancelled."""
        if self._alarm is not None and self._alarm.is_set():
            raise duckdb.InterruptException
        self._connection.execute(statement, parameters)

    def table(self, name: str, question: str, parameters: Mapping[str, object] | None = None) -> None:
        """Gives the answer of a SELECT a name until the question ends; it counts to MEMORY."""
        self._tables.add(name)
        self.run(f"CREATE OR REPLACE TEMP TABLE {name} AS {question}", parameters)

    def rows(
        self, question: str, parameters: Mapping[str, object] | None = None, *, schema: Mapping[str, Any]
    ) -> pl.DataFrame:
        """The answer of a SELECT, in the types of `schema`."""
        # A result with parameters reaches Polars by way of Python objects; a table does not.
        self.table("answer", question, parameters)
        try:
            frame = pl.DataFrame(self._connection.table("answer"))
        except pl.exceptions.ComputeError as exc:  # how Polars says that its source was interrupted
            if self._alarm is not None and self._alarm.is_set():
                raise duckdb.InterruptException(str(exc)) from exc
            raise
        return frame.cast({name: schema[name] for name in frame.columns})

    def _watch(self, alarm: threading.Event, over: threading.Event) -> None:
        alarm.wait(self.limit_s)
        alarm.set()
        while not over.wait(_AGAIN_S):
            self._connection.interrupt()

    def _damage(self, exc: duckdb.Error) -> BadPayload | SinkUnavailable:
        every = [file.path for files in self._files.values() for file in files]
        place = damaged_file(every)
        first, *_ = str(exc).splitlines()
        denied = os.strerror(errno.EACCES)
        if denied in first:  # whole, so nobody may be told to remove it
            return SinkUnavailable(
                f"results cannot be read from {place or self._place} ({denied}); give the right to read them"
            )
        if place is None:
            return SinkUnavailable(
                f"the question about {self._place} cannot be answered now ({first}); ask again, and look at the "
                "space on the disks of the results and of temporary files if it stays so"
            )
        return BadPayload(
            f"results cannot be read from {place} ({first}); remove the damaged file and run again"
        )


def one_of(column: str, values: Sequence[object], parameters: dict[str, object]) -> str:
    """The condition that a column has one of these values, each a parameter: so row groups are left out."""
    names = [f"{column}_{number}" for number in range(len(values))]
    parameters.update(zip(names, values, strict=True))
    return f'"{column}" IN ({", ".join(f"${name}" for name in names)})' if names else "false"


def cut_message(kept: str) -> str:
    """A message from this column, or from the end of its raw text."""
    return f'coalesce("{kept}", substr("raw", {MESSAGE_AT} + 1))'


def _column(name: str, *, elided: bool) -> str:
    if elided and name == "message":
        return f'{cut_message("message")} AS "message"'
    return f'"{name}"'


def _less_dropped(file: RowFile) -> str:
    ranges = ", ".join(f"({start}, {stop})" for start, stop in file.dropped)
    return (
        f"read_parquet({_text(file.path)}, hive_partitioning = false, file_row_number = true) "
        "WHERE file_row_number NOT IN "
        f"(SELECT unnest(range(start, stop)) FROM (VALUES {ranges}) AS dropped(start, stop))"
    )


def _text(path: Path) -> str:
    quoted = str(path.absolute()).replace("'", "''")
    return f"'{quoted}'"


def _kind(kind: Any) -> Any:
    return kind if isinstance(kind, type) else type(kind)


def _spill_folder(cache: Path) -> Path:
    """A name of this engine alone: two processes in one folder would take each other's files. DuckDB makes it
    when it needs it."""
    for old in cache.glob("answers-*"):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - STALE_S:
                shutil.rmtree(old, ignore_errors=True)
    return cache.absolute() / f"answers-{os.getpid()}-{uuid.uuid4().hex[:8]}"
