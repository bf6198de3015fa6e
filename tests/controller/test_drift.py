"""Drift: silent on streams that do not change, awake within two windows on those that do."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pipeline.controller import drift as module
from pipeline.controller.drift import (
    BINS,
    COUNTERS,
    WINDOWS,
    Drift,
    DriftWindow,
    advance,
    drift_between,
    stability,
    sums,
)
from pipeline.controller.drift_counts import measure_all
from pipeline.detect import WORK_SCHEMA
from pipeline.errors import BadPayload
from pipeline.records.schema import RESULT_SCHEMA

LINES = 2_000  # in a window
# The defaults of the settings, which the false alarms are counted by.
NOVELTY, UNKNOWN, SCORE = 0.05, 0.10, 0.25
modest = effort(max_examples=60, deadline=None)  # a busy machine is no fault
TOMORROW = datetime(2026, 11, 21, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference needs no day, where a test does not say so."""
    monkeypatch.setattr(module, "REFERENCE", timedelta(0))


def measure(rows: pl.DataFrame, work: pl.DataFrame) -> dict[str, int]:
    return measure_all([rows], [work])[0]


def rows(scores: list[float | None], reasons: list[list[str]] | None = None) -> pl.DataFrame:
    reasons = reasons or [[] for _ in scores]
    now = datetime.now(UTC)
    return pl.DataFrame(
        {
            "timestamp": [now] * len(scores),
            "score": scores,
            "anomalous": [None if s is None else s >= 0.5 for s in scores],
            "reasons": reasons,
        },
        schema={n: RESULT_SCHEMA[n] for n in ("timestamp", "score", "anomalous", "reasons")},
    )


def work(lines: Iterable[tuple[str, list[str] | None]]) -> pl.DataFrame:
    """(masked line, its unknown words or None when the cache answered it)"""
    lines = list(lines)
    return pl.DataFrame(
        {
            "masked": [masked for masked, _ in lines],
            "unseen": [unseen for _, unseen in lines],
            "tokens": [None if unseen is None else 9 for _, unseen in lines],
        },
        schema={n: WORK_SCHEMA[n] for n in ("masked", "unseen", "tokens")},
    )


