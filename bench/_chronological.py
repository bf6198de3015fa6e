"""Blue Gene/L in the order of time: learn from the first part as it is, faults and all, then judge every
line.

The training part carries no labels and holds faults, as a user's log does. A category of alerts
counts as found when one of its lines is flagged; a false alarm is a distinct masked line without any alert
that is flagged. Both are reported for the lines after the training part, and for the whole log, since the
product judges all of it."""

import gzip
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._baselines import keyword_rule
from bench._learnt import learn_and_score, verdicts
from bench._triage_data import tagged
from bench._triage_split import tree_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.verdict import pattern_ids

SHARES: Final = (0.4, 0.1)  # of the lines; two of the five categories end within the first 40 %


def measure(data: Path, *, seeds: int, edition: str = "causal") -> dict[str, Any]:
    """`first_40`, `first_10`: categories, recall and false alarms of ours (mean over the seeds) and of the
    baselines."""
    masks = MaskSet.load()
    path = data / "bgl" / "BGL_100k.log.gz"
    with gzip.open(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
        rows = tagged(file.read().splitlines(), masks)
    return {f"first_{100 * share:.0f}": _one(rows, share, seeds, edition) for share in SHARES}


def _one(rows: pl.DataFrame, share: float, seeds: int, edition: str) -> dict[str, Any]:
    cut = int(share * rows.height)
    rows = rows.with_columns(after=pl.int_range(pl.len()) >= cut)
    # In the order of their first lines, as the template tree meets them.
    lines = rows.unique(["masked", "severe"], keep="first", maintain_order=True)
    tree = tree_of(lines["masked"].to_list(), lines["severe"].to_list())
    placed = [tree.match(m, severe=s) for m, s in lines.select("masked", "severe").iter_rows()]
    lines = lines.with_columns(
        template_id=pl.Series(placed, dtype=pl.Int64),
        pattern_id=pl.Series(pattern_ids(lines["masked"].to_list()), dtype=pl.UInt64),
    )
    learnt = rows.filter(~pl.col("after")).group_by("masked", "severe").agg(pl.len().alias("count"))
    sample = learnt.join(lines, on=["masked", "severe"])
    known = set(sample["template_id"])
    masked = lines["masked"].to_list()
    runs: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        evidence, knowledge = learn_and_score(sample, masked, seed=seed, baseline=False, edition=edition)
        flags = [bool(v.anomalous) for v in verdicts(lines, evidence, knowledge)]
        runs.append(found(rows, lines, flags))
    rules = {
        "new_template": [t not in known for t in lines["template_id"]],
        "keywords": [v > 0 for v in keyword_rule(masked, lines["level"].to_list())],
    }
    return {
        "trained_on_lines": cut,
        "alert_lines_among_them": int(rows.filter(~pl.col("after"))["alert"].sum()),
        "seeds": seeds,
        **_mean(runs),
        "baselines": {name: found(rows, lines, hits) for name, hits in rules.items()},
    }


def found(rows: pl.DataFrame, lines: pl.DataFrame, flags: Sequence[bool]) -> dict[str, Any]:
    """`rows`: one per line (masked, severe, tag, alert, after); `lines`: the distinct ones, with a flag
    each."""
    judged = rows.join(
        lines.select("masked", "severe", flagged=pl.Series(flags, dtype=pl.Boolean)), on=["masked", "severe"]
    )
    return {"after": _part(judged.filter("after")), "whole_log": _part(judged)}


def _part(judged: pl.DataFrame) -> dict[str, Any]:
    alerts = judged.filter("alert")
    caught = alerts.filter("flagged")
    wrong = judged.group_by("masked").agg(
        pl.col("alert").any(), pl.col("flagged").any(), pl.col("severe").any()
    )
    wrong = wrong.filter(~pl.col("alert"))
    false = wrong.filter("flagged").height
    seconds = judged["timestamp"].drop_nulls().dt.epoch("s").to_numpy()
    days = float(seconds.max() - seconds.min()) / 86_400
    calm = judged.filter(pl.col("flagged") & ~pl.col("alert"))
    by_day = calm.select("masked", pl.col("timestamp").dt.date()).n_unique() if calm.height else 0
    return {
        "lines": judged.height,
        "categories": alerts["tag"].n_unique(),
        "categories_found": caught["tag"].n_unique(),
        "alert_line_recall": round(caught.height / max(1, alerts.height), 6),
        "distinct_false_alarms": false,
        "of_these_error_level": wrong.filter(pl.col("flagged") & pl.col("severe")).height,
        "false_alarms_per_day": round(by_day / max(1.0, days), 2),
        "distinct_normal": wrong.height,
        "distinct_false_alarms_per_100k_lines": round(100_000 * false / max(1, judged.height), 2),
    }


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure over the seeds; of categories found the fewest."""
    return {
        part: {
            name: min(r[part][name] for r in runs)
            if name == "categories_found"
            else round(statistics.fmean(r[part][name] for r in runs), 4)
            for name in runs[0][part]
        }
        for part in runs[0]
    }
