"""Pushed lines and records to the columns of RAW_SCHEMA, framed as in a file."""

import polars as pl

from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.records.schema import UTC_US, with_missing_columns
from pipeline.sources.framing import Framer


def framed(
    records: pl.DataFrame | Pushed, formats: tuple[str, ...] = ()
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """The records of a batch and the formats of their headers; `formats` belong to a batch framed before."""
    if isinstance(records, PushedLines):
        framer = Framer()
        frame = pl.concat([framer.feed(records.text.split("\n")), framer.flush()])
        return frame, framer.formats
    if isinstance(records, PushedRecords):
        return _columns(records), ()
    return records, formats


def _columns(records: PushedRecords) -> pl.DataFrame:
    message = pl.Series("message", records.messages, dtype=pl.String)
    texts = zip(
        ("level", "host", "process", "service"),
        (records.levels, records.hosts, records.processes, records.services),
        strict=True,
    )
    n = records.height
    columns = [
        message.alias("raw"),
        pl.int_range(1, n + 1, dtype=pl.UInt64, eager=True).alias("line"),
        (message.str.count_matches("\n", literal=True) + 1).cast(pl.UInt32).alias("lines"),
        pl.Series("timestamp", records.timestamps or [None] * n, dtype=pl.Int64).cast(UTC_US),
        pl.Series("timed", [None], dtype=pl.Boolean).new_from_index(0, n),
        *(pl.Series(name, values or [None] * n, dtype=pl.String) for name, values in texts),
        message,
    ]
    return with_missing_columns(pl.DataFrame(columns))
