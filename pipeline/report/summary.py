"""The numbers of a run."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.sinks.answers.folder import engine_over, files_in
from pipeline.sinks.answers.overview import COUNT_NAMES, counts_of, timeline_of

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
    files = files_in(results)
    with engine_over(results) as engine:
        counts = counts_of(engine, files)
        first, last = counts["first"].min(), counts["last"].max()
        if not isinstance(first, datetime) or not isinstance(last, datetime):
            return _summary(counts, None, None, {"bucket_s": 0, "buckets": []})
        begin, end = int(first.timestamp()), int(last.timestamp())
        width = _bucket_width(begin, end, buckets)
        timeline = timeline_of(engine, files, width)
    return _summary(counts, first, last, _timeline(timeline, begin, end, width))


def _summary(
    counts: pl.DataFrame, first: datetime | None, last: datetime | None, timeline: dict[str, Any]
) -> dict[str, Any]:
    names = list(COUNT_NAMES)
    return {
        **counts.select(pl.col(names).sum()).row(0, named=True),
        "first": _iso(first),
        "last": _iso(last),
        "model_versions": counts["model_version"].drop_nulls().unique().sort().to_list(),
        "by_workload": _by(counts, "workload", names),
        "by_level": _by(counts, "level", names),
        "timeline": timeline,
    }


def _by(grouped: pl.DataFrame, key: str, names: list[str]) -> list[dict[str, Any]]:
    rows = grouped.group_by(key).agg(pl.col(names).sum())
    return list(rows.sort("lines", key, descending=[True, False], nulls_last=True).iter_rows(named=True))


def _timeline(rows: pl.DataFrame, begin: int, end: int, width: int) -> dict[str, Any]:
    counted = {at: (lines, anomalous) for at, lines, anomalous in rows.iter_rows()}
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


def _iso(moment: datetime | None) -> str | None:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment is not None else None
