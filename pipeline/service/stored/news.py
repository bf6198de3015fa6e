"""What was never said before: the strangest calm lines of a span, which make no incident and no alarm.

A `logweir run` lists such lines behind its incidents. For a running pipeline the list comes from the stored
results, so every machine gives the same one. The rules are those of a run: at most `news_per_day` templates
of each 24 hours, and a new template that came together with errors stands only in their incident.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

import redis

from pipeline.marks.marks import State
from pipeline.records.news import DAY_US, NewsQuery
from pipeline.records.verdict import Reason
from pipeline.report.why import reasons_in_words
from pipeline.service.incidents import read_incidents
from pipeline.service.lines import chosen_names
from pipeline.service.marks import read_marks
from pipeline.service.questions import PatternsAsked
from pipeline.service.stored.values import NewLine, NewsPage
from pipeline.service.values import IncidentView
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.units import epoch_us
from pipeline.watching.incidents.onsets import GAP, SPAN

PAST: Final = timedelta(days=3)  # what was news then is none now; a training comes every day
CANDIDATES: Final = 200  # of each 24 hours, beside `news_per_day`: some are marked, or stand in incidents


def stored_news(
    answers: Answers,
    client: "redis.Redis | None",
    settings: Settings,
    *,
    since: datetime,
    until: datetime,
    now: datetime,
    workload: str | None = None,
    only: tuple[str, ...] = (),
) -> NewsPage:
    """The news of [since, until). Without `client`, which knows incidents and marks, all of them count.

    Raises BadInput, RedisUnavailable, and as `Answers` does."""
    asked = PatternsAsked(since=since, until=until, workload=workload)  # checks them
    allowed = int(settings.train.news_per_day)
    found = answers.news(
        NewsQuery(
            past=since - PAST,
            since=since,
            until=until,
            limit=allowed + CANDIDATES,
            workloads=chosen_names(answers, workload, only),
        )
    )
    missing = answers.not_read()
    rows = list(found.iter_rows(named=True))
    if rows and client is not None:
        incidents = read_incidents(client, settings, now, since=since, only=only).incidents
        normal = {
            (mark.template_id, mark.workload or "")
            for mark in read_marks(client, settings).marks
            if mark.state == State.NORMAL and not mark.expired
        }
        rows = [
            row
            for row in rows
            if not normal & {(row["template_id"], row["workload"]), (row["template_id"], "")}
            and (_never_said(row) is not None or not _is_told(row, incidents))
        ]
    days: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        days.setdefault((epoch_us(until) - 1 - epoch_us(row["first"])) // DAY_US, []).append(row)
    shown = [_new_line(row) for _, of_day in sorted(days.items()) for row in of_day[:allowed]]
    return NewsPage(news=shown, since=asked.since, until=asked.until, missing=missing)


def _is_told(row: dict[str, Any], incidents: Iterable[IncidentView]) -> bool:
    """Whether a calm new template is a cause of an incident, or began with one."""
    mark = f"T{row['template_id']}"
    return any(
        one.first - GAP <= row["first"] <= one.first + SPAN
        or any(cause.mark == mark and cause.workload == row["workload"] for cause in one.causes)
        for one in incidents
    )


def _never_said(row: dict[str, Any]) -> str | None:
    """What the reason of a sentence that was never said adds to it; None where the row has none."""
    reasons = row["reasons"] or []
    return next((text.partition(":")[2] for text in reasons if text.startswith(Reason.NEVER_SAID)), None)


def _new_line(row: dict[str, Any]) -> NewLine:
    message, reasons = row["message"] or "", row["reasons"] or []
    said = _never_said(row) or ""
    return NewLine(
        workload=row["workload"],
        template_id=row["template_id"],
        message=message,
        level=row["level"],
        why=reasons_in_words(reasons, row["level"], message),
        usual=said.partition(" ")[2],
        score=row["score"],
        records=row["records"],
        first=row["first"],
        last=row["last"],
        at=row["at"],
        record_id=row["record_id"],
    )
