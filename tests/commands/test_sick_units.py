"""Which unit of a run is sick, beside the units of its baseline."""

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
from answers_contract import row

from pipeline.commands.run.sick_units import SHOWN, sick_units
from pipeline.records.batch import Purpose
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

BEGAN = datetime(2026, 11, 25, 12, tzinfo=UTC)
EARLIER = BEGAN - timedelta(days=30)


def stored(settings: Settings, purpose: Purpose, found: list[dict[str, Any]]) -> None:
    rows = [row(n, **one) for n, one in enumerate(found, start=1)]
    parquet_of(settings, purpose).write("lines", pl.DataFrame(rows, schema=RESULT_SCHEMA))


def lines(begin: datetime, minutes: int, **more: Any) -> list[dict[str, Any]]:
    """Three templates of each of four hosts, a line each ten seconds."""
    return [
        {"timestamp": begin + timedelta(seconds=10 * n), "template_id": n % 3, "pattern_id": n % 3, "host": host}
        | more
        for host in ("n1", "n2", "n3", "n4")
        for n in range(6 * minutes)
    ]  # fmt: skip


def test_the_sick_host_of_a_run_comes_first_and_once(settings: Settings) -> None:
    stored(settings, Purpose.BASELINE, lines(EARLIER, 10))
    bad = {"template_id": 9, "pattern_id": 9, "host": "n3", "anomalous": True, "p_value": 0.001}
    odd = [{"timestamp": BEGAN + timedelta(minutes=m), **bad} for m in (2, 3, 25)]
    stored(settings, Purpose.SCORE, lines(BEGAN, 30) + odd)
    found = sick_units(settings, {9: "disk <*> full"})
    assert found is not None and (found["by"], found["judged"], found["normal"]) == ("host", 4, 4)
    assert found["level"] is None  # of four normal units
    names = [unit["unit"] for unit in found["units"]]
    assert names[0] == "n3" and sorted(names) == ["n1", "n2", "n3", "n4"] and len(names) <= SHOWN
    assert "`disk <*> full`" in found["units"][0]["reasons"][0]["text"]
    assert found["units"][0]["p_value"] == 0.2 < found["units"][1]["p_value"]


def test_services_are_ranked_where_lines_name_them(settings: Settings) -> None:
    for purpose, begin in ((Purpose.BASELINE, EARLIER), (Purpose.SCORE, BEGAN)):
        stored(settings, purpose, [one | {"service": f"s{n % 3}"} for n, one in enumerate(lines(begin, 5))])
    found = sick_units(settings, {})
    assert found is not None and found["by"] == "service"


def test_nothing_is_ranked_without_a_baseline_or_without_times_or_units(settings: Settings) -> None:
    assert sick_units(settings, {}) is None
    stored(settings, Purpose.SCORE, lines(BEGAN, 5))
    assert sick_units(settings, {}) is None
    stored(settings, Purpose.BASELINE, lines(EARLIER, 5, timed=False))
    assert sick_units(settings, {}) is None
    stored(settings, Purpose.BASELINE, lines(EARLIER, 5))
    assert sick_units(settings, {}) is not None
    stored(settings, Purpose.SCORE, lines(BEGAN, 5, host=None))
    assert sick_units(settings, {}) is None  # one file
