"""Rollups: counts of stored lines by hour, workload and template, so that sums over months are quick.

Compaction writes the rollup of a sealed part beside it, from the same rows. Lines of other parts, and of
parts that lie only partly in a span, are counted when they are asked for. A line therefore counts once.
"""

import io
import uuid
from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import UTC_US, of_lines
from pipeline.sinks.manifest import PREFIX, Part
from pipeline.sinks.parquet import ParquetSink
from pipeline.units import epoch_us

SAMPLE_CHARS: Final = 160
RATES_SCHEMA: Final[dict[str, Any]] = {
    "hour": UTC_US,
    "workload": pl.String,
    "template_id": pl.Int64,
    "records": pl.Int64,
    "anomalous": pl.Int64,
    "severe": pl.Int64,  # at an error-like level
    "score": pl.Float64,  # the greatest
    "first": UTC_US,
    "last": UTC_US,
    "sample": pl.String,  # the message of a record, cut at SAMPLE_CHARS
}


def rollup(lines: pl.LazyFrame) -> pl.LazyFrame:
    """RATES_SCHEMA of records in RESULT_SCHEMA; findings of the watcher are no lines."""
    return (
        lines.filter(of_lines())
        .group_by(
            pl.col("timestamp").dt.truncate("1h").alias("hour"),
            pl.col("workload"),
            pl.col("template_id").fill_null(0),
        )
        .agg(
            pl.len().cast(pl.Int64).alias("records"),
            pl.col("anomalous").fill_null(value=False).cast(pl.Int64).sum(),
            pl.col("level")
            .is_in(list(ERROR_LEVELS))
            .fill_null(value=False)
            .cast(pl.Int64)
            .sum()
            .alias("severe"),
            pl.col("score").max(),
            pl.col("timestamp").min().alias("first"),
            pl.col("timestamp").max().alias("last"),
            pl.col("message").first().str.head(SAMPLE_CHARS).alias("sample"),
        )
        .select(list(RATES_SCHEMA))
    )


def put_rollup(sink: ParquetSink, lines: pl.DataFrame, day: str) -> str:
    """Writes the rollup of a part that is about to be sealed; the key of its object.

    Raises StoreUnavailable."""
    out = io.BytesIO()
    rates = rollup(lines.lazy()).sort("workload", "template_id", "hour").collect()
    rates.write_parquet(out, compression="zstd", compression_level=3)
    name = f"{PREFIX}rates_1h/date={day}/{uuid.uuid4().hex}.parquet"
    sink.objects.put(name, out.getvalue())
    return name


def rates(
    sink: ParquetSink, *, since: datetime, until: datetime, workloads: Collection[str] | None = None
) -> pl.LazyFrame:
    """RATES_SCHEMA of the span [since, until); several rows may be of one hour, workload and template.

    Raises SinkUnavailable."""
    first, stop = epoch_us(since), epoch_us(until)
    counted: list[Part] = []
    others: list[Part] = []
    for part in sink.parts(since=since, until=until, workloads=workloads):
        whole = part.rates and first <= part.first_us and part.last_us < stop
        (counted if whole else others).append(part)
    span = (pl.col("timestamp") >= since) & (pl.col("timestamp") < until)
    frames = [rollup(sink.lazy(others).filter(span))]
    if counted:
        files = [sink.rollup_file(part) for part in counted]
        frames.append(
            pl.scan_parquet(
                files, schema=RATES_SCHEMA, extra_columns="ignore", hive_partitioning=False, glob=False
            )
        )
    found = pl.concat(frames)
    return found if workloads is None else found.filter(pl.col("workload").is_in(list(workloads)))


def pattern_sums(found: pl.LazyFrame, since: datetime, until: datetime, buckets: int) -> pl.DataFrame:
    """One row for each workload and template of `rates`: its sums, and `trend`, records in equal spans.

    Records count where their hour begins, so spans shorter than an hour show steps. Most records first."""
    key = ["workload", "template_id"]
    width = max(1, (epoch_us(until) - epoch_us(since)) // buckets)
    bucket = ((pl.col("hour").dt.epoch("us") - epoch_us(since)) // width).clip(0, buckets - 1).cast(pl.Int64)
    rows = found.with_columns(bucket.alias("bucket")).collect()
    sums = rows.group_by(key).agg(
        pl.col("records", "anomalous", "severe").sum(),
        pl.col("score").max(),
        pl.col("first").min(),
        pl.col("last").max(),
        pl.col("sample").first(),
    )
    spread = rows.group_by(*key, "bucket").agg(pl.col("records").sum())
    grid = (
        sums.select(key)
        .join(
            pl.DataFrame({"bucket": list(range(buckets))}),
            how="cross",
        )
        .join(spread, on=[*key, "bucket"], how="left")
        .sort("bucket")
        .group_by(key)
        .agg(pl.col("records").fill_null(0).alias("trend"))
    )
    return sums.join(grid, on=key).sort("records", *key, descending=[True, False, False])
