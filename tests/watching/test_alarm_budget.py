"""The alarm budget: how often findings come by chance, which of them ring, and what becomes of the others."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench._calm_services import BEGIN, DAY, KINDS, Kind, false_alarms, judged
from pipeline.records.verdict import Reason
from pipeline.settings import Settings
from pipeline.watching.alarm_budget import GRAVE, AlarmBudget, ChanceRate
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.numbers.scores import NumberScores
from pipeline.watching.rates.detection import AlertBackoff
from pipeline.watching.rates.rates import Alarm, Rates
from pipeline.watching.rates.thresholds import PeaksOverThreshold
from pipeline.watching.verdicts import MARKED_SCORE
from tests.watching.test_watching import FAULT, WORK, World

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ASKED = 0.01


# ---- how often by chance -----------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No finding waits until a pause is over."""
    monkeypatch.setattr(AlertBackoff, "quiet_until", lambda *_: 0.0)


@pytest.mark.usefixtures("impatient")
def test_of_normal_minutes_at_most_twice_the_share_that_was_asked_has_a_finding_of_each_kind() -> None:
    per_day, found = ASKED * DAY, Counter[Reason]()
    for number, service in enumerate(KINDS):
        rates = Rates.unpack(service.past[0])
        for part in (rates.detector.bursts, rates.detector.gaps, rates.detector.composition):
            part.peaks.allowed = per_day
        counts = service.counts(np.random.default_rng([7, number]), DAY // 2)
        found.update(alarm.kind for alarm in judged(rates, counts, BEGIN, math.inf))
    assert found and max(found.values()) <= 2 * per_day * len(KINDS) / 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [Reason.NUMBER_SHIFT, Reason.NUMBER_OUTLIER])
def test_of_normal_windows_of_numbers_at_most_twice_the_share_that_was_asked_has_a_finding(
    kind: Reason,
) -> None:
    found = 0
    for service in (Kind(4, (1.0,), 1.0), Kind(6, (1.0,), 1.0)):
        numbers, rng = Numbers(), np.random.default_rng(service.number)
        numbers.scores[kind] = NumberScores(ASKED * DAY)
        for minute in range(BEGIN, BEGIN + 2 * DAY):
            alarms = numbers.step(service.values(rng, minute), judged=True)
            found += sum(alarm.kind is kind for alarm in alarms)
    assert found <= 2 * ASKED * 4 * DAY


@given(
    st.lists(st.tuples(st.floats(3.0, 40.0), st.booleans()), max_size=30),
    st.floats(0.0, 60.0),
    st.floats(1e-6, 0.5),
    st.floats(60.0, 60_000.0),
)
def test_a_score_is_as_high_as_the_threshold_of_so_many_a_day_where_it_comes_as_seldom(
    peaks: list[tuple[float, bool]], score: float, most: float, minutes: float
) -> None:
    state = PeaksOverThreshold(Reason.RATE_BURST)
    for place, (height, alerted) in enumerate(peaks):
        state.add(height, place, alerted=alerted)
    per_day = state.per_day(score, 4320.0, minutes)
    if not math.isclose(per_day, most, rel_tol=1e-6):
        assert (score >= state.threshold(4320.0, minutes, most)) is (per_day <= most)


# ---- what rings --------------------------------------------------------------------------------------


def budget(workloads: int = 1, per_day: float = 2.0) -> AlarmBudget:
    return AlarmBudget(per_day=per_day, workloads=workloads)


def test_a_finding_rings_within_the_share_of_its_workload_and_what_is_grave_always() -> None:
    seldom, grave = ChanceRate(per_day=0.01, found_per_day=0.5), GRAVE
    once = [(NOW, 1)]
    assert budget().rings(seldom, NOW, once) and not budget(200).rings(seldom, NOW, once)
    assert budget(10_000).rings(grave, NOW, once)
    assert budget(200).share == pytest.approx(budget().share / 200)


def test_what_keeps_coming_rings_and_what_came_long_ago_does_not_count() -> None:
    usual = ChanceRate(per_day=0.4, found_per_day=0.5)

    def times(number: int, apart: timedelta) -> list[tuple[datetime, int]]:
        return [(NOW - place * apart, 1) for place in range(number)]

    assert not budget(200).rings(usual, NOW, times(2, timedelta(hours=1)))
    assert budget(200).rings(usual, NOW, times(8, timedelta(hours=1)))
    assert not budget(200).rings(usual, NOW, times(8, timedelta(hours=20)))
    assert not budget(200).rings(replace(usual, found_per_day=math.inf), NOW, times(8, timedelta(hours=1)))
    many = ChanceRate(per_day=70.0, found_per_day=72.0)  # of very many sessions some are odd all the time
    assert not budget().rings(many, NOW, [(NOW - timedelta(hours=20), 60), (NOW, 1)])
    assert budget().rings(many, NOW, [(NOW - timedelta(minutes=5), 25), (NOW, 1)])


