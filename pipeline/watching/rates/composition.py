"""Composition shift: the lines of a window divide over the templates otherwise than expected.

Each count is compared with its expectation, scaled as the whole window is, under the scatter that the
template's own windows had (a share that scatters more than multinomially: Dirichlet-multinomial in the limit
of many templates). The mean of these deviances (G statistic) is judged as a gamma variable with the mean and
variance of earlier windows. Templates that move together make that variance wide, so they are no surprise.
"""

from typing import Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import LASTING, SLOW, YOUNG
from pipeline.watching.rates.columns import TOTAL, Columns
from pipeline.watching.rates.detection import Detection, MinuteContext
from pipeline.watching.rates.scatter import dispersion
from pipeline.watching.rates.tail_bounds import Bools, Floats, common_factor, deviance, gamma_tail
from pipeline.watching.rates.thresholds import PeaksOverThreshold

WINDOW: Final = 15  # minutes
_LINES: Final = 100.0  # of a window that is judged
_HISTORY: Final = 24  # windows before one is judged: six hours
_EXPECTED: Final = 5.0  # lines of a template in a window before it counts
_MAX_NATS: Final = (
    8.0  # nats that one template adds at most: one that runs wild is a burst, no composition shift
)
_NORMAL: Final = 0.5  # Nats of a count that scatters as it should: half of a squared normal.
_LEAST_SCALE: Final = 0.1  # A window with a smaller part of its usual lines is another kind of work.
_OVER: Final = 3.0  # Nats; below, the composition is as in usual windows.
_PRIOR: Final = 12.0  # Windows' worth of what perfect counts would give.
_TWO_DAYS: Final = 192.0  # Windows.
_TESTS: Final = 96  # Windows a day.


