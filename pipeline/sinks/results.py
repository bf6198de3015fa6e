"""Stored results in a folder: reading them lazily, and naming a damaged file.

A folder without a manifest is no store. It holds Parquet files that somebody took out of one, and all of them
are read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import polars as pl

from pipeline.errors import BadPayload, SinkUnavailable
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.manifest import PREFIX
from pipeline.sinks.parquet import DAMAGED, ParquetSink
from pipeline.sinks.part_files import MESSAGE_AT, lazily_lines


@contextmanager
def readable(results: Path | ParquetSink) -> Iterator[None]:
    """Around every reading of `scan(results)`: raises BadPayload that names the damaged file, and
    SinkUnavailable where all files are intact."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as exc:
        place = damaged_file(result_files(results))
        if place is not None and isinstance(exc, pl.exceptions.PolarsError):
            raise BadPayload(
                f"results cannot be read from {place} ({exc}); remove the damaged file and run again"
            ) from exc
        where = results if isinstance(results, Path) else results.objects.url
        raise SinkUnavailable(
            f"results cannot be read from {where} now ({exc}); give the right to read them, look at their disk, "
            "and run again"
        ) from exc


def damaged_file(files: Iterable[Path]) -> Path | None:
    """The first file whose footer cannot be read or lacks columns; None where all can be read."""
    return next((file for file in files if not _intact(file)), None)


def scan(results: Path) -> pl.LazyFrame:
    """All records, RESULT_SCHEMA; a folder that is absent or empty has none."""
    if is_store(results):
        return ParquetSink(results).scan()
    groups = groupby(result_files(results), is_elided)
    frames = [lazily_lines(list(files), elided=elided) for elided, files in groups]
    return pl.concat(frames) if frames else pl.LazyFrame(schema=RESULT_SCHEMA)


def is_store(folder: Path) -> bool:
    return (folder / PREFIX).exists()


def result_files(results: Path | ParquetSink) -> Iterator[Path]:
    """The files that are read. A name with a leading dot is unfinished; a folder may be called x.parquet."""
    if isinstance(results, Path) and not is_store(results):
        yield from sorted(p for p in results.rglob("*.parquet") if not p.name.startswith(".") and p.is_file())
        return
    sink = ParquetSink(results) if isinstance(results, Path) else results
    yield from (file for part in sink.parts() if (file := sink.files.file(part)).exists())


def is_elided(file: Path) -> bool:
    """True for a file in which messages may be left out, as in sealed parts."""
    try:
        return MESSAGE_AT in pl.read_parquet_schema(file)
    except (*DAMAGED, OSError):  # its reading names it
        return False


def _intact(file: Path) -> bool:
    try:
        return set(RESULT_SCHEMA) <= set(pl.read_parquet_schema(file))
    except (*DAMAGED, OSError):
        return False
