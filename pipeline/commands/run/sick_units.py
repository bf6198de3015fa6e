"""Which unit of a run is sick: its services, hosts or files beside those of the baseline.

All windows are equally long, so that a unit is compared with one that spoke as long. A unit that has several
windows stands where its sickest one does.
"""

import math
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import polars as pl

from pipeline.errors import BadInput
from pipeline.records.batch import Purpose
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import is_timed, of_lines
from pipeline.records.unit_query import UnitKind
from pipeline.service.stored.units import busiest_units, drawn_units, fold_units
from pipeline.settings import Settings
from pipeline.sinks.answers.files import FileAnswers
from pipeline.sinks.choose import parquet_of
from pipeline.watching.units.ranking import rank_units
from pipeline.watching.units.values import RankedUnit

KINDS: Final[tuple[UnitKind, ...]] = ("service", "host", "source")  # the first with enough units is ranked
LEAST_UNITS: Final = 3
WINDOWS: Final = 24  # of a run at most
SHOWN: Final = 10


def sick_units(settings: Settings, texts: Mapping[int, str]) -> dict[str, Any] | None:
    """The units of a run and its baseline, ready for JSON: by, judged, normal, among, level, units.

    None without a baseline that has times, and where there are fewer than LEAST_UNITS to compare. `texts`: of
    templates. Raises SinkUnavailable, BadPayload."""
    spans = {purpose: _span(settings, purpose) for purpose in Purpose}
    run, normal = spans[Purpose.SCORE], spans[Purpose.BASELINE]
    if run is None or normal is None:
        return None
    windows = min(WINDOWS, math.ceil(run.length / min(run.length, normal.length)))
    width = run.length / windows
    by = next((kind for kind in KINDS if run.units[kind] >= LEAST_UNITS), None)
    if by is None:
        return None
    tables = {}
    with suppress(BadInput):  # more patterns than are compared
        for purpose, span in ((Purpose.SCORE, run), (Purpose.BASELINE, normal)):
            # A window that the baseline fills in part would be unlike every other one.
            whole = max(1, span.length // width)
            query = ResultQuery(limit=1, since=span.first, until=span.first + whole * width)
            with closing(FileAnswers(parquet_of(settings, purpose), limit_s=None)) as answers:
                tables[purpose], _ = fold_units(answers, settings, by, query, since=span.first, width=width)
    if len(tables) < len(Purpose) or not all(table.size for table in tables.values()):
        return None
    ranking = rank_units(busiest_units(tables[Purpose.SCORE]), drawn_units(tables[Purpose.BASELINE]), texts)
    sickest: dict[str, RankedUnit] = {}
    for unit in ranking.units:
        sickest.setdefault(unit.unit, unit)
    return {
        "by": by,
        "judged": len(sickest),
        "normal": ranking.normal,
        "level": None if ranking.threshold is None else ranking.level,
        "units": [asdict(unit) for unit in list(sickest.values())[:SHOWN]],
    }


@dataclass(frozen=True, slots=True)
class _Span:
    """The time of lines, and how many units of each kind they name."""

    first: datetime
    length: timedelta
    units: Mapping[str, int]


def _span(settings: Settings, purpose: Purpose) -> _Span | None:
    """That of lines with a time; None without any."""
    row = (
        parquet_of(settings, purpose)
        .scan()
        .filter(of_lines() & is_timed())
        .select(
            pl.col("timestamp").min().alias("first"),
            pl.col("timestamp").max().alias("last"),
            *(pl.col(kind).drop_nulls().n_unique().alias(kind) for kind in KINDS),
        )
        .collect(engine="streaming")
        .row(0, named=True)
    )
    if row["first"] is None:
        return None
    length = row["last"] - row["first"] + timedelta(seconds=1)
    return _Span(row["first"], length, {kind: row[kind] for kind in KINDS})
