"""Units in order of how unusual they are, each with its three reasons, and which of them are called unusual.

The evidence of a unit is the sum of its surprises. Its callers add to it what they say of it in flagged lines
(blame.py).

Its p-value is the share of normal units, each judged without itself, that have as much evidence. Beyond the
largest of them it falls as the largest ones let expect. A unit is called unusual at a p-value of `level`, if
the least one of all judged units is not due to chance: of a hundred units, one has 0.01.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.units import chance, plural
from pipeline.watching.units.blame import passed_on, walked
from pipeline.watching.units.evidence import new_patterns
from pipeline.watching.units.own_past import Beside, beside_past
from pipeline.watching.units.tails import Floats, tail_of
from pipeline.watching.units.unit_lines import UnitTable
from pipeline.watching.units.values import LEAST_NORMAL, RankedUnit, UnitEvidence, UnitRanking, UnitReason

LEVEL: Final = 0.01  # of normal units may be called unusual
ANY: Final = 0.05  # of answers about normal units alone may call one unusual
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
    """The judged units compared with normal ones; None: with each other. `texts`: of templates, for reasons.

    A unit in several judged windows stands where its most unusual one does, with one p-value of all of them
    (Simes)."""
    among = normal is None or normal.size == 0
    base = judged if normal is None or among else normal
    weighed = weigh_units(judged, base)
    beside, units = weighed.beside, weighed.by_unit()
    unusual = are_unusual(units["p_value"].to_numpy(), level)
    known = not among and base.size >= LEAST_NORMAL
    writer = _Reasons(
        judged=beside.judged,
        normal=beside.normal,
        texts=texts,
        among=among,
        pasts=beside.pasts,
        passed=weighed.passed,
    )
    nats_of = beside.of_judged | {UnitEvidence.NAMED: weighed.blamed}
    ranked = [
        RankedUnit(
            unit=row["unit"],
            evidence=round(row["evidence"], 3),
            p_value=row["p_value"],
            unusual=bool(is_unusual) if known else None,
            reasons=writer.of_unit(
                row["at"], {kind: float(nats[row["at"]]) for kind, nats in nats_of.items()}
            ),
            lines=row["lines"],
            flagged=row["flagged"],
            findings=row["findings"],
            first=row["first"],
            last=row["last"],
        )
        for row, is_unusual in zip(units[:limit].to_dicts(), unusual, strict=False)
    ]
    return UnitRanking(
        units=tuple(ranked), judged=units.height, normal=0 if among else base.size, among=among, level=level,
        unusual=int(unusual.sum()) if known else None,
    )  # fmt: skip


def are_unusual(p_values: Floats, level: float) -> npt.NDArray[np.bool_]:
    """Which units are unusual at a level; none where their number explains the least p-value."""
    if not p_values.size or 1.0 - (1.0 - p_values.min()) ** p_values.size > ANY:
        return np.zeros(p_values.size, dtype=np.bool_)
    found: npt.NDArray[np.bool_] = p_values <= level
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """`values`: the evidence of the judged units, `inside`: of the normal ones. `blamed`: what it grew by the
    walk. `passed`: at, to, share."""

    beside: Beside
    values: Floats
    inside: Floats
    blamed: Floats
    passed: pl.DataFrame

    @property
    def p_values(self) -> Floats:
        """Of the judged units in each window."""
        return tail_of(self.values - TIE, self.inside)

    def by_unit(self) -> pl.DataFrame:
        """Each judged unit once, the most unusual first: unit, at (of its most unusual window), evidence,
        p_value, lines, flagged, findings, first, last."""
        judged = self.beside.judged
        flagged = np.zeros(judged.size, dtype=np.int64)
        np.add.at(flagged, judged.patterns["at"].to_numpy(), judged.patterns["flagged"].to_numpy())
        p_value = pl.col("p_value")
        return (
            judged.units.with_row_index("at")
            .with_columns(
                evidence=pl.Series(self.values, dtype=pl.Float64),
                p_value=pl.Series(self.p_values, dtype=pl.Float64),
                flagged=pl.Series(flagged, dtype=pl.Int64),
            )
            .sort("evidence", descending=True)
            .group_by("unit")
            .agg(
                pl.col("at", "evidence").first(),
                (p_value * pl.len() / (pl.int_range(pl.len()) + 1)).min(),
                pl.col("lines", "flagged", "findings").sum(),
                pl.col("first").min(),
                pl.col("last").max(),
            )
            .sort("p_value", "evidence", "unit", descending=[False, True, False])
        )


def weigh_units(judged: UnitTable, base: UnitTable) -> Weighed:
    """The sum of the surprises of each unit, walked along the names in flagged lines."""
    beside = beside_past(judged, base)
    alone, inside = (np.sum(list(found.values()), axis=0) for found in (beside.of_judged, beside.of_normal))
    passed = passed_on(beside.judged, beside.normal)
    values = walked(alone, passed)
    if judged is not base:
        inside = walked(inside, passed_on(beside.normal))
    blamed = np.maximum(0.0, values - alone)
    return Weighed(beside=beside, values=values, inside=inside, blamed=blamed, passed=passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasons:
    """Writes the reasons of units."""

    judged: UnitTable
    normal: UnitTable
    texts: Mapping[int, str]
    among: bool
    pasts: Mapping[str, UnitTable]
    passed: pl.DataFrame

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
            case UnitEvidence.SESSIONS:
                found = self.judged.findings.filter(pl.col("at") == at).sort("p_value", nulls_last=True)
                text = (found["text"][0] or "") if found.height else ""
                number = int(found["n"].sum())
                return f"{plural(number, 'finding')} in its sessions and rates: {text[:TEXT_CHARS]}", ()
            case UnitEvidence.TIME:
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