class Stream:
    """Lines of many patterns with Zipf weights, in batches, under one model version with a cache that begins
    empty.

    A pattern is new with probability `novel`, has unknown words with `odd`, and has a score. `burst` lines in
    a row are of one pattern."""

    def __init__(
        self,
        seed: int,
        *,
        patterns: int = 3_000,
        novel: float = 0.1,
        odd: float = 0.1,
        burst: int = 1,
        size: int = LINES,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.burst, self.size = burst, size
        self.drawn = size // 8  # lines of a batch
        self.cache: set[int] = set()
        self.totals = dict.fromkeys(COUNTERS, 0)
        self.first = 0
        self.patterns(patterns, novel=novel, odd=odd)

    def patterns(self, count: int, *, novel: float, odd: float, score: float = 0.08) -> None:
        """Replace what the stream is made of."""
        rng = self.rng
        self.first += 1_000_000  # other patterns than before
        weights = 1.0 / np.arange(1, count + 1)
        self.weights = weights / weights.sum()
        # What the training has not seen is what is seldom: the tail.
        tail = np.arange(count) >= min(50, count // 4)
        self.novel = tail & (rng.random(count) < novel)
        self.unknown = np.where(tail & (rng.random(count) < odd), rng.integers(1, 5, count), 0)
        self.scores = np.clip(rng.normal(score, 0.05, count) + 0.5 * self.novel, 0, 1)

    def batch(self) -> dict[str, int]:
        drawn = self.rng.choice(len(self.weights), self.drawn // self.burst, p=self.weights)
        drawn = np.repeat(drawn, self.burst)
        few = np.unique(drawn)
        fresh = [p for p in few if p + self.first not in self.cache]
        self.cache.update(int(p) + self.first for p in fresh)
        counts = np.bincount(np.minimum((self.scores[drawn] * BINS).astype(int), BINS - 1), minlength=BINS)
        return {
            "lines": len(drawn),
            "novel": int(self.novel[drawn].sum()),
            "anomalous": int((self.scores[drawn] >= 0.5).sum()),
            "words": 8 * len(fresh),
            "unknown": int(self.unknown[fresh].sum()) if fresh else 0,
        } | {f"bin{i}": int(n) for i, n in enumerate(counts)}

    def run(self, state: DriftWindow | None, lines: int) -> tuple[DriftWindow | None, list[Drift]]:
        """The stream goes on for so many lines; the controller looks after each batch."""
        seen = []
        for _ in range(lines // self.drawn):
            for name, amount in self.batch().items():
                self.totals[name] += amount
            state, drift = advance(
                state, version="v1", counters=self.totals, drift_lines=self.size, now=TOMORROW
            )
            seen.append(drift)
        return state, seen


def alarms(drifts: list[Drift]) -> set[str]:
    found = set()
    for drift in drifts:
        if drift.novelty > NOVELTY:
            found.add("novelty")
        if drift.unknown > UNKNOWN:
            found.add("unknown")
        if drift.score > SCORE:
            found.add("score")
    return found


# What is counted


def test_a_batch_is_counted_by_lines_and_by_scored_words() -> None:
    frame = rows([0.05, 0.99, 1.0, 0.5], [[], ["new-template", "rare:1/9"], ["new-template"], ["rare:1/9"]])
    counted = measure(
        frame,
        work([("open <PATH> failed: <NUM>", ["open"]), ("known words only", None), ("<NUM> - <IP>", [])]),
    )
    assert counted == dict.fromkeys(COUNTERS, 0) | {
        "lines": 4, "novel": 2, "anomalous": 3, "words": 2, "unknown": 1, "bin0": 1, "bin9": 2, "bin5": 1,
    }  # fmt: skip


def test_a_batch_without_verdicts_counts_nothing() -> None:
    assert measure(rows([None, None]), work([("a", None)])) == {}


def test_a_batch_that_the_cache_answered_has_no_words() -> None:
    counted = measure(rows([0.1]), work([("a b c", None)]))
    assert (counted["words"], counted["unknown"], counted["lines"]) == (0, 0, 1)


def test_frames_of_the_whole_schemas_are_measured() -> None:
    frame = rows([0.1]).with_columns(
        pl.lit(None, dtype=t).alias(n) for n, t in RESULT_SCHEMA.items() if n not in ("timestamp", "score", "anomalous", "reasons")
    )  # fmt: skip
    assert measure(frame, pl.DataFrame(schema=WORK_SCHEMA))["lines"] == 1


@modest
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=50))
def test_every_scored_line_is_in_one_bin(scores: list[float | None]) -> None:
    counted = measure(rows(scores), work([]))
    assert sum(counted.get(f"bin{i}", 0) for i in range(BINS)) == counted.get("lines", 0)
    assert counted.get("lines", 0) == sum(s is not None for s in scores)
    assert set(counted) in (set(), set(COUNTERS))


# Windows


def even(lines: int, **more: int) -> dict[str, int]:
    return dict.fromkeys(COUNTERS, 0) | {"lines": lines, "bin0": lines} | more


def test_nothing_is_told_before_reference_and_window_are_full() -> None:
    state: DriftWindow | None = None
    for lines in (0, 60, 110, 160, 209):
        state, drift = advance(state, version="v1", counters=even(lines), drift_lines=100, now=TOMORROW)
        assert not drift.ready
        assert drift.lines == lines
        assert drift.needed == (200 if lines < 100 else 220)
        assert (drift.novelty, drift.unknown, drift.score) == (0, 0, 0)
    _, drift = advance(state, version="v1", counters=even(220), drift_lines=100, now=TOMORROW)
    assert drift.ready


def test_a_reference_spans_a_day_however_many_lines_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    state: DriftWindow | None = None
    for hour, lines in ((0, 10), (1, 5_000), (23, 90_000), (24, 96_000), (47, 180_000)):
        state, drift = advance(
            state, version="v1", counters=even(lines), drift_lines=100, now=TOMORROW + timedelta(hours=hour)
        )
        assert not drift.ready and (state.reference is None) == (hour < 24)
    _, drift = advance(state, version="v1", counters=even(192_000), drift_lines=100, now=TOMORROW)
    assert drift.ready and drift.lines == 96_000


def test_another_version_begins_anew() -> None:
    stream = Stream(1)
    state, seen = stream.run(None, 3 * LINES)
    assert seen[-1].ready
    state, drift = advance(state, version="v2", counters=even(50), drift_lines=LINES, now=TOMORROW)
    assert (drift.version, drift.ready, drift.lines) == ("v2", False, 50)
    assert state == DriftWindow(version="v2", began=TOMORROW)


def test_sums_that_shrink_begin_anew() -> None:
    state, seen = Stream(1).run(None, 3 * LINES)
    assert seen[-1].ready
    state, drift = advance(state, version="v1", counters=even(10), drift_lines=LINES, now=TOMORROW)
    assert not drift.ready
    assert state.reference is None


@modest
@given(steps=st.lists(st.integers(0, 700), max_size=60), size=st.integers(100, 500))
def test_a_window_is_as_long_as_its_reference_and_not_much_longer(steps: list[int], size: int) -> None:
    state: DriftWindow | None = None
    lines = 0
    for step in steps:
        lines += step
        state, drift = advance(state, version="v1", counters=even(lines), drift_lines=size, now=TOMORROW)
        if drift.ready:
            assert state.reference is not None
            span = max(size, state.reference["lines"])
            assert span <= drift.lines <= 1.5 * span + max(steps)
        assert len(state.marks) <= 4


def test_a_state_survives_json() -> None:
    state, _ = Stream(2).run(None, 3 * LINES)
    assert state is not None
    assert WINDOWS.from_json(WINDOWS.to_json(state)) == state
    blank = DriftWindow(version="v1")
    assert WINDOWS.from_json(WINDOWS.to_json(blank)) == blank


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"v": 1, "version": "v", "reference": null, "marks": [{"lines": "x"}]}',
        '{"v": 1, "version": "v", "reference": {"lines": 1}, "marks": []}',
    ],
)
def test_a_damaged_state_is_refused(text: str) -> None:
    with pytest.raises(BadPayload, match="window"):
        WINDOWS.from_json(text)


