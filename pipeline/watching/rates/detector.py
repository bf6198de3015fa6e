"""The detector of one workload's rates: bursts, silences and composition shifts against its own past.

Each minute is compared with what the past expects for its hour, and only then learnt. A baseline and a young
history alert nothing: their scores calibrate the thresholds. Each sub-state owns its columns; the detector
orders their steps.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np

from pipeline.watching.rates.baseline import LASTING, NOTHING, YOUNG, Baseline, Levels
from pipeline.watching.rates.bursts import LEARNT, Bursts
from pipeline.watching.rates.columns import DROP, HEAD, NEW_ROWS, OTHER, ROWS, TOTAL, UNCOUNTED, Table
from pipeline.watching.rates.composition import WINDOW, Composition
from pipeline.watching.rates.cusum import Cusum
from pipeline.watching.rates.daily_runs import DailyRuns
from pipeline.watching.rates.detection import (
    LAST_MINUTE,
    AlertBackoff,
    Detection,
    MinuteContext,
    PackedCauses,
    Positive,
)
from pipeline.watching.rates.gaps import Gaps
from pipeline.watching.rates.newcomers import Newcomers
from pipeline.watching.rates.scatter import BLOCK, Scatter
from pipeline.watching.rates.season import SLOTS, Season, slot_of
from pipeline.watching.rates.tail_bounds import Bools, Floats, common_factor, size_of
from pipeline.watching.rates.thresholds import PackedPeaks

_WORTH: Final = 100.0  # lines in the slow level before a template gets a season
_ERRORS_FROM: Final = 10.0  # minutes of history before errors are learnt
_LEAST_IDLE: Final = 3  # minutes; fewer are cheaper one by one


class PackedDetector(msgspec.Struct, array_like=True, frozen=True):
    """The wire form of a Detector; arrays are little-endian bytes."""

    ids: bytes
    columns: bytes
    season: tuple[bytes, bytes, bytes]
    hour: int
    peaks: tuple[PackedPeaks, PackedPeaks, PackedPeaks]
    causes: PackedCauses
    window: Annotated[int, msgspec.Meta(ge=-1, le=LAST_MINUTE)]
    composition: tuple[Positive, Positive, Positive, Positive]


class Detector:
    """Judges and learns minutes in the order given, in place: a minute has hundreds of templates."""

    def __init__(self) -> None:
        self.season = Season()
        self.baseline = Baseline()
        self.scatter = Scatter()
        self.cusum = Cusum()
        self.bursts = Bursts()
        self.gaps = Gaps()
        self.daily_runs = DailyRuns()
        self.newcomers = Newcomers()
        self.composition = Composition()
        self.backoff = AlertBackoff()
        self.alarm_per_day = math.inf  # of the round at hand: what comes more often by chance is no alarm
        parts = (
            self.season,
            self.baseline,
            self.scatter,
            self.cusum,
            self.bursts,
            self.gaps,
            self.daily_runs,
            self.newcomers,
            self.composition,
        )
        self.table = Table(*parts)

    # ---- a minute ----------------------------------------------------------------------------------

    def step(self, minute: int, counts: Mapping[int, int], *, judged: bool) -> list[Detection]:
        """Judge a complete minute (`judged`) and learn it."""
        x = self._spread(counts)
        self._turn(minute)
        at = self._context(minute, judged=judged)
        factor = self.season.factor
        slow, blocks = self.baseline.slow(), self.scatter.of_blocks()
        fast = self.baseline.fast(slow, blocks)
        usual = np.maximum(slow * factor, NOTHING)
        mean = np.maximum(usual, fast * factor)
        recent = self.baseline.common_factor()
        high = mean.copy()
        if counts:
            high[HEAD:] *= max(1.0, recent, common_factor(x[HEAD:], mean[HEAD:], 1.0))
            # Lines of templates in a burst are theirs, not the workload's.
            active = self.bursts.burst_age > 0
            if active.any():
                x[TOTAL] = max(0.0, x[TOTAL] - np.where(active, np.maximum(x - mean, 0.0), 0.0)[HEAD:].sum())
        unsure = self.season.unsure()
        minutes_size = size_of(high, self.baseline.slow_lines, unsure, at.dispersion)
        blocks_size = size_of(high, self.baseline.slow_lines, unsure, blocks)
        found = self.bursts.advance(at, x, high, self.cusum, (minutes_size, blocks_size))
        found += self.newcomers.advance(at, x)
        self.daily_runs.advance(at, x > 0, self.gaps.last_minute)
        found += self.gaps.advance(at, x, min(1.0, recent))
        found += self._missed_runs(at)
        if minute // WINDOW != self.composition.window:
            calm = (self.bursts.burst_age == 0) | (self.bursts.alert_state == LEARNT)
            found += self.composition.close(at, calm & (self.gaps.silence_age == 0))
        low = np.minimum(usual, np.maximum(fast * factor, NOTHING))
        low[HEAD:] *= min(1.0, recent)
        self._learn(at, x, usual, low, high)
        return found

    def _missed_runs(self, at: MinuteContext) -> list[Detection]:
        activity = min(1.0, float(self.gaps.activity()[TOTAL] * self.season.factor[TOTAL]))
        rows, found = self.daily_runs.missed(at, self.gaps.alerted > 0, activity)
        self.gaps.miss(rows)
        return found

    def _learn(self, at: MinuteContext, x: Floats, usual: Floats, low: Floats, high: Floats) -> None:
        self.composition.advance(x, usual)
        learn = self._learning()
        if self.composition.shift_age == LASTING + 1.0:
            self.baseline.discount(np.ones(len(x), dtype=bool))
        errors_learnt = (learn | (self.bursts.burst_age > 0)) & (self.baseline.age >= _ERRORS_FROM)
        # Errors in bursts are learnt too, cut at five standard deviations: clumps become known.
        cut = x
        if not learn.all():
            cut = np.where(learn, x, np.minimum(x, high + 5.0 * np.sqrt(high * at.dispersion)))
        self.baseline.advance(x, usual, self.season.factor, learn)
        self.scatter.advance(at.minute, cut, low, high, errors_learnt)
        self.gaps.learn(x, learn)
        self.season.advance(at.minute, x, learn)

    def _learning(self) -> Bools:
        """Rows whose levels are learnt: no burst, silence or composition shift of theirs goes on."""
        unlearnt = self.bursts.unlearnt() | self.gaps.unlearnt()
        if unlearnt[TOTAL] or self.composition.unlearnt():
            unlearnt[:] = True
        return ~unlearnt

    # ---- minutes without lines ---------------------------------------------------------------------

    def step_idle(self, minute: int, limit: int, *, judged: bool) -> int:
        """Up to `limit` minutes without lines and without a detection: `step` for each, in closed form.

        Sums decay, CUSUM statistics fall and gaps grow by recurrences over minutes and rows. The stretch ends
        where something else would happen: at the end of an hour, where a silence would be found, a window
        judged, or an alarm changes its state. Returns the number of minutes; 0 if this minute needs `step`.
        """
        if limit < _LEAST_IDLE or not self.bursts.idle_allowed(self.cusum):
            return 0
        self._turn(minute)
        learn = self._learning()
        limits = (
            60 - minute % 60,
            self.gaps.idle_limit(judged=judged),
            self.daily_runs.idle_limit(minute),
            self.composition.idle_limit(minute),
            self.season.idle_limit(minute, learn),
        )
        n = int(min(limit, *limits))
        if n < _LEAST_IDLE:
            return 0
        at = self._context(minute, judged=judged)
        activity = self.gaps.idle_activity(n, self.season.factor, learn)
        levels = self.baseline.levels(n, self.season.factor, learn)
        n = self.gaps.idle_until_silent(at, activity, levels.slow[:, TOTAL])
        if n < _LEAST_IDLE:
            return 0
        usual = np.maximum(levels.slow[:n] * self.season.factor, NOTHING)
        live = np.flatnonzero((self.cusum.highest() > 0) | (self.bursts.episode_score > 0))
        errors_learnt = learn & (self.baseline.age + np.arange(n)[:, None] >= _ERRORS_FROM)
        low, high, size = self._expect_idle(minute, levels, usual, errors_learnt, live)
        self.bursts.advance_idle(at, self.cusum.advance_idle(minute, high, size, live), live)
        self.gaps.advance_idle(n, activity, judged=judged)
        self.composition.advance_idle(minute, usual)
        self.baseline.advance_idle(usual, self.season.factor, learn)
        self.scatter.advance_idle(low, high, errors_learnt)
        self.season.advance_idle(minute, n, learn)
        return n

    def _expect_idle(
        self, minute: int, levels: Levels, usual: Floats, errors_learnt: Bools, live: Any
    ) -> tuple[Floats, Floats, Floats]:
        """The least and the most expected of each minute, (minutes, rows), and the sizes of the rows `live`.

        The error of a block of ten minutes is part of the expectation of the next block.
        """
        n, factor = len(usual), self.season.factor
        low, high, size = np.empty_like(usual), np.empty_like(usual), np.zeros((n, len(live)))
        falls = self.baseline.common_falls(usual)
        unsure = self.season.unsure()[live]
        begin = 0
        while begin < n:
            part = slice(begin, min(n, begin + BLOCK - (minute + begin) % BLOCK))
            blocks = self.scatter.of_blocks()
            fast = levels.fast(part, blocks) * factor
            high[part] = np.maximum(usual[part], fast)
            low[part] = np.minimum(usual[part], np.maximum(fast, NOTHING))
            if falls is not None:
                low[part, HEAD:] *= falls[part, None]
            if len(live):
                size[part] = size_of(high[part][:, live], levels.lines[part][:, live], unsure, blocks[live])
            self.scatter.advance_idle_block(minute + part.stop, low[part], high[part], errors_learnt[part])
            begin = part.stop
        return low, high, size

    def skip_hours(self, minute: int, limit: int, *, judged: bool) -> int:
        """Up to `limit` minutes without lines, in whole hours: `skip` for each, in closed form.

        The season's factors are those of before: it learns the hours when all have passed. The stretch ends
        before an hour in which a silence would be found, or a seasonality kind changes. Returns the number
        of minutes; 0 if this hour needs `skip`."""
        first = 60 - minute % 60
        limit = int(min(limit, self.daily_runs.idle_limit(minute)))
        if limit < first + 60 or self.composition.shift_age or (self.bursts.burst_age > 0).any():
            return 0
        if minute // 60 != self.season.hour:
            self._turn_season(minute)
        silent = bool(self.gaps.silence_age[TOTAL] > 0)
        if not silent:
            limit = int(min(limit, self.season.same_kinds()))
        lengths = np.full(min(SLOTS, max(0, limit - first) // 60 + 1), 60.0)
        lengths[0] = first
        slots = (slot_of(minute) + np.arange(len(lengths))) % SLOTS
        at = self._context(minute, judged=judged)
        factors = self.season.factors_of(slots, self.scatter.of_blocks())
        hours = self.gaps.skip_until_silent(at, lengths, factors[:, 0]) if limit >= first else 0
        if not hours:
            return 0
        n = int(lengths[:hours].sum())
        if not silent:
            self.baseline.decay_hours(lengths[:hours], factors[:hours], self.season.rows)
            self.season.advance_hours(slots[:hours], lengths[:hours])
        self.pause(minute + n)
        self.baseline.age += n
        if hours > 1:
            self._turn_season(minute + n - 1)
        return n

    def skip(self, minute: int, n: int, *, judged: bool) -> list[Detection]:
        """`n` minutes of one hour without lines, roughly: a long gap ends bursts and windows."""
        if minute // 60 != self.season.hour:
            self._turn_season(minute)
        at = self._context(minute, judged=judged)
        found = self.gaps.skip(at, n) + self._missed_runs(replace(at, minute=minute + n - 1))
        if not self.gaps.silence_age[TOTAL] > 0:
            everywhere = np.ones(len(self.table), dtype=bool)
            self.baseline.decay(n, self.season.factor, everywhere)
            self.season.advance_idle(minute, n, everywhere)
        self.pause(minute + n)
        self.baseline.age += n
        return found

    def pause(self, minute: int) -> None:
        """Forget what is under way, except the silences of templates."""
        at = self._context(minute, judged=False)
        self.bursts.pause(at)
        self.composition.pause(at)
        for part in (self.baseline, self.scatter, self.cusum):
            part.pause()

    # ---- rows --------------------------------------------------------------------------------------

    def _context(self, minute: int, *, judged: bool) -> MinuteContext:
        return MinuteContext(
            minute=minute,
            judged=judged,
            ids=self.table.ids,
            season=self.season,
            baseline=self.baseline,
            returns=self.gaps.returns,
            dispersion=self.scatter.of_minutes(),
            backoff=self.backoff,
            alarm_per_day=self.alarm_per_day,
        )

    def _turn(self, minute: int) -> None:
        """Bring season and peaks to the hour of this minute."""
        if minute // 60 != self.season.hour:
            self._turn_season(minute)
            for peaks in (self.bursts.peaks, self.gaps.peaks, self.composition.peaks):
                peaks.forget(minute)

    def _turn_season(self, minute: int) -> None:
        worth = (self.baseline.slow_lines >= _WORTH) & (self.baseline.age >= YOUNG)
        self.scatter.unlearn(self.season.turn(minute, worth, self.scatter.of_blocks()))

    def _spread(self, counts: Mapping[int, int]) -> Floats:
        """The counts by row. New templates get rows, if need be those with the fewest lines."""
        rows = self.table.rows
        fresh = [t for t in sorted(counts) if t not in rows and t != UNCOUNTED][:NEW_ROWS]
        missing = len(self.table) + len(fresh) - ROWS
        if missing > 0:
            self._forget_rows(max(DROP, missing), counts)
            fresh = fresh[: ROWS - len(self.table)]
        if fresh:
            self.table.grow(fresh)
        return self.table.spread(counts)

    def _forget_rows(self, n: int, counts: Mapping[int, int]) -> None:
        """Fold the `n` rows with the fewest lines into OTHER; rows with an open alarm, a
        run that is due, or a line now stay."""
        ids = np.array(self.table.ids)
        bound = (self.bursts.burst_age > 0) | (self.gaps.silence_age > 0) | self.daily_runs.regular()
        bound |= np.array([t in counts for t in self.table.ids])
        bound[:HEAD] = True
        free = np.flatnonzero(~bound)
        order = np.lexsort((ids[free], self.gaps.last_minute[free], self.baseline.slow_lines[free]))
        forgotten = free[order[:n]]
        self.baseline.fold(forgotten, OTHER)
        self.table.forget(forgotten)

    # ---- wire --------------------------------------------------------------------------------------

    def packed(self) -> PackedDetector:
        ids, columns = self.table.pack()
        of = self.composition
        return PackedDetector(
            ids=ids,
            columns=columns,
            season=self.season.pack(),
            hour=self.season.hour,
            peaks=(self.bursts.peaks.scores, self.gaps.peaks.scores, of.peaks.scores),
            causes=self.backoff.causes,
            window=of.window,
            composition=(of.windows, of.mean, of.square_mean, of.shift_age),
        )

    @classmethod
    def of(cls, packed: PackedDetector) -> Self:
        """The inverse of `packed`. Raises ValueError."""
        state = cls()
        state.table.unpack(packed.ids, packed.columns)
        state.season.unpack(*packed.season)
        state.season.hour = packed.hour
        of = state.composition
        for peaks, scores in zip((state.bursts.peaks, state.gaps.peaks, of.peaks), packed.peaks, strict=True):
            peaks.scores = sorted(scores)
        state.backoff.causes = packed.causes
        of.window = packed.window
        of.windows, of.mean, of.square_mean, of.shift_age = packed.composition
        return state
