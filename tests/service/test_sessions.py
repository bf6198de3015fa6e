"""The records of a session by its key, and what was found in sessions."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
import redis
from answers_contract import row
from small_bundles import ONE, put

from pipeline.drain.templates import Template, pack_template
from pipeline.errors import BadInput
from pipeline.models.bundle import SEQUENCES
from pipeline.models.registry import Registry
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.keys import Keys
from pipeline.service.stored.sessions import session_findings, stored_session
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.choose import parquet_of
from pipeline.watching.alarm_budget import GRAVE
from pipeline.watching.rows import SESSIONS, WatcherFinding, finding_rows
from pipeline.watching.sessions.model import SessionModel, dump

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = (NOW - timedelta(days=1), NOW + timedelta(days=1))


@pytest.fixture
def answers(settings: Settings) -> Iterator[Answers]:
    def at(second: int) -> datetime:
        return NOW + timedelta(seconds=second)

    rows = [
        row(1, timestamp=at(3), workload="shop/db", message=f"stored trace_id={TRACE}"),
        row(2, timestamp=at(1), message="asked", raw=f'{{"trace_id": "{TRACE}", "message": "asked"}}'),
        row(3, timestamp=at(2), message="another", raw='{"trace_id": "0000", "message": "another"}'),
    ]
    sink = parquet_of(settings)
    sink.write("lines", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    finding = WatcherFinding(
        source=SESSIONS, workload="shop/web", cause="session-event", subject="s", at=at(4),
        message=f"T7 `a: session b` is in no normal session: session {TRACE}, 3 events in 2 s from line 1 of a.log",
        detail="12:00:00 T1\n12:00:01 T7", reasons=("session-event:7",), score=0.99, p_value=0.001, chance=GRAVE, version="m",
    )  # fmt: skip
    for batch_id, _, found in finding_rows([finding]):
        sink.write(batch_id, found)
    with closing(answers_of(settings)) as opened:
        yield opened


def test_records_of_a_key_come_in_order_of_time_from_texts_and_fields(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    found = stored_session(answers, client, settings, TRACE, span=SPAN)
    assert [line.line for line in found.lines] == [2, 1] and found.workloads == ["shop/db", "shop/web"]
    (judged,) = found.findings
    assert judged.key == TRACE and judged.why == "T7 `a: session b` is in no normal session"
    assert judged.events == ["12:00:00 T1", "12:00:01 T7"]
    assert not found.more and found.in_hand == []
    assert stored_session(answers, client, settings, TRACE, span=SPAN, limit=1).more


def test_the_nearest_normal_session_is_named_with_the_differences(
    answers: Answers, client: "redis.Redis", settings: Settings
) -> None:
    assert stored_session(answers, client, settings, TRACE, span=SPAN).nearest == []  # no model
    learnt = SessionModel.fit([(1, 2, 2)] * 40 + [(1, 1, 1, 1, 3)] * 40)
    registry = Registry(client, settings)
    put(registry, ONE, workloads=("shop/db",), more={SEQUENCES: dump({"shop/db\0trace": learnt})})
    registry.promote(ONE, at=NOW)
    packed = pack_template(Template(template_id=2, text="kept <*>", severe=False, workload="shop/db"))
    client.hset(Keys(settings.redis.key_prefix).templates, "2", packed)
    found = stored_session(answers, client, settings, TRACE, span=SPAN)
    db = next(one for one in found.nearest if one.workload == "shop/db")
    assert (db.version, db.learnt, db.events) == (ONE, 80, 3)
    assert [(one.template_id, one.template, one.here, one.there) for one in db.differences] == [
        (2, "kept <*>", 0, 2)
    ]
    assert stored_session(answers, client, settings, TRACE, span=SPAN, limit=1).nearest == []  # a part of it
    place = registry.path(ONE) / SEQUENCES
    place.write_bytes(b"damaged")
    for copy in settings.data.dir.rglob(SEQUENCES):
        copy.write_bytes(b"damaged")
    assert len(stored_session(answers, client, settings, TRACE, span=SPAN).lines) == 2


def test_a_key_sees_only_its_workloads(answers: Answers, client: "redis.Redis", settings: Settings) -> None:
    found = stored_session(answers, client, settings, TRACE, span=SPAN, only=("shop/db",))
    assert [line.workload for line in found.lines] == ["shop/db"] and found.findings == []
    assert session_findings(answers, since=SPAN[0], until=SPAN[1], limit=9, only=("shop/db",)) == []


def test_findings_in_sessions_are_listed_without_a_key(answers: Answers) -> None:
    (one,) = session_findings(answers, since=SPAN[0], until=SPAN[1], limit=9)
    assert (one.key, one.workload) == (TRACE, "shop/web")


@pytest.mark.parametrize("key", ["", "abc", "a" * 201])
def test_a_text_that_is_no_key_is_refused(
    answers: Answers, client: "redis.Redis", settings: Settings, key: str
) -> None:
    with pytest.raises(BadInput, match="characters"):
        stored_session(answers, client, settings, key, span=SPAN)
