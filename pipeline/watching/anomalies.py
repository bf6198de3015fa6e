"""The anomalous templates of stored rows, as observations name them."""

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
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
ANOMALY_COLUMNS: Final = (
    "timestamp", "timed", "line", "lines", "template_id", "anomalous", "score", "level", "reasons", "message",
    "raw", "source",
)  # fmt: skip


def anomaly_tables(numbered: pl.DataFrame) -> dict[int, ObservedTable]:
    """ANOMALIES of each workload of rows with `of`, the number of the workload, and ANOMALY_COLUMNS.

    They are few, and a query that groups them waits some eighty times for a thread of Polars."""
    anomalous = pl.col("anomalous").fill_null(value=False) & pl.col("timestamp").is_not_null()
    found = numbered.filter(anomalous & (pl.col("lines") > 0))
    if found.is_empty():
        return {}
    groups = _AnomalyGroups.of_rows(found)
    of, scores = groups.of, groups.values["score"]
    unscored_first = np.where(np.isnan(scores), np.inf, scores)
    order = np.lexsort((-groups.values["n"], -unscored_first, of))
    numbers, starts = np.unique(of[order], return_index=True)
    tables: dict[int, ObservedTable] = {}
    for number, begin, end in zip(numbers.tolist(), starts, [*starts[1:], of.size], strict=True):
        tables[number] = groups.table(found, order[begin : min(end, begin + MAX_ANOMALIES)])
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnomalyGroups:
    """The anomalous rows of each workload and template."""

    of: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # the workload's number
    first: "np.ndarray[tuple[int], np.dtype[np.int64]]"  # its first row
    values: dict[str, "np.ndarray[tuple[int], np.dtype[Any]]"]  # columns of ANOMALIES; `level` as its rank

    @classmethod
    def of_rows(cls, found: pl.DataFrame) -> Self:
        ranks = {name: at for at, name in enumerate(LEVELS)}
        rank = np.array([ranks.get(level, -1) for level in found["level"].to_list()])
        says = _RowReasons(found["reasons"])
        severe = np.isin(rank, [ranks[level] for level in ERROR_LEVELS]) | says(Reason.ERROR_SEVERITY)
        warned = (rank == ranks["warning"]) | says(Reason.MARKED)
        at, timed = (
            found["timestamp"].dt.epoch("ms").to_numpy(),
            found["timed"].fill_null(value=True).to_numpy(),
        )
        of, template = found["of"].to_numpy(), found["template_id"].fill_null(UNCLASSIFIED).to_numpy()
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
                "level": np.maximum.reduceat(rank[order], starts),
                "severity": np.maximum.reduceat(np.where(severe, 3, np.where(warned, 2, 1))[order], starts),
                "new": np.logical_or.reduceat(says(Reason.NEW_TEMPLATE)[order], starts),
                "timed": any_timed,
            },
        )

    def table(
        self, found: pl.DataFrame, chosen: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> ObservedTable:
        """ANOMALIES of these groups."""
        columns: dict[str, list[Any]] = {name: one[chosen].tolist() for name, one in self.values.items()}
        columns["score"] = [None if math.isnan(score) else score for score in columns["score"]]
        columns["level"] = [None if rank < 0 else LEVELS[rank] for rank in columns["level"]]
        of_first = {
            name: found[name].gather(self.first[chosen]).to_list()
            for name in ("message", "raw", "source", "line")
        }
        texts = zip(of_first["message"], of_first["raw"], strict=True)
        columns["text"] = [(raw or "" if text is None else text)[:TEXT_CHARS] for text, raw in texts]
        columns["raw"] = [None if raw is None else raw[:RAW_CHARS] for raw in of_first["raw"]]
        columns |= {name: of_first[name] for name in ("source", "line")}
        return ObservedTable(ANOMALIES, {name: columns[name] for name in ANOMALIES.types})


class _RowReasons:
    """The rows of a column of reasons that have one of them."""

    def __init__(self, reasons: pl.Series) -> None:
        counts = reasons.list.len().fill_null(0).to_numpy()
        self._rows = np.repeat(np.arange(counts.size), counts)
        self._reasons = reasons.filter(pl.Series(counts > 0)).explode()
        self._height = counts.size

    def __call__(self, name: Reason) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
        found = np.zeros(self._height, dtype=np.bool_)
        found[self._rows[self._reasons.str.starts_with(name.value).fill_null(value=False).to_numpy()]] = True
        return found
