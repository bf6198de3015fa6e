"""Which unit of the store is unusual: hosts by windows, sessions as a whole."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
import redis
from answers_contract import row

from pipeline.errors import BadInput
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.unit_query import UnitKind
from pipeline.service.stored.asked_units import UnitsFound, units_asked
from pipeline.service.stored.units import stored_units
from pipeline.settings import Settings
from pipeline.sinks.answers.choose import answers_of
from pipeline.sinks.choose import parquet_of
from pipeline.watching.alarm_budget import GRAVE
from pipeline.watching.rows import SESSIONS, WatcherFinding, finding_rows

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def stored(settings: Settings, found: list[dict[str, Any]]) -> None:
    rows = [row(n, **one) for n, one in enumerate(found, start=1)]
    parquet_of(settings).write("lines", pl.DataFrame(rows, schema=RESULT_SCHEMA))


def line(at: datetime, template: int, **more: Any) -> dict[str, Any]:
    pattern = {"template_id": template, "pattern_id": template, "message": f"p{template}", "raw": None}
    return {"timestamp": at, **pattern, **more}


def asked(
    client: "redis.Redis", settings: Settings, by: UnitKind, since: str = "1h", **more: Any
) -> UnitsFound:
    with closing(answers_of(settings)) as answers:
        return stored_units(
            answers,
            client,
            settings,
            units_asked(by, since, None, more.pop("normal", None), NOW, **more),
            now=NOW,
        )


def test_an_unusual_host_comes_first_beside_its_own_windows(
    client: "redis.Redis", settings: Settings
) -> None:
    lines = [
        line(NOW - MINUTE * m, 1 + m % 3, host=f"n{host}", process="web")
        for host in range(4)
        for m in range(1, 420, 3)
    ]
    bad = {"host": "n2", "process": "web", "anomalous": True, "p_value": 0.001}
    lines += [line(NOW - MINUTE * m / 6, 9, **bad) for m in range(1, 30)]
    stored(settings, [*lines, line(NOW - MINUTE, 1)])
    found = asked(client, settings, "pod")
    ranking = found.ranking
    assert ranking.units[0].unit == "n2" and ranking.judged == 4 and ranking.normal == 24
    assert ranking.unusual == 1
    assert "none of its windows before has: `T9`" in " ".join(one.text for one in ranking.units[0].reasons)
    assert found.unnamed == 1 and found.open == 0
    assert asked(client, settings, "service").ranking.units == ()
    assert asked(client, settings, "process", workload="shop/*").ranking.judged == 1
    assert asked(client, settings, "host", only=("other/*",)).ranking.judged == 0


def test_a_session_counts_as_a_whole_and_its_findings_with_it(
    client: "redis.Redis", settings: Settings
) -> None:
    def session(n: int, at: datetime, *templates: int) -> list[dict[str, Any]]:
        key = f"request_id=req-{n:05}"
        return [line(at + timedelta(seconds=s), t, message=f"p{t} {key}") for s, t in enumerate(templates)]

    lines = [x for n in range(120) for x in session(n, NOW - MINUTE * (90 + n), 1, 2, 3)]
    lines += [x for n in range(200, 220) for x in session(n, NOW - MINUTE * (5 + n % 40), 1, 2, 3)]
    lines += session(300, NOW - MINUTE * 60 - timedelta(seconds=1), 1, 2, 3)  # over the border of the spans
    lines += session(400, NOW - MINUTE * 20, 1, 2) + session(500, NOW - timedelta(seconds=9), 1)
    stored(settings, lines)
    finding = WatcherFinding(
        source=SESSIONS, workload="shop/web", cause="session-counts", subject="s", at=NOW - MINUTE * 19,
        message="T3 is missing: session req-00400, 2 events in 1 s from line 1 of a.log", detail="",
        reasons=("session-counts:3 0/1",), score=0.9, p_value=1e-5, chance=GRAVE, version="m1",
    )  # fmt: skip
    for batch, _, rows in finding_rows([finding]):
        parquet_of(settings).write(batch, rows)
    found = asked(client, settings, "session")
    first, *others = found.ranking.units
    assert (first.unit, first.unusual, first.findings) == ("req-00400", True, 1)
    assert first.reasons[0].text.startswith("1 finding in its sessions and rates: T3 is missing")
    assert {unit.unit: unit.lines for unit in asked(client, settings, "session", limit=50).ranking.units}[
        "req-00300"
    ] == 3
    assert not any(unit.unusual for unit in others) and found.open == 1 and found.ranking.normal == 120


def test_a_record_counts_for_each_of_its_sessions(client: "redis.Redis", settings: Settings) -> None:
    def request(user: int, number: int, at: datetime, **more: Any) -> dict[str, Any]:
        keys = f"session_id=of-{user:05} request_id=r{number:05} trace_id={number:032x}"
        return line(at, 1 + number % 2, message=f"p {keys}", **more)

    lines = [request(n // 4, n, NOW - MINUTE * (90 + n // 4)) for n in range(400, 800)]
    lines += [request(n // 4, n, NOW - MINUTE * 20) for n in range(2000, 2040)]
    lines += [
        request(500, 2000, NOW - MINUTE * 20, anomalous=True, p_value=0.001),
        line(NOW - MINUTE * 20, 3),
    ]
    stored(settings, lines)
    found = asked(client, settings, "session", limit=60)
    units = {unit.unit: unit.lines for unit in found.ranking.units}
    # Ten users of four requests. A trace holds the same records as its request, so one is left out.
    assert found.ranking.judged == 50 and found.unnamed == 1
    assert units["of-00500"] == 5 and units[f"{2000:032x}"] == 2 and "r02000" not in units


def test_questions_without_sense_are_refused(client: "redis.Redis", settings: Settings) -> None:
    for by, more, sentence in (
        ("house", {}, "by 'house' is no unit; use one of host, pod"),
        ("host", {"normal": "30m"}, "is not after"),
        ("host", {"normal": "yesterday"}, "neither a span nor a time"),
    ):
        with pytest.raises(BadInput, match=sentence):
            asked(client, settings, by, **more)  # type: ignore[arg-type]
