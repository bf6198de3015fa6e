"""The lines that are expected of a workload, from its learnt rate."""

from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random

import pytest
import redis

from pipeline.redis.keys import Keys
from pipeline.service.stored.expected import expected_rates
from pipeline.settings import Settings
from pipeline.watching.rates.detector import Detector
from pipeline.watching.rates.outlook import ExpectedLines, expected_lines
from pipeline.watching.rates.rates import Rates

BEGIN = datetime(2026, 11, 23, tzinfo=UTC)  # a Monday
MINUTE = round(BEGIN.timestamp()) // 60
HOUR = timedelta(hours=1)


def lines_of(minute: int, random: Random) -> int:
    """40 a minute from 8 to 20 o'clock, 5 otherwise, with some chance."""
    mean = 40 if 8 <= minute % 1440 // 60 < 20 else 5
    return sum(random.random() < 0.5 for _ in range(2 * mean))


@pytest.fixture(scope="module")
def learnt() -> Detector:
    detector, random = Detector(), Random(1)
    for n in range(2 * 1440 + 240):
        detector.step(MINUTE + n, {1: lines_of(n, random)}, judged=False)
    return detector


def bands(detector: Detector, *ends: datetime) -> list[ExpectedLines]:
    return expected_lines(detector, ends)


def test_the_band_holds_what_comes_at_that_hour(learnt: Detector) -> None:
    (night, day) = bands(learnt, BEGIN + 52 * HOUR, BEGIN + 56 * HOUR, BEGIN + 60 * HOUR)
    assert night.low < 4 * 300 < night.high < 4 * 2_400 * 0.5
    assert day.low < 4 * 2_400 < day.high and day.low > night.high
    (mixed,) = bands(learnt, BEGIN + 55.5 * HOUR, BEGIN + 56.5 * HOUR)
    assert mixed.low < 150 + 1_200 < mixed.high and mixed.high < day.high
    (minute,) = bands(learnt, BEGIN + 56 * HOUR, BEGIN + 56 * HOUR + timedelta(minutes=1))
    assert 0 <= minute.low < 40 < minute.high


def test_a_workload_that_is_hardly_known_has_no_band() -> None:
    detector = Detector()
    assert bands(detector, BEGIN, BEGIN + HOUR) == []
    for n in range(59):
        detector.step(MINUTE + n, {1: 5}, judged=False)
    assert bands(detector, BEGIN, BEGIN + HOUR) == []
    detector.step(MINUTE + 59, {1: 5}, judged=False)
    (band,) = bands(detector, BEGIN + HOUR, BEGIN + 2 * HOUR)
    assert band.low < 300 < band.high


def test_a_state_that_cannot_be_read_gives_no_band(
    learnt: Detector, client: "redis.Redis", settings: Settings
) -> None:
    state = Rates()
    state.detector = learnt
    key = Keys(settings.redis.key_prefix).watching("rates")
    client.hset(key, mapping={"shop": state.pack(), "other": b"damaged"})
    ask = partial(expected_rates, client, settings, ["shop", "other", "none"])
    found = ask([BEGIN + 56 * HOUR, BEGIN + 57 * HOUR])
    assert found == {"shop": bands(learnt, BEGIN + 56 * HOUR, BEGIN + 57 * HOUR)}
