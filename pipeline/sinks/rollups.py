"""Tables beside the lines, so that questions over months are quick and outlive the lines.

Compaction writes them beside a sealed part, from the same rows: its findings, and counts by workload and
template in five minutes and in an hour. Lines of other parts, and of parts that lie only partly in a span,
are counted when they are asked for. A line therefore counts once.
"""

import io
import uuid
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import RESULT_SCHEMA, UTC_US, of_lines
from pipeline.sinks.manifest import PREFIX, ResultTable, TableFile
from pipeline.sinks.parquet import ParquetSink
from pipeline.units import epoch_us

SAMPLE_CHARS: Final = 160
# Trends of longer spans are read from counts by the hour.
FINE_SPAN: Final = timedelta(days=2)
RATES_SCHEMA: Final[dict[str, Any]] = {
    "bucket": UTC_US,  # begin of its hour or five minutes
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
_KEY: Final = ("bucket", "workload", "template_id")
_FINE: Final = (*_KEY, "records", "anomalous", "severe", "score")  # the columns by five minutes
_SUMS: Final = (
    pl.col("records", "anomalous", "severe").sum(),
    pl.col("score").max(),
    pl.col("first").min(),
    pl.col("last").max(),
    pl.col("sample").first(),
)
_WIDTHS: Final = {ResultTable.RATES_5M: "5m", ResultTable.RATES_1H: "1h"}


def rollup(lines: pl.LazyFrame, every: str = "1h") -> pl.LazyFrame:
    """RATES_SCHEMA of records in RESULT_SCHEMA; findings of the watcher are no lines."""
    return (
        lines.filter(of_lines())
        .group_by(
            pl.col("timestamp").dt.truncate(every).alias("bucket"),
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


def put_tables(sink: ParquetSink, lines: pl.DataFrame, day: str) -> dict[ResultTable, TableFile]:
    """Writes the tables of a part that is about to be sealed; a part without findings has no such file.

    Raises StoreUnavailable."""
    fine = rollup(lines.lazy(), "5m").collect()
    hours = (
        fine.lazy()
        .with_columns(pl.col("bucket").dt.truncate("1h"))
        .group_by(_KEY)
        .agg(_SUMS)
        .select(list(RATES_SCHEMA))
        .collect()
    )
    order = ("workload", "template_id", "bucket")
    found = {
        ResultTable.RATES_5M: fine.select(_FINE).sort(order),
        ResultTable.RATES_1H: hours.sort(order),
        ResultTable.FINDINGS: lines.filter(pl.col("anomalous")).select(list(RESULT_SCHEMA)),
    }
    return {
        table: _put(sink, table, frame, day)
        for table, frame in found.items()
        if table is not ResultTable.FINDINGS or not frame.is_empty()
    }


def _put(sink: ParquetSink, table: ResultTable, frame: pl.DataFrame, day: str) -> TableFile:
    out = io.BytesIO()
    frame.write_parquet(out, compression="zstd", compression_level=3)
    key = f"{PREFIX}{table}/date={day}/{uuid.uuid4().hex}.parquet"
    sink.objects.put(key, out.getvalue())
    return TableFile(key, out.tell())


def rates(
    sink: ParquetSink,
    *,
    since: datetime,
    until: datetime,
    workloads: Collection[str] | None = None,
    table: ResultTable = ResultTable.RATES_1H,
) -> pl.LazyFrame:
    """RATES_SCHEMA of the span [since, until), of RATES_5M less `first`, `last` and `sample`.

    Several rows may be of one bucket, workload and template. Where lines have expired that are partly in the
    span, those count whose bucket begins in it. Raises SinkUnavailable."""
    first, stop = epoch_us(since), epoch_us(until)
    schema = RATES_SCHEMA if table is ResultTable.RATES_1H else {name: RATES_SCHEMA[name] for name in _FINE}
    counted: list[TableFile] = []  # of parts that are in the span as a whole
    partly: list[TableFile] = []
    others = []
    for part in sink.parts(since=since, until=until, workloads=workloads, table=table):
        if table in part.tables and first <= part.first_us and part.last_us < stop:
            counted.append(part.tables[table])
        elif part.live:
            others.append(part)
        elif table in part.tables:
            partly.append(part.tables[table])
    span = (pl.col("timestamp") >= since) & (pl.col("timestamp") < until)
    frames = [rollup(sink.lazy(others).filter(span), _WIDTHS[table]).select(list(schema))]
    if counted:
        frames.append(sink.lazy_table(counted, schema))
    if partly:
        begins = (pl.col("bucket") >= since) & (pl.col("bucket") < until)
        frames.append(sink.lazy_table(partly, schema).filter(begins))
    found = pl.concat(frames)
    return found if workloads is None else found.filter(pl.col("workload").is_in(list(workloads)))


def pattern_sums(
    sink: ParquetSink,
    since: datetime,
    until: datetime,
    *,
    workloads: Collection[str] | None = None,
    buckets: int,
) -> pl.DataFrame:
    """One row for each workload and template: its sums, and `trend`, records in equal spans.

    Trends of up to FINE_SPAN come from counts by five minutes. Most records first. Raises SinkUnavailable."""
    key = ["workload", "template_id"]
    found = rates(sink, since=since, until=until, workloads=workloads).collect()
    sums, fine = _sums(found), found
    if until - since <= FINE_SPAN:
        table = ResultTable.RATES_5M
        fine = rates(sink, since=since, until=until, workloads=workloads, table=table).collect()
    trend = _trend(fine.lazy(), since, until, buckets).collect()
    return sums.join(trend, on=key, how="left").sort("records", *key, descending=[True, False, False])


def _sums(found: pl.DataFrame) -> pl.DataFrame:
    """One row for each workload and template of `rates`."""
    return found.group_by("workload", "template_id").agg(_SUMS)


def _trend(found: pl.LazyFrame, since: datetime, until: datetime, buckets: int) -> pl.LazyFrame:
    """Records of each workload and template in equal spans, a list in `trend`."""
    key = ["workload", "template_id"]
    width = max(1, (epoch_us(until) - epoch_us(since)) // buckets)
    bucket = ((pl.col("bucket").dt.epoch("us") - epoch_us(since)) // width).clip(0, buckets - 1)
    spread = found.group_by(*key, bucket.cast(pl.Int64).alias("at")).agg(pl.col("records").sum())
    grid = spread.select(key).unique().join(pl.LazyFrame({"at": list(range(buckets))}), how="cross")
    return (
        grid.join(spread, on=[*key, "at"], how="left")
        .sort("at")
        .group_by(key)
        .agg(pl.col("records").fill_null(0).alias("trend"))
    )


def compared(
    sink: ParquetSink,
    span: tuple[datetime, datetime],
    against: tuple[datetime, datetime],
    *,
    workloads: Collection[str] | None = None,
    buckets: int,
) -> pl.DataFrame:
    """`pattern_sums` of a span, with `before`: the records in another one, 0 for a pattern that is new.

    Patterns that are in the other span alone stand at the end, with 0 records. Raises SinkUnavailable."""
    key = ["workload", "template_id"]
    now = pattern_sums(sink, *span, workloads=workloads, buckets=buckets)
    other = rates(sink, since=against[0], until=against[1], workloads=workloads).collect()
    then = _sums(other).rename({"records": "before"}).sort("before", *key, descending=[True, False, False])
    absent = then.join(now, on=key, how="anti").with_columns(
        pl.lit(0, pl.Int64).alias("records"),
        pl.lit(0, pl.Int64).alias("anomalous"),
        pl.lit(0, pl.Int64).alias("severe"),
        pl.lit([0] * buckets, pl.List(pl.Int64)).alias("trend"),
    )
    with_before = now.join(then.select(*key, "before"), on=key, how="left")
    columns = with_before.columns
    return pl.concat([with_before, absent.select(columns)]).with_columns(pl.col("before").fill_null(0))
