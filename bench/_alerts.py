"""False alarms a day and workload, of sets with times, and what is found beside them.

A false alarm is a distinct masked line that no label calls anomalous and that is flagged, once a day and
workload; and a session without a label that is anomalous. `workload_days`: of the judged lines, the time from
the first to the last of each workload. A recording of minutes extrapolates to a day."""

from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._learnt import learn_and_score, verdicts
from bench._triage_data import SYSTEMS, framed, prepared
from bench._triage_split import tree_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.verdict import pattern_ids

LEARNT: Final = 0.4  # of the lines of a system, in the order of time
_DAY_S: Final = 86_400


def alarm_rate(lines: pl.DataFrame, sessions: int = 0, *, days: float | None = None) -> dict[str, Any]:
    """`lines`: workload, second, masked and flagged of lines that no label calls anomalous; `sessions`: such
    sessions that were found. `days`: of all workloads; None: by the times of the lines."""
    if days is None:
        moment = pl.col("second")
        spans = lines.drop_nulls("second").group_by("workload").agg(moment.max() - moment.min())
        days = float(spans["second"].sum()) / _DAY_S
    day = pl.col("second").fill_null(0) // _DAY_S
    alarms = lines.filter("flagged").select("workload", "masked", day).n_unique() + sessions
    return {
        "false_alarms": alarms,
        "workload_days": round(days, 4),
        "false_per_day": round(alarms / days, 2) if days else None,
    }


def systems(data: Path, *, seed: int = 1) -> dict[str, dict[str, Any]]:
    """`alarm_rate` and `recall` of each system of loghub that has error-like levels and times.

    The first LEARNT of the lines teach as they are, the others are judged. The level is the label, so it is
    hidden. `recall`: of the distinct error-like lines, those that are flagged; None without any."""
    masks = MaskSet.load()
    found = {}
    for name in SYSTEMS:
        rows = _system_lines(data, name, masks)
        if rows["severe"].any() and rows["timed"].any():
            found[f"{name.lower()}_level"] = _judged_later(rows, seed)
    return found


def _system_lines(data: Path, name: str, masks: MaskSet) -> pl.DataFrame:
    path = data / "loghub_2k" / name / f"{name}_2k.log"
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    if name == "BGL":
        lines = [line.split(" ", 1)[1] for line in lines]
    return prepared(framed(lines), masks).select("masked", "severe", "timestamp", "timed")


def _judged_later(rows: pl.DataFrame, seed: int) -> dict[str, Any]:
    cut = int(LEARNT * rows.height)
    learnt, later = rows.head(cut), rows.slice(cut)
    sample = learnt.group_by("masked", maintain_order=True).agg(pl.len().alias("count"))
    few = pl.DataFrame({"masked": later["masked"].unique(maintain_order=True)})
    tree = tree_of(sample["masked"].to_list(), [False] * sample.height)

    def placed(lines: pl.DataFrame) -> pl.DataFrame:
        masked = lines["masked"].to_list()
        ids = [tree.match(line, severe=False) for line in masked]
        return lines.with_columns(
            template_id=pl.Series(ids, dtype=pl.Int64),
            pattern_id=pl.Series(pattern_ids(masked), dtype=pl.UInt64),
            severe=pl.lit(value=False),
            level=pl.lit(None, dtype=pl.String),
        )

    few = placed(few)
    evidence, knowledge = learn_and_score(placed(sample), few["masked"].to_list(), seed=seed, baseline=False)
    flags = [bool(one.anomalous) for one in verdicts(few, evidence, knowledge)]
    judged = later.join(few.select("masked", flagged=pl.Series(flags, dtype=pl.Boolean)), on="masked")
    by_line = judged.group_by("masked").agg(pl.col("severe").mean() > 0.5, pl.col("flagged").any())
    bad = by_line.filter("severe")
    calm = judged.join(bad.select("masked"), on="masked", how="anti").select(
        pl.lit("").alias("workload"), pl.col("timestamp").dt.epoch("s").alias("second"), "masked", "flagged"
    )
    return alarm_rate(calm) | {
        "recall": round(bad.filter("flagged").height / bad.height, 4) if bad.height else None
    }
