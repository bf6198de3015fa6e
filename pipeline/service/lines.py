"""Stored lines: a page of those that match, those around one, and counts of patterns."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any, Final

import polars as pl
import redis

from pipeline.controller.watchlist import covers
from pipeline.drain.learner import template_texts
from pipeline.errors import BadInput, NotFound
from pipeline.records.pattern_query import PatternQuery
from pipeline.records.result_query import ResultQuery
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.structured import structured_fields, trace_ids
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.cursors import cursor_position, cursor_text
from pipeline.service.questions import BUCKETS, LinesAsked, PatternsAsked
from pipeline.service.values import Line, LinePage, PatternCount, PatternPage, RateTable, WorkloadRate
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.units import epoch_us

MAX_PATTERNS: Final = 10_000  # behind which no page of patterns goes
EXACT: Final = timedelta(seconds=1)  # of a time that a link of ours names
NEAR: Final = timedelta(days=1)
_COLUMNS: Final = [field.name for field in fields(Line) if field.name in RESULT_SCHEMA]


def stored_lines(answers: Answers, settings: Settings, asked: LinesAsked) -> LinePage:
    """A page of lines. A cursor keeps the span of the first page. Raises BadInput, and as `Answers` does."""
    rows, following = line_rows(answers, asked)
    missing = answers.not_read()
    seen = _visible(answers, asked.only) if rows.is_empty() else []
    return LinePage(
        lines=lines_of_rows(rows),
        next=following,
        stored_in=place_of(settings),
        workloads=seen,
        missing=missing,
    )


def line_rows(answers: Answers, asked: LinesAsked) -> tuple[pl.DataFrame, str | None]:
    """The rows of a page in RESULT_SCHEMA, and the next cursor. Raises as `stored_lines`."""
    before = None
    if asked.cursor is not None:
        position = cursor_position(asked.cursor, tuple[int, str, int | None, int | None], *asked.filters)
        at_us, record_id, *span = position
        before = (_moment(at_us), record_id)
        since, until = (None if us is None else _moment(us) for us in span)
        asked = replace(asked, since=since, until=until)
    names = chosen_names(answers, asked.workload, asked.only)
    query = ResultQuery(
        # One more says whether there is a next page.
        limit=asked.limit + (asked.context == 0),
        since=asked.since,
        until=asked.until,
        workloads=names,
        level=asked.level,
        text=asked.text,
        template_id=asked.template_id,
        anomalous=asked.anomalous,
        before=before,
    )
    rows = answers.lines(query)
    following = None
    if asked.context and not rows.is_empty():
        rows = answers.context(rows, asked.context)
    elif not asked.context:
        more = rows.height > asked.limit
        rows = rows.reverse().head(asked.limit)
        if more:
            span_us = [None if at is None else epoch_us(at) for at in (asked.since, asked.until)]
            last = [epoch_us(rows["timestamp"][-1]), rows["record_id"][-1]]
            following = cursor_text([*last, *span_us], *asked.filters)
    return rows, following


def last_stored(answers: Answers, *, only: tuple[str, ...] = ()) -> datetime | None:
    """When the newest result was written that the asker sees; None without any. Raises as `Answers` does."""
    return answers.last_time(chosen_names(answers, None, only))


def around_line(
    answers: Answers,
    settings: Settings,
    *,
    record_id: str,
    at: datetime | None,
    records: int,
    only: tuple[str, ...] = (),
) -> LinePage:
    """A line and so many records before and after it in its source. `at`: its time, which spares a search.

    Raises BadInput, and as `Answers` does."""
    hit = answers.lines(_one_record(record_id, at, EXACT))
    if hit.is_empty() and at is not None:
        hit = answers.lines(_one_record(record_id, at, NEAR))
    if hit.is_empty() or (only and not covers(only, hit["workload"][0])):
        raise NotFound(
            f"no stored line has the id {record_id[:80]!r}; `logweir results --json` shows the ids"
        )
    return LinePage(lines=lines_of_rows(answers.context(hit, records)), stored_in=place_of(settings))


def _one_record(record_id: str, at: datetime | None, near: timedelta) -> ResultQuery:
    since, until = (None, None) if at is None else (at - near, at + near)
    return ResultQuery(limit=1, record_id=record_id, since=since, until=until)


def stored_patterns(
    answers: Answers, client: "redis.Redis", settings: Settings, asked: PatternsAsked
) -> PatternPage:
    """A page of patterns. A cursor keeps the span of the first page. Raises BadInput, and as `Answers`
    does."""
    skipped = 0
    if asked.cursor is not None:
        skipped, *span = cursor_position(asked.cursor, tuple[int, int, int, int], *asked.filters)
        asked = asked.with_span(*map(_moment, span))
        if not 0 <= skipped <= MAX_PATTERNS:
            raise BadInput(f"pages of patterns end at {MAX_PATTERNS:,}; filter by workload or template")
    found = answers.patterns(
        PatternQuery(
            since=asked.since,
            until=asked.until,
            against=asked.other,
            workloads=chosen_names(answers, asked.workload, asked.only),
            template_ids=asked.among if asked.template_id is None else (asked.template_id,),
            anomalous=asked.anomalous,
            order=asked.order,
            limit=skipped + asked.limit + 1,
            buckets=asked.buckets,
        )
    )
    page = found.slice(skipped, asked.limit)
    following = None
    if found.height > skipped + asked.limit:
        span_us = [epoch_us(at) for at in (asked.since, asked.until, asked.other[0])]
        following = cursor_text([skipped + asked.limit, *span_us], *asked.filters)
    missing = answers.not_read()
    return PatternPage(
        patterns=_with_templates(page, client, settings),
        since=asked.since,
        until=asked.until,
        before_since=asked.other[0],
        next=following,
        missing=missing,
    )


def newest_patterns(
    answers: Answers,
    client: "redis.Redis",
    settings: Settings,
    *,
    since: datetime,
    until: datetime,
    limit: int,
    only: tuple[str, ...] = (),
) -> list[PatternCount]:
    """The patterns of a span that began last in it, the newest first. Nothing is compared, and the trend is
    the span as a whole, which costs half of a page of patterns. Raises as `Answers` does."""
    asked = PatternsAsked(since=since, until=until)  # checks them
    query = PatternQuery(
        since=asked.since,
        until=asked.until,
        workloads=chosen_names(answers, None, only),
        order="new",
        limit=limit,
        buckets=1,
    )
    return _with_templates(answers.patterns(query), client, settings)


def _with_templates(page: pl.DataFrame, client: "redis.Redis", settings: Settings) -> list[PatternCount]:
    with answering():
        texts = template_texts(client, Keys(settings.redis.key_prefix))
    return [PatternCount(**row, template=texts.get(row["template_id"])) for row in page.iter_rows(named=True)]


def stored_rates(
    answers: Answers,
    *,
    since: datetime,
    until: datetime,
    workload: str | None,
    buckets: int = BUCKETS,
    only: tuple[str, ...] = (),
) -> RateTable:
    """Lines of each workload in equal parts of a span. Raises BadInput, and as `Answers` does."""
    asked = PatternsAsked(since=since, until=until, workload=workload)  # checks them
    found = answers.rates(
        PatternQuery(
            since=since, until=until, workloads=chosen_names(answers, workload, only), buckets=buckets
        )
    )
    rows = [WorkloadRate(**row) for row in found.iter_rows(named=True)]
    return RateTable(
        since=asked.since,
        until=asked.until,
        bucket_s=(asked.until - asked.since).total_seconds() / buckets,
        workloads=sorted(rows, key=lambda one: (-one.records, one.workload)),
    )


def covered_names(pattern: str | None, names: Iterable[str]) -> tuple[str, ...] | None:
    """The names that match, None without a pattern."""
    return None if pattern is None else tuple(name for name in names if covers([pattern], name))


def chosen_names(answers: Answers, workload: str | None, only: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names that match a pattern and that the asker sees; None: all."""
    if workload is None and not only:
        return None
    seen = _visible(answers, only)
    return tuple(seen) if workload is None else covered_names(workload, seen)


