"""Which unit of a run is unusual, beside the units of its baseline."""

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
from answers_contract import row

from pipeline.commands.run.unusual_units import SHOWN, unusual_units
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


def test_the_unusual_host_of_a_run_comes_first_and_once(settings: Settings) -> None:
    stored(settings, Purpose.BASELINE, lines(EARLIER, 10))
    bad = {"template_id": 9, "pattern_id": 9, "host": "n3", "anomalous": True, "p_value": 0.001}
    odd = [{"timestamp": BEGAN + timedelta(minutes=m), **bad} for m in (2, 3, 25)]
    stored(settings, Purpose.SCORE, lines(BEGAN, 30) + odd)
    found = unusual_units(settings, {9: "disk <*> full"})
    assert found is not None and (found["by"], found["judged"], found["normal"]) == ("host", 4, 4)
    names = [unit["unit"] for unit in found["units"]]
    assert names[0] == "n3" and sorted(names) == ["n1", "n2", "n3", "n4"] and len(names) <= SHOWN
    assert [unit["unusual"] for unit in found["units"]] == [True, False, False, False]
    assert "`disk <*> full`" in " ".join(one["text"] for one in found["units"][0]["reasons"])
    assert found["units"][0]["lines"] == 6 * 30 + 3


def test_no_unit_of_a_run_like_its_baseline_is_unusual(settings: Settings) -> None:
    stored(settings, Purpose.BASELINE, lines(EARLIER, 10))
    stored(settings, Purpose.SCORE, lines(BEGAN, 30))
    found = unusual_units(settings, {})
    assert found is not None and found["unusual"] == 0


def test_the_kind_is_shown_whose_first_unit_stands_out(settings: Settings) -> None:
    def of(begin: datetime, bad: str) -> list[dict[str, Any]]:
        found = lines(begin, 30)
        for n, one in enumerate(found):
            one["service"] = f"s{n % 3}"
            if one["service"] == bad and n % 2:
                one |= {"template_id": 9, "pattern_id": 9}
        return found

    stored(settings, Purpose.BASELINE, of(EARLIER, ""))
    stored(settings, Purpose.SCORE, of(BEGAN, "s1"))
    found = unusual_units(settings, {})
    assert found is not None and (found["by"], found["units"][0]["unit"]) == ("service", "s1")


def test_classes_are_no_services(settings: Settings) -> None:
    for purpose, begin in ((Purpose.BASELINE, EARLIER), (Purpose.SCORE, BEGAN)):
        named = [one | {"service": f"DataNode{n % 3}$Server"} for n, one in enumerate(lines(begin, 5))]
        stored(settings, purpose, [one | {"host": None} for one in named])
    assert unusual_units(settings, {}) is None


def test_units_that_the_baseline_has_not_are_compared_as_a_whole(settings: Settings) -> None:
    def applications(begin: datetime, first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"timestamp": begin + timedelta(minutes=n, seconds=s), "workload": f"app-{first + n}", "host": None,
             "template_id": s % 3, "pattern_id": s % 3}
            for n in range(count) for s in range(20)
        ]  # fmt: skip

    stored(settings, Purpose.BASELINE, applications(EARLIER, 0, 30))
    bad = {
        "workload": "app-103",
        "host": None,
        "template_id": 9,
        "pattern_id": 9,
        "anomalous": True,
        "p_value": 1e-3,
    }
    odd = [{"timestamp": BEGAN + timedelta(minutes=3, seconds=s), **bad} for s in range(9)]
    stored(settings, Purpose.SCORE, applications(BEGAN, 100, 6) + odd)
    found = unusual_units(settings, {})
    assert found is not None and (found["by"], found["judged"], found["normal"]) == ("workload", 6, 30)
    assert found["unusual"] == 1 and found["units"][0]["unit"] == "app-103"


def test_nothing_is_ranked_without_a_baseline_or_without_times_or_units(settings: Settings) -> None:
    assert unusual_units(settings, {}) is None
    stored(settings, Purpose.SCORE, lines(BEGAN, 5))
    assert unusual_units(settings, {}) is None
    stored(settings, Purpose.BASELINE, lines(EARLIER, 5, timed=False))
    assert unusual_units(settings, {}) is None
    stored(settings, Purpose.BASELINE, lines(EARLIER, 5))
    assert unusual_units(settings, {}) is not None
    stored(settings, Purpose.SCORE, lines(BEGAN, 5, host=None))
    assert unusual_units(settings, {}) is None  # one file
