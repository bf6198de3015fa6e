"""Lines whose times are ahead of the clock: judged where most of them are, counted where they are not."""

from dataclasses import replace

import numpy as np
import pytest
from watching.test_rates import START, frame, play, traffic
from watching.test_watching import T0, World

from pipeline.records.batch import Purpose
from pipeline.records.left_out import LeftOut, total_left_out, unpack_left_out
from pipeline.records.verdict import Reason
from pipeline.service.status import read_status
from pipeline.settings import Settings
from pipeline.watching.anomalies import ANOMALIES
from pipeline.watching.observation import EVENTS, RATES, Lane, Observation
from pipeline.watching.rates import minute_counts
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.rates.rates import Rates
from pipeline.watching.table import ObservedTable
from pipeline.workers.scrape import Scrape

HOUR = 60


@pytest.fixture
def world(settings: Settings) -> World:
    return World(settings)


@pytest.fixture(scope="module")
def learnt() -> bytes:
    """A day of a workload in UTC."""
    rates = Rates.unpack(None)
    assert play(rates, traffic(24 * HOUR)) == []
    return rates.pack()


def faults() -> np.ndarray:
    counts = traffic(4 * HOUR, seed=1)
    counts[20:40] *= 10
    counts[80:] = 0
    return counts


def play_ahead(rates: Rates, counts: np.ndarray, ahead: int, start: int) -> list:
    """Minute by minute, by a clock that shows `ahead` minutes less than the lines."""
    told = []
    for row, line in enumerate(counts):
        some = {j + 1: int(n) for j, n in enumerate(line) if n}
        if some:
            rates.observe(frame(start + row + ahead, some), judged=True)
        told += rates.close(start + row + 1)
    return told


