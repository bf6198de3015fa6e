"""The order of causes in one incident: the cause first, its consequences behind it."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.watching.incidents.leading import Sign, is_request, lead_order
from pipeline.watching.incidents.onsets import SPAN

START = datetime(2026, 11, 19, 9, 0, 0, 1000, tzinfo=UTC)


def sign(seconds: float = 0, text: str = "could not open the door", **changes: Any) -> Sign:
    first = START + timedelta(seconds=seconds)
    base: dict[str, Any] = {
        "severity": 3,
        "new": True,
        "first": first,
        "last": first,
        "count": 1,
        "text": text,
        "tie": (text, seconds),
    }
    return Sign(**(base | changes))


def led(*signs: Sign) -> list[int]:
    return lead_order(signs)


def test_what_is_error_like_comes_first_however_late() -> None:
    assert led(sign(0, severity=1), sign(1, severity=2), sign(90)) == [2, 1, 0]


def test_what_no_training_has_seen_comes_before_what_goes_on_all_day() -> None:
    daily = sign(0, new=False, last=START + 2 * SPAN)
    assert led(daily, sign(20, new=False), sign(40)) == [2, 1, 0]


def test_the_earlier_cause_leads_where_clocks_cannot_differ_so_much() -> None:
    assert led(sign(4), sign(0, count=500)) == [1, 0]


def test_within_a_second_the_rarer_cause_leads() -> None:
    assert led(sign(0, count=40), sign(0.4), sign(0.9, count=5)) == [1, 2, 0]


def test_within_a_second_of_equally_rare_causes_the_earlier_leads() -> None:
    assert led(sign(0.002, count=40), sign(0.001, count=44)) == [1, 0]


def test_a_time_in_whole_seconds_leads_nothing_of_that_second() -> None:
    coarse = sign(0, first=START.replace(microsecond=0))
    assert led(coarse, sign(0.5)) == [1, 0]


def test_a_bare_record_of_a_request_follows_what_says_something() -> None:
    access = sign(0, '"GET /cart HTTP/1.1" 502 157 "-" "okhttp/4.9"')
    assert led(access, sign(2, count=90)) == [1, 0]


@pytest.mark.parametrize(
    ("text", "request_alone"),
    [
        ('"POST /a/b?c=d HTTP/1.1" 500 23 "https://shop.example/" "Mozilla/5.0 (X11; Linux)"', True),
        ("GET /cart 500 12ms", True),
        ("method=GET path=/cart status=500 duration=3ms", True),
        ("[12] GET /cart failed", False),
        ('connect() failed while connecting to upstream, request: "GET / HTTP/1.1"', False),
        ("OutOfMemoryError", False),
        ('level=error msg="could not reach the database"', False),
        ("", False),
    ],
)
def test_a_request_is_told_from_a_sentence(text: str, request_alone: bool) -> None:
    assert is_request(text) is request_alone


@given(
    st.lists(
        st.builds(
            sign,
            st.floats(0, 300),
            st.sampled_from(["disk full", '"GET / HTTP/1.1" 500 1', ""]),
            severity=st.integers(1, 3),
            new=st.booleans(),
            count=st.integers(1, 10_000),
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_every_cause_has_one_place_whatever_the_order_of_the_input(
    signs: list[Sign], draw: random.Random
) -> None:
    distinct = [replace(one, tie=(at,)) for at, one in enumerate(signs)]
    order = lead_order(distinct)
    assert sorted(order) == list(range(len(signs)))
    shuffled = draw.sample(distinct, len(distinct))
    assert [shuffled[at] for at in lead_order(shuffled)] == [distinct[at] for at in order]
