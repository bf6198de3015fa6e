"""Times of day at which a training is due."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pipeline.controller.schedule import last_time_of_day, next_time_of_day

BERLIN = ZoneInfo("Europe/Berlin")
MILLENNIUM = datetime(2000, 1, 1)  # noqa: DTZ001 - hypothesis adds the zone itself
modest = effort(max_examples=60, deadline=None)  # a busy machine is no fault


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_without_times_there_is_none() -> None:
    assert last_time_of_day(utc("2026-11-20 12:00"), (), BERLIN) is None
    assert next_time_of_day(utc("2026-11-20 12:00"), (), BERLIN) is None


def test_a_time_of_day_is_one_of_its_zone() -> None:
    now = utc("2026-11-20 12:00")
    assert last_time_of_day(now, ("02:30", "18:00"), BERLIN) == utc("2026-11-20 01:30")
    assert next_time_of_day(now, ("02:30", "18:00"), BERLIN) == utc("2026-11-20 17:00")


def test_the_very_moment_has_come() -> None:
    now = utc("2026-11-20 01:30")
    assert last_time_of_day(now, ("02:30",), BERLIN) == now
    assert next_time_of_day(now, ("02:30",), BERLIN) == utc("2026-11-21 01:30")


def test_a_skipped_time_comes_once_that_day_an_hour_later() -> None:
    # 2026-03-29: 02:00 becomes 03:00.
    assert last_time_of_day(utc("2026-03-29 12:00"), ("02:30",), BERLIN) == utc("2026-03-29 01:30")
    assert next_time_of_day(utc("2026-03-28 12:00"), ("02:30",), BERLIN) == utc("2026-03-29 01:30")


def test_a_repeated_time_comes_once_that_day() -> None:
    # 2026-10-25: 03:00 becomes 02:00, so 02:30 is at 00:30 and at 01:30 UTC.
    first = utc("2026-10-25 00:30")
    assert last_time_of_day(utc("2026-10-25 01:45"), ("02:30",), BERLIN) == first
    assert next_time_of_day(first, ("02:30",), BERLIN) == utc("2026-10-26 01:30")


def hours(begin: datetime, days: int) -> Iterator[datetime]:
    for hour in range(days * 24):
        yield begin + timedelta(hours=hour)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])
def test_in_a_whole_year_a_time_comes_once_a_day(zone: str) -> None:
    seen = {last_time_of_day(now, ("02:10",), ZoneInfo(zone)) for now in hours(utc("2026-01-01 12:00"), 365)}
    assert len(seen) == 366  # both first days of January


@modest
@given(
    now=st.datetimes(MILLENNIUM, MILLENNIUM.replace(year=2040), timezones=st.just(UTC)),
    times=st.lists(st.times().map(lambda t: f"{t:%H:%M}"), min_size=1, max_size=4),
    zone=st.sampled_from(["Europe/Berlin", "America/St_Johns", "Pacific/Apia", "Africa/Casablanca", "UTC"]),
)
def test_no_time_lies_between_the_last_and_the_next(now: datetime, times: list[str], zone: str) -> None:
    last = last_time_of_day(now, times, ZoneInfo(zone))
    following = next_time_of_day(now, times, ZoneInfo(zone))
    assert last is not None
    assert following is not None
    assert last <= now < following <= last + timedelta(hours=49)
    assert next_time_of_day(last, times, ZoneInfo(zone)) == following
    assert last_time_of_day(following - timedelta(seconds=1), times, ZoneInfo(zone)) == last
