"""Questions about all lines of some files: what a report of a run shows beside its findings."""

from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from pipeline.records.schema import RESULT_SCHEMA, UTC_US
from pipeline.sinks.answers.engine import Engine, RowFile

COUNT_NAMES: Final = (
    "records",
    "lines",
    "anomalous",
    "anomalous_lines",
    "not_judged",
    "not_judged_lines",
    "untimed",
    "untimed_lines",
)
COUNTS_SCHEMA: Final[dict[str, Any]] = {
    "workload": pl.String,
    "level": pl.String,
    "model_version": pl.String,
    **dict.fromkeys(COUNT_NAMES, pl.Int64),
    "first": UTC_US,  # without records that have no time
    "last": UTC_US,
}
TIMELINE_SCHEMA: Final[dict[str, Any]] = {"start": pl.Int64, "lines": pl.Int64, "anomalous": pl.Int64}
EXCERPT_SCHEMA: Final[dict[str, Any]] = {
    "template_id": pl.Int64,
    "source": pl.String,
    "line": pl.UInt64,
    "raw": pl.String,
}

# Findings in sessions and rates are no lines. Foreign records do not say whether they are timed, and count.
_LINES: Final = """(
    SELECT *, timed IS DISTINCT FROM false AS stamped FROM lines WHERE coalesce(template_id, 0) >= 0
)"""
_COUNTS: Final = f"""
SELECT
    workload,
    level,
    model_version,
    count(*) AS records,
    coalesce(sum(lines), 0)::BIGINT AS lines,
    count(*) FILTER (WHERE anomalous) AS anomalous,
    coalesce(sum(lines) FILTER (WHERE anomalous), 0)::BIGINT AS anomalous_lines,
    count(*) FILTER (WHERE score IS NULL) AS not_judged,
    coalesce(sum(lines) FILTER (WHERE score IS NULL), 0)::BIGINT AS not_judged_lines,
    count(*) FILTER (WHERE NOT stamped) AS untimed,
    coalesce(sum(lines) FILTER (WHERE NOT stamped), 0)::BIGINT AS untimed_lines,
    min("timestamp") FILTER (WHERE stamped) AS "first",
    max("timestamp") FILTER (WHERE stamped) AS "last"
FROM {_LINES}
GROUP BY workload, level, model_version
"""
_TIMELINE: Final = f"""
SELECT
    floor(epoch_us("timestamp") / ($width_s * 1e6))::BIGINT * $width_s AS start,
    coalesce(sum(lines), 0)::BIGINT AS lines,
    coalesce(sum(lines) FILTER (WHERE anomalous), 0)::BIGINT AS anomalous
FROM {_LINES}
WHERE stamped
GROUP BY start
"""
# The numbers of rows are found first: texts of millions of rows would be read for some hundred of them.
_FIRSTS: Final = """
SELECT (place // 4294967296)::BIGINT AS file, (place % 4294967296)::BIGINT AS row
FROM (
    SELECT min(file * 4294967296 + row) AS place
    FROM (SELECT coalesce(template_id, 0) AS template_id, file, row FROM lines)
    WHERE template_id >= 0
    GROUP BY template_id
)
"""
_SAMPLES: Final = """
SELECT
    coalesce(template_id, 0) AS template_id,
    coalesce(source, '') AS source,
    coalesce(line, 0) AS line,
    left(coalesce(raw, message, ''), $chars) AS raw
FROM lines SEMI JOIN firsts USING (file, row)
ORDER BY 1
"""


def counts_of(engine: Engine, files: Sequence[RowFile]) -> pl.DataFrame:
    """COUNTS_SCHEMA: how many lines each workload, level and model version has.

    Raises AnswerCancelled, BadInput, BadPayload."""
    with engine.question():
        engine.view("lines", files, RESULT_SCHEMA)
        return engine.rows(_COUNTS, schema=COUNTS_SCHEMA)


def timeline_of(engine: Engine, files: Sequence[RowFile], width_s: int) -> pl.DataFrame:
    """TIMELINE_SCHEMA: lines in spans of `width_s`, by their begin in seconds since 1970, without empty ones.

    Raises AnswerCancelled, BadInput, BadPayload."""
    with engine.question():
        engine.view("lines", files, RESULT_SCHEMA)
        return engine.rows(_TIMELINE, {"width_s": width_s}, schema=TIMELINE_SCHEMA)


def samples_of(engine: Engine, files: Sequence[RowFile], chars: int) -> pl.DataFrame:
    """The first stored record of each template (0: unclassified): template_id, source, line, and raw cut at
    `chars` characters.

    Raises AnswerCancelled, BadInput, BadPayload."""
    with engine.question():
        engine.view("lines", files, RESULT_SCHEMA, numbered=True)
        engine.table("firsts", _FIRSTS)
        return engine.rows(_SAMPLES, {"chars": chars}, schema=EXCERPT_SCHEMA)
