"""What soon follows an event in normal sessions, and a verdict that names what did not follow."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.watching.sessions.follow_ups import FollowUps, Part, learn_follow_ups
from pipeline.watching.sessions.missing import MAX_MISSING, with_missing
from pipeline.watching.sessions.model import LEVEL, NORMAL, SessionModel, SessionVerdict, dump, load

CREATED, AUDITED, CHARGED, RARE = 1, 2, 3, 9
MINUTE_MS = 60_000


def order(number: int) -> Part:
    """Created, audited at any time, charged within two seconds; one in 500 takes twenty."""
    charged_ms = 20_000 if number % 500 == 7 else 300 + 10 * (number % 150)
    times = sorted(
        [(0, CREATED), (charged_ms, CHARGED), (random.Random(number).randint(-5_000, 5_000), AUDITED)]
    )
    return [event for _, event in times], [1_000_000 + at for at, _ in times]


NORMAL_PARTS = [order(number) for number in range(1_000)]
LEARNT = learn_follow_ups([*NORMAL_PARTS, ([CREATED, RARE, CHARGED], [0, 1, 2])])


def test_a_follow_up_is_learnt_with_its_usual_time_and_what_comes_in_any_order_is_none() -> None:
    assert [(one.after, one.event) for one in LEARNT.every] == [(CREATED, CHARGED)]
    (charged,) = LEARNT.every
    assert (charged.usual_ms, charged.longest_ms) == (2_000, 20_000)
    assert (charged.parts, charged.came, charged.within) == (1_001, 1_001, 999)


def test_what_did_not_come_in_time_is_missing_unless_it_may_still_come() -> None:
    (missing,) = LEARNT.missing([AUDITED, CREATED], [0, 500], waited_ms=MINUTE_MS)
    assert (missing.follow_up.event, missing.at, missing.late_ms) == (CHARGED, 1, None)
    assert missing.p_value == pytest.approx(1 / 1_002)
    assert LEARNT.missing([CREATED], [0], waited_ms=1_000) == []
    assert LEARNT.missing([CREATED, CHARGED], [0, 1_999], waited_ms=MINUTE_MS) == []
    (late,) = LEARNT.missing([CREATED, CHARGED], [0, 9_000], waited_ms=MINUTE_MS)
    (later,) = LEARNT.missing([CREATED, CHARGED], [0, 40_000], waited_ms=MINUTE_MS)
    assert (late.late_ms, later.late_ms) == (9_000, 40_000)
    assert late.p_value == pytest.approx(3 / 1_002) and later.p_value < 1 / 1_002


def test_events_of_one_moment_come_in_any_order() -> None:
    assert LEARNT.missing([CHARGED, AUDITED, CREATED], [7, 7, 7], waited_ms=MINUTE_MS) == []
    assert LEARNT.missing([CHARGED, AUDITED, CREATED], [6, 7, 7], waited_ms=MINUTE_MS) != []


def test_the_latest_event_without_its_follow_up_comes_first() -> None:
    chain = learn_follow_ups([([1, 2, 3, 4, 5], [0, 10, 20, 30, 40])] * 60)
    found = chain.missing([1, 2, 3], [0, 10, 20], waited_ms=MINUTE_MS)
    assert [(one.follow_up.after, one.follow_up.event) for one in found][:2] == [(3, 4), (3, 5)]


def test_a_session_is_anomalous_for_a_missing_event_alone_only_where_normal_ones_nearly_never_miss_it() -> (
    None
):
    few, many = LEARNT, learn_follow_ups([([CREATED, CHARGED], [0, 100])] * 4_000)
    broken: Part = ([CREATED], [0])
    assert with_missing(NORMAL, few.missing(*broken, waited_ms=MINUTE_MS)) == NORMAL
    verdict = with_missing(NORMAL, many.missing(*broken, waited_ms=MINUTE_MS))
    assert verdict.anomalous and verdict.score > 0.5 and verdict.p_value <= LEVEL
    assert verdict.reasons == ("session-missing:3 after 1 1000 4000/4000",)
    assert verdict.cause == "session-missing:3-after-1"
    slow = with_missing(NORMAL, many.missing([CREATED, CHARGED], [0, 30_000], waited_ms=MINUTE_MS))
    assert slow.reasons == ("session-missing:3 after 1 1000 4000/4000 late 30000",)


def test_an_anomalous_session_names_what_is_missing_behind_its_own_reasons() -> None:
    wrong = SessionVerdict(
        anomalous=True, score=0.9, p_value=0.001, reasons=("session-event:9",), cause="session-event:9"
    )
    chain = learn_follow_ups([(list(range(1, 9)), list(range(8)))] * 60)
    verdict = with_missing(wrong, chain.missing([1, 2], [0, 1], waited_ms=MINUTE_MS))
    assert verdict.cause == wrong.cause and verdict.p_value == wrong.p_value
    assert verdict.reasons[:2] == ("session-event:9", "session-missing:3 after 2 1000 60/60")
    assert len(verdict.reasons) == 1 + MAX_MISSING


def test_follow_ups_are_a_part_of_a_session_model_in_its_file() -> None:
    model = SessionModel.fit([events for events, _ in NORMAL_PARTS])
    assert not model.follow_ups.every
    object.__setattr__(model, "follow_ups", LEARNT)
    assert load(dump({"shop\0trace": model}))["shop\0trace"].follow_ups == LEARNT


@given(st.lists(st.lists(st.tuples(st.integers(-2, 6), st.integers(0, 9_000)), max_size=9), max_size=80))
def test_no_normal_part_misses_more_than_was_counted(drawn: list[list[tuple[int, int]]]) -> None:
    parts: list[Part] = [
        ([event for event, _ in part], sorted(at for _, at in part)) for part in drawn if part
    ]
    learnt = learn_follow_ups(parts)
    for one in learnt.every:
        assert one.within <= one.came <= one.parts and one.after != one.event
        alone = FollowUps((one,))
        missed = sum(
            bool(alone.missing(*part, waited_ms=10 * MINUTE_MS)) for part in parts if len(part[0]) > 1
        )
        assert missed == one.parts - one.within
