"""Blue Gene/L, 100,000 lines with the label column cut off, the first 4,000 as baseline: time, memory,
recall.

Recall counts alert lines (label not "-") that are anomalous; false alarms are distinct masked lines that
carry no alert label. Nothing is tuned on these labels: the threshold comes from the baseline."""

import gzip
from pathlib import Path
from typing import Any

import polars as pl

from bench._running import scratch, watched_run
from pipeline.records.schema import of_lines

BASELINE_LINES = 4_000


def measure(data: Path) -> dict[str, Any]:
    with gzip.open(
        data / "bgl" / "BGL_100k.log.gz", "rt", encoding="utf-8", errors="surrogateescape"
    ) as file:
        labelled = [line.split(" ", 1) for line in file]
    with scratch() as folder:
        log, baseline = folder / "bgl.log", folder / "baseline.log"
        lines = [rest for _, rest in labelled]
        log.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
        baseline.write_text("".join(lines[:BASELINE_LINES]), encoding="utf-8", errors="surrogateescape")
        with_baseline = watched_run([str(log), "--baseline", str(baseline)], folder / "out")
        scores = _score(folder / "out", [label != "-" for label, _ in labelled])
        without = watched_run([str(log)], folder / "self")
        self_scores = _score(folder / "self", [label != "-" for label, _ in labelled])
    return {
        "baseline": {"seconds": with_baseline.seconds, "peak_rss_mib": with_baseline.peak_rss_mib,
                     "peak_pss_mib": with_baseline.peak_pss_mib,
                     "lines_per_s": with_baseline.summary["run"]["lines_per_s"],
                     "ready_seconds": with_baseline.summary["run"]["ready_seconds"], **scores},
        "self": {"seconds": without.seconds, "peak_rss_mib": without.peak_rss_mib, **self_scores},
    }  # fmt: skip


def _score(out: Path, alerts: list[bool]) -> dict[str, Any]:
    rows = pl.read_parquet(out / "results/**/*.parquet", hive_partitioning=False).filter(of_lines())
    labels = pl.DataFrame(
        {"line": pl.int_range(1, len(alerts) + 1, dtype=pl.UInt64, eager=True), "alert": alerts}
    )
    rows = rows.join(labels, on="line", how="left")
    alert, normal = rows.filter("alert"), rows.filter(~pl.col("alert"))
    flagged = normal.filter("anomalous")
    error_like = flagged.filter(pl.col("level").is_in(["error", "critical", "fatal"]))
    return {
        "lines_read": len(alerts),
        "lines_stored": int(rows["lines"].sum()),
        "alert_lines": alert.height,
        "recall": round(float(alert["anomalous"].mean() or 0), 6),
        "distinct_normal": normal["pattern_id"].n_unique(),
        "distinct_normal_flagged": flagged["pattern_id"].n_unique(),
        "of_these_error_level": error_like["pattern_id"].n_unique(),
    }