@pytest.mark.parametrize("ahead", [12, 13, 14, 15, 120, 14 * HOUR])
def test_a_stream_that_is_steadily_ahead_of_the_clock_is_judged_by_its_own_time(ahead: int) -> None:
    rates = Rates()
    assert play_ahead(rates, traffic(24 * HOUR), ahead, START) == []
    told = play_ahead(rates, faults(), ahead, START + 24 * HOUR)
    assert {alarm.kind for alarm in told} >= {Reason.RATE_BURST, Reason.RATE_SILENCE}
    burst = min(alarm.began for alarm in told if alarm.kind is Reason.RATE_BURST)
    assert abs(int(burst.timestamp()) // 60 - (START + 24 * HOUR + ahead + 20)) <= 2, "the time of the lines"
    assert (rates.ahead, rates.out_of_range, rates.late) == (ahead - 1 if ahead > 13 else 0, 0, 0)


def test_the_lead_survives_the_store_and_is_known_again(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    play_ahead(rates, traffic(10), 120, START + 24 * HOUR)
    assert Rates.unpack(rates.pack()).ahead == rates.ahead == 119


@pytest.mark.parametrize("shift", [60, 120])
def test_a_clock_that_is_set_ahead_or_back_is_no_silence_and_the_faults_after_it_are_told(
    learnt: bytes, shift: int
) -> None:
    rates, start = Rates.unpack(learnt), START + 24 * HOUR
    assert play_ahead(rates, traffic(2 * HOUR, seed=2), shift, start) == [], "summer begins"
    assert rates.ahead == shift - 1
    assert play_ahead(rates, traffic(2 * HOUR, seed=3), 0, start + 2 * HOUR) == [], "and ends"
    assert rates.ahead == 0
    lost = rates.late + rates.out_of_range
    assert 0 < lost <= 5 * 80, "some minutes until it was clear"
    told = play_ahead(rates, faults(), 0, start + 4 * HOUR)
    assert {alarm.kind for alarm in told} >= {Reason.RATE_BURST, Reason.RATE_SILENCE}
    assert rates.late + rates.out_of_range == lost


@pytest.mark.parametrize("ahead", [120, 5 * 525_600])
def test_a_few_lines_of_a_broken_clock_move_no_time_and_are_counted(learnt: bytes, ahead: int) -> None:
    rates, start = Rates.unpack(learnt), START + 24 * HOUR
    for minute, line in enumerate(traffic(HOUR, seed=4)):
        rates.observe(frame(start + minute, {j + 1: int(n) for j, n in enumerate(line) if n}), judged=True)
        if minute % 7 == 0:
            rates.observe(frame(start + minute + ahead, {1: 2}), judged=True)
        assert rates.close(start + minute + 1) == []
    assert (rates.ahead, rates.late) == (0, 0)
    assert rates.out_of_range >= 14


def test_of_a_workload_that_rests_one_broken_line_moves_no_time(learnt: bytes) -> None:
    rates, start = Rates(), START
    rates.observe(frame(start + 500, {1: 1}), judged=True)
    for minute in range(120):
        if minute % 30 == 29:
            rates.observe(frame(start + minute, {1: 1}), judged=True)
        rates.close(start + minute + 1)
    assert (rates.ahead, rates.out_of_range) == (0, 1)


def test_a_file_of_local_times_is_judged_to_its_end_though_its_last_hours_are_ahead() -> None:
    counts = np.vstack([traffic(24 * HOUR), faults()])
    clock = START + len(counts) - 2 * HOUR
    rates = Rates()
    rows, columns = np.nonzero(counts)
    each = zip((START + rows).tolist(), (columns + 1).tolist(), counts[rows, columns].tolist(), strict=True)
    told = []
    for row in each:
        rates.add([row], judged=True)
    for minute in range(6):
        told += rates.close(clock + minute)
    assert {alarm.kind for alarm in told} >= {Reason.RATE_BURST}
    assert (rates.late, rates.out_of_range) == (0, 0)


def test_at_the_end_of_a_run_every_line_is_judged_whatever_the_clock_says() -> None:
    rates = Rates()
    lines = [(START + minute, 1, 5) for minute in (0, 1, 2, 200, 201, 5_000_000)]
    rates.add(lines[:4], judged=True)
    rates.close(START + 1, finite=True)
    rates.add(lines[4:], judged=True)
    rates.close(START + 2, finite=True, end=True)
    assert (rates.late, rates.out_of_range, rates._scored.pending) == (0, 0, {})


def minutes_of(first: int, last: int) -> Observation:
    """A batch with sixty templates in each of these minutes of a log that ended long ago."""
    cells = [(START + minute, template) for minute in range(first, last) for template in range(60)]
    columns = {
        "minute": [at for at, _ in cells],
        "template_id": [template for _, template in cells],
        "n": [3] * len(cells),
    }
    return replace(
        seen("app.log", START + 2_000),
        rates=ObservedTable(RATES, columns),
        newest_ms=60_000 * (START + last),
    )


@pytest.mark.parametrize("held", [1_000, 200_000])
def test_batches_of_a_run_are_in_the_rates_whatever_their_order(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(minute_counts, "MOST_HELD", held)
    counts, rates = MinuteCounts(), Rates()
    order = list(range(0, 600, 10))
    if held > 36_000:  # what came before the first model is judged last
        order = order[20:] + order[:20]
    for look, first in enumerate(order):
        counts.observe(minutes_of(first, first + 10), judged=True)
        if counts.is_due(START + 1_000 + look, 0, finite=True):
            counts.judge(rates, START + 1_000 + look, finite=True)
    while counts.waiting or counts.behind:
        counts.judge(rates, START + 2_000, finite=True, end=True)
    assert (rates.late, rates.out_of_range, counts.left_out.late) == (0, 0, 0)
    assert rates._scored.closed is not None and rates._scored.closed >= START + 599


# ---- sources of one workload ---------------------------------------------------------------------


def seen(source: str, minute: int, *, ahead: int = 0, n: int = 5) -> Observation:
    return Observation(
        batch_id=f"{source}-{minute}",
        workload="shop",
        lane=Lane.FRESH,
        purpose=Purpose.SCORE,
        version="m1",
        source=source,
        accepted_ms=60_000 * minute,
        newest_ms=60_000 * (minute + ahead),
        rates=ObservedTable(RATES, {"minute": [minute + ahead], "template_id": [1], "n": [n]}),
        events=EVENTS.empty(),
        anomalies=ANOMALIES.empty(),
    )


@pytest.mark.parametrize(("majority", "minority"), [(0, 120), (120, 0)])
def test_a_source_with_another_clock_than_the_majority_is_moved_to_the_time_of_the_workload(
    majority: int, minority: int
) -> None:
    counts, rates = MinuteCounts(), Rates()
    for minute in range(START, START + HOUR):
        for host in ("a", "b", "c"):
            counts.observe(seen(host, minute, ahead=majority), judged=True)
        counts.observe(seen("d", minute, ahead=minority), judged=True)
        counts.advance({})
        counts.judge(rates, minute + 1)
        counts = MinuteCounts.unpack(counts.pack())
    assert counts.lead in (majority, max(0, majority - 1))
    lost = rates.late + rates.out_of_range
    assert 0 < lost <= 10 * 5, "of the minutes until its clock was known"
    assert set(counts.sources) == {"d"}
    assert counts.left_out.ahead == 5 * HOUR * (3 if majority else 1)
    assert counts.left_out.lead == 120


def test_sources_in_step_with_their_workload_are_not_remembered() -> None:
    counts, rates = MinuteCounts(), Rates()
    for minute in range(START, START + 20):
        for host in range(100):
            counts.observe(seen(f"host-{host}", minute, ahead=120), judged=True)
        counts.advance({})
        counts.judge(rates, minute + 1)
    assert counts.lead > 100
    assert counts.sources == {}
    assert rates.late + rates.out_of_range == 0


# ---- what is said of it --------------------------------------------------------------------------


def in_two_hours(world: World) -> int:
    return world.ledger.store.now_ms() // 1000 - int(T0.timestamp()) + 7_200


def test_lines_ahead_of_the_clock_are_counted_by_workload_and_shown(world: World) -> None:
    first = in_two_hours(world)
    for minute in range(5):
        world.stored(*((None, first + 60 * minute, 5) for _ in range(3)))
    world.stored((None, first - 7_200, 5), workload="bank")
    world.round(end=True)
    status = read_status(world.settings, world.client)
    assert status.watching["ahead"] == 15
    assert list(status.left_out) == ["shop"]
    (sentence,) = status.left_out["shop"].sentences
    assert sentence.startswith("15 lines are up to 2.1 h ahead of the clock") and "time zone?" in sentence
    values = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in Scrape(world.client, world.settings).collect()
        for sample in family.samples
    }
    assert values["logweir_left_out_total", "ahead"] == 15
    assert values["logweir_left_out_total", "late"] == 0


def test_what_is_left_out_of_the_rates_is_added_up_round_by_round(world: World) -> None:
    counts = MinuteCounts()
    counts.left_out.late = 3
    assert counts.left_out.growth() == {"late": 3}
    blob = counts.left_out.pack(1_000)
    assert counts.left_out.growth() == {}
    counts.left_out.late += 2
    assert counts.left_out.growth() == {"late": 2}
    (one,) = unpack_left_out({b"shop": blob, b"damaged": b"\x00"}).values()
    assert (one.late, one.at_ms) == (3, 1_000)
    both = total_left_out([one, LeftOut(ahead=2, lead=60, values=4)])
    assert both.sentences() == [
        "2 lines are up to 60 min ahead of the clock; is it the time zone?",
        "3 lines are not in the rates, because their minute was judged before",
        "4 values of numbers could not be followed",
    ]


def test_a_workload_that_is_forgotten_takes_what_was_left_out_of_it_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.watching import rate_round

    world.stored((None, in_two_hours(world), 5))
    world.round()
    assert world.client.hkeys(world.keys.watching("left_out")) == [b"shop"]
    monkeypatch.setattr(rate_round, "FORGET_MS", -1)
    world.round()
    assert world.client.hkeys(world.keys.watching("left_out")) == []
