"""Units in order of how sick they are, each with its three reasons, and which of them are called sick.

The evidence of a unit is the sum of its surprises. Its callers add to it: the time that they spend where they
call it (waits.py), and what they say of it in flagged lines (blame.py).

A unit is sick at a level where so few normal units, each judged without itself, have as much. This is
conformal: n normal units allow no level below 1 / (n + 1). With fewer than that no unit is called sick, and
the answer says so. The order does not depend on the level.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from pipeline.units import chance, plural, seconds
from pipeline.watching.units.blame import passed_on, walked
from pipeline.watching.units.evidence import new_patterns
from pipeline.watching.units.own_past import Beside, beside_past
from pipeline.watching.units.tails import Floats
from pipeline.watching.units.unit_lines import UnitTable
from pipeline.watching.units.values import RankedUnit, UnitEvidence, UnitRanking, UnitReason
from pipeline.watching.units.waits import moved, waited_for

LEVEL: Final = 0.01  # of normal units may be called sick
REASONS: Final = 3
NAMED: Final = 2  # templates in a reason
TEXT_CHARS: Final = 90
# A unit left out of n others is measured by n - 1. Equal units differ by less than this, and count as equal.
TIE: Final = 0.02
_LEAST_NATS: Final = math.log(2)  # a reason that one normal unit in two has is none


def rank_units(
    judged: UnitTable,
    normal: UnitTable | None,
    texts: Mapping[int, str],
    *,
    level: float = LEVEL,
    limit: int | None = None,
) -> UnitRanking:
    """The judged units beside normal ones; None: beside each other. `texts`: of templates, for reasons."""
    among = normal is None or normal.size == 0
    base = judged if normal is None or among else normal
    weighed = weigh_units(judged, base)
    judged, values, inside = weighed.beside.judged, weighed.values, weighed.inside
    n = 0 if among else base.size
    ordered = np.sort(inside)
    p_values = (1 + inside.size - np.searchsorted(ordered, values - TIE, side="left")) / (1 + inside.size)
    least = 1 / (n + 1)
    rank = n - math.floor(level * (n + 1) + 1e-9)
    threshold = None if among or level < least else float(ordered[max(0, rank)]) + TIE
    order = np.lexsort((judged.units["unit"].to_numpy(), -values)) if judged.size else np.zeros(0, np.int64)
    shown = order[:limit]
    writer = _Reasons(
        judged=judged,
        normal=base,
        texts=texts,
        among=among,
        pasts=weighed.beside.pasts,
        passed=weighed.passed,
        waits=weighed.waits,
    )
    nats_of = weighed.beside.of_judged | {UnitEvidence.NAMED: weighed.blamed}
    flagged = np.zeros(judged.size, dtype=np.int64)
    np.add.at(flagged, judged.patterns["at"].to_numpy(), judged.patterns["flagged"].to_numpy())
    sick = values > threshold if threshold is not None else np.zeros(judged.size, dtype=np.bool_)
    ranked = []
    for at in shown.tolist():
        row = judged.units.row(at, named=True)
        ranked.append(
            RankedUnit(
                unit=row["unit"],
                evidence=round(float(values[at]), 3),
                p_value=float(p_values[at]),
                sick=bool(sick[at]) if threshold is not None else None,
                reasons=writer.of_unit(at, {kind: float(nats[at]) for kind, nats in nats_of.items()}),
                lines=row["lines"],
                flagged=int(flagged[at]),
                findings=row["findings"],
                first=row["first"],
                last=row["last"],
            )
        )
    return UnitRanking(
        units=tuple(ranked), judged=judged.size, normal=n, among=among, level=level, least_level=least,
        threshold=threshold, sick=int(sick.sum()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """`values`: the evidence of the judged units, `inside`: of the normal ones. `blamed`: what it grew by the
    walk. `passed`: at, to, share. `waits`: the same, where time of callers is most of the time of `to`."""

    beside: Beside
    values: Floats
    inside: Floats
    blamed: Floats
    passed: pl.DataFrame
    waits: pl.DataFrame


def weigh_units(judged: UnitTable, base: UnitTable) -> Weighed:
    """The sum of the surprises of each unit, after time of callers moved to the units they wait for, and the
    sum walked along the names in flagged lines."""
    beside = beside_past(judged, base)
    waits = waited_for(beside.judged, base)
    own = beside.of_judged[UnitEvidence.TIME]
    time = moved(own, waits)
    beside = replace(beside, of_judged=beside.of_judged | {UnitEvidence.TIME: time})
    waits = waits.filter(pl.Series((time > 2 * own)[waits["to"].to_numpy()]))
    alone, inside = (np.sum(list(found.values()), axis=0) for found in (beside.of_judged, beside.of_normal))
    passed = passed_on(beside.judged, base)
    values = walked(alone, passed)
    blamed = np.maximum(0.0, values - alone)
    return Weighed(beside=beside, values=values, inside=inside, blamed=blamed, passed=passed, waits=waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasons:
    """Writes the reasons of units."""

    judged: UnitTable
    normal: UnitTable
    texts: Mapping[int, str]
    among: bool
    pasts: Mapping[str, UnitTable]
    passed: pl.DataFrame
    waits: pl.DataFrame

    def of_unit(self, at: int, nats: Mapping[UnitEvidence, float]) -> tuple[UnitReason, ...]:
        """The heaviest of a unit, at most REASONS."""
        past = self.pasts.get(self.judged.units["unit"][at])
        if past is not None and past is not self.normal:
            return replace(self, normal=past).of_unit(at, nats)
        rows = self.judged.patterns.filter(pl.col("at") == at)
        kinds = sorted((kind for kind in nats if nats[kind] > _LEAST_NATS), key=lambda kind: -nats[kind])
        reasons = []
        for kind in kinds:
            text, templates = self._sentence(kind, at, rows)
            if text:
                reasons.append(
                    UnitReason(evidence=kind, nats=round(nats[kind], 2), text=text, templates=templates)
                )
        return tuple(reasons[:REASONS])

    def _sentence(self, kind: UnitEvidence, at: int, rows: pl.DataFrame) -> tuple[str, tuple[int, ...]]:
        match kind:
            case UnitEvidence.NEW:
                return self._new(at, rows)
            case UnitEvidence.COUNTS:
                return self._counts(at, rows)
            case UnitEvidence.ACTIVE:
                own, usual = self.judged.units["active_s"][at], self._median("active_s")
                return f"it spoke for {seconds(own)}, where {self._whose} speak for {seconds(usual)}", ()
            case UnitEvidence.SESSIONS:
                found = self.judged.findings.filter(pl.col("at") == at).sort("p_value", nulls_last=True)
                text = (found["text"][0] or "") if found.height else ""
                number = int(found["n"].sum())
                return f"{plural(number, 'finding')} in its sessions and rates: {text[:TEXT_CHARS]}", ()
            case UnitEvidence.TIME:
                callers = self._units(self.waits.filter(pl.col("to") == at))
                if callers:
                    return f"requests of {callers} take longer where they call it", ()
                return "it needed longer for its requests itself, without what it waited for others", ()
            case UnitEvidence.NAMED:
                named = self._units(self.passed.filter(pl.col("to") == at))
                return f"anomalous or new lines of {named} name it" if named else "", ()
            case UnitEvidence.FLAGGED:
                found = rows.filter(pl.col("flagged") > 0).sort("p_value", "template_id", nulls_last=True)
                number, (names, ids) = found["template_id"].n_unique(), self._named(found)
                p = chance(found["p_value"][0]) if found.height else ""
                return f"{plural(number, 'anomalous pattern')}{f' (p {p})' if p else ''}: {names}", ids

    @property
    def _whose(self) -> str:
        if self.among:
            return "the others"
        return "normal units" if self.normal.units["unit"].n_unique() > 1 else "its windows before"

    def _median(self, column: str) -> float:
        value = self.normal.units[column].median()
        return float(value) if isinstance(value, int | float) else 0.0

    def _new(self, at: int, rows: pl.DataFrame) -> tuple[str, tuple[int, ...]]:
        if self.among:
            shared = self.judged.patterns.filter(pl.col("at") != at).select("pattern_id").unique()
            found = rows.join(shared, on="pattern_id", how="anti")
        else:
            found = new_patterns(replace(self.judged, patterns=rows), self.normal)
        if found.is_empty():
            return "", ()
        names, ids = self._named(found.sort("flagged", "n", descending=True))
        number = found["pattern_id"].n_unique()
        return f"{plural(number, 'pattern')} that none of {self._whose} has: {names}", ids

    def _counts(self, at: int, rows: pl.DataFrame) -> tuple[str, tuple[int, ...]]:
        """The template whose count is the farthest from the median of normal units."""
        usual = self.normal.patterns.filter(pl.col("at") != at) if self.among else self.normal.patterns
        size = max(1, self.normal.size - self.among)
        # The median count over all units; a template of less than half of them has 0.
        counts = (
            usual.group_by("at", "template_id")
            .agg(pl.col("n").sum())
            .group_by("template_id")
            .agg(
                pl.col("n").sort(descending=True).get(size // 2, null_on_oob=True).fill_null(0).alias("usual")
            )
        )
        own = rows.group_by("template_id").agg(pl.col("n").sum().alias("own"))
        both = own.join(counts, on="template_id", how="full", coalesce=True).fill_null(0)
        far = (
            both.with_columns(((pl.col("own") + 1).log() - (pl.col("usual") + 1).log()).abs().alias("far"))
            .sort("far", "template_id", descending=[True, False])
            .head(1)
        )
        if far.is_empty() or far["far"][0] == 0.0:
            return "its counts are those of no normal unit", ()
        own_n, usual_n, template = far["own"][0], far["usual"][0], far["template_id"][0]
        name, ids = self._named(far)
        how = f"{own_n:,} times" if own_n else "never"
        return f"{how}, where {self._whose} have it {plural(usual_n, 'time')}: {name}", ids or (template,)

    def _units(self, passing: pl.DataFrame) -> str:
        """Names of the units `at` of at, to, share, those first that pass on the most of what they have."""
        found = passing.sort("share", "at", descending=[True, False])
        names = ", ".join(f"`{self.judged.units['unit'][row]}`" for row in found["at"].to_list()[:NAMED])
        return f"{names} and {found.height - NAMED} more" if found.height > NAMED else names

    def _named(self, rows: pl.DataFrame) -> tuple[str, tuple[int, ...]]:
        ids = tuple(dict.fromkeys(rows["template_id"].to_list()))[:NAMED]
        names = [self.texts.get(template) or f"T{template}" for template in ids]
        return "; ".join(f"`{name[:TEXT_CHARS]}`" for name in names), ids
