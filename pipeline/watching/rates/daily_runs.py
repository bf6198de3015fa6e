"""Templates that come about once a day, as those of a nightly job do, and the first run that does not come.

A run begins with a line after three hours without one of its template. Runs count as regular while they
begin at about the same time of day. How many are needed follows from how well their times agree: three if
they agree to some minutes, six if they lie more than an hour apart. A run is due on a day if there was one on
each of the three days before and, once a week is known, on the same day of the week; or if there was one on
that day in two weeks. Nothing is missed of a job that does not run every day anyway.

The workload is a row too. Where its lines come as daily runs, it consists of its jobs, and nothing else could
show that it is there.
"""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.columns import HEAD, OTHER, TOTAL, Columns
from pipeline.watching.rates.detection import (
    TOGETHER,
    DailyRun,
    Detection,
    MinuteContext,
    cause_of_row,
)
from pipeline.watching.rates.tail_bounds import Bools, Floats

LEAST_RUNS: Final = 3
_DAY: Final = 1440.0
_REST: Final = 180.0  # minutes without a line of its template before a run
_LONGEST: Final = 240.0  # minutes; what comes for longer is no run of a job
_MOVED: Final = 120.0  # minutes between the times of day of two runs in a row; a change of the clock is 60
_LATE: Final = (
    75.0  # minutes beyond the latest run before one is missed: a change of the clock, and some more
)
_HABIT: Final = 480.0  # minutes: work of people falls into some eight hours of the day, at any time of these
_FALSE_PER_DAY: Final = 0.01  # of a workload, if the templates that come once a day came at random
_LEAST_CANDIDATES: Final = 10.0
_FORGET: Final = 0.9  # of the spread of the times, at each run
_KNOWN_DAYS: Final = 28
_MOST_RUNS: Final = 28.0
_JOB: Final = 60.0  # minutes between the lines of one job
_REGULAR: Final = 0.8  # share of the days with a run, or of those that are as they were a week before