@given(st.floats(0.01, 400.0), st.integers(1, 60), st.floats(1.0, 1440.0))
def test_the_chance_of_as_many_findings_is_never_said_to_be_less_than_it_is(
    a_day: float, count: int, minutes: float
) -> None:
    mean = a_day * minutes / DAY
    fewer = math.fsum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(count))
    chance = ChanceRate(per_day=math.inf, found_per_day=a_day)
    spans = DAY / minutes
    seen = [(NOW - timedelta(minutes=minutes), count)]
    if budget().rings(chance, NOW, seen):
        assert spans * (1.0 - fewer) <= budget().share + 1e-6


def test_two_hundred_calm_services_have_no_more_false_alarms_than_three_times_those_of_one() -> None:
    found = false_alarms(services=200, minutes=20, seed=2, per_day=2.0)
    assert found.found > 0 and found.of_one > 0
    assert found.of_all <= 3 * found.of_one


# ---- a finding that becomes surer ---------------------------------------------------------------------


def grown(share: float, counts: Iterator[list[int]]) -> list[Alarm]:
    rates = Rates.unpack(KINDS[0].past[0])
    return [
        alarm
        for minute, row in enumerate(counts)
        for alarm in judged(rates, np.array([row]), BEGIN + minute, share)
        if alarm.template_id == 2
    ]


def burst() -> Iterator[list[int]]:
    rng = np.random.default_rng(1)
    for minute in range(60):
        yield [*rng.poisson([6.0]).tolist(), 8 if 20 <= minute < 40 else 2, 0]


def silence() -> Iterator[list[int]]:
    rng = np.random.default_rng(1)
    for minute in range(60):
        yield [*rng.poisson([6.0]).tolist(), 0 if minute >= 20 else 2, 0]


@pytest.mark.parametrize("counts", [burst, silence])
def test_a_finding_that_was_kept_back_is_reported_once_more_when_it_is_an_alarm(counts: object) -> None:
    assert callable(counts)
    share = 1e-4
    (once,) = grown(math.inf, counts())
    first, again = grown(share, counts())
    assert (first.cause, first.at) == (once.cause, once.at) and first.per_day > share
    assert again.cause == first.cause and again.at > first.at and again.per_day <= share


def test_a_shift_of_numbers_that_was_kept_back_is_reported_once_more_when_it_is_an_alarm() -> None:
    numbers, rng, service = Numbers.unpack(KINDS[2].past[1]), np.random.default_rng(3), KINDS[2]
    share, found = 1e-4, []
    for minute in range(BEGIN, BEGIN + 60):
        ((key, counts),) = service.values(rng, minute)
        slower = {place + (14 if minute > BEGIN + 20 else 0): n for place, n in counts.items()}
        found += numbers.step([(key, slower)], judged=True, alarm_per_day=share)
    first, again = found
    assert first.cause == again.cause and first.per_day > share >= again.per_day


# ---- in the watcher ------------------------------------------------------------------------------------


def shown(world: World) -> int:
    """The number of incidents."""
    blob = world.client.get(world.keys.watching("incidents"))
    assert isinstance(blob, bytes)
    return len(Incidents.unpack(blob).all())


def broken(world: World, times: int, begin: int) -> None:
    for number in range(times):
        world.stored((f"x{begin + number}", begin + number, FAULT))


def test_what_the_budget_keeps_back_is_stored_and_counted_and_opens_no_incident(world: World) -> None:
    world.rules.per_day = 100_000.0
    world.stored(("x", 0, FAULT))
    told = world.round(end=True)
    assert len(told.found) == 1 and world.sink.rows().height == 1
    assert (world.numbers()["kept_back"], shown(world)) == (1, 0)
    world.watcher = world.another()  # another process goes on with what is counted
    broken(world, 12, 10)
    world.round(end=True)
    assert shown(world) == 1, "so many of one cause in a moment are no chance"
    assert world.ledger.backlog.watching()["kept_back"] == 1


@pytest.mark.parametrize(
    ("level", "score", "alerts", "rings"),
    [
        ("warning", 0.7, 2.0, 1),
        ("warning", 0.7, 0.1, 0),
        ("error", 0.7, 0.1, 1),
        ("info", MARKED_SCORE, 0.1, 1),
    ],
)
def test_a_warning_rings_as_the_budget_allows_and_an_error_and_a_marked_line_always(
    settings: Settings, level: str, score: float, alerts: float, rings: int
) -> None:
    world = World(settings.replace(alerts_per_day=alerts))
    reasons = pl.lit(["marked:anomalous"] if score == MARKED_SCORE else [], dtype=pl.List(pl.String))
    rows = world.rows([(None, 0, WORK)], anomalous=True).with_columns(
        level=pl.lit(level), score=pl.lit(score), p_value=pl.lit(0.05), reasons=reasons
    )
    world.commit(world.accept(1), rows, [None])
    world.round()
    assert (shown(world), world.numbers().get("kept_back", 0)) == (rings, 1 - rings)


@pytest.fixture
def world(settings: Settings) -> World:
    return World(settings)
