"""Stored results: reading them lazily, and the numbers of a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.schema import RESULT_SCHEMA, of_lines

TIMELINE_BUCKETS: Final = 240  # bars that can still be told apart on a 1,600 px page

LATER: Final = frozenset({"p_value"})  # columns that files of older builds lack

# Widths a reader can name: seconds, minutes, hours, days.
_BUCKET_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


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
    """The records of these files, RESULT_SCHEMA: files of older builds lack columns, which are null then."""
    # Names may hold * and =, so they are taken as they are.
    return pl.scan_parquet(
        list(files),
        schema=RESULT_SCHEMA,
        missing_columns="insert",
        extra_columns="ignore",  # of a newer build
        hive_partitioning=False,
        glob=False,
    )


def complete(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of an older build as RESULT_SCHEMA."""
    lacking = [pl.lit(None, dtype=RESULT_SCHEMA[n]).alias(n) for n in LATER if n not in frame.columns]
    return frame.with_columns(lacking).select(list(RESULT_SCHEMA)) if lacking else frame


def summary(results: Path, *, buckets: int = TIMELINE_BUCKETS) -> dict[str, Any]:
    """The numbers of a results folder, ready for JSON; times are ISO 8601 in UTC, null when empty.

    Of lines alone: what watching found in sessions and rates is counted in no number. Keys: records, lines, anomalous, anomalous_lines, warming, first, last, model_versions, by_workload,
    by_level, timeline. A row of `by_*` has its name and the same five counts, most lines first.
    `timeline` is `{"bucket_s": width, "buckets": [[start, lines, anomalous lines], ...]}` without holes.
    Raises BadPayload when a file is damaged.
    """
    with readable(results):
        return _summary(scan(results).filter(of_lines()), buckets)


def files_of(results: Path) -> list[Path]:
    """Names that start with a dot are still being written; a workload may be called x.parquet, and is a folder."""
    return sorted(p for p in results.rglob("*.parquet") if not p.name.startswith(".") and p.is_file())


def _intact(file: Path) -> bool:
    try:
        return set(RESULT_SCHEMA) - LATER <= set(pl.read_parquet_schema(file))
    except (pl.exceptions.PolarsError, OSError):
        return False


def _summary(records: pl.LazyFrame, buckets: int) -> dict[str, Any]:
    counts = (
        pl.len().cast(pl.Int64).alias("records"),
        pl.col("lines").cast(pl.Int64).sum(),
        pl.col("anomalous").fill_null(value=False).cast(pl.Int64).sum(),
        pl.col("lines").cast(pl.Int64).filter(pl.col("anomalous")).sum().alias("anomalous_lines"),
        pl.col("score").is_null().cast(pl.Int64).sum().alias("warming"),
    )
    grouped = (
        records.group_by("workload", "level", "model_version")
        .agg(*counts, pl.col("timestamp").min().alias("first"), pl.col("timestamp").max().alias("last"))
        .collect(engine="streaming")
    )
    names = ["records", "lines", "anomalous", "anomalous_lines", "warming"]
    first, last = grouped["first"].min(), grouped["last"].max()
    total = grouped.select(pl.col(names).sum()).row(0, named=True)
    return {
        **total,
        "first": _iso(first),
        "last": _iso(last),
        "model_versions": grouped["model_version"].drop_nulls().unique().sort().to_list(),
        "by_workload": _by(grouped, "workload", names),
        "by_level": _by(grouped, "level", names),
        "timeline": _timeline(records, first, last, buckets),
    }


def _by(grouped: pl.DataFrame, key: str, names: list[str]) -> list[dict[str, Any]]:
    rows = grouped.group_by(key).agg(pl.col(names).sum())
    return list(rows.sort("lines", key, descending=[True, False], nulls_last=True).iter_rows(named=True))


def _timeline(records: pl.LazyFrame, first: Any, last: Any, buckets: int) -> dict[str, Any]:
    if first is None or last is None:
        return {"bucket_s": 0, "buckets": []}
    begin, end = int(first.timestamp()), int(last.timestamp())
    width = _bucket_width(begin, end, buckets)
    start = (pl.col("timestamp").dt.epoch("s") // width * width).alias("start")
    lines = pl.col("lines").cast(pl.Int64)
    rows = (
        records.group_by(start)
        .agg(lines.sum(), lines.filter(pl.col("anomalous")).sum().alias("anomalous"))
        .collect(engine="streaming")
    )
    counted = {at: (n, flagged) for at, n, flagged in rows.drop_nulls("start").iter_rows()}
    return {
        "bucket_s": width,
        "buckets": [
            [_iso(datetime.fromtimestamp(at, UTC)), *counted.get(at, (0, 0))]
            for at in range(begin // width * width, end + 1, width)
        ],
    }


def _bucket_width(begin: int, end: int, buckets: int) -> int:
    """The smallest width, aligned to its own multiples, that needs no more than `buckets` bars."""
    for width in _BUCKET_S:
        if end // width - begin // width + 1 <= buckets:
            return width
    days = 1
    while end // (days * 86_400) - begin // (days * 86_400) + 1 > buckets:
        days += 1
    return days * 86_400


def _iso(moment: Any) -> str | None:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment is not None else None
