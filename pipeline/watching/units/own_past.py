"""The evidence of units: each compared with its own earlier windows, or with all normal units without any.

Services differ more from each other than an unusual one differs from its past. A window in which a unit wrote
nothing is part of its past too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from pipeline.watching.units.evidence import ByEvidence, surprises
from pipeline.watching.units.unit_lines import UnitTable

LEAST_OWN: Final = 3  # normal windows; fewer leave no deviation to measure by
MAX_OWN: Final = 300  # units with a past, those with the most lines; each costs some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Nats of each evidence, of judged units and of normal ones without themselves. `pasts`: by the unit, the
    windows that it was compared with; the others were compared with all."""

    judged: UnitTable
    normal: UnitTable
    of_judged: ByEvidence
    of_normal: ByEvidence
    pasts: Mapping[str, UnitTable]


def beside_past(judged: UnitTable, normal: UnitTable) -> Beside:
    """A unit of the past that writes nothing in a judged window joins the judged ones.

    Where both are one table, the judged units are compared with the others among them."""
    owners = set[str]() if judged is normal else _with_past(normal)
    if not owners:
        of_judged, of_normal = surprises(judged, normal)
        return Beside(judged=judged, normal=normal, of_judged=of_judged, of_normal=of_normal, pasts={})
    judged, normal = (table.with_silent(_silent(table, owners)) for table in (judged, normal))
    units, before = judged.units["unit"], normal.units["unit"]
    alone = (~units.is_in(owners)).arg_true()
    found, of_normal = surprises(judged.chosen(alone), normal)
    of_judged = {kind: np.zeros(judged.size) for kind in found}
    _fill(of_judged, alone, found)
    pasts = {}
    for unit in sorted(owners):
        here, rows = (units == unit).arg_true(), (before == unit).arg_true()
        pasts[unit] = normal.chosen(rows)
        found, inside = surprises(judged.chosen(here), pasts[unit])
        _fill(of_judged, here, found)
        _fill(of_normal, rows, inside)
    return Beside(judged=judged, normal=normal, of_judged=of_judged, of_normal=of_normal, pasts=pasts)


def _with_past(normal: UnitTable) -> set[str]:
    """At most MAX_OWN units of normal windows, none where there are few windows: sessions have one."""
    if normal.units["window"].n_unique() < LEAST_OWN:
        return set()
    lines = normal.units.group_by("unit").agg(pl.col("lines").sum())
    return set(lines.sort("lines", "unit", descending=[True, False])["unit"].head(MAX_OWN))


def _silent(table: UnitTable, owners: set[str]) -> list[tuple[str, int]]:
    """The windows of a table in which these units write nothing."""
    spoke = set(table.units.select("unit", "window").iter_rows())
    windows = table.units["window"].unique().sort().to_list()
    return [(unit, window) for window in windows for unit in sorted(owners) if (unit, window) not in spoke]


def _fill(found: ByEvidence, rows: pl.Series, values: ByEvidence) -> None:
    for kind, nats in values.items():
        found[kind][rows.to_numpy()] = nats
