"""Which unit of a run is unusual: its hosts, files or services compared with those of the baseline.

A unit that the baseline has too is compared with its own windows there. All windows are about equally long,
and there are at least LEAST_WINDOWS of each span, so that a unit shows how much it varies. Units that the
baseline has not, as applications and instances that live for minutes, are compared as a whole.

Of the kinds of units, the one is shown whose first unit stands out the most.
"""

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

KINDS: Final[tuple[UnitKind, ...]] = ("host", "workload", "service")  # of equal ones the first is shown
LEAST_UNITS: Final = 3
LEAST_WINDOWS: Final = 6
MOST_WINDOWS: Final = 144  # of a run
SHOWN: Final = 10
_KNOWN: Final = 0.5  # of the units of a run that the baseline has; with fewer they are compared as a whole
# Names of classes and modules, which programs write where others write a service.
_CODE: Final = r"[a-z][A-Z]|\$|^\w+(?:\.\w+){2,}$|::|<init>|\.py$"


def unusual_units(settings: Settings, texts: Mapping[int, str]) -> dict[str, Any] | None:
    """The units of a run and its baseline, ready for JSON: by, judged, normal, unusual, level, units.

    None without a baseline that has times, and where no kind has LEAST_UNITS to compare. `texts`: of
    templates. Raises SinkUnavailable, BadPayload."""
    run, normal = (_span(settings, purpose) for purpose in (Purpose.SCORE, Purpose.BASELINE))
    if run is None or normal is None:
        return None
    found = [
        ranked
        for kind in KINDS
        if len(run.units[kind]) >= LEAST_UNITS and normal.units[kind]
        if (ranked := _ranked(settings, kind, run, normal, texts)) is not None
    ]
    return min(found, key=_standing_out)[1] if found else None


def _standing_out(ranked: tuple[float, dict[str, Any]]) -> tuple[bool, float, float]:
    """Of a host, a file and a service that are unusual, the one of which fewer others are."""
    p_value, facts = ranked
    return not facts["unusual"], (facts["unusual"] or 0) / facts["judged"], p_value


def _ranked(
    settings: Settings, kind: UnitKind, run: "_Span", normal: "_Span", texts: Mapping[int, str]
) -> tuple[float, dict[str, Any]] | None:
    """The least p-value, corrected for the number of units, and the answer; None with too many patterns."""
    again = len(run.units[kind] & normal.units[kind]) >= _KNOWN * len(run.units[kind])
    width = min(run.length, normal.length) / LEAST_WINDOWS
    width = max(width, run.length / MOST_WINDOWS) if again else max(run.length, normal.length)
    tables = []
    with suppress(BadInput):  # more patterns than are compared
        for purpose, span in ((Purpose.SCORE, run), (Purpose.BASELINE, normal)):
            # Windows fill the span: a last one that is cut short would be unlike every other one.
            windows = max(1, round(span.length / width))
            query = ResultQuery(limit=1, since=span.first, until=span.first + span.length)
            with closing(FileAnswers(parquet_of(settings, purpose), limit_s=None)) as answers:
                table, _ = fold_units(
                    answers, settings, kind, query, since=span.first, width=span.length / windows
                )
            tables.append(table)
    if len(tables) < len(Purpose) or not all(table.size for table in tables):
        return None
    ranking = rank_units(busiest_units(tables[0]), drawn_units(tables[1]), texts, limit=SHOWN)
    return ranking.units[0].p_value * ranking.judged, {
        "by": kind,
        "judged": ranking.judged,
        "normal": len(normal.units[kind]),
        "level": ranking.level,
        "unusual": ranking.unusual,
        "units": [asdict(unit) for unit in ranking.units],
    }


@dataclass(frozen=True, slots=True)
class _Span:
    """The time of lines, and the units that they name."""

    first: datetime
    length: timedelta
    units: Mapping[UnitKind, frozenset[str]]


def _span(settings: Settings, purpose: Purpose) -> _Span | None:
    """That of lines with a time; None without any."""
    lines = parquet_of(settings, purpose).scan().filter(of_lines() & is_timed())
    row = (
        lines.select(
            pl.col("timestamp").min().alias("first"),
            pl.col("timestamp").max().alias("last"),
            *(pl.col(kind).drop_nulls().unique().implode().alias(kind) for kind in KINDS),
        )
        .collect(engine="streaming")
        .row(0, named=True)
    )
    if row["first"] is None:
        return None
    names = {kind: frozenset(row[kind]) for kind in KINDS}
    classes = pl.Series(sorted(names["service"]), dtype=pl.String).str.contains(_CODE).sum()
    if 2 * classes > len(names["service"]):
        names["service"] = frozenset()
    length = row["last"] - row["first"] + timedelta(seconds=1)
    return _Span(row["first"], length, names)
