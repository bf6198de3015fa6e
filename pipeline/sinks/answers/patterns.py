"""Patterns from files: counts by the hour and five minutes where there are some, and lines for the others.

Lines of parts that are not sealed are counted once for sums and trend together. Of a part that lies only
partly in a span, the lines of the five minutes at its ends are counted, and the others come from counts.
Samples and trends are read for the patterns of a page alone."""

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
_FINE_US: Final = 300_000_000
_HOUR_US: Final = 12 * _FINE_US
# The columns of lines that counts need. Messages of a cut part would be read for all of its lines.
_READ: Final = ("workload", "template_id", "timestamp", "anomalous", "level", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFiles:
    """The files with the counts of a span [begin, end). Each line counts in one of `inner`, `border`, `cut`,
    `cut_lines`, `lines`.

    `fine_inner` and `fine_border`: the counts of the same parts for the trend of a short span, by five
    minutes; of a long one both are empty."""

    begin: datetime
    end: datetime
    inner: tuple[RowFile, ...] = ()  # counts by the hour, of parts that are in the span as a whole
    border: tuple[RowFile, ...] = ()  # of other parts, whose lines have expired
    cut: tuple[RowFile, ...] = ()  # counts by five minutes, of parts that are partly in the span
    cut_lines: tuple[RowFile, ...] = ()  # their lines, for what is before and behind the whole five minutes
    cut_hours: tuple[RowFile, ...] = ()  # their counts by the hour, for samples
    lines: tuple[RowFile, ...] = ()
    fine_inner: tuple[RowFile, ...] = ()
    fine_border: tuple[RowFile, ...] = ()

    @property
    def bounds(self) -> dict[str, int]:
        """Microseconds: of the span, and of the whole five minutes in it. Without such, all is before."""
        begin, end = epoch_us(self.begin), epoch_us(self.end)
        first, stop = -(-begin // _FINE_US) * _FINE_US, end // _FINE_US * _FINE_US
        whole = (first, stop) if first < stop else (end, end)
        return {"begin": begin, "end": end, "whole_begin": whole[0], "whole_end": whole[1]}


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
    left(any_value(message), {chars}) AS sample
FROM (
    SELECT * REPLACE (coalesce(template_id, 0) AS template_id) FROM (
        SELECT {read}, message FROM lines
        WHERE "timestamp" >= make_timestamptz($begin) AND "timestamp" < make_timestamptz($end)
        UNION ALL
        SELECT {read}, NULL AS message FROM cut_lines
        WHERE "timestamp" >= make_timestamptz($begin) AND "timestamp" < make_timestamptz($whole_begin)
        UNION ALL
        SELECT {read}, NULL AS message FROM cut_lines
        WHERE "timestamp" >= make_timestamptz($whole_end) AND "timestamp" < make_timestamptz($end)
    )
)
WHERE template_id >= 0 AND {chosen}
GROUP BY ALL
"""
# The counts of both spans in these columns.
_COUNTS: Final = """
SELECT true AS now, {columns} FROM ({slotted} now_inner) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({slotted} now_border WHERE {now_within}) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({cut} now_cut WHERE {now_whole}) WHERE {chosen}
UNION ALL
SELECT false AS now, {columns} FROM ({slotted} then_inner) WHERE {chosen}
UNION ALL
SELECT false AS now, {columns} FROM ({slotted} then_border WHERE {then_within}) WHERE {chosen}
UNION ALL
SELECT false AS now, {columns} FROM ({cut} then_cut WHERE {then_whole}) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM now_lines
UNION ALL
SELECT false AS now, {columns} FROM then_lines
"""
# Counts by five minutes have no samples.
_CUT_SAMPLES: Final = """
UNION ALL
SELECT now, workload, template_id, 0 AS slot, 0 AS records, 0 AS severe, NULL AS score, sample
FROM (
    SELECT true AS now, * FROM now_cut_hours WHERE {now_hours}
    UNION ALL
    SELECT false AS now, * FROM then_cut_hours WHERE {then_hours}
)
WHERE {chosen}
"""
# The counts by five minutes, where they give the trend.
_FINE: Final = """
SELECT true AS now, {columns} FROM ({slotted} now_fine_inner) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({slotted} now_fine_border WHERE {now_within}) WHERE {chosen}
UNION ALL
SELECT true AS now, {columns} FROM ({slotted} now_cut WHERE {now_whole}) WHERE {chosen}
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
        "now_within": _within(now.bounds["begin"], now.bounds["end"]),
        "then_within": _within(then.bounds["begin"], then.bounds["end"]),
        "now_whole": _within(now.bounds["whole_begin"], now.bounds["whole_end"]),
        "then_whole": _within(then.bounds["whole_begin"], then.bounds["whole_end"]),
        "now_hours": _within(now.bounds["begin"] // _HOUR_US * _HOUR_US, now.bounds["end"]),
        "then_hours": _within(then.bounds["begin"] // _HOUR_US * _HOUR_US, then.bounds["end"]),
        "read": ", ".join(f'"{column}"' for column in _READ),
    }
    slots = {"since": epoch_us(query.since), "width": width_us(query), "buckets": query.buckets}
    words["sums"] = _COUNTS.format(
        slotted="SELECT * FROM",
        cut="SELECT * FROM",
        columns='workload, template_id, records, anomalous, "first", "last"',
        **words,
    )
    columns = "workload, template_id, slot, records"
    fine = _FINE.format(slotted=_SLOTTED, columns=columns, **words)
    words["counts"] = _COUNTS.format(
        slotted=_SLOTTED,
        cut=_SLOTTED.replace("*", "*, NULL::VARCHAR AS sample"),
        columns=f"{columns}, severe, score, sample",
        **words,
    ) + _CUT_SAMPLES.format(**words)
    words["trend"] = (
        f"SELECT now, place, slot, fine.records FROM ({fine}) AS fine "
        "JOIN shown USING (workload, template_id)"
        if now.fine_inner or now.fine_border
        else "SELECT * FROM few"
    )
    with engine.question():
        for span, files in (("now", now), ("then", then)):
            engine.view("lines", files.lines, RESULT_SCHEMA)
            engine.view("cut_lines", files.cut_lines, RESULT_SCHEMA)
            engine.table(f"{span}_lines", _LINES.format(**words), parameters | slots | files.bounds)
            engine.view(f"{span}_inner", files.inner, RATES_SCHEMA)
            engine.view(f"{span}_border", files.border, RATES_SCHEMA)
            engine.view(f"{span}_cut", files.cut, FINE_SCHEMA)
            engine.view(f"{span}_cut_hours", files.cut_hours, RATES_SCHEMA)
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


def _within(begin_us: int, end_us: int) -> str:
    return f"bucket >= make_timestamptz({begin_us}) AND bucket < make_timestamptz({end_us})"
