"""Gaps between the lines of a template, and silences: gaps that outgrow those of the past.

A gap is measured in minutes in which a line was to be expected, so a night is short. Templates are waited for
only in minutes in which something else came: a stream that is down is one silence of the workload.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import LASTING, SLOW, geometric
from pipeline.watching.rates.columns import HEAD, OTHER, TOTAL, Columns
from pipeline.watching.rates.detection import TOGETHER, Detection, MinuteContext, cause_of_row
from pipeline.watching.rates.tail_bounds import Bools, Floats
from pipeline.watching.rates.thresholds import DAYS_28, OVER, PeaksOverThreshold

_REGULAR: Final = 20.0  # Returns after which a template counts as one that keeps coming.
_PATIENCE: Final = 240.0  # Minutes of history before anything is waited for.
_GIVEN_UP: Final = 2880.0  # Minutes after which a silent template is no longer waited for.
_STEADY: Final = 0.35  # Least scale of the tail of gaps, in usual gaps: the clocks of heartbeats drift.
_CHANCE: Final = 0.5  # scale beyond which lines come by chance rather than as a clock does
_DOUBT: Final = math.log(6.0)  # nats more for these: a sixth of the budget; people miss heartbeats
_MISSED: Final = 2.0  # Lines expected in the gap: a template that hardly comes any more is not missed.
_EMPTY: Final = 3.0  # Minutes without a line before a silence can be.
_LEAST_TESTS: Final = 10.0  # A day.
_FIRST: Final = 1.5  # Minutes with a line before the first gap that is learnt.
_MOST_RETURNS: Final = 20_000
# Values of `alerted`.
FOUND: Final = 1.0  # reported, but no alarm so far
ALARM: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleActivity:
    """Activity of rows TOTAL and OTHER before each minute without lines: (minutes, 2)."""

    ratio: Floats  # active minutes per minute of exposure
    due: Floats  # chance of a line in the minute
    learn: Bools  # (2,)


class Gaps(Columns):
    active_minutes: Floats  # decayed minutes with a line, of those that could have one
    active_exposure: Floats
    elapsed: Floats  # running gap
    returns: Floats  # closed gaps: number, sum, sum of squares, longest
    gap_sum: Floats
    gap_square_sum: Floats
    gap_max: Floats
    last_minute: Floats  # epoch minute of the last line
    silence_age: Floats  # minutes since a silence was found
    alerted: Floats  # FOUND or ALARM

    def __init__(self) -> None:
        super().__init__()
        self.peaks = PeaksOverThreshold(Reason.RATE_SILENCE)

    def advance(self, at: MinuteContext, counts: Floats, fall: float) -> list[Detection]:
        """Judge one minute. `fall`: the common factor of the last minutes, at most 1."""
        came = counts > 0
        activity, scale = self.activity(), self._scale()
        due = self._due(at, activity, fall)
        if not came[TOTAL]:
            due[HEAD:] = 0.0
        self.elapsed += due
        expected = self._expected(at, at.minute)
        score = _nats(self.elapsed, self.gap_max, self._evidence(scale), scale, expected)
        tests, age = self._tests(activity), float(at.baseline.age[TOTAL])
        threshold = self.peaks.threshold(tests, age)
        if came.any():
            self._close(at, came, score, scale, threshold)
        patient = (self.returns >= _REGULAR) & (at.baseline.age >= _PATIENCE)
        patient[OTHER] = False
        patient &= expected >= _MISSED
        silent = patient & ~came & (due > 0) & (score >= threshold) & (at.minute - self.last_minute >= _EMPTY)
        detections: list[Detection] = []
        if at.judged:
            self.silence_age[self.silence_age > 0] += 1.0
            self.silence_age[silent & (self.silence_age == 0)] = 1.0
            detections = self._alerts(at, silent, score, tests)
        given_up = self.silence_age >= _GIVEN_UP
        if given_up.any():
            self.clear(given_up, "returns", "gap_sum", "gap_square_sum", "gap_max", "elapsed")
            self.clear(given_up, "silence_age", "alerted")
        return detections

    def learn(self, counts: Floats, learn: Bools) -> None:
        """Learn how often each row is active, in the rows of `learn` that are not silent."""
        waited = learn & (self.silence_age == 0)
        if not counts[TOTAL] > 0:
            waited[HEAD:] = False
        active, exposure = self.active_minutes, self.active_exposure
        self.active_minutes = np.where(waited, active * (1.0 - SLOW) + (counts > 0), active)
        self.active_exposure = np.where(waited, exposure * (1.0 - SLOW) + 1.0, exposure)

    def advance_idle(self, n: int, activity: IdleActivity, *, judged: bool) -> None:
        """`n` minutes without lines, in which no silence begins or changes its state."""
        self.elapsed[:HEAD] += activity.due[:n].sum(axis=0)
        if judged:
            self.silence_age[self.silence_age > 0] += n
        some = np.flatnonzero(activity.learn)
        remaining, ones = geometric(n, SLOW)
        self.active_minutes[some] *= remaining
        self.active_exposure[some] = self.active_exposure[some] * remaining + ones

    def idle_activity(self, n: int, factor: Floats, learn: Bools) -> IdleActivity:
        learn = learn[:HEAD] & (self.silence_age[:HEAD] == 0)
        remaining, ones = geometric(np.arange(n)[:, None], SLOW)
        active = self.active_minutes[:HEAD] * np.where(learn, remaining, 1.0)
        exposure = self.active_exposure[:HEAD] * np.where(learn, remaining, 1.0) + np.where(learn, ones, 0.0)
        ratio = active / np.maximum(exposure, 1.0)
        return IdleActivity(ratio=ratio, due=np.minimum(1.0, ratio * factor[:HEAD]), learn=learn)

    def idle_limit(self, *, judged: bool) -> float:
        """Minutes until a silence that goes on changes its state."""
        limit = math.inf
        for end in (LASTING, _GIVEN_UP) if judged else ():
            before = self.silence_age[(self.silence_age > 0) & (self.silence_age < end)]
            if len(before):
                limit = min(limit, int(end - 1 - before.max()))
        return limit

    def idle_until_silent(self, at: MinuteContext, activity: IdleActivity, slow: Floats) -> int:
        """Minutes before the workload's silence is found or alerts; `slow` is its level in each."""
        n, age = len(activity.due), float(at.baseline.age[TOTAL])
        if not at.judged or self.returns[TOTAL] < _REGULAR or age + n - 1 < _PATIENCE:
            return n
        until = 0.0
        if self.silence_age[TOTAL] > 0:
            if self.alerted[TOTAL] == ALARM:
                return n
            until = 0.0 if self.alerted[TOTAL] else at.backoff.quiet_until(Reason.RATE_SILENCE.value)
        k = np.arange(n)
        elapsed = self.elapsed[TOTAL] + np.cumsum(activity.due[:, TOTAL])
        if elapsed[-1] <= self.gap_max[TOTAL]:
            return n
        empty = at.minute + k - self.last_minute[TOTAL]
        expected = slow * at.season.factor[TOTAL] * empty
        score = self._score_of_total(elapsed, expected)
        silent = (activity.due[:, TOTAL] > 0) & (empty >= _EMPTY) & (expected >= _MISSED)
        silent &= (age + k >= _PATIENCE) & (at.minute + k >= until)
        silent &= score >= self.peaks.floor(_LEAST_TESTS)
        for minute in np.flatnonzero(silent).tolist():
            ratio = self.activity()
            ratio[:HEAD] = activity.ratio[minute]
            if score[minute] >= self._next_height(at, self._tests(ratio), age + minute):
                return int(minute)
        return n

    def skip(self, at: MinuteContext, n: int) -> list[Detection]:
        """`n` minutes of one hour without lines, roughly: only the workload can fall silent, at their end."""
        activity = self.activity()
        self.elapsed[TOTAL] += n * self._due(at, activity, 1.0)[TOTAL]
        last = replace(at, minute=at.minute + n - 1)
        expected = self._expected(last, last.minute)[TOTAL]
        score = float(self._score_of_total(self.elapsed[TOTAL], expected))
        patient = self.returns[TOTAL] >= _REGULAR and at.baseline.age[TOTAL] >= _PATIENCE
        detections = list[Detection]()
        if at.judged and patient and score >= self.peaks.floor(_LEAST_TESTS):
            tests = self._tests(activity)
            if score >= self._next_height(at, tests, float(at.baseline.age[TOTAL])) and expected >= _MISSED:
                self.silence_age[TOTAL] = max(1.0, self.silence_age[TOTAL])
                found = self._silence(last, TOTAL, score, tests)
                known = [TOTAL] if self.alerted[TOTAL] else []
                reported, detections = at.report([(TOTAL, found)], known, _merged)
                for row, alarm in reported.items():
                    self.alerted[row] = ALARM if alarm else FOUND
        self._pass(n)
        return detections

    def _pass(self, n: float) -> None:
        """The workload had no line for `n` minutes."""
        if self.silence_age[TOTAL] > 0:
            self.silence_age[TOTAL] += n
        else:
            remaining, ones = geometric(n, SLOW)
            self.active_minutes[TOTAL] *= remaining
            self.active_exposure[TOTAL] = self.active_exposure[TOTAL] * remaining + ones

    def skip_until_silent(self, at: MinuteContext, lengths: Floats, factor: Floats) -> int:
        """`skip` for hours of so many minutes, up to the one at whose end the workload's silence may alert.

        `factor`: the workload's, by hour. Returns the number of hours that have passed."""
        before = np.cumsum(lengths) - lengths
        silent = bool(self.silence_age[TOTAL] > 0)
        remaining, ones = geometric(np.zeros(len(lengths)) if silent else before, SLOW)
        active = self.active_minutes[TOTAL] * remaining
        ratio = active / np.maximum(self.active_exposure[TOTAL] * remaining + ones, 1.0)
        due = lengths * np.minimum(1.0, ratio * factor)
        hours = len(lengths)
        if at.judged and self.returns[TOTAL] >= _REGULAR and not (silent and self.alerted[TOTAL] == ALARM):
            slow = at.baseline.slow_of_hours(TOTAL, lengths, factor)
            expected = slow * factor * (at.minute + before + lengths - 1 - self.last_minute[TOTAL])
            hours = self._first_silent(at, np.cumsum(due), ratio, before, expected)
            if silent and hours < len(lengths):
                hours = 0
        self.elapsed[TOTAL] += due[:hours].sum()
        self._pass(float(lengths[:hours].sum()))
        return hours

    def _first_silent(
        self, at: MinuteContext, elapsed: Floats, ratio: Floats, before: Floats, expected: Floats
    ) -> int:
        """The first hour at whose end a silence may be found; their number where none is."""
        score = self._score_of_total(self.elapsed[TOTAL] + elapsed, expected)
        age = at.baseline.age[TOTAL] + before
        found = (expected >= _MISSED) & (age >= _PATIENCE) & (score >= self.peaks.floor(_LEAST_TESTS))
        activity = self.activity()
        for hour in np.flatnonzero(found).tolist():
            activity[TOTAL] = ratio[hour]
            if score[hour] >= self._next_height(at, self._tests(activity), float(age[hour])):
                return int(hour)
        return len(elapsed)

    def miss(self, rows: list[int]) -> None:
        """These rows are silent, and reported."""
        self.silence_age[rows] = np.maximum(self.silence_age[rows], 1.0)
        self.alerted[rows] = ALARM

    def unlearnt(self) -> Bools:
        """Rows whose level is not learnt, because a silence goes on."""
        return np.asarray((self.silence_age > 0) & (self.silence_age < LASTING))

    def activity(self) -> Floats:
        """Minutes with a line per minute that could have one."""
        return self.active_minutes / np.maximum(self.active_exposure, 1.0)

    def _tests(self, activity: Floats) -> float:
        """Gaps a day of the templates that keep coming."""
        return max(1440 * float(activity[self.returns >= _REGULAR].sum()), _LEAST_TESTS)

    def _due(self, at: MinuteContext, activity: Floats, fall: float) -> Floats:
        """The chance of a line in this minute, by row."""
        due = np.minimum(1.0, activity * at.season.factor)
        due[HEAD:] *= fall
        return due

    def _expected(self, at: MinuteContext, minute: int) -> Floats:
        """Lines that the level of each row expects in the running gap."""
        return np.asarray(at.baseline.slow() * at.season.factor * (minute - self.last_minute))

    def _score_of_total(self, elapsed: Floats, expected: Floats) -> Floats:
        """The scores of gaps of the workload, in each of which `expected` lines were due."""
        scale = self._scale()
        evidence = self._evidence(scale)
        return _nats(elapsed, self.gap_max[TOTAL], evidence[TOTAL], scale[TOTAL], expected)

    def _evidence(self, scale: Floats) -> Floats:
        """Nats of a gap as long as the longest one."""
        return np.asarray(np.log(np.maximum(self.returns, 1.0)) - np.where(scale > _CHANCE, _DOUBT, 0.0))

    def _scale(self) -> Floats:
        """Scale of the tail beyond the longest gap, from the gaps' spread and their maximum."""
        n = np.maximum(self.returns, 1.0)
        mean = self.gap_sum / n
        spread = np.sqrt(np.maximum(self.gap_square_sum / n - mean**2, 0.0))
        return np.maximum(np.maximum(_STEADY, spread), (self.gap_max - mean) / np.log(n + 1.0))

    def _close(self, at: MinuteContext, came: Bools, score: Floats, scale: Floats, threshold: float) -> None:
        """Close and learn the gaps of the rows that came."""
        for row in np.flatnonzero(came & (self.silence_age > 0)).tolist():
            at.backoff.ended(cause_of_row(Reason.RATE_SILENCE, row, at.ids), at.minute)
        for row in np.flatnonzero(came & (score >= 3.0) & (self.returns >= _REGULAR)).tolist():
            alerted, height = bool(self.alerted[row] > 0), float(score[row])
            self.peaks.add(min(height, threshold + OVER) if alerted else height, at.minute, alerted=alerted)
        # A silence that ended by itself counts as a gap just long enough to alert. So a template that pauses
        # now and then is learnt, and a long outage does not make the detector deaf. A first line has no gap
        # before it, and the gap before the second is measured by the rate of one line: many times too long.
        learn = came & (self.active_minutes > _FIRST)
        evidence = self._evidence(scale)
        longest = self.gap_max + scale * np.maximum(threshold - evidence, 1.0)
        gap = np.where(self.alerted > 0, np.minimum(self.elapsed, longest), self.elapsed)
        self.gap_max = np.where(learn, np.maximum(self.gap_max * (1.0 - DAYS_28), gap), self.gap_max)
        self.gap_sum[learn] += gap[learn]
        self.gap_square_sum[learn] += gap[learn] ** 2
        self.returns[learn] += 1.0
        many = self.returns > _MOST_RETURNS
        if many.any():
            for values in (self.returns, self.gap_sum, self.gap_square_sum):
                values[many] *= 0.5
        self.clear(came, "elapsed", "silence_age", "alerted")
        self.last_minute[came] = float(at.minute)

    def _alerts(self, at: MinuteContext, silent: Bools, score: Floats, tests: float) -> list[Detection]:
        """Detections of silences that have not alerted, or were found and are alarms now; many at once are
        one of the workload."""
        rows = np.flatnonzero((self.silence_age > 0) & silent & (self.alerted < ALARM)).tolist()
        waiting = rows[:1] if TOTAL in rows else rows
        found = [(row, self._silence(at, row, float(score[row]), tests)) for row in waiting]
        known = [row for row in waiting if self.alerted[row]]
        reported, detections = at.report(found, known, _merged)
        for row, alarm in reported.items():
            self.alerted[row] = ALARM if alarm else FOUND
        return detections

    def _next_height(self, at: MinuteContext, tests: float, age: float) -> float:
        """The score at which the workload's silence is reported, be it for the first time or as an alarm."""
        if self.alerted[TOTAL] == ALARM:
            return math.inf
        return self.peaks.threshold(tests, age, at.alarm_per_day if self.alerted[TOTAL] else math.inf)

    def _silence(self, at: MinuteContext, row: int, score: float, tests: float) -> Detection:
        began = int(self.last_minute[row]) + 1
        expected = float(at.baseline.slow()[row] * at.season.factor[row] * (at.minute + 1 - began))
        age = float(at.baseline.age[TOTAL])
        return at.detection(
            Reason.RATE_SILENCE,
            row,
            began=began,
            expected=expected,
            observed=0.0,
            nats=score,
            threshold=self.peaks.threshold(tests, age),
            per_day=self.peaks.per_day(score, tests, age),
        )


def _nats(elapsed: Floats, longest: Floats, evidence: Floats, scale: Floats, expected: Floats) -> Floats:
    """Minus the logarithm of the chance of a gap so long.

    n gaps, none longer than the longest, bound the chance of a longer one by 1/n. Beyond, the tail is
    exponential. Where lines come by chance, a gap without `expected` lines is no stranger than a Poisson
    process makes it: the past may have had short gaps by luck.
    """
    beyond = elapsed - longest
    tail = np.where(beyond > 0, evidence + beyond / scale, 0.0)
    return np.where(scale > _CHANCE, np.minimum(tail, np.maximum(expected - _DOUBT, 0.0)), tail)


def _merged(found: list[Detection]) -> Detection:
    """Silences of many templates as one of the workload."""
    return replace(
        found[0],
        template_id=None,
        began=min(d.began for d in found),
        expected=sum(d.expected for d in found),
        nats=max(d.nats for d in found),
        per_day=min(d.per_day for d in found),
        others=tuple(d.template_id for d in found if d.template_id is not None)[:TOGETHER],
    )
