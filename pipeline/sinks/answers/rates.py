"""Lines of workloads in equal parts of a span: one pass over the counts, and over lines without counts."""

from typing import Any, Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.pattern_query import RATE_SCHEMA, PatternQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.engine import Engine
from pipeline.sinks.answers.patterns import (
    RateFiles,
    buckets_within,
    chosen_lines,
    slotted_counts,
    width_us,
)
from pipeline.sinks.rollups import FINE_SCHEMA

_COLUMNS: Final = "workload, template_id, slot, records, anomalous, severe"
_READ: Final[dict[str, Any]] = {
    name: RESULT_SCHEMA[name] for name in ("workload", "template_id", "timestamp", "anomalous", "level")
}
_LINES: Final = """
SELECT
    workload,
    coalesce(template_id, 0) AS template_id,
    greatest(0, least($buckets - 1, (epoch_us("timestamp") - {since}) // {width})) AS slot,
    1 AS records,
    coalesce(anomalous, false)::BIGINT AS anomalous,
    coalesce(level IN ({severe}), false)::BIGINT AS severe
FROM {name}
WHERE {wanted}
"""
_RATES: Final = """
WITH slots AS (
    SELECT
        workload,
        slot,
        sum(records)::BIGINT AS records,
        sum(anomalous)::BIGINT AS anomalous,
        sum(severe)::BIGINT AS severe
    FROM ({pieces})
    WHERE template_id >= 0 AND {chosen}
    GROUP BY workload, slot
), sums AS (
    SELECT
        workload,
        sum(records)::BIGINT AS records,
        sum(anomalous)::BIGINT AS anomalous,
        sum(severe)::BIGINT AS severe,
        map(list(slot), list(records)) AS known
    FROM slots
    GROUP BY workload
)
SELECT
    workload,
    records,
    anomalous,
    severe,
    [coalesce(known[slot], 0) FOR slot IN range($buckets)] AS trend
FROM sums
ORDER BY workload
"""


def workload_rates(engine: Engine, query: PatternQuery, files: RateFiles) -> pl.DataFrame:
    """RATE_SCHEMA by workload. Raises AnswerCancelled, BadInput, BadPayload."""
    chosen, parameters = chosen_lines(query)
    bounds, width = files.bounds, width_us(query)
    counts = slotted_counts(bounds["begin"], width)
    span = buckets_within(bounds["begin"], bounds["end"])
    whole = buckets_within(bounds["whole_begin"], bounds["whole_end"])
    pieces = []
    with engine.question():
        # Those by five minutes, where the span is short; each line counts in one of them.
        for name, found, wanted in (
            ("inner_counts", files.fine_inner or files.inner, "true"),
            ("border_counts", files.fine_border or files.border, span),
            ("cut_counts", files.cut, whole),
        ):
            if found:
                engine.view(name, found, FINE_SCHEMA)
                pieces.append(f"SELECT {_COLUMNS} FROM ({counts} {name} WHERE {wanted})")
        ends = f"{_between(bounds['begin'], bounds['whole_begin'])} OR {_between(bounds['whole_end'], bounds['end'])}"
        for name, found, wanted in (
            ("lines", files.lines, _between(bounds["begin"], bounds["end"])),
            ("cut_lines", files.cut_lines, ends),
        ):
            if found or not (pieces or name == "lines"):
                engine.view(name, found, _READ)
                severe = ", ".join(f"'{level}'" for level in sorted(ERROR_LEVELS))
                pieces.append(
                    _LINES.format(name=name, wanted=wanted, since=bounds["begin"], width=width, severe=severe)
                )
        question = _RATES.format(pieces=" UNION ALL ".join(pieces), chosen=chosen)
        return engine.rows(question, parameters | {"buckets": query.buckets}, schema=RATE_SCHEMA)


def _between(begin_us: int, end_us: int) -> str:
    return f'("timestamp" >= make_timestamptz({begin_us}) AND "timestamp" < make_timestamptz({end_us}))'
