"""Bursts: more lines than the baseline explains, in one minute or little by little (CUSUM)."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import LASTING, NOTHING, YOUNG
from pipeline.watching.rates.columns import OTHER, TOTAL, Columns
from pipeline.watching.rates.cusum import Cusum
from pipeline.watching.rates.detection import TOGETHER, Detection, MinuteContext, cause_of_row
from pipeline.watching.rates.tail_bounds import Bools, Floats, tail_nats
from pipeline.watching.rates.thresholds import DAYS_28, OVER, PeaksOverThreshold

# Values of `alert_state`.
PENDING: Final = 0.0
ALERTED: Final = 1.0
LEARNT: Final = 2.0  # an episode of a baseline or of a young template: it only calibrates
FOUND: Final = 3.0  # reported, but no alarm so far

FEW_TIMES: Final = 3.0  # Minutes with a line before more lines can be a burst.
_QUIET: Final = 15.0  # Quiet minutes in a row that end a burst.
_REPEAT: Final = 5.0  # Nats that a burst adds to what the next one of the same template needs.
_CAPPED: Final = 4 * _REPEAT  # Nats past the threshold at which a CUSUM statistic is cut.
_TESTS: Final = 3 * 1440  # Of a template a day: each minute, and two CUSUM statistics.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """One minute by row: nats of the minute alone, of the CUSUM, and beyond normal scores."""

    now: Floats
    sums: Floats
    excess: Floats
    threshold: float
    tests: float  # a day
    counts: Floats
    mean: Floats
    size: Floats


class Bursts(Columns):
    """An episode is a score that rose; a burst is an episode above the threshold."""

    burst_age: Floats  # minutes since a burst began
    quiet_run: Floats  # quiet minutes of it in a row
    alert_state: Floats
    max_normal_score: Floats
    episode_score: Floats  # highest of the episode under way
    episode_count: Floats

    def __init__(self) -> None:
        super().__init__()
        self.peaks = PeaksOverThreshold(Reason.RATE_BURST)

    def advance(
        self, at: MinuteContext, counts: Floats, mean: Floats, cusum: Cusum, sizes: tuple[Floats, Floats]
    ) -> list[Detection]:
        """Judge one minute: `counts` where `mean` is expected; `sizes` of minutes and of blocks."""
        now = tail_nats(counts, mean, sizes[0])
        sums = cusum.advance(at.minute, counts, mean, sizes[1])
        score = np.maximum(now, sums)
        grown = (at.baseline.age >= YOUNG) & (at.returns >= FEW_TIMES)
        watched = int(np.count_nonzero(grown)) + 1
        tests, age = float(_TESTS * watched), float(at.baseline.age[TOTAL])
        threshold = self.peaks.threshold(tests, age)
        alarm = self.peaks.threshold(tests, age, at.alarm_per_day)
        grown[OTHER] = False
        excess = score - self.max_normal_score
        new = grown & (self.burst_age == 0) & (excess >= threshold) & (counts > mean)
        self.alert_state[new] = PENDING if at.judged else LEARNT
        self.burst_age[self.burst_age > 0] += 1.0
        self.burst_age[new] = 1.0
        self.episode_score = np.where(grown, np.maximum(self.episode_score, score), 0.0)
        self.episode_count = np.where(self.burst_age > 0, np.maximum(self.episode_count, counts), 0.0)
        cusum.cap(self.max_normal_score + alarm + _CAPPED)
        scores = _Scores(
            now=now, sums=sums, excess=excess, threshold=threshold, tests=tests, counts=counts, mean=mean,
            size=sizes[0],
        )  # fmt: skip
        detections = self._alerts(at, scores, cusum) if at.judged else []
        self._settle(at, scores, cusum)
        return detections

    def advance_idle(self, at: MinuteContext, sums: Floats, live: Any) -> None:
        """Minutes without lines and without a burst: `sums` of the CUSUM (minutes, rows of `live`)."""
        scores = np.zeros_like(self.episode_score)
        scores[live] = self._idle_scores(at, sums, live)
        self.episode_score = scores
        self.clear(slice(None), "episode_count", "quiet_run")
        self.max_normal_score *= (1.0 - DAYS_28) ** len(sums)

    def _idle_scores(self, at: MinuteContext, sums: Floats, live: Any) -> Floats:
        """The scores of the episodes that go on; those of the ended ones become peaks."""
        n = len(sums)
        often = at.returns[live] >= FEW_TIMES
        # The minute from which on there is history enough to judge.
        grown = np.where(often & (live != OTHER), np.clip(YOUNG - at.baseline.age[live], 0, n), n)
        grown = grown.astype(np.int64)
        first = sums[np.minimum(grown, n - 1), np.arange(len(live))]
        score = np.where(
            grown == 0, np.maximum(self.episode_score[live], sums[0]), np.where(grown < n, first, 0.0)
        )
        over = sums < 1.0
        after = over.argmax(axis=0)
        peaks = over[-1] & (after >= grown) & (score >= 3.0)
        for i in np.flatnonzero(peaks).tolist():
            normal = self.max_normal_score[live[i]] * (1.0 - DAYS_28) ** (after[i] + 1)
            self.peaks.add(float(score[i] - normal), at.minute + int(after[i]), alerted=False)
        return np.where(over[-1], 0.0, score)

    def idle_allowed(self, cusum: Cusum) -> bool:
        """False in a burst, and while a CUSUM statistic may be cut, as the cut moves with the threshold."""
        if bool((self.burst_age > 0).any()):
            return False
        return not float(cusum.highest().max()) > self.peaks.floor(_TESTS) + _CAPPED

    def _alerts(self, at: MinuteContext, of: _Scores, cusum: Cusum) -> list[Detection]:
        """Detections of bursts that go on and have not alerted, or were found and are alarms now; many at
        once are one of the workload."""
        open_ = (self.burst_age > 0) & ((self.alert_state == PENDING) | (self.alert_state == FOUND))
        rows = np.flatnonzero(open_ & (of.excess >= of.threshold) & (of.counts > of.mean))
        found: list[tuple[int, Detection]] = []
        age = float(at.baseline.age[TOTAL])
        for row in rows.tolist():
            sudden = of.now[row] > of.sums[row]
            found.append((row, at.detection(
                Reason.RATE_BURST, row,
                began=at.minute if sudden else int(cusum.began[row]),
                expected=float(of.mean[row] if sudden else cusum.expected[row]),
                observed=float(of.counts[row] if sudden else cusum.lines[row]),
                nats=float(of.excess[row]), threshold=of.threshold,
                per_day=self.peaks.per_day(float(of.excess[row]), of.tests, age),
            )))  # fmt: skip
        if self.alert_state[TOTAL] == ALERTED:  # these bursts are part of the workload's
            self.alert_state[rows] = ALERTED
            return []
        known = np.flatnonzero(self.alert_state == FOUND).tolist() if found else []
        reported, detections = at.report(found, known, _merged)
        for row, alarm in reported.items():
            self.alert_state[row] = ALERTED if alarm else FOUND
        return detections

    def _settle(self, at: MinuteContext, of: _Scores, cusum: Cusum) -> None:
        """End bursts that are over, and learn the scores of episodes that were normal."""
        self.max_normal_score *= 1.0 - DAYS_28
        active = self.burst_age > 0
        if active.any():
            expected = at.baseline.recent_expected
            wide = 1.5 * expected + 3.0 * np.sqrt(expected * at.dispersion) + 1e-9
            quiet = (of.now < 2.0) & (at.baseline.recent_lines <= wide)
            self.quiet_run = np.where(active & quiet, self.quiet_run + 1.0, 0.0)
        else:
            self.quiet_run[:] = 0.0
        over = active & (self.quiet_run >= _QUIET)
        repeat_score = tail_nats(self.episode_count, of.mean, of.size) if over.any() else of.now
        small = ~active & (self.episode_score > 0) & (of.sums < 1.0)
        for row in np.flatnonzero(over | (small & (self.episode_score >= 3.0))).tolist():
            self._end_episode(at, row, of.threshold, float(repeat_score[row]), burst=bool(over[row]))
        self.episode_score[over | small] = 0.0
        if not active.any():
            return
        cusum.end(over)
        self.clear(over, "burst_age", "quiet_run", "alert_state")
        # A burst that lasts is the new level, with an hour's weight, so that errors of it are soon put right.
        lasting = (self.burst_age == LASTING) & (self.alert_state != LEARNT)
        at.baseline.discount(lasting)
        at.baseline.scale(lasting, np.maximum(cusum.lines, 0.0) / np.maximum(cusum.expected, NOTHING))
        cusum.end(self.burst_age >= LASTING)

    def _end_episode(
        self, at: MinuteContext, row: int, threshold: float, repeat_score: float, *, burst: bool
    ) -> None:
        alerted = burst and bool(self.alert_state[row] != LEARNT)
        score, normal = float(self.episode_score[row]), float(self.max_normal_score[row])
        if burst:
            cause = cause_of_row(Reason.RATE_BURST, row, at.ids)
            at.backoff.ended(cause, at.minute)
            # `repeat_score`: the score it would have now that its clumps are known.
            height = min(score, max(threshold, repeat_score))
            # A burst that comes again and again belongs to the workload; two may be one fault, not repaired.
            habit = not alerted or at.backoff.repeats(cause, at.minute) >= 3
            self.max_normal_score[row] = max(normal, height) if habit else normal + _REPEAT
            score = min(score, normal + threshold + OVER) if alerted else height
        self.peaks.add(score - normal, at.minute, alerted=alerted)

    def unlearnt(self) -> Bools:
        """Rows whose level is not learnt, because a burst goes on."""
        return np.asarray((self.burst_age > 0) & (self.alert_state != LEARNT) & (self.burst_age < LASTING))

    def pause(self, at: MinuteContext) -> None:
        for row in np.flatnonzero(self.burst_age > 0).tolist():
            at.backoff.ended(cause_of_row(Reason.RATE_BURST, row, at.ids), at.minute)
        self.clear(slice(None), "episode_score", "burst_age", "quiet_run", "alert_state")


def _merged(found: list[Detection]) -> Detection:
    """Bursts of many templates as one of the workload."""
    found = sorted(found, key=lambda one: -one.nats)
    templates = [one for one in found if one.template_id is not None]
    return replace(
        found[0],
        template_id=None,
        began=min(one.began for one in found),
        expected=sum(one.expected for one in templates),
        seen=sum(one.seen for one in templates),
        others=tuple(one.template_id for one in templates if one.template_id is not None)[:TOGETHER],
    )
