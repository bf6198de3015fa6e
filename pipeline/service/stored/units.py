"""Which unit is unusual: hosts, pods, services or sessions in order, each with its reasons.

Normal is a span before: each of its units, in each window as long as the span that is asked for, is one
normal unit. A session has no windows. It belongs to the span of its last line, with all of its lines.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import polars as pl
import redis

from pipeline.drain.learner import template_texts
from pipeline.errors import RedisUnavailable
from pipeline.records.result_query import ResultQuery
from pipeline.records.unit_query import UNIT_COLUMNS, UnitKind
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.lines import chosen_names
from pipeline.service.stored.asked_units import UnitsAsked, UnitsFound
from pipeline.service.stored.unit_sessions import SessionUnits
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.units import epoch_us
from pipeline.watching.rows import NUMBERS, RATES, SESSIONS
from pipeline.watching.sessions.keys import user_patterns
from pipeline.watching.units.ranking import rank_units
from pipeline.watching.units.unit_lines import UnitFold, UnitTable, unit_lines

MAX_JUDGED: Final = 20_000  # units; those with the most flagged lines and findings
MAX_NORMAL: Final = 5_000  # units, drawn by chance
_COLUMNS: Final = (
    "timestamp", "timed", "pattern_id", "template_id", "anomalous", "p_value", "reasons", "message",
    "source",
)  # fmt: skip


def stored_units(
    answers: Answers, client: "redis.Redis | None", settings: Settings, asked: UnitsAsked, *, now: datetime
) -> UnitsFound:
    """The most unusual first. Without Redis templates are named by numbers. Raises BadInput, and as
    `Answers` does."""
    table, unnamed = _folded(answers, settings, asked)
    judged, normal, waiting = _parted(table, settings, asked, now)
    texts: dict[int, str] = {}
    if client is not None:
        with suppress(RedisUnavailable), answering():  # results are read without a stack too
            texts = template_texts(client, Keys(settings.redis.key_prefix))
    return UnitsFound(
        by=asked.by,
        normal_since=asked.normal,
        since=asked.since,
        until=asked.until,
        ranking=rank_units(busiest_units(judged), drawn_units(normal), texts, limit=asked.limit),
        unnamed=unnamed,
        open=waiting,
    )


def _folded(answers: Answers, settings: Settings, asked: UnitsAsked) -> tuple[UnitTable, int]:
    """All lines of both spans, and the number of those that name no unit."""
    query = ResultQuery(
        limit=1,
        since=asked.normal,
        until=asked.until,
        workloads=chosen_names(answers, asked.workload, asked.only),
    )
    return fold_units(answers, settings, asked.by, query, since=asked.since, width=asked.until - asked.since)


def fold_units(
    answers: Answers,
    settings: Settings,
    by: UnitKind,
    query: ResultQuery,
    *,
    since: datetime,
    width: timedelta,
) -> tuple[UnitTable, int]:
    """The lines of these units in windows of a width, the first of which begins at `since`; and the number of
    lines that name none. A session is one window. Raises BadInput, and as `Answers` does."""
    column = UNIT_COLUMNS[by]
    names = list(dict.fromkeys([*_COLUMNS, column or "raw"]))
    sessions = SessionUnits(user_patterns(settings.watch.session_keys))
    since_us, width_us = epoch_us(since), width // timedelta(microseconds=1)
    fold, unnamed = UnitFold(), 0
    for page in answers.pages(query, names):
        found = page["source"].is_in([SESSIONS, RATES, NUMBERS])
        if column is None:
            sessions.add(page, found)
            continue
        # A finding of the watcher belongs to no file.
        unit = page.select(pl.when(~found).then(column))[column] if by == "source" else page[column]
        window = (page["timestamp"].to_physical() - since_us) // width_us
        unnamed += int((unit.is_null() & ~found).sum())
        fold.add(unit_lines(page, unit, window, found))
    if column is None:
        return sessions.table(), sessions.unnamed
    return fold.table(), unnamed


def _parted(
    table: UnitTable, settings: Settings, asked: UnitsAsked, now: datetime
) -> tuple[UnitTable, UnitTable, int]:
    """The judged units, the normal ones, and the number of sessions that may go on."""
    if UNIT_COLUMNS[asked.by] is not None:
        late = table.units["window"] >= 0
        return table.chosen(late.arg_true()), table.chosen((~late).arg_true()), 0
    last = table.units["last"].fill_null(0)
    late = last >= asked.since.timestamp()
    still = last > (now - timedelta(seconds=settings.watch.session_timeout_s)).timestamp()
    return (
        table.chosen((late & ~still).arg_true()),
        table.chosen((~late).arg_true()),
        int((late & still).sum()),
    )


def busiest_units(table: UnitTable) -> UnitTable:
    """At most MAX_JUDGED units: those with the most flagged lines and findings."""
    if table.size <= MAX_JUDGED:
        return table
    flagged = np.zeros(table.size)
    np.add.at(flagged, table.patterns["at"].to_numpy(), table.patterns["flagged"].to_numpy())
    flagged += table.units["findings"].to_numpy()
    return table.chosen(pl.Series(np.sort(np.argsort(-flagged, kind="stable")[:MAX_JUDGED])))


def drawn_units(table: UnitTable) -> UnitTable:
    """At most MAX_NORMAL units, drawn by chance."""
    if table.size <= MAX_NORMAL:
        return table
    rows = np.random.default_rng(0).choice(table.size, MAX_NORMAL, replace=False)
    return table.chosen(pl.Series(np.sort(rows)))