def test_counters_are_read_as_redis_gives_them() -> None:
    assert sums({"lines": "12", "bin0": b"3"})["lines"] == 12
    assert set(sums({})) == set(COUNTERS)


def test_what_is_told_is_plain_json() -> None:
    _, seen = Stream(3).run(None, 3 * LINES)
    assert json.loads(json.dumps(asdict(seen[-1])))["version"] == "v1"


# Stationary streams


@pytest.mark.long
def test_streams_that_do_not_change_raise_no_alarm() -> None:
    runs = [alarms(Stream(seed).run(None, 12 * LINES)[1]) for seed in range(40)]
    assert sum(map(bool, runs)) == 0


@pytest.mark.long
@pytest.mark.parametrize("burst", [10, 50])
def test_streams_of_bursts_raise_no_alarm_at_the_default_size(burst: int) -> None:
    # In windows of 2,000 lines, bursts of ten raise one in an eighth of such runs: short windows are for
    # tests.
    runs = [alarms(Stream(seed, burst=burst, size=20_000).run(None, 240_000)[1]) for seed in range(20)]
    assert sum(map(bool, runs)) == 0


def test_a_tail_of_ever_new_lines_full_of_unknown_words_is_no_drift() -> None:
    for seed in range(4):
        stream = Stream(seed, patterns=50_000, novel=0.0, odd=0.9)
        _, seen = stream.run(None, 15 * LINES)
        late = seen[-1]
        assert late.ready
        assert alarms(seen) == set()
        assert late.unknown_now <= late.unknown_then


