"""Evidence that a unit is unusual, measured against normal units; each of these leaves itself out.

`new`       distinct patterns that no normal unit has, less what a unit of so many patterns has anyway
`counts`    distance of its counts by template to those of the nearest normal unit
`sessions`  findings in its sessions and rates, by the p-values of their distinct causes (Fisher). Findings
            about numbers count only where its own time is not known
`flagged`   its distinct flagged templates, by their p-values (Fisher)
`time`      its own time above the usual, as a share of all its usual time, where lines say durations and
            traces

All but the last two grow with the logarithm of what they count: a loud unit does not win by loudness alone.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.watching.units.own_time import excess
from pipeline.watching.units.tails import (
    Floats,
    conformal_nats,
    conformal_nats_left_out,
    student_nats,
    student_nats_left_out,
)
from pipeline.watching.units.unit_lines import UnitTable
from pipeline.watching.units.values import UnitEvidence

MAX_NORMAL: Final = 1_000  # distinct count vectors of normal units that others are compared with
LEAST_NORMAL: Final = 50  # of them, where many units with many templates are judged
WORK: Final = 2_000_000_000  # differences of counts; a core takes about 6 s for them
MAX_TEMPLATES: Final = 1_000  # columns of a count vector; rarer templates share OTHERS columns
OTHERS: Final = 16
_CELLS: Final = 4_000_000  # of one table of differences, 16 MB
UNMEASURED_P: Final = 0.01  # of a line that words alone flagged
LEAST_P: Final = 1e-6  # of one cause: a single line decides nothing by itself


# Of a tail: the difference that is worth little, however equal the normal units are. Found on HDFS blocks,
# nodes of Blue Gene/L, traces and the samples (docs/LOG.md); half and twice of them change little.
LEAST_SCALE: Final = {
    UnitEvidence.NEW: 0.5,
    UnitEvidence.COUNTS: 1.0,
    UnitEvidence.SESSIONS: 1.0,
    UnitEvidence.FLAGGED: 1.0,
    UnitEvidence.TIME: 0.5,
}
ByEvidence = dict[UnitEvidence, Floats]


def surprises(judged: UnitTable, normal: UnitTable) -> tuple[ByEvidence, ByEvidence]:
    """Nats of each evidence, of judged units and of normal ones; each normal unit is left out of its own.

    Where both are one table, the judged units are compared with the others among them."""
    among = judged is normal
    vectors = _Vectors.of(normal, judged)
    inside = _plain(normal) | {
        UnitEvidence.NEW: _new_left_out(normal),
        UnitEvidence.TIME: excess(normal.times, normal.times, normal.size),
        UnitEvidence.COUNTS: vectors.left_out(),
    }
    of_normal: ByEvidence = {}
    for kind, scale in LEAST_SCALE.items():
        if kind is UnitEvidence.COUNTS:
            of_normal[kind] = conformal_nats_left_out(inside[kind], _wide(inside[kind], scale))
        else:
            of_normal[kind] = student_nats_left_out(inside[kind], scale)
    if among:
        return of_normal, of_normal
    values = _plain(judged) | {
        UnitEvidence.NEW: _excess(
            _counted(new_patterns(judged, normal), judged.size), judged, _share(normal)
        ),
        UnitEvidence.COUNTS: vectors.distances(judged),
        UnitEvidence.TIME: excess(judged.times, normal.times, judged.size),
    }
    of_judged: ByEvidence = {}
    for kind, scale in LEAST_SCALE.items():
        if kind is UnitEvidence.COUNTS:
            of_judged[kind] = conformal_nats(values[kind], inside[kind], _wide(inside[kind], scale))
        else:
            of_judged[kind] = student_nats(values[kind], inside[kind], scale)
    return of_judged, of_normal


def _wide(distances: Floats, scale: float) -> float:
    """Normal units that have little in common are far from each other: an excess is worth less there."""
    return max(scale, float(np.median(distances))) if distances.size else scale


def new_patterns(judged: UnitTable, normal: UnitTable) -> pl.DataFrame:
    """The rows of `patterns` of judged units whose pattern no normal unit has."""
    return judged.patterns.join(normal.patterns.select("pattern_id").unique(), on="pattern_id", how="anti")


def _once(normal: UnitTable) -> pl.DataFrame:
    """The rows of normal units whose pattern no other one has."""
    return normal.patterns.filter(pl.col("at").n_unique().over("pattern_id") == 1)


def _new_left_out(normal: UnitTable) -> Floats:
    return _excess(_counted(_once(normal), normal.size), normal, _share(normal))


def _share(normal: UnitTable) -> float:
    """Of the patterns of a normal unit, those that no other one has."""
    own = _counted(_once(normal), normal.size).sum()
    return float(own / max(1.0, _counted(normal.patterns, normal.size).sum()))


def _excess(new: Floats, table: UnitTable, share: float) -> Floats:
    """By how many e-folds the new patterns are more than a unit of so many patterns has."""
    found: Floats = np.log1p(new) - np.log1p(share * _counted(table.patterns, table.size))
    return found


def _counted(patterns: pl.DataFrame, size: int) -> Floats:
    """Distinct patterns of each unit."""
    counts = np.zeros(size)
    found = patterns.group_by("at").agg(pl.col("pattern_id").n_unique().alias("n"))
    counts[found["at"].to_numpy()] = found["n"].to_numpy()
    return counts


def _plain(table: UnitTable) -> ByEvidence:
    """The evidence that needs no other unit."""
    return {
        UnitEvidence.SESSIONS: _fisher(table.findings, table.size),
        UnitEvidence.FLAGGED: _fisher(table.patterns.filter(pl.col("flagged") > 0), table.size),
    }


def _fisher(rows: pl.DataFrame, size: int) -> Floats:
    """The sum over distinct templates of -log of their least p-value."""
    p = pl.col("p_value").fill_null(UNMEASURED_P).clip(LEAST_P, 1.0)
    sums = (
        rows.group_by("at", "template_id")
        .agg(p.min())
        .group_by("at", maintain_order=True)
        .agg((-pl.col("p_value").log()).sum().alias("nats"))
    )
    values = np.zeros(size)
    values[sums["at"].to_numpy()] = sums["nats"].to_numpy()
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vectors:
    """Count vectors of normal units, each distinct one once."""

    columns: dict[int, int]
    rows: npt.NDArray[np.float32]  # (B, T), log2(1 + count)
    times: npt.NDArray[np.int64]  # (B,) units that have it
    row_of: npt.NDArray[np.int64]  # (n,) the row of each normal unit, -1 where it is left out

    @classmethod
    def of(cls, normal: UnitTable, judged: UnitTable) -> "_Vectors":
        spread = (
            pl.concat([normal.patterns, judged.patterns])
            .group_by("template_id")
            .agg(pl.len().alias("units"))
            .sort("units", "template_id", descending=[True, False])
            .head(MAX_TEMPLATES)
        )
        columns = {template: at for at, template in enumerate(spread["template_id"].to_list())}
        every = _matrix(normal, columns)
        rows, row_of, times = np.unique(every, axis=0, return_inverse=True, return_counts=True)
        row_of = row_of.reshape(-1)
        most = min(MAX_NORMAL, max(LEAST_NORMAL, WORK // max(1, judged.size * every.shape[1])))
        if len(rows) > most:  # the most frequent, and a fixed draw of the others
            order = np.argsort(-times, kind="stable")
            drawn = np.random.default_rng(0).permutation(order[most // 2 :])
            kept = np.sort(np.concatenate([order[: most // 2], drawn[: most - most // 2]]))
            place = np.full(len(rows), -1)
            place[kept] = np.arange(len(kept))
            rows, times, row_of = rows[kept], times[kept], place[row_of]
        return cls(columns=columns, rows=rows, times=times, row_of=row_of)

    def distances(self, table: UnitTable) -> Floats:
        """Of each unit to the nearest normal one."""
        every, row_of = np.unique(_matrix(table, self.columns), axis=0, return_inverse=True)
        return self._nearest(every, itself=None)[row_of.reshape(-1)]

    def left_out(self) -> Floats:
        """Of each normal unit to the nearest other one; 0 for one that is left out of the table."""
        alone = np.flatnonzero(self.times == 1)
        found = np.zeros(len(self.rows))
        found[alone] = self._nearest(self.rows[alone], itself=alone)
        return np.where(self.row_of < 0, np.median(found) if found.size else 0.0, found[self.row_of])

    def _nearest(self, vectors: npt.NDArray[np.float32], *, itself: "npt.NDArray[np.int64] | None") -> Floats:
        found = np.zeros(len(vectors))
        if len(self.rows) < (1 if itself is None else 2):
            return found
        step = max(1, _CELLS // max(1, self.rows.size))
        for begin in range(0, len(vectors), step):
            part = vectors[begin : begin + step]
            table = np.abs(part[:, None] - self.rows[None]).sum(axis=2)
            if itself is not None:
                table[np.arange(len(part)), itself[begin : begin + step]] = np.inf
            found[begin : begin + len(part)] = table.min(axis=1)
        return found


def _matrix(table: UnitTable, columns: dict[int, int]) -> npt.NDArray[np.float32]:
    """(units, templates) of log2(1 + count)."""
    width = len(columns)
    counted = table.patterns.group_by("at", "template_id").agg(pl.col("n").sum())
    places = counted["template_id"].replace_strict(columns, default=None, return_dtype=pl.Int64)
    other = width + (counted["template_id"] % OTHERS)
    at = pl.select(pl.coalesce(places, other)).to_series().to_numpy()
    counts = np.zeros((table.size, width + OTHERS), dtype=np.float32)
    np.add.at(counts, (counted["at"].to_numpy(), at), counted["n"].to_numpy())
    logs: npt.NDArray[np.float32] = np.log2(1.0 + counts)
    return logs
