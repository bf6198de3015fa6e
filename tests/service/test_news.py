"""What was never said before: which calm lines are listed, how many of a day, and what leaves the list."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import redis
from answers_contract import frame, row

from pipeline.marks.marks import State, Target
from pipeline.marks.store import Marks
from pipeline.redis.keys import Keys
from pipeline.report.findings import collect
from pipeline.service.stored.news import stored_news
from pipeline.service.stored.values import NewsPage
from pipeline.settings import Settings
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.choose import parquet_of
from pipeline.watching.incidents.live import IncidentEvent, Incidents

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
NEW = {"reasons": ["new-template"]}


def said(number: int, hours: float, **changes: Any) -> dict[str, Any]:
    """A line so many hours ago whose sentence no training has seen."""
    facts = {
        "timestamp": NOW - hours * HOUR, "template_id": number, "pattern_id": number, "score": number / 100,
        "message": f"array {number} is degraded", "reasons": ["never-said:21509 healthy"],
        "anomalous": True,
    }  # fmt: skip
    return row(number, **(facts | changes))


def news(settings: Settings, client: "redis.Redis | None", *rows: dict[str, Any], **asked: Any) -> NewsPage:
    if rows:
        parquet_of(settings).write("b", frame(list(rows)))
    span = {"since": NOW - 24 * HOUR, "until": NOW}
    with closing(answers_of(settings)) as answers:
        return stored_news(answers, client, settings, now=NOW, **(span | asked))


def templates(page: NewsPage) -> list[int]:
    return [one.template_id for one in page.news]


def test_a_line_is_listed_with_what_usually_stood_there(settings: Settings, client: "redis.Redis") -> None:
    (one,) = news(settings, client, said(7, 2), said(7, 1, record_id="later")).news
    assert (one.why, one.usual) == ("never seen in 21,509 lines; usually “healthy”", "healthy")
    assert (one.message, one.record_id, one.at, one.records) == (
        "array 7 is degraded",
        "a-7",
        NOW - 2 * HOUR,
        2,
    )
    assert (one.first, one.last, one.workload, one.level) == (
        NOW - 2 * HOUR,
        NOW - HOUR,
        "shop/web",
        "info",
    )


def test_each_day_lists_its_strangest_lines_and_a_line_on_the_day_it_came_first(
    settings: Settings, client: "redis.Redis"
) -> None:
    settings = settings.replace(news_per_day=2)
    rows = [*(said(n, 1) for n in (1, 2, 3)), *(said(n, 30) for n in (11, 12, 13)), said(14, 110)]
    again = [said(13, 3, record_id="again"), said(14, 3, record_id="again", pattern_id=14)]
    assert templates(news(settings, client, *rows, *again)) == [14, 3]
    assert templates(news(settings, client, since=NOW - 48 * HOUR)) == [3, 2, 13, 12]
    # What was news more than three days before the span is news again, if no training has seen it since.
    assert templates(news(settings, client, since=NOW - 24 * HOUR, until=NOW - 2 * HOUR)) == [14]


def test_a_new_template_of_an_incident_stands_in_it_alone_and_a_marked_one_nowhere(
    settings: Settings, client: "redis.Redis"
) -> None:
    begun = NOW - 5 * HOUR
    state = Incidents()
    cause = {"kind": "template", "count": 1, "score": 0.9, "text": "x", "source": "a.log", "line": 1}
    for number, severity, at in ((90, 3, begun), (3, 1, begun + timedelta(seconds=9))):
        state.add(
            [
                IncidentEvent(
                    event_id=str(number), workload="shop/web", cause=f"template:{number}", first=at, last=at,
                    severity=severity, **cause,
                )
            ]
        )  # fmt: skip
    state.close(NOW)
    client.set(Keys(settings.redis.key_prefix).watching("incidents"), state.pack())
    near = [said(4, 5, **NEW), said(3, 4, **NEW), said(3, 3, **NEW, workload="shop/db", record_id="db")]
    rows = [*near, said(1, 2, **NEW), said(2, 5), said(5, 1), said(6, 1, workload="shop/db")]
    assert templates(news(settings, client, *rows)) == [6, 5, 3, 2, 1]
    Marks(client, settings).put(Target.template(5), State.NORMAL, workload="shop/web", text="", by="ann")
    Marks(client, settings).put(Target.template(6), State.NORMAL, workload="shop/web", text="", by="ann")
    Marks(client, settings).put(Target.template(2), State.ANOMALOUS, text="", by="ann")
    Marks(client, settings).put(Target.template(1), State.NORMAL, text="", by="ann")
    assert templates(news(settings, client)) == [6, 3, 2]
    # Without Redis, as over files alone, nobody knows incidents and marks.
    assert templates(news(settings, None)) == [6, 5, 4, 3, 3, 2, 1]


def test_a_run_and_a_running_pipeline_list_the_same_lines_in_the_same_order(
    settings: Settings, client: "redis.Redis"
) -> None:
    rows = [
        said(
            n, 1 + n / 10, workload=("shop/web", "bank")[n % 2], score=(n * 3 % 8 + 1) / 16 - n / 1_000,
            template_id=n % 8 + 1, **(NEW if n % 8 > 5 else {}),
        )
        for n in range(24)
    ]  # fmt: skip
    for allowed in (3, 10):
        page = news(settings.replace(news_per_day=allowed), client, *(rows if allowed == 3 else ()))
        templates = pl.DataFrame(schema={"template_id": pl.Int64, "template": pl.String})
        of_run = collect(settings.data.results, templates, news=allowed)
        assert len(of_run) == min(allowed, 8) and all(one.news for one in of_run)
        assert [(one.workload, one.template_id, one.count, one.score) for one in of_run] == [
            (one.workload, one.template_id, one.records, one.score) for one in page.news
        ]


def test_only_workloads_that_match_and_may_be_seen_are_listed(
    settings: Settings, client: "redis.Redis"
) -> None:
    rows = [said(n, 1, workload=name) for n, name in ((1, "shop/web"), (2, "shop/db"), (3, "bank"))]
    assert templates(news(settings, client, *rows, workload="shop/*")) == [2, 1]
    assert templates(news(settings, client, only=("shop/db", "bank"))) == [3, 2]
    assert templates(news(settings, client, only=("nothing",))) == []
