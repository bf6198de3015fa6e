"""A new template that comes a hundred times in ten minutes is reported once, with its count."""

import pytest

from pipeline.records.verdict import Reason
from pipeline.watching.rates.newcomers import FLAPS, SPAN, WATCHED
from pipeline.watching.rates.rates import Alarm, Rates
from tests.watching.test_rates import START, minute_of

USUAL, FLAP = 1, 9
LATER = int(WATCHED) + 60


def told(lines: dict[int, dict[int, int]], *, until: int = LATER + 90, judged: bool = True) -> list[Alarm]:
    """The alarms about new templates, of a calm workload with these lines by minute and template."""
    rates, alarms = Rates.unpack(None), []
    for minute in range(until):
        counts = ({USUAL: 5} if minute % 2 else {}) | lines.get(minute, {})
        rates.add([(START + minute, one, n) for one, n in counts.items()], judged=judged)
        alarms += rates.close(START + minute + 1)
        if minute == LATER + 3:
            rates = Rates.unpack(rates.pack())
    return [alarm for alarm in alarms if " new " in alarm.sentence]


def flapping(template: int = FLAP, per_minute: int = 12, minutes: int = 20) -> dict[int, dict[int, int]]:
    return {LATER + n: {template: per_minute} for n in range(minutes)}


def test_it_is_reported_once_with_its_count_as_soon_as_it_came_a_hundred_times() -> None:
    (alarm,) = told(flapping(minutes=60))
    assert (alarm.kind, alarm.template_id, alarm.cause) == (Reason.RATE_BURST, FLAP, f"rate-burst:{FLAP}")
    assert alarm.sentence == f"template {FLAP} is new and came 108 times from 2024-01-01 05:00 UTC to 05:08"
    assert minute_of(alarm) == START + LATER + 8 and alarm.score > 0.5 and alarm.p_value < 0.02


@pytest.mark.parametrize(
    "lines",
    [
        flapping(per_minute=9),
        flapping(per_minute=99, minutes=1),
        {minute: {FLAP: 30} for minute in range(LATER, LATER + 60, 10)},
        {minute: {FLAP: 20} for minute in range(60, 300)},  # while the workload itself was new
        {60: {FLAP: 1}} | flapping(minutes=8),  # it is known: bursts are another rule's
    ],
)
def test_a_new_template_that_comes_more_seldom_and_a_known_one_are_not_flapping(
    lines: dict[int, dict[int, int]],
) -> None:
    assert told(lines) == []


def test_a_first_line_before_does_not_hide_it() -> None:
    lines = {LATER: {FLAP: 1}} | {LATER + 20 + n: {FLAP: 25} for n in range(4)}
    (alarm,) = told(lines)
    assert alarm.seen == FLAPS and minute_of(alarm) < START + LATER + 20 + SPAN


def test_one_change_that_brings_several_is_one_alarm() -> None:
    several = {minute: {FLAP + n: 20 for n in range(5)} for minute in range(LATER, LATER + 9)}
    (alarm,) = told(several)
    assert alarm.template_id is None
    assert (
        alarm.sentence
        == "many new templates (9, 10, 11 and more) came 500 times from 2024-01-01 05:00 UTC to 05:04"
    )
    later = flapping() | {LATER + 9 + n: {FLAP + 1: 20} for n in range(9)}
    assert len(told(later)) == 1


def test_a_baseline_teaches_and_reports_nothing() -> None:
    assert told(flapping(), judged=False) == []
