"""The numbers of a run."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.records.schema import is_timed, of_lines
from pipeline.sinks.results import readable, scan

TIMELINE_BUCKETS: Final = 240  # bars that can still be told apart on a 1,600 px page
# Widths a reader can name: seconds, minutes, hours, days.
_BUCKET_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def run_summary(results: Path, *, buckets: int = TIMELINE_BUCKETS) -> dict[str, Any]:
    """The numbers of a results folder, ready for JSON; times are ISO 8601 in UTC, null when empty.

    Counts lines alone, without findings in sessions and rates. Keys: records, lines, anomalous,
    anomalous_lines, not_judged, not_judged_lines, untimed, untimed_lines, first, last, model_versions,
    by_workload, by_level, timeline. A row of `by_*` has its name and the same eight counts, most lines
    first. `timeline` is `{"bucket_s": width, "buckets": [[start, lines, anomalous lines], ...]}` without
    holes. `first`, `last` and `timeline` leave out records without a time (`untimed`). Raises BadPayload
    when a file is damaged."""
    with readable(results):
        return _summary(scan(results).filter(of_lines()), buckets)


def _summary(records: pl.LazyFrame, buckets: int) -> dict[str, Any]:
    counts = (
        pl.len().cast(pl.Int64).alias("records"),
        pl.col("lines").cast(pl.Int64).sum(),
        pl.col("anomalous").fill_null(value=False).cast(pl.Int64).sum(),
        pl.col("lines").cast(pl.Int64).filter(pl.col("anomalous")).sum().alias("anomalous_lines"),
        pl.col("score").is_null().cast(pl.Int64).sum().alias("not_judged"),
        pl.col("lines").cast(pl.Int64).filter(pl.col("score").is_null()).sum().alias("not_judged_lines"),
        (~is_timed()).cast(pl.Int64).sum().alias("untimed"),
        pl.col("lines").cast(pl.Int64).filter(~is_timed()).sum().alias("untimed_lines"),
    )
    stamped = pl.col("timestamp").filter(is_timed())
    grouped = (
        records.group_by("workload", "level", "model_version")
        .agg(*counts, stamped.min().alias("first"), stamped.max().alias("last"))
        .collect(engine="streaming")
    )
    names = ["records", "lines", "anomalous", "anomalous_lines"]
    names += ["not_judged", "not_judged_lines", "untimed", "untimed_lines"]
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
        records.filter(is_timed())
        .group_by(start)
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