class Composition(Columns):
    lines: Floats  # of the running window, and their expectation
    expected: Floats
    error: Floats  # decayed over windows: squared errors, expectations, deviances, number of windows
    error_expected: Floats
    deviances: Floats
    judged_windows: Floats

    def __init__(self) -> None:
        super().__init__()
        self.peaks = PeaksOverThreshold(Reason.RATE_MIX)
        self.window = -1  # epoch quarter of an hour of the running window
        self.windows = 0.0  # behind the means
        self.mean = 0.0  # of the mean deviance of a window, nats, and of its square
        self.square_mean = 0.0
        self.shift_age = 0.0  # minutes since a composition shift began

    def close(self, at: MinuteContext, steady: Bools) -> list[Detection]:
        """Judge and learn the window that ended before this minute, by `steady` templates."""
        steady = (at.baseline.age >= YOUNG) & steady
        steady[TOTAL] = False
        big = steady & (self.expected >= _EXPECTED)
        detections: list[Detection] = []
        scatter = dispersion(self.error, self.error_expected)
        scale = self._window_scale(big, scatter) if float(self.lines[big].sum()) >= _LINES else 0.0
        if np.count_nonzero(big) >= 3 and scale >= _LEAST_SCALE:
            expected = np.maximum(self.expected * scale, 1e-9)
            # Errors of the levels are among those of the windows, so only a young level adds its error.
            spread = scatter - 1.0 + expected / (at.baseline.slow_lines + 1.0)
            each = np.minimum(deviance(self.lines, expected, expected / np.maximum(spread, 1e-9)), _MAX_NATS)
            usual = (self.deviances + _PRIOR * _NORMAL) / (self.judged_windows + _PRIOR)
            each_scaled = each * np.minimum(1.0, _NORMAL / usual)
            mean = float(each_scaled[big].mean())
            moved = np.where(big & (each_scaled > 0), np.abs(self.lines - expected), 0.0)
            score = self._surprise(mean, int(np.count_nonzero(big)))
            detections = self._alerts(at, score, moved, expected)
            if not self.shift_age or self.shift_age >= LASTING:
                self._learn(big, mean, each, expected)
        self._begin(at.minute // WINDOW)
        return detections

    def advance(self, counts: Floats, usual: Floats) -> None:
        """Add one minute: `counts` where `usual` is expected."""
        self.lines += counts
        self.expected += usual
        if self.shift_age:
            self.shift_age += 1.0

    def advance_idle(self, minute: int, usual: Floats) -> None:
        """Minutes without lines, `usual` (minutes, rows); a window that ends in them is not judged."""
        window = (minute + len(usual) - 1) // WINDOW
        begin = 0
        if window != self.window:
            begin = max(0, window * WINDOW - minute)
            self._begin(window)
        self.expected += usual[begin:].sum(axis=0)
        if self.shift_age:
            self.shift_age += len(usual)

    def idle_limit(self, minute: int) -> float:
        """Minutes before the end of a window that may be judged, or of a shift that becomes the new level."""
        limit = LASTING - 1 - self.shift_age if self.shift_age else np.inf
        if float(self.lines[1:].sum()) >= _LINES - 1.0:
            limit = min(limit, 0 if minute // WINDOW != self.window else WINDOW - minute % WINDOW)
        return float(limit)

    def unlearnt(self) -> bool:
        """Whether no level is learnt, because the composition is shifted."""
        return 0 < self.shift_age < LASTING

    def pause(self, at: MinuteContext) -> None:
        if self.shift_age:
            self._end(at)
        self.clear(slice(None), "lines", "expected")

    def _begin(self, window: int) -> None:
        self.clear(slice(None), "lines", "expected")
        self.window = window

    def _end(self, at: MinuteContext) -> None:
        self.shift_age = 0.0
        at.backoff.ended(Reason.RATE_MIX.value, at.minute)

    def _window_scale(self, big: Bools, scatter: Floats) -> float:
        """How many times the expected lines the window has, by its templates together."""
        lines, expected = self.lines[big], self.expected[big]
        if len(lines) < 5:
            return float(lines.sum() / expected.sum())
        return common_factor(lines, expected, _EXPECTED, scatter[big])

    def _surprise(self, mean: float, templates: int) -> float:
        """Nats of a mean deviance this high; never more than independent templates allow."""
        n = min(self.windows, _TWO_DAYS)
        # A squared normal, halved, has a mean of half a nat and a variance of half a nat squared.
        usual = (n * self.mean + _PRIOR * _NORMAL) / (n + _PRIOR)
        variance = n * max(0.0, self.square_mean - self.mean**2) + _PRIOR * _NORMAL / templates
        variance = max(variance / (n + _PRIOR), usual / templates)
        return gamma_tail(mean, usual, variance)

    def _learn(self, rows: Bools, mean: float, each: Floats, expected: Floats) -> None:
        self.windows += 1
        # The mean of two days of windows; of all windows until there are as many.
        weight = max(1.0 / self.windows, 1.0 / _TWO_DAYS)
        self.mean += weight * (mean - self.mean)
        self.square_mean += weight * (mean**2 - self.square_mean)
        values = (self.lines - expected) ** 2, expected, each, np.ones(len(each))
        names = "error", "error_expected", "deviances", "judged_windows"
        for name, more in zip(names, values, strict=True):
            old = getattr(self, name)
            setattr(self, name, np.where(rows, old * (1.0 - WINDOW * SLOW) + more, old))

    def _alerts(self, at: MinuteContext, score: float, moved: Floats, expected: Floats) -> list[Detection]:
        if self.shift_age:
            if score < _OVER:
                self._end(at)
            return []
        ready = self.windows >= _HISTORY
        age = float(at.baseline.age[TOTAL])
        threshold = self.peaks.threshold(_TESTS, age)
        alerted = at.judged and ready and score >= threshold
        if ready:
            self.peaks.add(min(score, threshold + _OVER) if alerted else score, at.minute, alerted=alerted)
        if not alerted:
            return []
        self.shift_age = 1.0
        first = [int(row) for row in np.argsort(-moved, kind="stable")[:3] if moved[row] > 0]
        found = Detection(
            kind=Reason.RATE_MIX, template_id=None, began=self.window * WINDOW, minute=at.minute - 1,
            expected=float(expected[first[0]]) if first else 0.0,
            seen=float(self.lines[first[0]]) if first else 0.0,
            nats=score, threshold=threshold, per_day=self.peaks.per_day(score, _TESTS, age), others=tuple(at.ids[row] for row in first),
        )  # fmt: skip
        return [found] if at.backoff.admit(found.cause, at.minute) else []
