"""Units ranked: AUROC of sick before normal ones, beside simple rules, with all learnt units and with six.

With six, what is drawn are the normal units that others are compared with. The line model and the session
model are those of all learnt units, as in a pipeline that was trained before. The judged units are at most
JUDGED of each health, for time."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from bench._alerts import alarm_rate
from bench._baselines import keyword_rule, trigram_novelty
from bench._ranking import auroc
from bench._units_data import JudgedLines, UnitSet, judged_lines, unit_sets
from pipeline.watching.units.evidence import new_patterns, surprises
from pipeline.watching.units.ranking import weigh_units
from pipeline.watching.units.unit_lines import UNIT_LINES, UnitFold, UnitTable

FEW: Final = 6
JUDGED: Final = 3_000
LEVELS: Final = (0.01, 0.05)


def measure(data: Path, *, draws: int) -> dict[str, Any]:
    """The figures of every set. `draws`: of six normal units."""
    return {name: _of_set(units, draws=draws) for name, units in unit_sets(data, seed=1)}


def _of_set(units: UnitSet, *, draws: int) -> dict[str, Any]:
    judged = judged_lines(units, seed=1)
    fold, normal_fold = UnitFold(), UnitFold()
    chosen = _chosen(units)
    for rows in (judged.lines.select(list(UNIT_LINES)), judged.found):
        fold.add(rows.filter(pl.col("unit").is_in(chosen)))
        normal_fold.add(rows.filter(pl.col("unit").is_in(units.learnt)))
    table, normal = fold.table(), normal_fold.table()
    names = table.units["unit"].to_list()
    sick = [units.sick[name] for name in names]
    rules = _rules(judged, units, names)
    counts = _counts(table)
    few: dict[str, list[float]] = {"auroc": [], "novelty": []}
    draw = np.random.default_rng(1)
    for _ in range(draws):
        six = normal.chosen(pl.Series(np.sort(draw.choice(normal.size, FEW, replace=False))))
        few["auroc"].append(auroc(_evidence(table, six), sick))
        few["novelty"].append(auroc(_novelty(table, six), sick))
    found = {
        "auroc": round(auroc(_evidence(table, normal), sick), 4),
        "count_auroc": round(auroc(counts, sick), 4),
        "rules": {"novelty": round(auroc(_novelty(table, normal), sick), 4)}
        | {name: round(auroc(values, sick), 4) for name, values in rules.items()},
        "six": {
            name: {"mean": round(statistics.fmean(values), 4), "sd": round(statistics.pstdev(values), 4)}
            for name, values in few.items()
        },
        "units": {"judged": len(sick), "sick": sum(sick), "normal": normal.size},
        "alerts": _alerts(judged, units),
    }
    p_values, bad = weigh_units(table, normal).p_values, np.asarray(sick)
    for level in LEVELS:
        called = p_values <= level
        found[f"called_at_{level:g}"] = {
            "normal": round(float(called[~bad].mean()), 4), "sick": round(float(called[bad].mean()), 4)
        }  # fmt: skip
    return found


def _alerts(judged: JudgedLines, units: UnitSet) -> dict[str, Any]:
    """False alarms of the normal units that were not learnt, and the share of the sick ones with an alarm."""
    sick = {unit for unit, bad in units.sick.items() if bad}
    normal = pl.col("unit").is_in(list(units.sick.keys() - sick - units.learnt))
    lines = judged.lines.filter(normal).select(
        pl.lit("").alias("workload"), "second", "masked", pl.col("flagged").fill_null(value=False)
    )
    told = set(judged.lines.filter("flagged")["unit"]) | set(judged.found["unit"])
    return alarm_rate(lines, judged.found.filter(normal).height) | {
        "recall": round(len(sick & told) / max(1, len(sick)), 4)
    }


def _chosen(units: UnitSet) -> list[str]:
    """The judged units, at most JUDGED of each health."""
    draw, chosen = np.random.default_rng(1), list[str]()
    for bad in (False, True):
        those = sorted(u for u, sick in units.sick.items() if sick is bad and u not in units.learnt)
        chosen += [those[at] for at in draw.permutation(len(those))[:JUDGED].tolist()]
    return chosen


def _evidence(table: UnitTable, normal: UnitTable) -> Sequence[float]:
    found, _ = surprises(table, normal)
    values: list[float] = np.sum(list(found.values()), axis=0).tolist()
    return values


def _counts(table: UnitTable) -> list[float]:
    """Flagged lines and findings in sessions."""
    counts = table.units["findings"].to_numpy().astype(np.float64)
    np.add.at(counts, table.patterns["at"].to_numpy(), table.patterns["flagged"].to_numpy())
    return [float(count) for count in counts]


def _novelty(table: UnitTable, normal: UnitTable) -> list[float]:
    counts = np.zeros(table.size)
    np.add.at(counts, new_patterns(table, normal)["at"].to_numpy(), 1.0)
    return [float(count) for count in counts]


def _rules(judged: JudgedLines, units: UnitSet, names: Sequence[str]) -> dict[str, list[float]]:
    """By line, the greatest of a unit; the first is our own score."""
    few = judged.lines.unique(["masked", "severe"], maintain_order=True)
    learnt = judged.lines.filter(pl.col("unit").is_in(units.learnt))["masked"].unique().to_list()
    masked = few["masked"].to_list()
    scored = few.select("masked", "severe").with_columns(
        trigram_novelty=pl.Series(trigram_novelty(learnt, masked)),
        keywords=pl.Series(keyword_rule(masked, few["level"].to_list())),
    )
    most = (
        judged.lines.join(scored, on=["masked", "severe"])
        .group_by("unit")
        .agg(pl.col("score", "trigram_novelty", "keywords").max())
    )
    ordered = pl.DataFrame({"unit": names}).join(most, on="unit", how="left", maintain_order="left")
    return {
        f"most_{name}": ordered[name].fill_null(0.0).to_list()
        for name in ("score", "trigram_novelty", "keywords")
    }
