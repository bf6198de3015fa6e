"""The evidence of units: each beside its own windows before, where it has enough of them, else beside all.

Services differ more from each other than a sick one differs from its past. Hosts and pods that are replicas
of each other lose little by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from pipeline.watching.units.evidence import ByEvidence, surprises
from pipeline.watching.units.unit_lines import UnitTable

LEAST_OWN: Final = 5  # windows; fewer leave too little to measure a deviation by
MAX_OWN: Final = 100  # units with a past; each costs some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Nats of each evidence, of judged units and of normal ones without themselves. `pasts`: by the unit, the
    windows that it was compared with; the others were compared with all."""

    judged: UnitTable
    of_judged: ByEvidence
    of_normal: ByEvidence
    pasts: Mapping[str, UnitTable]


def beside_past(judged: UnitTable, normal: UnitTable) -> Beside:
    """A unit that spoke in every normal window, and writes nothing now, joins the judged ones.

    Where both are one table, the judged units are compared with the others among them."""
    rows_of = {} if judged is normal else _windows_of(normal)
    if not rows_of:
        of_judged, of_normal = surprises(judged, normal)
        return Beside(judged=judged, of_judged=of_judged, of_normal=of_normal, pasts={})
    judged = judged.with_silent(_silent(judged, normal, rows_of))
    units = judged.units["unit"]
    alone = (~units.is_in(list(rows_of))).arg_true()
    found, of_normal = surprises(judged.chosen(alone), normal)
    of_judged = {kind: np.zeros(judged.size) for kind in found}
    _fill(of_judged, alone, found)
    pasts = {}
    for unit, rows in rows_of.items():
        here = (units == unit).arg_true()
        if here.is_empty():
            continue
        pasts[unit] = normal.chosen(rows)
        found, inside = surprises(judged.chosen(here), pasts[unit])
        _fill(of_judged, here, found)
        _fill(of_normal, rows, inside)
    return Beside(judged=judged, of_judged=of_judged, of_normal=of_normal, pasts=pasts)


def _windows_of(normal: UnitTable) -> dict[str, pl.Series]:
    """The rows of each unit with enough windows, at most MAX_OWN units: those with the most lines."""
    rows = normal.units.with_row_index("row").group_by("unit").agg("row", pl.col("lines").sum())
    rows = rows.filter(pl.col("row").list.len() >= LEAST_OWN).sort("lines", "unit", descending=[True, False])
    return {unit: pl.Series(at).sort() for unit, at in rows.head(MAX_OWN).select("unit", "row").iter_rows()}


def _silent(judged: UnitTable, normal: UnitTable, rows_of: Mapping[str, pl.Series]) -> list[tuple[str, int]]:
    """Units that were never silent, with the judged windows in which they are."""
    windows = normal.units["window"].n_unique()
    steady = sorted(unit for unit, rows in rows_of.items() if len(rows) == windows)
    spoke = set(judged.units.select("unit", "window").iter_rows())
    asked = judged.units["window"].unique().sort().to_list()
    return [(unit, window) for window in asked for unit in steady if (unit, window) not in spoke]


def _fill(found: ByEvidence, rows: pl.Series, values: ByEvidence) -> None:
    for kind, nats in values.items():
        found[kind][rows.to_numpy()] = nats