class DailyRuns(Columns):
    began: Floats  # epoch minute of the first line since `_REST`
    onset: Floats  # epoch minute of the newest regular run
    runs: Floats  # regular runs; other ones count against them
    days: Floats  # bits: a run so many days before the newest
    earlier: Floats  # minutes by which the times of day of earlier runs lie before that of the newest
    later: Floats
    expected: Floats  # epoch minute of the next run, at the time of day of the newest; 0: none is due
    heard: Floats  # minutes with lines of the workload about that time

    def advance(self, at: MinuteContext, came: Bools, last_minute: Floats) -> None:
        """Learn the runs that begin in this minute. `last_minute`: of the last line before it, by row."""
        rows = np.flatnonzero(came)
        rows = rows[rows != OTHER]
        begins = (last_minute[rows] == 0) | (at.minute - last_minute[rows] >= _REST)
        for row in rows[begins].tolist():
            self._begin(row, float(at.minute))
        long = rows[~begins]
        long = long[at.minute - self.began[long] > _LONGEST]
        self.clear(long, "runs", "expected")
        if came[TOTAL]:
            near = (self.expected > 0) & (at.minute >= self.expected - self.earlier - _LATE)
            self.heard[near & (at.minute <= self._deadline())] += 1.0

    def missed(self, at: MinuteContext, alerted: Bools, activity: float) -> tuple[list[int], list[Detection]]:
        """Rows whose run is missed for the first time, and the detections that report them: one of each job.

        `alerted`: rows whose silence is reported already. `activity`: the workload's usual share of minutes
        with a line. No run is missed where the workload itself was silent, unless it consists of its jobs.
        """
        self.clear(alerted, "expected")
        if alerted[TOTAL] and self._only_jobs():
            self.clear(slice(None), "expected")
        waits = self._waits()
        if not waits.any() or not (waits & (at.minute > self._deadline())).any():
            return [], []
        nats, threshold = self._nats(), self._threshold(at.minute)
        reported: list[int] = []
        detections: list[Detection] = []
        for job in self._jobs(np.flatnonzero(waits).tolist()):
            late = [row for row in job if at.minute > self._deadline()[row]]
            missing = [row for row in late if nats[row] >= threshold and self._was_heard(row, activity)]
            for row in set(late) - set(missing):
                self._await(row, at.minute)
            if not missing:
                continue
            if at.judged:
                if not at.backoff.admit(cause_of_row(Reason.RATE_SILENCE, missing[0], at.ids), at.minute):
                    continue  # it is asked again when the pause is over
                # The rest of the job would be missed within the hour.
                rest = [row for row in job if nats[row] >= threshold and row != missing[0]]
                detections.append(self._detection(at, missing[0], rest, float(nats[missing[0]]), threshold))
                missing = [missing[0], *rest]
            self.clear(missing, "expected")
            reported += [TOTAL, *missing] if self._only_jobs() else missing
        return (reported if at.judged else []), detections

    def regular(self) -> Bools:
        """Rows whose next run is awaited."""
        return np.asarray(self.expected > 0)

    def next_missed(self) -> int:
        """The first epoch minute in which an awaited run would be missed; 0 if none is awaited."""
        waits = self._waits()
        return math.floor(self._deadline()[waits].min()) + 1 if waits.any() else 0

    def idle_limit(self, minute: int) -> float:
        """Minutes until a run may be missed."""
        missed = self.next_missed()
        return max(0, missed - minute) if missed else math.inf

    def _waits(self) -> Bools:
        waits = np.asarray(self.expected > 0)
        waits[:HEAD] = False
        return waits

    def _only_jobs(self) -> bool:
        return bool(self.runs[TOTAL] >= LEAST_RUNS)

    def _begin(self, row: int, minute: float) -> None:
        self.began[row] = minute
        days = round((minute - self.onset[row]) / _DAY)
        moved = minute - self.onset[row] - days * _DAY
        if self.runs[row] > 0 and 1 <= days < _KNOWN_DAYS and abs(moved) <= _MOVED:
            self.earlier[row] = max(_FORGET * self.earlier[row] + moved, 0.0)
            self.later[row] = max(_FORGET * self.later[row] - moved, 0.0)
            self.runs[row] = min(self.runs[row] + 1.0, _MOST_RUNS)
            self.days[row] = float(int(self.days[row]) << days & (1 << _KNOWN_DAYS) - 1 | 1)
            self.onset[row] = minute
        elif self.runs[row] >= LEAST_RUNS:  # somebody started it once more
            self.runs[row] -= 1.0
        else:
            self.clear(row, "earlier", "later")
            self.runs[row], self.days[row], self.onset[row] = 1.0, 1.0, minute
        self._await(row, minute)

    def _await(self, row: int, minute: float) -> None:
        """Wait for the next run after this minute."""
        self.clear(row, "expected", "heard")
        if self.runs[row] < LEAST_RUNS:
            return
        first = max(1, math.floor((minute - self.onset[row] - self.later[row] - _LATE) / _DAY) + 1)
        days = int(self.days[row])
        if not _is_regular(days):
            return
        due = (day for day in range(first, first + 7) if day < _KNOWN_DAYS and _is_due(days, day))
        for day in due:
            self.expected[row] = self.onset[row] + day * _DAY
            return

    def _deadline(self) -> Floats:
        return self.expected + self.later + _LATE

    def _nats(self) -> Floats:
        """Minus the logarithm of the chance that so many times at random lie so close together."""
        runs = np.maximum(self.runs, 1.0)
        share = np.minimum(1.0, (self.earlier + self.later + 1.0) / _HABIT)
        return np.asarray(-np.log(runs) - (runs - 1.0) * np.log(share))

    def _threshold(self, minute: int) -> float:
        runs, onset = self.runs[HEAD:], self.onset[HEAD:]
        candidates = np.count_nonzero((runs > 0) & (onset > minute - (LEAST_RUNS + 1) * _DAY))
        return math.log(max(float(candidates), _LEAST_CANDIDATES) / _FALSE_PER_DAY)

    def _was_heard(self, row: int, activity: float) -> bool:
        """Whether the workload had about as many minutes with lines as usual around the time of the run. One
        that consists of its jobs has none."""
        if self._only_jobs():
            return True
        usual = activity * (self.earlier[row] + self.later[row] + 2 * _LATE)
        return bool(self.heard[row] >= max(1.0, usual - 2 * math.sqrt(usual)))

    def _jobs(self, rows: list[int]) -> list[list[int]]:
        """The rows by job: their runs are expected soon after one another."""
        at = self.expected + self.later
        jobs: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (at[row], row)):
            if jobs and at[row] - at[jobs[-1][-1]] <= _JOB:
                jobs[-1].append(row)
            else:
                jobs.append([row])
        return jobs

    def _detection(
        self, at: MinuteContext, first: int, rest: list[int], nats: float, threshold: float
    ) -> Detection:
        expected = self.expected[first]
        run = DailyRun(
            first=int(expected - self.earlier[first]),
            last=int(expected + self.later[first]),
            days=int(self.days[first]).bit_count(),
        )
        found = at.detection(
            Reason.RATE_SILENCE,
            first,
            began=run.first,
            expected=1.0,
            observed=0.0,
            nats=nats,
            threshold=threshold,
            per_day=0.0,
        )
        others = [at.ids[row] for row in rest if at.minute > self.expected[row] + self.later[row]]
        return replace(found, run=run, others=tuple(others[:TOGETHER]))


def _is_due(days: int, day: int) -> bool:
    """Whether a run is due so many days after the newest one, which is bit 0 of `days`."""

    def came(back: int) -> bool:
        return back >= day and bool(days >> (back - day) & 1)

    known = day + days.bit_length() - 1  # days since the first run
    weekly = [came(back) for back in (7, 14) if back <= known]
    if came(1) and came(2) and came(3):
        return not weekly or any(weekly)
    return len(weekly) == 2 and all(weekly)


def _is_regular(days: int) -> bool:
    """Whether there was a run on nearly every day since the first one, or every week on the same days."""
    known = days.bit_length()
    weeks = known - 7
    alike = weeks - ((days ^ days >> 7) & (1 << max(0, weeks)) - 1).bit_count()
    return days.bit_count() >= _REGULAR * known or (weeks >= 7 and alike >= _REGULAR * weeks)
