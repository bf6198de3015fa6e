"""Calm new lines from files: one pass over the findings of sealed parts and over the lines of the others."""

from collections.abc import Sequence
from typing import Final

import polars as pl

from pipeline.records.news import DAY_US, MESSAGE_CHARS, NEWS_SCHEMA, NOT_CALM, NOVEL, NewsQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.verdict import Reason
from pipeline.sinks.answers.engine import Engine, RowFile, one_of
from pipeline.units import epoch_us

_KINDS: Final = "[split_part(one, ':', 1) FOR one IN reasons]"
# Reasons of the lines of a fault, which may be millions, are not looked at.
_CALM: Final = f"""(
    CASE
        WHEN anomalous IS NOT TRUE OR list_contains({_KINDS}, '{Reason.MARKED}') THEN false
        WHEN list_contains({_KINDS}, '{Reason.NEVER_SAID}') THEN true
        WHEN level IN ({", ".join(f"'{level}'" for level in NOT_CALM)}) THEN false
        ELSE len(reasons) > 0 AND list_has_all([{", ".join(f"'{kind}'" for kind in sorted(NOVEL))}], {_KINDS})
    END
)"""
# Memory grows with distinct masked lines, not with records.
_NEWS: Final = f"""
WITH patterns AS (
    SELECT
        workload,
        coalesce(template_id, 0) AS template_id,
        pattern_id,
        count(*) AS records,
        min("timestamp") AS "first",
        max("timestamp") AS "last",
        max(score) AS score,
        min(struct_pack(
            sense := -score, "at" := "timestamp", record_id := record_id, level := level,
            message := left(message, {MESSAGE_CHARS}), reasons := reasons
        )) AS strangest
    FROM lines
    WHERE "timestamp" >= make_timestamptz($past) AND "timestamp" < make_timestamptz($until)
        AND coalesce(template_id, 0) >= 0 AND {{chosen}} AND {_CALM}
    GROUP BY ALL
), templates AS (
    SELECT
        workload,
        template_id,
        sum(records)::BIGINT AS records,
        min("first") AS "first",
        max("last") AS "last",
        max(score) AS score,
        min(strangest) AS strangest,
        ($until - 1 - epoch_us(min("first"))) // {DAY_US} AS day
    FROM patterns
    WHERE "first" >= make_timestamptz($since)
    GROUP BY workload, template_id
), in_turns AS (
    SELECT *, row_number() OVER (PARTITION BY day, workload ORDER BY score DESC, "first", template_id) AS turn
    FROM templates
)
SELECT in_turns.* EXCLUDE (strangest), unnest(strangest)
FROM in_turns
QUALIFY row_number() OVER (PARTITION BY day ORDER BY turn, score DESC, "first", workload, template_id) <= $limit
ORDER BY turn, score DESC, "first", workload, template_id
"""


def calm_news(engine: Engine, files: Sequence[RowFile], query: NewsQuery) -> pl.DataFrame:
    """NEWS_SCHEMA: the strangest of each workload, then the second of each, and so on.

    Raises AnswerCancelled, BadInput, BadPayload."""
    parameters: dict[str, object] = {
        name: epoch_us(getattr(query, name)) for name in ("past", "since", "until")
    }
    chosen = "true" if query.workloads is None else one_of("workload", query.workloads, parameters)
    with engine.question():
        engine.view("lines", files, RESULT_SCHEMA)
        found = engine.rows(
            _NEWS.format(chosen=chosen),
            parameters | {"limit": query.limit},
            schema=NEWS_SCHEMA | {"sense": pl.Float64, "day": pl.Int64, "turn": pl.Int64},
        )
    return found.select(list(NEWS_SCHEMA))
