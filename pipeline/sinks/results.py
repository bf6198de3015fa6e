"""Stored results: reading them lazily, and the numbers of a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.schema import RESULT_SCHEMA


@contextmanager
def readable(results: Path) -> Iterator[None]:
    """Around every reading of `scan(results)`: raises BadPayload that names the damaged file."""
    try:
        yield
    except pl.exceptions.PolarsError as exc:
        place = next((file for file in files_of(results) if not _intact(file)), results)
        raise BadPayload(
            f"results cannot be read from {place} ({exc}); remove the damaged file and run again"
        ) from exc


def scan(results: Path) -> pl.LazyFrame:
    """All records, RESULT_SCHEMA; a folder that is absent or empty has none."""
    files = files_of(results)
    if not files:
        return pl.LazyFrame(schema=RESULT_SCHEMA)
    return lazily(files)


def lazily(files: Sequence[Path]) -> pl.LazyFrame:
    """The records of these files, RESULT_SCHEMA."""
    # Names may hold * and =, so they are taken as they are.
    return pl.scan_parquet(
        list(files),
        schema=RESULT_SCHEMA,
        extra_columns="ignore",  # of a newer build
        hive_partitioning=False,
        glob=False,
    )


def files_of(results: Path) -> list[Path]:
    """Finished files. A name with a leading dot is unfinished; a folder may be called x.parquet."""
    return sorted(p for p in results.rglob("*.parquet") if not p.name.startswith(".") and p.is_file())


def _intact(file: Path) -> bool:
    try:
        return set(RESULT_SCHEMA) <= set(pl.read_parquet_schema(file))
    except (pl.exceptions.PolarsError, OSError):
        return False