def _visible(answers: Answers, only: tuple[str, ...]) -> list[str]:
    names = answers.workloads()
    return [name for name in names if covers(only, name)] if only else names


def place_of(settings: Settings) -> str:
    """Where results lie: a folder, the URL of a bucket, or the names of indices."""
    if "parquet" in settings.data.sinks:
        url = settings.data.results_url
        return str(settings.data.results) if url.startswith("file:") else url
    from pipeline.opensearch.documents import indices

    return indices(settings)


def lines_of_rows(rows: pl.DataFrame) -> list[Line]:
    """Rows of RESULT_SCHEMA as lines, with the fields that stand beside their messages."""
    extra = [name for name in ("hit", "place") if name in rows.columns]
    columns = rows.select([*_COLUMNS, *extra]).iter_rows(named=True)
    return [_line(row, raw) for row, raw in zip(columns, rows["raw"], strict=True)]


def _line(row: dict[str, Any], raw: str | None) -> Line:
    beside = dict(structured_fields(raw))
    return Line(**row, **trace_ids(beside)._asdict(), fields=beside)


def _moment(at_us: int) -> datetime:
    with suppress(OverflowError):
        return datetime.fromisoformat("1970-01-01T00:00:00+00:00") + timedelta(microseconds=at_us)
    raise BadInput("the cursor names no time; leave it out")
