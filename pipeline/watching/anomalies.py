"""The anomalous templates of stored rows, as observations name them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.verdict import UNCLASSIFIED, Reason
from pipeline.watching.table import ObservedTable, Schema

MAX_ANOMALIES: Final = 200  # templates of one batch; more are an unknown format, and one incident
TEXT_CHARS: Final = 300
RAW_CHARS: Final = 600

ANOMALIES: Final = Schema(
    {
        "template_id": pl.Int64,
        "n": pl.UInt32,
        "first": pl.Int64,  # event time, milliseconds since the epoch
        "last": pl.Int64,
        "score": pl.Float64,
        "p_value": pl.Float64,  # the lowest, null where none has one
        "level": pl.String,  # the most severe
        # 3: error-like by level or reason, 2: warning or marked, 1: neither (findings.finding_severity).
        "severity": pl.Int64,
        "text": pl.String,  # of its first record
        "raw": pl.String,  # of that record, with what stands beside its message
        "source": pl.String,  # where that record stands
        "line": pl.UInt64,
        "new": pl.Boolean,  # no training has seen the template
        "timed": pl.Boolean,  # false: no record has a time, and `first` and `last` are those of arrival
    }
)
Ints = npt.NDArray[np.int64]
ANOMALY_COLUMNS: Final = (
    "timestamp", "timed", "line", "lines", "template_id", "anomalous", "score", "p_value", "level", "reasons", "message",
    "raw", "source",
)  # fmt: skip


def anomaly_tables(found: pl.DataFrame, of: Ints) -> dict[int, ObservedTable]:
    """ANOMALIES of each workload. `found`: ANOMALY_COLUMNS of anomalous records with a time, at least one.
    `of`: the number of the workload of each.

    They are few, and a query that groups them waits some eighty times for a thread of Polars."""
    groups = _AnomalyGroups.of_rows(found, of)
    scores = groups.values["score"]
    unscored_first = np.where(np.isnan(scores), np.inf, scores)
    order = np.lexsort((-groups.values["n"], -unscored_first, groups.of))
    numbers, starts, counts = np.unique(groups.of[order], return_index=True, return_counts=True)
    if counts.max() > MAX_ANOMALIES:
        order = order[np.arange(order.size) - np.repeat(starts, counts) < MAX_ANOMALIES]
        counts = np.minimum(counts, MAX_ANOMALIES)
    table = groups.table(found, order)
    ends = np.cumsum(counts).tolist()
    return {
        number: table.slice(end - count, end)
        for number, count, end in zip(numbers.tolist(), counts.tolist(), ends, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnomalyGroups:
    """The anomalous rows of each workload and template."""

    of: Ints  # the workload's number
    first: Ints  # its first row
    values: dict[str, "npt.NDArray[Any]"]  # columns of ANOMALIES; `level` as its rank

    @classmethod
    def of_rows(cls, found: pl.DataFrame, of: Ints) -> Self:
        ranks = {name: at for at, name in enumerate(LEVELS)}
        rank = np.array([ranks.get(level, -1) for level in found["level"].to_list()])
        has_error, is_marked, is_new = _with_reasons(
            found["reasons"], (Reason.ERROR_SEVERITY, Reason.MARKED, Reason.NEW_TEMPLATE)
        )
        severe = np.isin(rank, [ranks[level] for level in ERROR_LEVELS]) | has_error
        warned = (rank == ranks["warning"]) | is_marked
        columns = found.select(
            pl.col("timestamp").dt.epoch("ms"),
            pl.col("timed").fill_null(value=True),
            pl.col("template_id").fill_null(UNCLASSIFIED),
        )
        at, timed, template = (one.to_numpy() for one in columns.get_columns())
        order = np.lexsort((found["line"].to_numpy(), at, template, of))
        changes = (np.diff(column[order], prepend=column[order[:1]] - 1) != 0 for column in (of, template))
        starts = np.flatnonzero(np.logical_or.reduce(list(changes)))
        any_timed = np.logical_or.reduceat(timed[order], starts)
        # An arrival says nothing of when a timed fault began.
        counts = timed | ~np.repeat(any_timed, np.diff(starts, append=of.size))[np.argsort(order)]
        bounds = np.iinfo(np.int64)
        return cls(
            of=of[order][starts],
            first=order[starts],
            values={
                "template_id": template[order][starts],
                "n": np.diff(starts, append=of.size),
                "first": np.minimum.reduceat(np.where(counts, at, bounds.max)[order], starts),
                "last": np.maximum.reduceat(np.where(counts, at, bounds.min)[order], starts),
                "score": np.fmax.reduceat(found["score"].to_numpy()[order], starts),
                "p_value": np.fmin.reduceat(found["p_value"].to_numpy()[order], starts),
                "level": np.maximum.reduceat(rank[order], starts),
                "severity": np.maximum.reduceat(np.where(severe, 3, np.where(warned, 2, 1))[order], starts),
                "new": np.logical_or.reduceat(is_new[order], starts),
                "timed": any_timed,
            },
        )

    def table(self, found: pl.DataFrame, order: Ints) -> ObservedTable:
        """ANOMALIES of these groups, in this order."""
        columns: dict[str, list[Any]] = {name: one[order].tolist() for name, one in self.values.items()}
        for name in ("score", "p_value"):
            columns[name] = [None if math.isnan(value) else value for value in columns[name]]
        columns["level"] = [None if rank < 0 else LEVELS[rank] for rank in columns["level"]]
        first = self.first[order]
        of_first = {name: found[name][first].to_list() for name in ("message", "raw", "source", "line")}
        texts = zip(of_first["message"], of_first["raw"], strict=True)
        columns["text"] = [(raw or "" if text is None else text)[:TEXT_CHARS] for text, raw in texts]
        columns["raw"] = [None if raw is None else raw[:RAW_CHARS] for raw in of_first["raw"]]
        columns |= {name: of_first[name] for name in ("source", "line")}
        return ObservedTable(ANOMALIES, {name: columns[name] for name in ANOMALIES.types})


def _with_reasons(reasons: pl.Series, wanted: Sequence[Reason]) -> "list[npt.NDArray[np.bool_]]":
    """The rows of a column of reasons that have each of these."""
    counts = reasons.list.len().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(counts.size), counts)
    each = reasons.filter(pl.Series(counts > 0)).explode().to_frame("reason")
    hits = each.select(
        pl.col("reason").str.starts_with(name.value).fill_null(value=False).alias(name.value)
        for name in wanted
    )
    found = []
    for hit in hits.get_columns():
        flags = np.zeros(counts.size, dtype=np.bool_)
        flags[rows[hit.to_numpy()]] = True
        found.append(flags)
    return found
