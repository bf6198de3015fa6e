"""The rate detector: what it tells, what it keeps quiet about, and what holds whatever arrives."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason
from pipeline.watching.rates.columns import ROWS
from pipeline.watching.rates.rates import MAX_PACKED, Alarm, Rates
from pipeline.watching.rates.season import Season, slot_of
from pipeline.watching.rates.tail_bounds import (
    common_factor,
    deviance,
    gamma_tail,
    log_likelihood_ratio,
    tail_nats,
)
from pipeline.watching.rates.thresholds import PeaksOverThreshold

START = 28_401_120  # epoch minute of Monday 2024-01-01 00:00 UTC
LEVELS = np.array([0.05, 0.4, 2.0, 6.0, 15.0, 40.0])


def frame(minute: int, counts: Mapping[int, int]) -> pl.DataFrame:
    return pl.DataFrame(
        {"minute": [minute] * len(counts), "template_id": list(counts), "n": list(counts.values())},
        schema={"minute": pl.Int64, "template_id": pl.Int64, "n": pl.UInt32},
    )


def traffic(minutes: int, seed: int = 0, levels: Any = LEVELS) -> Any:
    """Poisson counts of templates 1..K and a heartbeat of one a minute as K + 1."""
    rng = np.random.default_rng(seed)
    lines = rng.poisson(levels, size=(minutes, len(levels)))
    return np.column_stack([lines, np.ones(minutes, dtype=np.int64)])


def play(rates: Rates, counts: Any, start: int = START, *, judged: bool = True) -> list[Alarm]:
    """Minute by minute, as a live stream."""
    rows, columns = np.nonzero(counts)
    lines = {"minute": start + rows, "template_id": columns + 1, "n": np.asarray(counts)[rows, columns]}
    whole = pl.DataFrame(lines, schema={"minute": pl.Int64, "template_id": pl.Int64, "n": pl.UInt32})
    edges = np.searchsorted(rows, np.arange(len(counts) + 1)).tolist()
    told = []
    for row, (begin, end) in enumerate(itertools.pairwise(edges)):
        if begin < end:
            rates.observe(whole.slice(begin, end - begin), judged=judged)
        told += rates.close(start + row + 1)
    return told


@pytest.fixture(scope="module")
def learnt() -> bytes:
    """A day of even traffic."""
    rates = Rates.unpack(None)
    assert play(rates, traffic(1440)) == []
    return rates.pack()


def minute_of(alarm: Alarm) -> int:
    return int(alarm.at.timestamp()) // 60


# ---- what is told --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("factor", "within"), [(3, 8), (10, 3)])
def test_a_burst_is_told_once_with_its_onset(learnt: bytes, factor: int, within: int) -> None:
    counts = traffic(120, seed=1)
    counts[20:80, 3] *= factor
    told = play(Rates.unpack(learnt), counts, START + 1440)
    (alarm,) = told
    assert (alarm.kind, alarm.template_id, alarm.cause) == (Reason.RATE_BURST, 4, "rate-burst:4")
    assert minute_of(alarm) - (START + 1460) < within
    assert abs(int(alarm.began.timestamp()) // 60 - (START + 1460)) <= 2
    assert alarm.seen > 2 * alarm.expected
    assert alarm.p_value < 1e-5
    assert alarm.score >= 0.5
    assert "template 4" in alarm.sentence


def test_a_heartbeat_that_stops_is_told_once_and_says_since_when(learnt: bytes) -> None:
    counts = traffic(90, seed=2)
    counts[30:, 6] = 0
    (alarm,) = play(Rates.unpack(learnt), counts, START + 1440)
    assert (alarm.kind, alarm.template_id) == (Reason.RATE_SILENCE, 7)
    assert int(alarm.began.timestamp()) // 60 == START + 1470
    assert minute_of(alarm) - (START + 1470) < 15


def test_a_changed_mix_is_told_though_the_sum_stays(learnt: bytes) -> None:
    rng = np.random.default_rng(3)
    counts = traffic(120, seed=3)
    counts[30:, 5] = rng.poisson(18, size=90)
    counts[30:, 4] = rng.poisson(29, size=90)
    counts[30:, 3] = rng.poisson(14, size=90)
    told = play(Rates.unpack(learnt), counts, START + 1440)
    assert told
    assert {alarm.kind for alarm in told} <= {Reason.RATE_MIX, Reason.RATE_BURST}


@pytest.mark.long
def test_a_mix_of_many_small_changes_is_told_though_clumps_come_and_go() -> None:
    """Every template moves by half, none of them enough alone; one that comes in clumps does not hide it."""
    rng = np.random.default_rng(30)
    levels = np.full(12, 3.0)
    counts = rng.poisson(levels, size=(1620, 12))
    clumps = rng.poisson(0.03, size=1620) * rng.poisson(60, size=1620)
    rates = Rates.unpack(None)
    play(rates, np.column_stack([counts, clumps])[:1440])
    counts[1470:1560, ::2] = rng.poisson(1.5, size=(90, 6))
    counts[1470:1560, 1::2] = rng.poisson(4.5, size=(90, 6))
    told = play(rates, np.column_stack([counts, clumps])[1440:], START + 1440)
    (mix,) = [alarm for alarm in told if alarm.kind is Reason.RATE_MIX]
    assert 1470 < minute_of(mix) - START < 1530
    assert mix.p_value < 1e-3


def test_one_template_that_runs_wild_is_no_changed_mix(learnt: bytes) -> None:
    counts = traffic(120, seed=31)
    counts[30:90, 3] *= 30
    assert {a.kind for a in play(Rates.unpack(learnt), counts, START + 1440)} == {Reason.RATE_BURST}


@pytest.mark.long
def test_work_that_alternates_is_no_changed_mix() -> None:
    """Half an hour of one work, half an hour of another, as in HDFS: neither is a change."""
    rng = np.random.default_rng(32)
    first = (np.arange(2 * 1440) // 30 % 2 == 0)[:, None]
    counts = rng.poisson(np.where(first, [20.0, 20, 20, 20, 2, 2], [0.5, 0.5, 0.5, 0.5, 10, 10]))
    rates = Rates.unpack(None)
    play(rates, counts[:1440])
    told = play(rates, counts[1440:], START + 1440)
    assert [a for a in told if a.kind is Reason.RATE_MIX] == []


def test_a_burst_does_not_make_itself_expected(learnt: bytes) -> None:
    """Thrice as often is told of a line of one in two minutes, before half an hour is over."""
    found = 0
    for seed in range(40, 46):
        counts = traffic(90, seed=seed)
        counts[30:60, 1] = np.random.default_rng(seed).poisson(3 * LEVELS[1] * 1.5, size=30)
        counts[:30, 1] = np.random.default_rng(seed + 50).poisson(LEVELS[1] * 1.5, size=30)
        told = play(Rates.unpack(learnt), counts, START + 1440)
        found += any(a.cause == "rate-burst:2" and minute_of(a) < START + 1500 for a in told)
    assert found >= 5


@pytest.mark.long
def test_what_is_seldom_by_the_clock_is_not_missed_in_a_busy_hour() -> None:
    """Ten minutes of work every six hours, with a line of template 3 in each; the last time 45 more, without
    it."""
    counts = np.zeros((2600, 3), dtype=np.int64)
    rng = np.random.default_rng(35)
    for begin in range(0, len(counts), 360):
        minutes = 10 if begin < 2520 else 55
        counts[begin : begin + minutes, :2] = rng.poisson(6.0, size=(minutes, 2)) + 1
        counts[begin : begin + 10, 2] = 1
    told = play(Rates.unpack(None), counts)
    assert [a for a in told if a.kind is Reason.RATE_SILENCE and a.template_id == 3] == []


def test_a_stream_that_is_down_is_one_silence_of_the_workload(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    counts = traffic(300, seed=4)
    counts[30:200] = 0
    told = play(rates, counts, START + 1440)
    assert [(a.kind, a.template_id) for a in told] == [(Reason.RATE_SILENCE, None)]
    assert "nothing at all" in told[0].sentence


def test_traffic_that_trebles_is_one_alarm_of_the_workload(learnt: bytes) -> None:
    counts = traffic(120, seed=5)
    counts[30:90, :6] *= 3
    told = play(Rates.unpack(learnt), counts, START + 1440)
    assert [a.template_id for a in told] == [None]


def test_a_new_template_is_no_burst(learnt: bytes) -> None:
    counts = np.column_stack([traffic(90, seed=6), np.zeros(90, dtype=np.int64)])
    counts[30:, 7] = 9
    told = play(Rates.unpack(learnt), counts, START + 1440)
    assert not [a for a in told if a.template_id is not None]


@pytest.mark.long
def test_a_baseline_is_only_learnt() -> None:
    counts = traffic(900)
    counts[700:730, 3] *= 10
    rates = Rates.unpack(None)
    assert play(rates, counts, judged=False) == []
    # What the baseline did is normal, what goes far beyond it is not.
    again, more = traffic(90, seed=7), traffic(90, seed=7)
    again[30:40, 3] *= 8
    more[30:40, 2] *= 12
    state = rates.pack()
    assert play(Rates.unpack(state), again, START + 960) == []
    assert [a.template_id for a in play(Rates.unpack(state), more, START + 960)] == [3]


@pytest.mark.long
def test_a_season_of_hours_is_learnt_and_the_night_is_no_silence() -> None:
    day = (np.arange(4 * 1440) // 60) % 24
    level = np.where((day >= 8) & (day < 20), 20.0, 0.5)
    rng = np.random.default_rng(8)
    counts = np.stack([rng.poisson(level), rng.poisson(level / 2), rng.poisson(level / 4)], axis=1)
    rates = Rates.unpack(None)
    play(rates, counts[: 3 * 1440])
    assert play(rates, counts[3 * 1440 :], START + 3 * 1440) == []
    # The day's level at night is a burst.
    rates.observe(frame(START + 4 * 1440, {1: 1}), judged=True)
    night = np.column_stack([rng.poisson(20.0, size=30), rng.poisson(0.3, size=(30, 2))])
    told = play(rates, night, START + 4 * 1440 + 1)
    assert [a.template_id for a in told if a.kind is Reason.RATE_BURST][:1] in ([1], [None])
    assert any("at these hours" in a.sentence for a in told)


# ---- what is kept quiet --------------------------------------------------------------------------


@pytest.mark.long
def test_a_lasting_burst_is_one_alarm_and_becomes_the_new_level(learnt: bytes) -> None:
    counts = traffic(1200, seed=9)
    counts[60:, 3] *= 6
    rates = Rates.unpack(learnt)
    told = play(rates, counts[:700], START + 1440)
    assert [a.cause for a in told] == ["rate-burst:4"]
    assert play(rates, counts[700:], START + 2140) == []
    # Now six times the old level is usual, and the old level no burst; six times that is one.
    more = traffic(60, seed=10)
    more[:, 3] *= 36
    assert "rate-burst:4" in {a.cause for a in play(rates, more, START + 2640)}


def test_an_ongoing_burst_is_not_normal_within_minutes(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    counts = traffic(120, seed=11)
    counts[:, 3] *= 5
    play(rates, counts, START + 1440)
    row = rates.detector.table.rows[4]
    assert rates.detector.baseline.slow()[row] < 1.2 * LEVELS[3]


def test_what_flaps_is_told_ever_more_rarely(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    counts = traffic(14 * 60, seed=12)
    for hour in range(14):
        counts[hour * 60 : hour * 60 + 10, 3] *= 10
    told = [a for a in play(rates, counts, START + 1440) if a.cause == "rate-burst:4"]
    assert 1 <= len(told) <= 6
    pauses = np.diff([minute_of(a) for a in told])
    assert (np.diff(pauses) >= 0).all()


# ---- clocks --------------------------------------------------------------------------------------


def test_a_replay_of_an_old_log_is_judged_by_its_own_time(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    counts = traffic(300, seed=13)
    counts[100:130, 3] *= 10
    wall, told = START + 5_000_000, []
    for begin in range(0, 300, 50):
        rows = [
            frame(START + 1440 + begin + i, {j + 1: int(n) for j, n in enumerate(line) if n})
            for i, line in enumerate(counts[begin : begin + 50])
        ]
        rates.observe(pl.concat(rows), judged=True)
        told += rates.close(wall)
    told += rates.close(wall + 3)
    assert [a.cause for a in told] == ["rate-burst:4"]
    assert abs(minute_of(told[0]) - (START + 1540)) < 5
    assert not rates.live


def test_lines_from_the_far_future_and_past_do_not_stop_it(learnt: bytes) -> None:
    rates = Rates.unpack(learnt)
    for wrong in (2**62, -(2**62), START + 10**8, 0, 5):
        rates.observe(frame(wrong, {1: 1, 99: 7}), judged=True)
    counts = traffic(90, seed=14)
    counts[40:60, 3] *= 10
    told = play(rates, counts, START + 1440)
    assert [a.cause for a in told] == ["rate-burst:4"]
    assert rates.out_of_range > 0
    assert len(rates.pack()) < MAX_PACKED


@pytest.mark.parametrize("now", [0, 2**62, -5])
def test_a_caller_whose_clock_is_wrong_gets_an_answer_at_once(learnt: bytes, now: int) -> None:
    rates = Rates.unpack(learnt)
    rates.observe(frame(START + 1440, {1: 1}), judged=True)
    assert len(rates.close(now)) <= 1
    counts = traffic(30, seed=15)
    assert len(play(rates, counts, START + 1440)) <= 1


def test_lines_that_come_a_minute_late_are_counted_in_their_minute() -> None:
    one, two = Rates.unpack(None), Rates.unpack(None)
    counts = traffic(50, seed=16)
    before: dict[int, int] = {}
    play(one, counts)
    for row, line in enumerate(counts):
        some = {j + 1: int(n) for j, n in enumerate(line) if n}
        halves = [{k: v for k, v in some.items() if k % 2 == side} for side in (0, 1)]
        two.observe(frame(START + row, halves[0]), judged=True)
        if row:
            two.observe(frame(START + row - 1, before), judged=True)
        before = halves[1]
        two.close(START + row + 1)
    assert two.late == 0
    events = [r.detector.baseline.slow_lines[0] for r in (one, two)]
    assert events[1] == pytest.approx(events[0], rel=0.1)


# ---- whatever arrives ----------------------------------------------------------------------------


def stationary() -> Iterator[tuple[int, Any]]:
    for seed in range(3):
        rng = np.random.default_rng(100 + seed)
        levels = np.exp(rng.uniform(np.log(0.003), np.log(60), 12))
        yield seed, traffic(1440, seed=seed, levels=levels)


@pytest.mark.long
def test_a_stationary_stream_keeps_within_its_budget() -> None:
    told = {seed: play(Rates.unpack(None), counts) for seed, counts in stationary()}
    assert sum(map(len, told.values())) <= 3  # three days at one a day


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 79), max_size=4), factor=st.sampled_from([1, 8]))
def test_a_state_behaves_the_same_after_any_cut(
    learnt: bytes, seed: int, cuts: list[int], factor: int
) -> None:
    counts = traffic(80, seed=seed)
    counts[30:60, seed % 6] *= factor
    counts[50:, 6] = 0
    whole, parts = Rates.unpack(learnt), Rates.unpack(learnt)
    expected = play(whole, counts, START + 1440)
    told, edges = [], sorted({0, 80, *cuts})
    for begin, end in itertools.pairwise(edges):
        told += play(parts, counts[begin:end], START + 1440 + begin)
        parts = Rates.unpack(parts.pack())
    assert told == expected
    assert parts.pack() == whole.pack()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_order_of_rows_within_a_minute_is_irrelevant(data: st.DataObject) -> None:
    counts = traffic(8, seed=data.draw(st.integers(0, 99)))
    one, two = Rates.unpack(None), Rates.unpack(None)
    for row, line in enumerate(counts):
        some = [(START + row, j + 1, int(n)) for j, n in enumerate(line) if n]
        mixed = data.draw(st.permutations(some))
        cut = data.draw(st.integers(0, len(some)))
        schema = {"minute": pl.Int64, "template_id": pl.Int64, "n": pl.UInt32}
        one.observe(pl.DataFrame(some, schema=schema, orient="row"), judged=True)
        for piece in (mixed[:cut], mixed[cut:]):
            two.observe(pl.DataFrame(piece, schema=schema, orient="row"), judged=True)
        one.close(START + row + 1)
        two.close(START + row + 1)
    assert one.pack() == two.pack()


@pytest.mark.long
def test_a_flood_of_templates_stays_within_the_bound() -> None:
    rates = Rates.unpack(None)
    rng = np.random.default_rng(0)
    for minute in range(60):
        ids = rng.integers(-(2**62), 2**62, size=3000)
        rates.observe(
            pl.DataFrame({"minute": START + minute - rng.integers(0, 5, size=3000), "template_id": ids,
                          "n": rng.integers(1, 2**31, size=3000)}),
            judged=minute % 3 > 0,
        )  # fmt: skip
        rates.close(START + minute + 1)
        if minute % 20 == 19:
            blob = rates.pack()
            assert len(blob) <= MAX_PACKED
            assert Rates.unpack(blob).pack() == blob
    assert len(rates.detector.table) <= ROWS


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1) | st.integers(START - 300, START + 300) | st.none(),
            st.integers(-(2**63), 2**63 - 1) | st.integers(1, 5) | st.none(),
            st.integers(0, 2**32 - 1) | st.none(),
        ),
        max_size=30,
    ),
    nows=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(START - 300, START + 300), max_size=4),
)
def test_no_times_or_counts_hang_it_or_make_it_grow(rows: list[Any], nows: list[int]) -> None:
    rates = Rates.unpack(None)
    schema = {"minute": pl.Int64, "template_id": pl.Int64, "n": pl.UInt32}
    for now in [*nows, START]:
        rates.observe(pl.DataFrame(rows, schema=schema, orient="row"), judged=now % 2 == 0)
        for alarm in rates.close(now):
            assert 0 <= alarm.p_value <= 1
        rates = Rates.unpack(rates.pack())
    assert len(rates.pack()) < 64 << 10


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_state_is_refused_or_works(learnt: bytes, data: st.DataObject) -> None:
    blob = bytearray(learnt)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.sampled_from([len(blob), len(blob), len(blob) // 2]))]
    try:
        rates = Rates.unpack(bytes(blob))
    except BadPayload:
        return
    play(rates, traffic(3), START + 1441)
    rates.pack()


def test_a_season_at_a_place_before_the_first_is_refused() -> None:
    season = Season()
    place, sums, minutes = season.pack()
    broken = np.frombuffer(place, dtype="<i8").copy()
    broken[1] = -256
    with pytest.raises(ValueError, match="do not fit"):
        season.unpack(broken.tobytes(), sums, minutes)


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xc0", b"x" * (MAX_PACKED + 1), msgpack.packb([99]), msgpack.packb([2, [], [], [], []]), msgpack.packb([1, [], [], [], []]), msgpack.packb(7)],
)  # fmt: skip
def test_what_is_no_state_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        Rates.unpack(blob)


def test_counts_without_their_columns_are_refused() -> None:
    with pytest.raises(BadPayload):
        Rates.unpack(None).observe(pl.DataFrame({"minute": [1], "n": [1]}), judged=True)
    with pytest.raises(BadPayload):
        Rates.unpack(None).observe(pl.DataFrame({"minute": ["x"], "template_id": [1], "n": [1]}), judged=True)


# ---- the mathematics -----------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(mean=st.floats(0.01, 50), size=st.floats(0.05, 1e6), n=st.integers(0, 200))
def test_the_tail_bound_never_claims_more_than_the_exact_tail(mean: float, size: float, n: int) -> None:
    k = np.arange(0, 4000)
    p = size / (size + mean)
    steps = np.log((k[:-1] + size) * (1 - p) / (k[:-1] + 1))
    logs = size * np.log(p) + np.concatenate([[0.0], np.cumsum(steps)])
    exact = float(np.exp(logs[n:]).sum())
    nats = float(tail_nats(np.array([float(n)]), np.array([mean]), np.array([size]))[0])
    assert np.exp(-nats) >= exact * (1 - 1e-6) - 1e-12


def test_the_likelihood_ratio_averages_below_one_when_nothing_changed() -> None:
    rng = np.random.default_rng(0)
    counts = rng.negative_binomial(3.0, 3.0 / (3.0 + 2.0), size=200_000).astype(float)
    ratios = np.exp(log_likelihood_ratio(counts, np.full(200_000, 2.0), np.full(200_000, 3.0), 2.0))
    assert ratios.mean() == pytest.approx(1.0, abs=0.05)


def test_one_wild_template_does_not_move_the_common_factor() -> None:
    mean = np.array([10.0, 10, 10, 10, 10, 10, 500])
    count = mean.copy()
    count[6] *= 20
    assert common_factor(count, mean, 1.0) == 1.0
    assert common_factor(mean * 3, mean, 1.0) == 3.0


@settings(max_examples=50, deadline=None)
@given(mean=st.floats(0.01, 50), size=st.floats(0.05, 1e6), n=st.integers(0, 200))
def test_deviance_is_the_tail_bound_above_and_the_like_below_the_mean(
    mean: float, size: float, n: int
) -> None:
    one = np.array([float(n)]), np.array([mean]), np.array([size])
    if n >= mean:
        assert deviance(*one)[0] == pytest.approx(tail_nats(*one)[0], abs=1e-6)
    none = float(deviance(np.zeros(1), np.array([mean]), np.array([size]))[0])
    assert none == pytest.approx(size * np.log1p(mean / size), rel=1e-6)  # exactly that of no line at all
    assert deviance(*one)[0] >= 0


def test_the_gamma_bound_never_claims_more_than_draws_show() -> None:
    draws = np.random.default_rng(0).gamma(3.0, 2.0, size=400_000)
    for value in (6.5, 10.0, 15.0, 25.0):
        assert np.exp(-gamma_tail(value, 6.0, 12.0)) >= (draws >= value).mean()
    assert gamma_tail(5.0, 6.0, 12.0) == 0.0


def test_what_scatters_says_less_of_the_common_factor() -> None:
    mean = np.full(7, 10.0)
    count = np.array([5.0, 5, 5, 5, 100, 100, 100])
    scatter = np.array([1.0, 1, 1, 1, 50, 50, 50])
    assert common_factor(count, mean, 1.0, scatter) == 0.5


def test_the_threshold_is_what_history_exceeded_as_often_as_allowed() -> None:
    peaks = PeaksOverThreshold(Reason.RATE_BURST)
    for i in range(200):
        peaks.add(3.0 + i / 10, i, alerted=False)
    assert peaks.level(1.0, 10 * 1440) == pytest.approx(3.0 + 18.9)
    assert peaks.level(0.5, 1440) > 3.0 + 19.9


def test_slots_begin_on_monday() -> None:
    assert slot_of(START) == 0
    assert slot_of(START + 61) == 1
    assert slot_of(START - 1) == 167