def test_an_empty_cache_in_the_middle_is_no_drift() -> None:
    stream = Stream(5, odd=0.5)
    state, _ = stream.run(None, 4 * LINES)
    stream.cache.clear()
    _, seen = stream.run(state, 4 * LINES)
    assert alarms(seen) == set()


# Shifts


def within(seed: int, kind: str, **shift: float) -> int:
    """Lines after the shift at which it is told."""
    stream = Stream(seed, novel=0.02, odd=0.02)
    state, before = stream.run(None, 5 * LINES)
    assert alarms(before) == set()
    stream.patterns(3_000, **({"novel": 0.02, "odd": 0.02} | shift))
    _, seen = stream.run(state, 4 * LINES)
    return next((n for n, drift in enumerate(seen, 1) if kind in alarms([drift])), 10**6) * stream.drawn


@pytest.mark.parametrize("seed", range(10))
def test_new_templates_are_noticed_within_two_windows(seed: int) -> None:
    assert within(seed, "novelty", novel=0.5) <= 2 * LINES


@pytest.mark.parametrize("seed", range(10))
def test_unknown_words_are_noticed_within_two_windows(seed: int) -> None:
    assert within(seed, "unknown", odd=0.9) <= 2 * LINES


@pytest.mark.parametrize("seed", range(10))
def test_higher_scores_are_noticed_within_two_windows(seed: int) -> None:
    assert within(seed, "score", score=0.3) <= 2 * LINES


def test_shares_are_told_with_what_they_were() -> None:
    then = even(1_000, novel=12, words=400, unknown=4)
    now = even(1_000, novel=91, words=500, unknown=100)
    drift = drift_between(then, now, version="v1")
    assert (drift.novelty_then, drift.novelty_now) == (0.012, 0.091)
    assert drift.novelty == pytest.approx(0.079)
    assert drift.unknown == pytest.approx(0.2 - 0.01)


def test_one_odd_line_after_a_quiet_reference_is_no_rise() -> None:
    drift = drift_between(even(20_000, words=12), even(20_000, words=20, unknown=10), version="v1")
    assert drift.unknown < UNKNOWN


# The stability index


def test_equal_histograms_have_index_zero() -> None:
    assert stability([100, 0, 50, 0, 0, 0, 0, 0, 1, 0], [100, 0, 50, 0, 0, 0, 0, 0, 1, 0]) == 0


def test_the_index_is_the_formula_on_full_bins() -> None:
    p, q = (0.7, 0.3), (0.3, 0.7)
    expected = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert stability([70_000, 30_000], [30_000, 70_000]) == pytest.approx(expected, rel=1e-3)


def test_three_lines_in_an_empty_bin_are_no_shift() -> None:
    assert stability([20_000, 0, 0], [20_000, 3, 0]) < 0.01


@pytest.mark.parametrize(("then", "now"), [([0, 0], [0, 0]), ([0, 0], [5, 5]), ([5, 0], [9, 0])])
def test_histograms_that_tell_nothing_have_index_zero(then: list[int], now: list[int]) -> None:
    assert stability(then, now) == 0


@modest
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=BINS, max_size=BINS))
def test_the_index_is_a_finite_number_and_the_same_both_ways(pairs: list[tuple[int, int]]) -> None:
    then, now = [a for a, _ in pairs], [b for _, b in pairs]
    index = stability(then, now)
    assert index >= 0
    assert math.isfinite(index)
    assert stability(now, then) == pytest.approx(index)


def test_equal_distributions_are_seldom_told_apart_even_in_small_windows() -> None:
    rng = np.random.default_rng(0)
    p = np.array([0.6, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.005, 0.003, 0.002])
    told = 0
    for _ in range(2_000):
        then, now = rng.multinomial(150, p), rng.multinomial(150, p)
        told += stability(then.tolist(), now.tolist()) > SCORE
    assert told <= 5
