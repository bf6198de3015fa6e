"""Minutes without lines: many at once come to what each by itself comes to, and a look that is cut short to
what a whole one does."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.watching.rates.detection import Detection
from pipeline.watching.rates.detector import Detector
from pipeline.watching.rates.rates import Alarm, Rates

START = 28_401_120  # epoch minute of Monday 2024-01-01 00:00 UTC
Lines = list[tuple[int, dict[int, int]]]


def stream(seed: int, *, alike: bool, steady: bool, parts: int) -> Lines:
    """Stretches of traffic, some of them bursts, with pauses of all lengths between them."""
    rng = np.random.default_rng(seed)
    levels = np.exp(rng.uniform(np.log(0.01), np.log(20), int(rng.integers(1, 16))))
    if alike:
        levels[:] = levels[0]
    if steady:
        levels[0] = 30.0
    minute, found = START + int(rng.integers(10_000)), []
    for _ in range(parts):
        boost = rng.choice([1, 1, 1, 6, 40])
        for _ in range(int(rng.integers(1, 25 if not steady else 80))):
            counts = rng.poisson(levels * boost)
            if counts.any():
                found.append((minute, {i + 1: int(n) for i, n in enumerate(counts) if n}))
            minute += 1
        minute += int(rng.choice([1, 3, 10, 30, 59, 200, 700], p=[0.2, 0.2, 0.2, 0.2, 0.14, 0.04, 0.02]))
    return found


def judged_by(
    detector: Detector, lines: Lines, *, at_once: bool, judged: bool
) -> tuple[list[Detection], int]:
    """What is told, and how many minutes were judged with others."""
    told, together = [], 0
    minute = lines[0][0] if lines else 0
    for at, counts in lines:
        while minute < at:
            n = detector.step_idle(minute, at - minute, judged=judged) if at_once else 0
            if not n:
                told += detector.step(minute, {}, judged=judged)
            together += n
            minute += max(1, n)
        told += detector.step(at, counts, judged=judged)
        minute = at + 1
    return told, together


def assert_same(one: Detector, two: Detector) -> None:
    """Equal to rounding; peaks of equal height stand in any order."""
    assert one.table.ids == two.table.ids
    for mine, theirs in zip(one.table.parts, two.table.parts, strict=True):
        for name in mine.columns():
            assert getattr(theirs, name) == pytest.approx(getattr(mine, name), rel=1e-9, abs=1e-12), name
    assert two.season.sums == pytest.approx(one.season.sums, rel=1e-6)
    assert two.season.minutes == pytest.approx(one.season.minutes, rel=1e-6)
    for owner, other in ((one.bursts, two.bursts), (one.gaps, two.gaps), (one.composition, two.composition)):
        here, there = ([(round(s, 6), m, a) for s, m, a in part.peaks.scores] for part in (owner, other))
        assert sorted(here) == sorted(there)
    assert two.backoff.causes == one.backoff.causes
    a, b = one.composition, two.composition
    assert (b.window, b.windows, b.shift_age) == (a.window, a.windows, a.shift_age)
    assert (b.mean, b.square_mean) == pytest.approx((a.mean, a.square_mean), rel=1e-9)


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    alike=st.booleans(),
    steady=st.booleans(),
    judged=st.sampled_from([True, True, False]),
)
def test_empty_minutes_at_once_are_what_they_are_one_by_one(
    seed: int, *, alike: bool, steady: bool, judged: bool
) -> None:
    lines = stream(seed, alike=alike, steady=steady, parts=6)
    one, two = Detector(), Detector()
    told, _ = judged_by(one, lines, at_once=False, judged=judged)
    again, _ = judged_by(two, lines, at_once=True, judged=judged)
    assert [(s.kind, s.template_id, s.began, s.minute) for s in again] == [
        (s.kind, s.template_id, s.began, s.minute) for s in told
    ]
    assert_same(one, two)


@pytest.mark.long
def test_a_silence_within_them_is_found_in_its_minute() -> None:
    """A heartbeat of every minute for half a day; then nothing for an hour."""
    lines: Lines = [(START + i, {1: 1, 2: 3}) for i in range(720)]
    lines.append((START + 800, {1: 1}))
    one, two = Detector(), Detector()
    told, _ = judged_by(one, lines, at_once=False, judged=True)
    again, together = judged_by(two, lines, at_once=True, judged=True)
    assert [s.minute for s in told] == [s.minute for s in again] != []
    assert together > 60
    assert_same(one, two)


@pytest.mark.long
def test_a_season_that_comes_to_be_known_within_them_is_known_from_that_minute_on() -> None:
    lines: Lines = [(START + i, {1: 2}) for i in range(2850)]
    lines.append((START + 2909, {1: 1}))
    one, two = Detector(), Detector()
    judged_by(one, lines, at_once=False, judged=False)
    _, together = judged_by(two, lines, at_once=True, judged=False)
    assert together > 40
    assert one.season.minutes[:, 0].sum() > 2880
    assert_same(one, two)


# ---- long gaps, by hours ---------------------------------------------------------------------------


def through_gap(detector: Detector, minute: int, until: int, *, at_once: bool) -> tuple[list[Detection], int]:
    """The detections of a gap that goes on by hours, and the number of steps."""
    found: list[Detection] = []
    for steps in itertools.count():
        if minute >= until:
            return found, steps
        n = detector.skip_hours(minute, until - minute, judged=True) if at_once else 0
        if not n:
            n = min(until, minute - minute % 60 + 60) - minute
            found += detector.skip(minute, n, judged=True)
        minute += n
    raise AssertionError("unreachable")


def test_hours_at_once_are_what_they_are_one_by_one_and_a_silence_ends_in_its_hour() -> None:
    """Work of some minutes every few hours, less than two days of it; then nothing for a week."""
    one, two = Detector(), Detector()
    lines: Lines = [
        (START + begin + i, {1: 3, 2: 1 + i % 3}) for begin in range(0, 1500, 150) for i in range(12)
    ]
    for detector in (one, two):
        judged_by(detector, lines, at_once=True, judged=True)
    minute = lines[-1][0] + 1
    found, steps = through_gap(one, minute, minute + 9_000, at_once=False)
    same, fewer = through_gap(two, minute, minute + 9_000, at_once=True)
    assert [(d.kind, d.began, d.minute) for d in same] == [(d.kind, d.began, d.minute) for d in found]
    assert found and found[0].minute > minute + 120, "the silence shows after some hours"
    assert (steps > 140, fewer < 10) == (True, True)
    assert_same(one, two)


def test_hours_at_once_teach_the_season_what_they_teach_one_by_one() -> None:
    """Three days of mornings with more lines, learnt from; a week of nothing. The season learns the hours
    of the gap when it has passed, so the levels differ by some percent."""
    lines: Lines = [(START + m, {1: 90 if m % 1440 < 720 else 20, 2: 10}) for m in range(0, 3 * 1440, 30)]
    one, two = Detector(), Detector()
    for detector in (one, two):
        judged_by(detector, lines, at_once=True, judged=False)
    minute = lines[-1][0] + 1
    for detector, at_once in ((one, False), (two, True)):
        detector.gaps.returns[:] = 0.0  # nothing is waited for
        through_gap(detector, minute, minute + 9_000, at_once=at_once)
    assert two.season.minutes == pytest.approx(one.season.minutes)
    assert two.season.sums == pytest.approx(one.season.sums)
    assert (two.season.hour, two.baseline.age[0]) == (one.season.hour, one.baseline.age[0])
    assert two.baseline.slow_lines == pytest.approx(one.baseline.slow_lines, rel=1e-9)
    for name in ("slow_exposure", "fast_exposure", "lag_exposure"):
        assert getattr(two.baseline, name) == pytest.approx(getattr(one.baseline, name), rel=0.25), name
    assert two.gaps.elapsed[0] == pytest.approx(one.gaps.elapsed[0], rel=0.1)


# ---- a look that is cut short --------------------------------------------------------------------


def frame(lines: Lines) -> pl.DataFrame:
    rows = [(minute, template_id, n) for minute, counts in lines for template_id, n in counts.items()]
    schema = {"minute": pl.Int64, "template_id": pl.Int64, "n": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def pieces(lines: Lines, size: int) -> Iterator[Lines]:
    for at in range(0, len(lines), size):
        yield lines[at : at + size]


def after(steps: int) -> Callable[[], bool]:
    """Time is up after so many steps."""
    counter = itertools.count(1)
    return lambda: next(counter) < steps


def read(rates: Rates, lines: Lines, *, steps: int | None) -> tuple[list[Alarm], Rates, int]:
    """As a file is read, in pieces: the alarms, the state in the end, and how often a look was gone on
    with."""
    told, more = [], 0
    for at, piece in enumerate([*pieces(lines, 30), []]):
        now = START + 10_000_000 + 3 * at
        rates.observe(frame(piece), judged=True)
        told += rates.close(now, None if steps is None else after(steps))
        while rates.behind:
            rates = Rates.unpack(rates.pack())
            told += rates.close(now + 500, after(steps or 1))
            more += 1
    return told, rates, more


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 5))
def test_a_look_that_runs_out_of_time_is_gone_on_with_and_comes_to_the_same(seed: int, steps: int) -> None:
    lines = stream(seed, alike=False, steady=False, parts=6)
    told, one, _ = read(Rates(), lines, steps=None)
    again, two, more = read(Rates(), lines, steps=steps)
    assert [(a.cause, a.began, a.at) for a in again] == [(a.cause, a.began, a.at) for a in told]
    assert more > 0
    assert_same(one.detector, two.detector)
