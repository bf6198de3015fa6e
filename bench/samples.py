"""The recorded faults: at which place in the findings each one first appears, and what else is flagged.

A finding belongs to a fault when one of its anomalous records holds a line that the labels name.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

from bench._running import scratch, watched_run
from pipeline.report import findings

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
FIRST = 10


def measure(_data: Path) -> dict[str, Any]:
    labels = json.loads((SAMPLES / "labels.json").read_text(encoding="utf-8"))
    observed = [str(p) for p in sorted((SAMPLES / "observed").glob("*.zst"))]
    baseline = [str(p) for p in sorted((SAMPLES / "baseline").glob("*.zst"))]
    with scratch() as folder:
        run = watched_run([*observed, "--baseline", *baseline], folder / "out")
        with_baseline = _ranks(folder / "out", labels)
        watched_run(observed, folder / "self")
        by_itself = _ranks(folder / "self", labels)
    return {
        "seconds": run.seconds,
        "lines": run.summary["lines"],
        "findings": run.summary["run"]["findings"],
        "baseline": with_baseline,
        "self": by_itself,
    }


def _ranks(out: Path, labels: dict[str, Any]) -> dict[str, Any]:
    rows = pl.read_parquet(out / "results/**/*.parquet", hive_partitioning=False)
    found = findings.collect(out / "results", pl.read_parquet(out / "templates.parquet"))
    spans = rows.filter("anomalous").select(
        pl.col("source").str.split("/").list.last().str.strip_suffix(".zst").alias("file"),
        "workload",
        "template_id",
        "line",
        "lines",
    )
    place = {(f.workload, i): n for n, f in enumerate(found, start=1) for i in f.template_ids}
    incident = {(f.workload, i): f.incident for f in found for i in f.template_ids}
    ranks: dict[str, int | None] = {}
    told: dict[str, int] = {}  # the incident of the finding that tells of a fault first
    caught, named = 0, 0
    for fault in labels["faults"]:
        best: int | None = None
        lines = pl.DataFrame(
            {
                "file": [Path(x["file"]).name.removesuffix(".zst") for x in fault["lines"]],
                "at": [x["line"] for x in fault["lines"]],
            },
            schema={"file": pl.String, "at": pl.UInt64},
        )
        hits = spans.join(lines, on="file").filter(
            (pl.col("at") >= pl.col("line")) & (pl.col("at") < pl.col("line") + pl.col("lines"))
        )
        for workload, template_id in hits.select("workload", "template_id").unique().iter_rows():
            here = place.get((workload, template_id))  # None for news that is not listed
            if here is not None and (best is None or here < best):
                best, told[str(fault["name"])] = here, incident[(workload, template_id)]
        ranks[str(fault["name"])] = best
        caught += hits.select("file", "at").unique().height
        named += lines.unique().height
    return {
        "faults": len(ranks),
        "in_first_10": sum(r is not None and r <= FIRST for r in ranks.values()),
        "ranks": ranks,
        "fault_lines_named": named,
        "fault_lines_flagged": caught,
        "findings": len(found),
        "incidents": _incidents(found, told),
    }


def _incidents(found: list[findings.Finding], told: dict[str, int]) -> dict[str, Any]:
    """How the findings group: best is one incident for each fault and none beside them."""
    sizes = Counter(f.incident for f in found)
    faults = Counter(told.values())
    return {
        "incidents": len(sizes),
        "with_a_fault": len(faults),
        "faults_that_share_one": sum(n for n in faults.values() if n > 1),
        "findings_of_each": [sizes[number] for number in sorted(sizes)],
    }
