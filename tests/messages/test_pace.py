"""Few records are worked on in few passes, and nobody waits who sends now and then."""

import pytest

from pipeline.messages.pace import AT_ONCE, FEW_BATCHES, PASSES_PER_S, SMALL, PassPace


class Time:
    """A clock that only sleep moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pace(time: Time) -> PassPace:
    return PassPace(lambda: time.now, time.sleep)


def passes(pace: PassPace, time: Time, number: int, *, records: int, every_s: float = 0.0) -> float:
    """The seconds that so many passes take, where batches come at this interval."""
    began = time.now
    for _ in range(number):
        time.now += every_s
        pace.wait()
        pace.began(records)
    return time.now - began


def test_a_trickle_has_few_passes(pace: PassPace, time: Time) -> None:
    seconds = passes(pace, time, 103, records=190, every_s=0.001)
    assert seconds == pytest.approx((103 - AT_ONCE) / PASSES_PER_S, rel=0.01)
    assert max(time.slept) <= 1.0 / PASSES_PER_S


def test_batches_now_and_then_do_not_wait(pace: PassPace, time: Time) -> None:
    passes(pace, time, 10, records=1, every_s=1.0 / PASSES_PER_S)
    assert time.slept == []
    time.now += 2.0
    passes(pace, time, int(AT_ONCE), records=1)
    assert time.slept == []
    pace.wait()
    assert len(time.slept) == 1


def test_large_passes_do_not_wait(pace: PassPace, time: Time) -> None:
    passes(pace, time, 1_000, records=SMALL)
    assert time.slept == []


def test_many_small_batches_do_not_wait(pace: PassPace, time: Time) -> None:
    """A group has at most 64 of them: at a pass a second there would be no more in a second."""
    for _ in range(1_000):
        pace.wait()
        pace.began(FEW_BATCHES, FEW_BATCHES)
    assert time.slept == []


def test_a_flood_after_a_trickle_waits_once_at_most(pace: PassPace, time: Time) -> None:
    passes(pace, time, 50, records=5)
    before = len(time.slept)
    passes(pace, time, 50, records=SMALL)
    assert len(time.slept) <= before + 1
