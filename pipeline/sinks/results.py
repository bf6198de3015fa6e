"""Stored results: reading them lazily, and naming a damaged file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.parquet import DAMAGED, ParquetSink


@contextmanager
def readable(results: Path | ParquetSink) -> Iterator[None]:
    """Around every reading of `scan(results)`: raises BadPayload that names the damaged file."""
    try:
        yield
    except pl.exceptions.PolarsError as exc:
        sink = ParquetSink(results) if isinstance(results, Path) else results
        files = (sink.files.file(part) for part in sink.parts())
        place = next((file for file in files if file.exists() and not _intact(file)), sink.objects.url)
        raise BadPayload(
            f"results cannot be read from {place} ({exc}); remove the damaged file and run again"
        ) from exc


def scan(results: Path) -> pl.LazyFrame:
    """All records, RESULT_SCHEMA; a folder that is absent or empty has none."""
    return ParquetSink(results).scan()


def _intact(file: Path) -> bool:
    try:
        return set(RESULT_SCHEMA) <= set(pl.read_parquet_schema(file))
    except (*DAMAGED, OSError):
        return False
