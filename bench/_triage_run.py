"""The repeats of the triage bench, spread over two processes.

Repeat r of seed s is the split 1000 s + r of every set, so a seed is one whole answer: its average over the
sets is one number, and the spread of those numbers is what chance alone moves."""

import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from bench._triage import BASELINES, OURS, Repeat, repeat, table
from bench._triage_data import TriageSet

PROCESSES: Final = 2
# Reported, but no part of the average: the same faults as another set. Split once a seed.
BESIDE: Final = frozenset({"trainticket_wide"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run. `repeats` in all, spread evenly over the seeds."""

    seeds: int = 5
    repeats: int = 20
    peers: bool = True
    edition: str = "causal"  # of the line model
    first: int = 1  # seed

    def splits(self) -> list[tuple[int, int]]:
        """(seed, split) of every repeat."""
        each = max(1, self.repeats // self.seeds)
        return [
            (seed, 1000 * seed + r)
            for seed in range(self.first, self.first + self.seeds)
            for r in range(each)
        ]


def run(sets: Iterable[TriageSet], plan: Plan, *, processes: int = PROCESSES) -> dict[str, Any]:
    """`<set>`: auroc, ap, baselines, terms ...; `average`; `skipped`."""
    chosen = list(sets)
    once = replace(plan, repeats=plan.seeds)
    jobs = [(s, seed, split) for s in chosen for seed, split in (once if s.name in BESIDE else plan).splits()]
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [
            (s.name, seed, pool.submit(repeat, s, seed=split, peers=plan.peers, edition=plan.edition))
            for s, seed, split in jobs
        ]
        done = [(name, seed, future.result()) for name, seed, future in waiting]
    found: dict[str, dict[int, list[Repeat]]] = {}
    for name, seed, outcome in done:
        if outcome is not None:
            found.setdefault(name, {}).setdefault(seed, []).append(outcome)
    values: dict[str, Any] = {s.name: _row(s, found[s.name], plan) for s in chosen if s.name in found}
    values["average"] = average(found, plan)
    values["skipped"] = {
        s.name: f"{s.normal} normal and {s.anomalies} anomalous patterns are too few to be split"
        for s in chosen
        if s.name not in found
    }
    return values


def _row(triage: TriageSet, by_seed: dict[int, list[Repeat]], plan: Plan) -> dict[str, Any]:
    figures = table([r for repeats in by_seed.values() for r in repeats])
    area, precision = figures["auroc"], figures["ap"]
    return {
        "auroc": round(area[OURS], 4),
        "ap": round(precision[OURS], 4),
        "auroc_sd": _spread([table(r)["auroc"][OURS] for r in by_seed.values()]),
        "baselines": {n: {"auroc": round(area[n], 4), "ap": round(precision[n], 4)} for n in names(plan)},
        "adding": {n[1:]: round(v, 4) for n, v in area.items() if n.startswith("+")},
        "alone": {n[1:]: round(v, 4) for n, v in area.items() if n.startswith("=")},
        "anomalies_flagged": round(figures["anomalies_flagged"], 4),
        "normal_flagged": round(figures["normal_flagged"], 4),
        # False alarms: normal lines without an error level and an error word, beside what was asked for.
        "calm_flagged": round(figures["calm_flagged"], 4),
        "calm_nominal": round(figures["calm_nominal"], 4),
        "calm_at_1_percent": round(figures["calm_at_1_percent"], 4),
        "normal": triage.normal,
        "anomalous": triage.anomalies,
        "repeats": sum(map(len, by_seed.values())),
        "about": triage.about,
    }


def average(found: dict[str, dict[int, list[Repeat]]], plan: Plan) -> dict[str, Any]:
    """Over the sets, each with equal weight, per seed; `ahead_of` are the rows that ours beats by more than
    its spread.

    The spread is the larger of ours over the seeds and that of the difference to the row, both on the same
    splits."""
    counted = {name: seeds for name, seeds in found.items() if name not in BESIDE}
    per_seed: dict[str, list[float]] = {}
    precise: dict[str, list[float]] = {}
    for seed in sorted({seed for seeds in counted.values() for seed in seeds}):
        tables = [table(seeds[seed]) for seeds in counted.values() if seed in seeds]
        for name in tables[0]["auroc"]:
            per_seed.setdefault(name, []).append(statistics.fmean(t["auroc"][name] for t in tables))
            precise.setdefault(name, []).append(statistics.fmean(t["ap"][name] for t in tables))
    if not per_seed:
        return {}
    ours = per_seed[OURS]
    rows = {}
    for name in names(plan):
        gaps = [a - b for a, b in zip(ours, per_seed[name], strict=True)]
        need = max(_spread(ours), _spread(gaps))
        rows[name] = {
            "auroc": round(statistics.fmean(per_seed[name]), 4),
            "auroc_sd": _spread(per_seed[name]),
            "ap": round(statistics.fmean(precise[name]), 4),
            "ahead_by": round(statistics.fmean(gaps), 4),
            "ahead": statistics.fmean(gaps) > need,
        }
    return {
        "auroc": round(statistics.fmean(ours), 4),
        "auroc_sd": _spread(ours),
        "ap": round(statistics.fmean(precise[OURS]), 4),
        "sets": len(counted),
        "seeds": len(ours),
        "baselines": rows,
        "ahead_of_all": all(row["ahead"] for row in rows.values()),
        "adding": {n[1:]: round(statistics.fmean(v), 4) for n, v in per_seed.items() if n.startswith("+")},
        "alone": {n[1:]: round(statistics.fmean(v), 4) for n, v in per_seed.items() if n.startswith("=")},
    }


def names(plan: Plan) -> list[str]:
    """The baseline rows that a plan computes."""
    return [name for name in BASELINES if plan.peers or name != "nulog"]


def _spread(values: Sequence[float]) -> float:
    return round(statistics.stdev(values), 4) if len(values) > 1 else 0.0
