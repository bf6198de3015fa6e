"""The order of causes in one incident: the cause first, its consequences behind it."""

import random
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.watching.incidents.leading import Grade, Sign, grade_of, is_request, lead_order, thrown_in
from pipeline.watching.incidents.onsets import SPAN

START = datetime(2026, 11, 19, 9, 0, 0, 1000, tzinfo=UTC)


def sign(seconds: float = 0, text: str = "could not open the door", **changes: Any) -> Sign:
    first = START + timedelta(seconds=seconds)
    base: dict[str, Any] = {
        "grade": Grade.ERROR,
        "workload": "shop",
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


def test_the_gravest_comes_first_however_late() -> None:
    assert led(sign(0, grade=Grade.CALM), sign(1, grade=Grade.WARNING), sign(90)) == [2, 1, 0]


def test_a_warning_that_names_a_failure_counts_as_an_error_where_a_program_writes_nothing_graver() -> None:
    failing = sign(0, grade=Grade.FAILING, workload="redis")
    assert led(failing, sign(1), sign(2)) == [0, 1, 2]
    assert led(failing, sign(1, workload="redis"), sign(2)) == [1, 2, 0]


def test_a_known_warning_leads_with_its_trace_only_where_another_cause_quotes_it() -> None:
    traced = sign(0, grade=Grade.TRACED, new=False, thrown=("no such user as gray",))
    error = sign(2, new=False)
    assert led(traced, error) == [1, 0], "the program went on, and nobody speaks of it"
    assert led(traced, error, sign(3, "cannot start: no such user as gray", new=False)) == [0, 1, 2]
    assert led(replace(traced, new=True), replace(error, new=True)) == [0, 1], "no training has seen it"
    later = replace(traced, first=traced.first + timedelta(seconds=1), thrown=("the disk is full",))
    quoter = replace(later, first=later.first + timedelta(seconds=1))
    assert led(traced, later, quoter) == [1, 0, 2], "a text that others quote comes first"
    assert led(traced, replace(later, thrown=())) == [0, 1], "neither is quoted"


def test_what_was_thrown_first_and_last_is_kept() -> None:
    raw = "cannot read\njava.io.IOException: broken pipe of node 7\n\tat a.B.c(B.java:7)\nCaused by: E.Error: no\n"
    assert thrown_in(raw) == ("broken pipe of node 7",)
    assert thrown_in(raw + "Caused by: x.OtherError: the disk is full\n") == (
        "broken pipe of node 7",
        "the disk is full",
    )
    assert thrown_in("java.io.IOException: broken pipe of node 7") == ()


def test_what_no_training_has_seen_comes_before_what_goes_on_all_day() -> None:
    daily = sign(0, new=False, last=START + 2 * SPAN)
    assert led(daily, sign(20, new=False), sign(40)) == [2, 1, 0]


def test_what_came_once_leads_what_it_set_off() -> None:
    assert led(sign(0, count=500), sign(4), sign(4.9, count=7)) == [1, 2, 0]


def test_of_equally_rare_causes_the_earlier_leads() -> None:
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


TRACE = "java.io.IOException: broken\n\tat a.B.c(B.java:7)"


@pytest.mark.parametrize(
    ("level", "severity", "raw", "grade"),
    [
        ("error", 3, "12:00 ERROR cannot save", Grade.ERROR),
        ("fatal", 3, "12:00 FATAL too many clients", Grade.ERROR),
        ("info", 3, f"12:00 INFO retrying\n{TRACE}", Grade.TRACED),
        ("warning", 2, f"12:00 WARN retrying\n{TRACE}", Grade.TRACED),
        (None, 3, f"retrying failed\n{TRACE}", Grade.ERROR),
        ("info", 1, f"12:00 INFO config\n{TRACE}", Grade.CALM),
        ("info", 3, "server process was terminated by signal 9: Killed", Grade.ERROR),
        ("info", 3, "the request failed", Grade.WORDED),
        (None, 3, "the request failed", Grade.UNLEVELLED),
        ("warning", 3, "Failed opening the file", Grade.FAILING),
        ("warning", 2, "the queue is long", Grade.WARNING),
        ("info", 1, "all is well", Grade.CALM),
        ("error", 3, "12:00 ERROR RECEIVED SIGNAL 15: SIGTERM", Grade.WARNING),
        (
            "error",
            3,
            "12:00 ERROR worker died\njava.lang.InterruptedException: sleep interrupted",
            Grade.WARNING,
        ),
        ("error", 3, "12:00 ERROR cannot read limit, using the default", Grade.WARNING),
        ("error", 3, "12:00 ERROR the disk is full; interrupts are off", Grade.WARNING),
        ("error", 3, f"12:00 ERROR the disk is full\n{TRACE}\n\tat x.Interrupts.y(I.java:1)", Grade.ERROR),
    ],
)
def test_the_level_of_a_record_weighs_more_than_its_words(
    level: str | None, severity: int, raw: str, grade: Grade
) -> None:
    assert grade_of(level, severity, raw, raw) is grade


@pytest.mark.parametrize("filler", ["\n", " \n", "\n\t", "a.", "using "])
def test_a_hostile_record_is_graded_in_milliseconds(filler: str) -> None:
    raw = "x failed\n" + filler * 4_000
    began = time.process_time()
    for _ in range(10):
        grade_of("error", 3, raw, raw)
    assert time.process_time() - began < 3, "blank lines took 1.5 s each"


@given(
    st.lists(
        st.builds(
            sign,
            st.floats(0, 300),
            st.sampled_from(["disk full", '"GET / HTTP/1.1" 500 1', ""]),
            grade=st.sampled_from(Grade),
            workload=st.sampled_from(["shop", "bank"]),
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
