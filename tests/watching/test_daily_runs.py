"""Runs that come once a day: the first missed one is reported, once for each job."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from pipeline.records.verdict import Reason
from pipeline.watching.rates.daily_runs import _is_regular
from pipeline.watching.rates.gaps import Gaps
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.rates.rates import Alarm, Rates
from tests.watching.test_rates import START, minute_of, play

DAY = 1440
NIGHT = 180  # 03:00
BUSY, JOB = 1, 7


class Shop:
    """A workload with a line of BUSY every `every` minutes, and jobs; or one of `jobs_alone`."""

    def __init__(self, *, jobs_alone: bool = False, every: int = 15) -> None:
        self.every = every
        self.busy = [] if jobs_alone else [BUSY]
        self.rates = Rates.unpack(None)
        self.minute = START
        self.alarms: list[Alarm] = []

    def until(self, end: int, runs: Mapping[int, Sequence[int]], *, silent: range = range(0)) -> None:
        """Minutes since START. `runs`: the templates of a minute. `silent`: minutes without any line."""
        for minute in range(self.minute - START, end):
            templates = [*([] if minute % self.every else self.busy), *runs.get(minute, ())]
            if templates and minute not in silent:
                self.rates.add([(START + minute, one, 1) for one in templates], judged=True)
            if minute % self.every == 0 or (templates and minute not in silent):
                self.alarms += self.rates.close(START + minute + 1)
        self.minute = START + end

    def days(self, days: Sequence[int], *, until: int) -> None:
        """Runs on these days, each up to two minutes after its time."""
        self.until(until * DAY, {day * DAY + NIGHT + day % 3: (JOB,) for day in days})

    def missed(self) -> list[int]:
        """The days on which a run was called missed."""
        return [(minute_of(alarm) - START) // DAY for alarm in self.alarms]


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_the_first_missed_run_after_three_is_reported_once(shop: Shop) -> None:
    shop.days([0, 1, 2], until=6)
    (alarm,) = shop.alarms
    assert (alarm.kind, alarm.template_id, alarm.cause) == (Reason.RATE_SILENCE, JOB, f"rate-silence:{JOB}")
    assert 75 <= minute_of(alarm) - (START + 3 * DAY + NIGHT) <= 92
    assert alarm.sentence == (
        f"template {JOB} did not come on 2024-01-04: on 3 days before it came between 03:00 and 03:02 UTC"
    )
    assert alarm.score >= 0.5 and alarm.p_value < 0.001


@pytest.mark.long
@pytest.mark.parametrize("days", [[0, 1], [0, 2, 4, 6], [0, 1, 3, 4, 6]])
def test_what_did_not_come_on_three_days_in_a_row_is_not_awaited(shop: Shop, days: list[int]) -> None:
    shop.days(days, until=9)
    assert shop.alarms == []


def test_the_lines_of_one_job_are_one_alarm_and_another_job_has_its_own(shop: Shop) -> None:
    job = {day * DAY + NIGHT + after: (7 + n,) for day in range(4) for n, after in enumerate((0, 2, 30, 34))}
    other = {day * DAY + 12 * 60: (20,) for day in range(4)}
    shop.until(6 * DAY, job | other)
    first, second = shop.alarms
    assert (first.template_id, second.template_id) == (7, 20)
    assert first.sentence.endswith("at 03:00 UTC; 8, 9, 10 did not come either")


def test_a_run_that_stops_halfway_misses_the_rest(shop: Shop) -> None:
    whole = {day * DAY + NIGHT + after: (7 + n,) for day in range(4) for n, after in enumerate((0, 2, 30))}
    shop.until(5 * DAY, whole | {4 * DAY + NIGHT: (7,)})
    (alarm,) = shop.alarms
    assert alarm.template_id == 8
    assert alarm.sentence.endswith("at 03:02 UTC; 9 did not come either")


@pytest.mark.parametrize("silent", [range(-5, 90), range(-600, 300), range(5 - DAY, 15)])
def test_nothing_is_missed_while_the_workload_was_silent(silent: range) -> None:
    shop = Shop(every=10)
    at = 4 * DAY + NIGHT
    runs = {day * DAY + NIGHT: (JOB, JOB + 1) for day in range(4)} | {5 * DAY + NIGHT: (JOB, JOB + 1)}
    shop.until(6 * DAY, runs, silent=range(at + silent.start, at + silent.stop))
    assert {alarm.template_id for alarm in shop.alarms} <= {None}


def test_a_job_that_is_a_workload_of_its_own_is_missed_as_well() -> None:
    shop = Shop(jobs_alone=True)
    lines = {
        day * DAY + NIGHT + day % 3 + after: (7 + n,)
        for day in range(3)
        for n, after in enumerate((0, 2, 30))
    }
    shop.until(6 * DAY, lines)
    (alarm,) = shop.alarms
    assert alarm.sentence == (
        "template 7 did not come on 2024-01-04: on 3 days before it came between 03:00 and 03:02 UTC; "
        "8, 9 did not come either"
    )
    assert 75 <= minute_of(alarm) - (START + 3 * DAY + NIGHT) <= 92
    shop.until(9 * DAY, {day * DAY + NIGHT: (7,) for day in (6, 7)})
    assert shop.missed() == [3]


def test_a_replayed_job_is_missed_between_two_of_its_runs() -> None:
    rates = Rates.unpack(None)
    runs = [START + day * DAY + NIGHT for day in (0, 1, 2, 4)]
    rates.add([(minute, JOB, 1) for minute in runs], judged=True)
    alarms = rates.close(START + 400 * DAY) + rates.close(START + 400 * DAY + 5, end=True)
    assert [(minute_of(alarm) - START) // DAY for alarm in alarms] == [3]


def test_a_workload_is_looked_at_until_its_job_is_missed() -> None:
    rates, counts = Rates.unpack(None), MinuteCounts()
    for day in range(3):
        rates.add([(START + day * DAY + NIGHT, JOB, 1)], judged=True)
        for minute in range(NIGHT, NIGHT + 20):
            rates.close(START + day * DAY + minute)
    counts.newest_ms = (START + 2 * DAY + NIGHT) * 60_000
    counts.live, counts.awaits, deadline = rates.live, rates.awaits, START + 3 * DAY + NIGHT + 76
    assert counts.awaits == deadline
    assert counts.is_due(deadline, deadline * 60_000)
    assert not counts.is_due(deadline + 60, (deadline + 60) * 60_000)


@pytest.mark.parametrize(
    ("days", "regular"),
    [
        ([0, 1, 2], True),
        ([0, 1, 2, 4, 5, 6], True),
        ([0, 1, 3, 5, 6, 7], False),
        ([day for day in range(20) if day % 7 < 5], True),
        ([0, 7, 14], True),
        ([0, 1, 4, 5, 8, 9, 10, 13, 15, 16, 17], False),
    ],
)
def test_a_job_is_regular_if_it_ran_daily_or_on_the_same_days_of_each_week(
    days: Sequence[int], regular: bool
) -> None:
    assert _is_regular(sum(1 << days[-1] - day for day in days)) is regular


@pytest.mark.long
def test_nothing_is_missed_of_a_job_that_leaves_out_days(shop: Shop) -> None:
    shop.days([0, 2, 4, 5, 7, 8, 9, 11, 12, 13], until=18)
    assert shop.missed() == []


@pytest.mark.long
def test_a_job_of_working_days_is_missed_on_its_first_saturday_only(shop: Shop) -> None:
    workdays = [day for day in range(28) if day % 7 < 5 and day != 22]
    shop.days(workdays, until=28)
    assert shop.missed() == [5, 22], "the first Saturday, and the Tuesday without a run"


@pytest.mark.long
def test_a_job_is_missed_again_when_it_came_back_for_three_days(shop: Shop) -> None:
    shop.days([0, 1, 2, 4, 5, 6, 8, 9], until=11)
    assert shop.missed() == [3, 7]


@pytest.mark.long
@pytest.mark.parametrize("moved", [-60, 60])
def test_a_change_of_the_clock_misses_nothing(shop: Shop, moved: int) -> None:
    shop.until(10 * DAY, {day * DAY + NIGHT + (moved if day > 4 else 0): (JOB,) for day in range(10)})
    assert shop.alarms == []
    shop.until(11 * DAY, {})
    assert shop.missed() == [10]


def test_a_job_at_midnight_is_one_of_every_day(shop: Shop) -> None:
    shop.until(7 * DAY, {day * DAY + (1 if day % 2 else -1): (JOB,) for day in range(1, 5)})
    assert shop.missed() == [5]


def test_a_run_that_somebody_starts_once_more_changes_nothing(shop: Shop) -> None:
    runs = {day * DAY + NIGHT: (JOB,) for day in range(6)} | {
        4 * DAY + 900: (JOB,),
        5 * DAY + NIGHT + 4: (JOB,),
    }
    shop.until(6 * DAY, runs)
    assert shop.alarms == []
    shop.until(7 * DAY, {})
    assert shop.missed() == [6]


def test_lines_of_a_run_that_are_counted_twice_or_late_change_nothing(shop: Shop) -> None:
    shop.days([0, 1, 2], until=3)
    for minute in (2 * DAY + NIGHT, 2 * DAY + NIGHT + 1):
        shop.rates.add([(START + minute, JOB, 1)], judged=True)
    shop.days([], until=4)
    assert shop.missed() == [3]


def test_a_late_run_is_reported_and_over_when_it_comes(shop: Shop) -> None:
    runs = {day * DAY + NIGHT: (JOB,) for day in range(4)}
    shop.until(
        7 * DAY, runs | {4 * DAY + NIGHT + 300: (JOB,)} | {day * DAY + NIGHT: (JOB,) for day in (5, 6)}
    )
    assert shop.missed() == [4]


@pytest.mark.long
@pytest.mark.parametrize(
    "minutes",
    [
        lambda day, rng: sorted(rng.integers(DAY, size=2)),  # by chance
        lambda day, rng: [540 + int(rng.integers(480))],  # somebody's work, at any hour of the working day
        lambda day, rng: range(NIGHT, NIGHT + 600, 20),  # all morning
        lambda day, rng: range(0, DAY, 240),  # every four hours
    ],
)
def test_what_is_no_run_of_a_job_is_not_missed(
    shop: Shop, minutes: Callable[[int, np.random.Generator], Sequence[int]]
) -> None:
    rng = np.random.default_rng(5)
    shop.until(
        12 * DAY,
        {
            day * DAY + int(one): (JOB,)
            for day in range(10)
            for one in minutes(day, rng)
            if rng.random() < 0.9
        },
    )
    assert all("did not come on" not in alarm.sentence for alarm in shop.alarms)


def test_a_baseline_teaches_runs_and_reports_none() -> None:
    rates, runs = Rates.unpack(None), {day * DAY + NIGHT: JOB for day in (0, 1, 2, 4, 5, 6)}
    alarms = []
    for minute in range(9 * DAY):
        if minute % 10 == 0:
            rates.add(
                [(START + minute, t, 1) for t in (BUSY, runs.get(minute)) if t], judged=minute >= 7 * DAY
            )
            alarms += rates.close(START + minute + 1)
    (alarm,) = alarms
    assert (minute_of(alarm) - START) // DAY == 7


@pytest.mark.long
@pytest.mark.parametrize("period", [5, 15])
def test_a_steady_heartbeat_is_missed_after_three_beats(period: int) -> None:
    stops = 2 * DAY
    counts = np.zeros((stops + 4 * period, 2), dtype=np.int64)
    counts[:, 0] = np.random.default_rng(1).poisson(2, size=len(counts))
    counts[:stops:period, 1] = 1
    (alarm,) = play(Rates.unpack(None), counts)
    assert alarm.template_id == 2
    assert 2 * period < minute_of(alarm) - (START + stops - period) < 4 * period


def test_a_gap_says_less_of_lines_that_come_by_chance_than_of_a_clock() -> None:
    gaps = Gaps()
    gaps.returns += 100.0
    steady, chance = gaps._evidence(np.array([0.35, 0.9]))
    assert steady == pytest.approx(np.log(100)) and chance == pytest.approx(np.log(100 / 6))


def test_what_is_awaited_survives_packing(shop: Shop) -> None:
    shop.days([0, 1, 2], until=3)
    shop.rates = Rates.unpack(shop.rates.pack())
    shop.days([], until=4)
    shop.rates = Rates.unpack(shop.rates.pack())
    assert shop.missed() == [3]
