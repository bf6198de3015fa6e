"""Tables beside the lines, so that questions over months are quick and outlive the lines.

Compaction writes them with a sealed part, from the same rows. Its findings are the anomalous lines.
Counts are by workload and template, in five minutes and in an hour. Lines of other parts, and of parts that
lie only partly in a span, are counted when they are asked for (sinks/answers/patterns.py). A line therefore
counts once.
"""

import uuid
from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.pattern_query import SAMPLE_CHARS
from pipeline.records.schema import RESULT_SCHEMA, UTC_US, of_lines
from pipeline.sinks.manifest import PREFIX, ResultTable, TableFile
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.part_files import put_table

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
# The columns by five minutes.
FINE_SCHEMA: Final[dict[str, Any]] = {
    name: RATES_SCHEMA[name] for name in (*_KEY, "records", "anomalous", "severe", "score", "first", "last")
}
_SUMS: Final = (
    pl.col("records", "anomalous", "severe").sum(),
    pl.col("score").max(),
    pl.col("first").min(),
    pl.col("last").max(),
    pl.col("sample").first(),
)


def _counted(lines: pl.LazyFrame) -> pl.LazyFrame:
    """RATES_SCHEMA of records in RESULT_SCHEMA, by five minutes; findings of the watcher are no lines."""
    return (
        lines.filter(of_lines())
        .group_by(
            pl.col("timestamp").dt.truncate("5m").alias("bucket"),
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
    fine = _counted(lines.lazy()).collect()
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
        ResultTable.RATES_5M: fine.select(list(FINE_SCHEMA)).sort(order),
        ResultTable.RATES_1H: hours.sort(order),
        ResultTable.FINDINGS: lines.filter("anomalous").select(list(RESULT_SCHEMA)),
    }
    return {
        table: _put(sink, table, frame, day)
        for table, frame in found.items()
        if table is not ResultTable.FINDINGS or not frame.is_empty()
    }


def _put(sink: ParquetSink, table: ResultTable, frame: pl.DataFrame, day: str) -> TableFile:
    key = f"{PREFIX}{table}/date={day}/{uuid.uuid4().hex}.parquet"
    return TableFile(key, put_table(sink.objects, key, frame))
