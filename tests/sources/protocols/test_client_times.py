"""Times as clients write them."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records.pushed import EARLIEST, LATEST
from pipeline.sources.protocols.client_times import (
    _of_any_iso,
    are_fine,
    has_fraction,
    of_fraction,
    of_iso,
    of_microseconds,
    of_nanoseconds,
    of_value,
)

AT = 1795600800_123456  # 2026-11-25T10:00:00.123456Z


@pytest.mark.parametrize(
    "written",
    [
        "2026-11-25T10:00:00.123456Z",
        "2026-11-25T10:00:00.123456789Z",
        "2026-11-25T11:00:00.123456+01:00",
        AT,
        str(AT),
        AT * 1000 + 999,
        1795600800.123456,
        "1795600800.123456",
    ],
)
def test_one_moment_in_every_notation_is_one_number(written: object) -> None:
    assert of_value(written) == AT


@pytest.mark.parametrize(
    "written",
    ["", "soon", "2026-13-45T99:00:00Z", "2026-11-25T10:00:00", "9999-12-31T23:59:59-23:59", "nan", "inf", "1e999",
     "9" * 5000, None, True, [], {}, 1e300, 10**400, 0, float("nan")],
)  # fmt: skip
def test_a_time_that_is_none_or_that_no_record_can_hold_is_none(written: object) -> None:
    assert of_value(written) is None


def test_milliseconds_are_told_from_seconds_by_their_size() -> None:
    assert of_value(1795600800) == 1795600800_000_000
    assert of_value(1795600800_123) == 1795600800_123_000


def test_nanoseconds_come_as_numbers_or_as_text_and_zero_is_no_time() -> None:
    assert of_nanoseconds(AT * 1000) == of_nanoseconds(str(AT * 1000)) == AT
    assert [of_nanoseconds(value) for value in (0, "0", "", "x", "9" * 5000, None, 10**40)] == [None] * 7
    assert of_nanoseconds(2**64 - 1) == (2**64 - 1) // 1000


def test_microseconds_are_digits() -> None:
    assert of_microseconds(b"1795600800123456") == AT
    assert [of_microseconds(text) for text in (b"", b"-5", b"1.5", "\u0661", b"9" * 29, b"0")] == [None] * 6


def test_every_moment_is_one_that_records_can_hold() -> None:
    for moment in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        micros = of_iso(moment.isoformat())
        assert micros is not None
        assert EARLIEST <= micros <= LATEST


def test_times_tell_requests_apart_if_all_are_there_and_they_are_not_cut_to_seconds() -> None:
    assert are_fine([AT, 1795600800_000_000])
    assert not are_fine([1795600800_000_000, 1795600801_000_000])
    assert not are_fine([AT, None])
    assert not are_fine([])


def test_one_whole_millisecond_tells_nothing_and_a_microsecond_or_a_second_moment_does() -> None:
    millisecond = AT // 1000 * 1000
    assert not are_fine([millisecond])
    assert not are_fine([millisecond] * 3)
    assert are_fine([millisecond, millisecond, millisecond + 1000])
    assert are_fine([millisecond + 1])
    assert [of_fraction(digits) for digits in ("003", "000004321", "", None)] == [3000, 4, None, None]


def test_a_text_without_a_fraction_says_no_less_than_a_second() -> None:
    assert has_fraction("2026-11-25T10:00:00.000Z")
    assert has_fraction(1795600800.5)
    assert not has_fraction("2026-11-25T10:00:00Z")
    assert not has_fraction(None)


@given(
    st.datetimes(timezones=st.just(UTC)),
    st.sampled_from(
        ("", ".25", ".250", ".000001", ".999999", ".123456789", ".12x", ".\u0661\u0662\u0663", ",250", ".-25")
    ),
    st.sampled_from(("Z", "z", "+01:00", "", "\u00e9")),
    st.sampled_from(("T", " ", "\u00e9")),
)
def test_a_time_of_a_known_second_is_the_one_that_is_read_as_a_whole(
    moment: datetime, fraction: str, offset: str, between: str
) -> None:
    text = f"{moment.replace(microsecond=0, tzinfo=None).isoformat(between)}{fraction}{offset}"
    assert of_iso(text) == _of_any_iso(text)


@pytest.mark.parametrize("day", ["2026-W48", "2026-W48-1", "20261125", "2026-11-25"])
@pytest.mark.parametrize("second", ["10:00:00", "100000", "10:00:00.1", "10:00:00.12", "1:00:00.123"])
def test_a_time_in_another_notation_of_iso_is_the_one_that_is_read_as_a_whole(day: str, second: str) -> None:
    for fraction in ("", ".123", ".123456"):
        text = f"{day}T{second}{fraction}Z"
        assert of_iso(text) == _of_any_iso(text), text
