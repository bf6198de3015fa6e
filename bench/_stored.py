"""What a stack has stored, for benches that look at single batches."""

import shutil
from collections.abc import Iterator
from typing import NamedTuple

import polars as pl

from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.manifest import spans


class StoredBatch(NamedTuple):
    """A batch with the time of its commit, in seconds since 1970."""

    batch_id: str
    written_s: float
    rows: pl.DataFrame


def stored_batches(settings: Settings) -> Iterator[StoredBatch]:
    """The batches of all parts that are not sealed; compaction seals after ten minutes at the earliest."""
    sink = parquet_of(settings)
    for part in sink.parts():
        batches = sink.batches(part)
        where = spans((one.batch_id, one.rows) for one in batches)
        for one in batches:
            rows = sink.files.read(part, where[one.batch_id])
            if not rows.is_empty():
                yield StoredBatch(one.batch_id, one.written_ms / 1000, rows)


def clear(settings: Settings) -> None:
    """Removes all results of a stack that rests."""
    shutil.rmtree(settings.data.results, ignore_errors=True)
