"""Patterns from files: counts by the hour and five minutes where there are some, and lines for the others.

Lines of parts that are not sealed, and of parts that lie only partly in a span, are counted once for sums and
trend together. Samples and trends are read for the patterns of a page alone."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.pattern_query import PATTERN_ORDERS, PATTERN_SCHEMA, SAMPLE_CHARS, PatternQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.sinks.answers.engine import Engine, RowFile, one_of
from pipeline.sinks.rollups import FINE_SCHEMA, RATES_SCHEMA
from pipeline.units import epoch_us

# Trends of longer spans are read from counts by the hour.
FINE_SPAN: Final = timedelta(days=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFiles:
    """The files with the counts of a span [begin, end). Each line counts in one of `inner`, `border`,
    `lines`.

    `fine_inner` and `fine_border`: the counts of the same parts for the trend of a short span, by five
    minutes; of a long one both are empty."""

    begin: datetime
    end: datetime
    inner: tuple[RowFile, ...] = ()  # counts by the hour, of parts that are in the span as a whole
    border: tuple[RowFile, ...] = ()  # of other parts, whose lines have expired
    lines: tuple[RowFile, ...] = ()
    fine_inner: tuple[RowFile, ...] = ()
    fine_border: tuple[RowFile, ...] = ()


# Counts of lines, for sums and trend.
_LINES: Final = """
SELECT
    workload,
    template_id,
    greatest(0, least($buckets - 1, (epoch_us("timestamp") - $since) // $width)) AS slot,
    count(*) AS records,
    count(*) FILTER (WHERE anomalous) AS anomalous,
    count(*) FILTER (WHERE level IN ({severe})) AS severe,
    max(score) AS score,
    min("timestamp") AS "first",
    max("timestamp") AS "last",
    any_value(left(message, {chars})) AS sample
FROM (SELECT * REPLACE (coalesce(template_id, 0) AS template_id) FROM lines)
WHERE "timestamp" >= make_timestamptz($begin) AND "timestamp" < make_timestamptz($end)
    AND template_id >= 0 AND {chosen}
GROUP BY ALL
"""
# The counts of both spans in these columns.
_COUNTS: Final = """
SELECT true AS now, {columns} FROM ({slotted} now_inner) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({slotted} now_border WHERE {now_within}) WHERE {chosen}
UNION ALL
SELECT false AS now, {columns} FROM ({slotted} then_inner) WHERE {chosen}
UNION ALL
SELECT false AS now, {columns} FROM ({slotted} then_border WHERE {then_within}) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM now_lines
UNION ALL
SELECT false AS now, {columns} FROM then_lines
"""
# The counts by five minutes, where they give the trend.
_FINE: Final = """
SELECT true AS now, {columns} FROM ({slotted} now_fine_inner) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({slotted} now_fine_border WHERE {now_within}) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM now_lines
"""
_SLOTTED: Final = (
    "SELECT *, greatest(0, least($buckets - 1, (epoch_us(bucket) - $since) // $width)) AS slot FROM"
)
# The patterns that are shown, with what an order needs.
_SHOWN: Final = """
WITH spans AS (
    SELECT
        now,
        workload,
        template_id,
        sum(records) AS records,
        sum(anomalous) AS anomalous,
        min("first") AS "first",
        max("last") AS "last"
    FROM ({sums}) AS counted
    GROUP BY now, workload, template_id
), sums AS (
    SELECT
        workload,
        template_id,
        coalesce(sum(records) FILTER (WHERE now), 0)::BIGINT AS records,
        coalesce(sum(records) FILTER (WHERE NOT now), 0)::BIGINT AS before,
        coalesce(sum(anomalous) FILTER (WHERE now), 0)::BIGINT AS anomalous,
        coalesce(min("first") FILTER (WHERE now), min("first")) AS "first",
        coalesce(max("last") FILTER (WHERE now), max("last")) AS "last"
    FROM spans
    GROUP BY workload, template_id
), changed AS (
    SELECT *, (records + 1) / (before + 1) AS change FROM sums
)
SELECT *, row_number() OVER (ORDER BY {order}) AS place
FROM changed
WHERE {wanted}
ORDER BY place
{limit}
"""
_PAGE: Final = """
WITH few AS MATERIALIZED (
    SELECT now, place, slot, counts.records, counts.severe, score, sample
    FROM ({counts}) AS counts JOIN shown USING (workload, template_id)
), counted AS (
    SELECT
        place,
        coalesce(sum(severe) FILTER (WHERE now), 0)::BIGINT AS severe,
        max(score) FILTER (WHERE now) AS score,
        max(score) AS score_then,
        coalesce(any_value(sample) FILTER (WHERE now), any_value(sample)) AS sample
    FROM few GROUP BY place
), slots AS (
    SELECT place, slot, sum(records)::BIGINT AS records FROM ({trend}) WHERE now GROUP BY place, slot
), trends AS (
    SELECT place, list(coalesce(slots.records, 0) ORDER BY slot) AS trend
    FROM (SELECT place, unnest(range($buckets)) AS slot FROM shown) LEFT JOIN slots USING (place, slot)
    GROUP BY place
)
SELECT
    shown.* EXCLUDE (place),
    severe,
    CASE WHEN records > 0 THEN score ELSE score_then END AS score,
    sample,
    trend
FROM shown LEFT JOIN counted USING (place) LEFT JOIN trends USING (place)
ORDER BY place
"""
_NO_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


def pattern_page(
    engine: Engine, query: PatternQuery, now: RateFiles, then: RateFiles | None = None
) -> pl.DataFrame:
    """PATTERN_SCHEMA in the order that was asked for, from the files of the span and those of the other one.

    Raises AnswerCancelled, BadInput, BadPayload."""
    then = then or RateFiles(begin=_NO_TIME, end=_NO_TIME)
    by = [f'"{column}" {"DESC" if down else "ASC"}' for column, down in PATTERN_ORDERS[query.order]]
    chosen, parameters = _chosen(query)
    words = {
        "chosen": chosen,
        "order": ", ".join([*by, "workload", "template_id"]),
        "wanted": "anomalous > 0" if query.anomalous else "true",
        "limit": "" if query.limit is None else f"LIMIT {query.limit:d}",
        "severe": ", ".join(f"'{level}'" for level in sorted(ERROR_LEVELS)),
        "chars": SAMPLE_CHARS,
        "now_within": _within(now),
        "then_within": _within(then),
    }
    slots = {"since": epoch_us(query.since), "width": width_us(query), "buckets": query.buckets}
    words["sums"] = _COUNTS.format(
        slotted="SELECT * FROM", columns='workload, template_id, records, anomalous, "first", "last"', **words
    )
    columns = "workload, template_id, slot, records"
    fine = _FINE.format(slotted=_SLOTTED, columns=columns, **words)
    words["counts"] = _COUNTS.format(slotted=_SLOTTED, columns=f"{columns}, severe, score, sample", **words)
    words["trend"] = (
        f"SELECT now, place, slot, fine.records FROM ({fine}) AS fine JOIN shown USING (workload, template_id)"
        if now.fine_inner or now.fine_border
        else "SELECT * FROM few"
    )
    with engine.question():
        for span, files in (("now", now), ("then", then)):
            engine.view("lines", files.lines, RESULT_SCHEMA)
            bounds = {"begin": epoch_us(files.begin), "end": epoch_us(files.end)}
            engine.table(f"{span}_lines", _LINES.format(**words), parameters | slots | bounds)
            engine.view(f"{span}_inner", files.inner, RATES_SCHEMA)
            engine.view(f"{span}_border", files.border, RATES_SCHEMA)
        engine.view("now_fine_inner", now.fine_inner, FINE_SCHEMA)
        engine.view("now_fine_border", now.fine_border, FINE_SCHEMA)
        engine.table("shown", _SHOWN.format(**words), parameters)
        page = engine.rows(_PAGE.format(**words), parameters | slots, schema=PATTERN_SCHEMA)
    return page.select(list(PATTERN_SCHEMA))


def width_us(query: PatternQuery) -> int:
    """The length of a bucket of the trend."""
    return max(1, (epoch_us(query.until) - epoch_us(query.since)) // query.buckets)


def _chosen(query: PatternQuery) -> tuple[str, dict[str, object]]:
    """The condition of workloads and templates, and its parameters."""
    parameters: dict[str, object] = {}
    wanted = ["true"]
    if query.workloads is not None:
        wanted.append(one_of("workload", query.workloads, parameters))
    if query.template_ids is not None:
        wanted.append(one_of("template_id", query.template_ids, parameters))
    return " AND ".join(wanted), parameters


def _within(files: RateFiles) -> str:
    return (
        f"bucket >= make_timestamptz({epoch_us(files.begin)}) "
        f"AND bucket < make_timestamptz({epoch_us(files.end)})"
    )
