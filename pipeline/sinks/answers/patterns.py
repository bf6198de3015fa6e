"""Patterns from files: counts by the hour and five minutes where there are some, and lines for the others.

Lines of parts that are not sealed are counted once for sums and trend together. Of a part that lies only
partly in a span, the lines of the five minutes at its ends are counted, and the others come from counts.
Samples and trends are read for the patterns of a page alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
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
    def read_lines(self) -> bool:
        """Whether some lines have no counts."""
        return bool(self.lines or self.cut_lines)

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
# Counts by five minutes have no samples.
_CUT_SAMPLES: Final = (
    "SELECT {flag} AS now, workload, template_id, 0 AS slot, 0 AS records, 0 AS severe, NULL AS score, sample "
    "FROM {span}_cut_hours WHERE {hours}"
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


def pattern_page(
    engine: Engine, query: PatternQuery, now: RateFiles, then: RateFiles | None = None
) -> pl.DataFrame:
    """PATTERN_SCHEMA in the order that was asked for, from the files of the span and those of the other one.

    Raises AnswerCancelled, BadInput, BadPayload."""
    by = [f'"{column}" {"DESC" if down else "ASC"}' for column, down in PATTERN_ORDERS[query.order]]
    chosen, parameters = chosen_lines(query)
    words = {
        "chosen": chosen,
        "order": ", ".join([*by, "workload", "template_id"]),
        "wanted": "anomalous > 0" if query.anomalous else "true",
        "limit": "" if query.limit is None else f"LIMIT {query.limit:d}",
        "severe": ", ".join(f"'{level}'" for level in sorted(ERROR_LEVELS)),
        "chars": SAMPLE_CHARS,
        "read": ", ".join(f'"{column}"' for column in _READ),
    }
    slots = {"since": epoch_us(query.since), "width": width_us(query), "buckets": query.buckets}
    spans = {"now": now} | ({} if then is None else {"then": then})
    words["sums"] = _chosen_of(
        _counts(spans, 'workload, template_id, records, anomalous, "first", "last"', "SELECT * FROM"), chosen
    )
    slotted = slotted_counts(slots["since"], slots["width"])
    columns = "workload, template_id, slot, records"
    cut = slotted.replace("*", "*, NULL::VARCHAR AS sample", 1)
    pieces = _counts(spans, f"{columns}, severe, score, sample", slotted, cut) + _samples(spans)
    words["counts"] = _chosen_of(pieces, chosen)
    words["trend"] = (
        f"SELECT now, place, slot, fine.records FROM ({_chosen_of(_fine(now, columns, slotted), chosen)}) AS fine "
        "JOIN shown USING (workload, template_id)"
        if now.fine_inner or now.fine_border
        else "SELECT * FROM few"
    )
    with engine.question():
        for span, files in spans.items():
            if files.read_lines or span == "now":
                engine.view("lines", files.lines, RESULT_SCHEMA)
                engine.view("cut_lines", files.cut_lines, RESULT_SCHEMA)
                engine.table(f"{span}_lines", _LINES.format(**words), parameters | slots | files.bounds)
            _views(engine, span, files)
        engine.table("shown", _SHOWN.format(**words), parameters)
        page = engine.rows(
            _PAGE.format(**words), parameters | {"buckets": query.buckets}, schema=PATTERN_SCHEMA
        )
    return page.select(list(PATTERN_SCHEMA))


def _views(engine: Engine, span: str, files: RateFiles) -> None:
    """A name for each kind of counts that the span has: a statement takes half a millisecond."""
    for kind, found, schema in (
        ("inner", files.inner, RATES_SCHEMA),
        ("border", files.border, RATES_SCHEMA),
        ("cut", files.cut, FINE_SCHEMA),
        ("cut_hours", files.cut_hours, RATES_SCHEMA),
        ("fine_inner", files.fine_inner, FINE_SCHEMA),
        ("fine_border", files.fine_border, FINE_SCHEMA),
    ):
        if found:
            engine.view(f"{span}_{kind}", found, schema)


def _counts(spans: Mapping[str, RateFiles], columns: str, slotted: str, cut: str = "") -> list[str]:
    """The SELECTs of these columns from the counts of each span, and from the sums of its lines."""
    found = []
    for span, files in spans.items():
        begin = f"SELECT {'true' if span == 'now' else 'false'} AS now, {columns} FROM"
        bounds = files.bounds
        if files.inner:
            found.append(f"{begin} ({slotted} {span}_inner)")
        if files.border:
            found.append(
                f"{begin} ({slotted} {span}_border WHERE {buckets_within(bounds['begin'], bounds['end'])})"
            )
        if files.cut:
            whole = buckets_within(bounds["whole_begin"], bounds["whole_end"])
            found.append(f"{begin} ({cut or slotted} {span}_cut WHERE {whole})")
        if files.read_lines or span == "now":
            found.append(f"{begin} {span}_lines")
    return found


def _samples(spans: Mapping[str, RateFiles]) -> list[str]:
    """The SELECTs of the samples of cut parts."""
    return [
        _CUT_SAMPLES.format(
            flag="true" if span == "now" else "false",
            span=span,
            hours=buckets_within(files.bounds["begin"] // _HOUR_US * _HOUR_US, files.bounds["end"]),
        )
        for span, files in spans.items()
        if files.cut_hours
    ]


def _fine(files: RateFiles, columns: str, slotted: str) -> list[str]:
    """The SELECTs of the counts by five minutes, where they give the trend."""
    bounds, begin = files.bounds, f"SELECT true AS now, {columns} FROM"
    found = [f"{begin} now_lines"]
    if files.fine_inner:
        found.append(f"{begin} ({slotted} now_fine_inner)")
    if files.fine_border:
        inside = buckets_within(bounds["begin"], bounds["end"])
        found.append(f"{begin} ({slotted} now_fine_border WHERE {inside})")
    if files.cut:
        found.append(
            f"{begin} ({slotted} now_cut WHERE {buckets_within(bounds['whole_begin'], bounds['whole_end'])})"
        )
    return found


def slotted_counts(since_us: int, width: int) -> str:
    """The SELECT of counts with the slot of their bucket. A last slot may take more: the query bounds it."""
    slot = f"greatest(0, least($buckets - 1, (epoch_us(bucket) - {since_us}) // {width}))"
    return f"SELECT *, {slot} AS slot FROM"


def _chosen_of(pieces: Iterable[str], chosen: str) -> str:
    return f"SELECT * FROM ({' UNION ALL '.join(pieces)}) WHERE {chosen}"


def width_us(query: PatternQuery) -> int:
    """The length of a bucket of the trend."""
    return max(1, (epoch_us(query.until) - epoch_us(query.since)) // query.buckets)


def chosen_lines(query: PatternQuery) -> tuple[str, dict[str, object]]:
    """The condition of workloads and templates, and its parameters."""
    parameters: dict[str, object] = {}
    wanted = ["true"]
    if query.workloads is not None:
        wanted.append(one_of("workload", query.workloads, parameters))
    if query.template_ids is not None:
        wanted.append(one_of("template_id", query.template_ids, parameters))
    return " AND ".join(wanted), parameters


def buckets_within(begin_us: int, end_us: int) -> str:
    """The condition of buckets that begin in [begin, end)."""
    return f"bucket >= make_timestamptz({begin_us}) AND bucket < make_timestamptz({end_us})"
