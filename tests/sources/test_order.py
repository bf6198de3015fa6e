"""Years and repeated hours that only the order of lines tells."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from pipeline.records.schema import raw_frame
from pipeline.sources.formats import detect, parse

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def times(lines: list[str], zone: str = "UTC", sources: list[str] | None = None) -> list[datetime]:
    records = raw_frame(lines)
    if sources is not None:
        records = records.with_columns(pl.Series("source", sources))
    return parse(records, detect(lines), arrived=NOW, zone=zone)["timestamp"].to_list()


def syslog(days: list[datetime]) -> list[str]:
    return [f"{day:%b} {day.day:2d} 08:00:00 web1 app[7]: tick" for day in days]


def day(month: int, of_month: int) -> datetime:
    return datetime(2000, month, of_month, tzinfo=UTC)


@pytest.mark.parametrize("days", [1, 9, 40, 170])
def test_a_file_of_months_never_falls_by_a_year(days: int) -> None:
    """Also over two New Years, and over the day of the year that is today."""
    right = [datetime(2024, 12, 20, 8, tzinfo=UTC) + timedelta(days=days * n) for n in range(700 // days)]
    right = [day for day in right if day < NOW]
    assert times(syslog(right)) == right


def test_each_file_of_a_batch_has_its_own_order() -> None:
    one = [datetime(2025, 11, 27, 8, tzinfo=UTC), datetime(2026, 3, 1, 8, tzinfo=UTC)]
    other = [datetime(2026, 11, 27, 8, tzinfo=UTC), datetime(2026, 11, 28, 8, tzinfo=UTC)]
    lines = syslog([*one, *other, *one])
    assert times(lines, sources=["a"] * 2 + ["b"] * 2 + ["c"] * 2) == [*one, *other, *one]


def test_lines_out_of_order_around_new_year_keep_their_years() -> None:
    right = [datetime(2026, 1, 1, 8, tzinfo=UTC), datetime(2025, 12, 31, 8, tzinfo=UTC)] * 3
    assert times(syslog(right)) == right


def test_years_that_other_lines_write_settle_those_that_no_line_writes() -> None:
    written = "2019-02-25T08:00:00Z INFO started"
    lines = [written, *syslog([day(2, 25), day(12, 31), day(1, 1)])]
    assert [time.year for time in times(lines)] == [2019, 2019, 2019, 2020]
    later = [*syslog([day(12, 31), day(2, 24)]), written]
    assert [(time.year, time.month) for time in times(later)] == [(2018, 12), (2019, 2), (2019, 2)]
    ahead = ["2026-11-28T08:00:00Z INFO now", *syslog([day(12, 24)])]
    assert times(ahead)[1].year == 2025  # a year that is to come is none


LOCAL = [
    f"2026-10-25 {hour}:{minute:02d}:00 INFO x"
    for hour in ("01", "02", "02", "03")
    for minute in range(0, 60, 10)
]


def test_the_hour_that_comes_twice_is_told_by_the_fall_of_the_clock() -> None:
    found = times(LOCAL, "Europe/Berlin")
    assert found == [datetime(2026, 10, 24, 23, tzinfo=UTC) + timedelta(minutes=10 * n) for n in range(24)]


def test_an_hour_that_comes_once_is_the_first_one_and_jitter_does_not_repeat_it() -> None:
    jitter = [LOCAL[6], LOCAL[8], LOCAL[8].replace("02:20:00", "02:19:58"), LOCAL[9]]
    found = times(jitter, "Europe/Berlin")
    assert [time.hour for time in found] == [0, 0, 0, 0]


def test_a_zone_that_a_line_writes_needs_no_order() -> None:
    lines = [line.replace(" INFO", " CEST INFO") for line in LOCAL[6:12]]
    lines += [line.replace(" INFO", " CET INFO") for line in LOCAL[6:12]]
    assert [time.hour for time in times(lines, "Europe/Berlin")] == [0] * 6 + [1] * 6
