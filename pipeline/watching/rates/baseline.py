"""The EWMA baseline: the level of each template over two days, over two hours, and over the last ten minutes.

A level is a decayed sum of lines over the equally decayed sum of seasonal factors (exposure), so the season
does not move it. A slow swell is followed, so that a morning is no burst before the season is known. The fast
sums have two stages: the last minutes count little yet, so a burst does not make itself expected.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipeline.watching.rates.columns import HEAD, Columns
from pipeline.watching.rates.tail_bounds import Bools, Floats, common_factor

SLOW: Final = 1 / 2880  # forgetting per minute: two days
FAST: Final = 1 / 60  # of each of two stages; together two hours
RECENT: Final = 1 / 10
YOUNG: Final = 60.0  # Minutes of history before anything is judged.
LASTING: Final = 360.0  # Minutes after which a deviation becomes the new level.
NOTHING: Final = 1e-9  # Lines a minute; keeps ratios finite.
_RECENT_LEAST: Final = 3.0  # Lines expected of a template before it counts for the common factor.
_FEW: Final = 5.0  # Lines, times the dispersion, of the slow level in the fast one.
_FORGET_TO: Final = 60.0  # Minutes' worth of the old level that is remaining past LASTING.


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The sums before each minute: (minutes, rows)."""

    lines: Floats
    slow: Floats
    fast_lines: Floats
    fast_exposure: Floats

    def fast(self, part: slice, dispersion: Floats) -> Floats:
        return _shrunk(self.fast_lines[part], self.fast_exposure[part], self.slow[part], dispersion)


class Baseline(Columns):
    age: Floats  # minutes
    slow_lines: Floats
    slow_exposure: Floats
    lag_lines: Floats  # first stage of the fast sums
    lag_exposure: Floats
    fast_lines: Floats
    fast_exposure: Floats
    recent_lines: Floats
    recent_expected: Floats

    def slow(self) -> Floats:
        """Lines a minute over two days, at a seasonal factor of 1."""
        return self.slow_lines / np.maximum(self.slow_exposure, 1.0)

    def fast(self, slow: Floats, dispersion: Floats) -> Floats:
        """Lines a minute over two hours, shrunk to the slow level where lines are few."""
        return _shrunk(self.fast_lines, self.fast_exposure, slow, dispersion)

    def common_factor(self) -> float:
        """The factor by which all templates together deviated in the last ten minutes."""
        return common_factor(self.recent_lines[HEAD:], self.recent_expected[HEAD:], _RECENT_LEAST)

    def advance(self, counts: Floats, usual: Floats, factor: Floats, learn: Bools) -> None:
        """Learn one minute: `counts` where the slow level expects `usual`. Levels change in `learn` only."""
        self.slow_lines = _add(self.slow_lines, SLOW, counts, learn)
        self.slow_exposure = _add(self.slow_exposure, SLOW, factor, learn)
        self.lag_lines = _add(self.lag_lines, FAST, counts, learn)
        self.lag_exposure = _add(self.lag_exposure, FAST, factor, learn)
        self.fast_lines = _follow(self.fast_lines, self.lag_lines, learn)
        self.fast_exposure = _follow(self.fast_exposure, self.lag_exposure, learn)
        self.recent_lines = self.recent_lines * (1.0 - RECENT) + counts
        self.recent_expected = self.recent_expected * (1.0 - RECENT) + usual
        self.age += 1.0

    def advance_idle(self, usual: Floats, factor: Floats, learn: Bools) -> None:
        """Minutes without any line in which the slow level expects `usual`: (minutes, rows)."""
        n = len(usual)
        self.decay(n, factor, learn)
        remaining = (1.0 - RECENT) ** np.arange(n - 1, -1, -1)
        self.recent_lines *= (1.0 - RECENT) ** n
        self.recent_expected = self.recent_expected * (1.0 - RECENT) ** n + remaining @ usual
        self.age += n

    def decay(self, n: int, factor: Floats, learn: Bools) -> None:
        """Let the levels forget `n` minutes without lines."""
        k = np.array([[n]])
        after = (
            *self._slow_after(k, factor, learn),
            *self._fast_after(k, factor, learn),
            *self._lag_after(k, factor, learn),
        )
        (
            self.slow_lines,
            self.slow_exposure,
            self.fast_lines,
            self.fast_exposure,
            self.lag_lines,
            self.lag_exposure,
        ) = (values[0].copy() for values in after)

    def decay_hours(self, lengths: Floats, factors: Floats, rows: Any) -> None:
        """`decay` of all rows over hours of so many minutes, in closed form.

        `factors`: (hours, seasons), of the rows `rows`; those of other rows are 1. An hour's part of a sum
        forgets over the hours behind it, and the parts add up."""
        n, behind = lengths.sum(), lengths.sum() - np.cumsum(lengths)

        def exposure(weights: Floats) -> Floats:
            added = np.full(len(self.age), weights.sum())
            added[rows] += weights @ (factors - 1.0)
            return added

        ones = geometric(lengths, SLOW)[1]
        self.slow_lines = self.slow_lines * geometric(n, SLOW)[0]
        self.slow_exposure = self.slow_exposure * geometric(n, SLOW)[0] + exposure(
            ones * geometric(behind, SLOW)[0]
        )
        stays, ones = geometric(lengths, FAST)
        follows = (1.0 - stays * (1.0 + lengths * FAST)) / FAST  # of the second stage
        later = geometric(behind, FAST)[0]
        remaining, steps = geometric(n, FAST)[0], n * FAST
        self.fast_lines = remaining * (self.fast_lines + steps * self.lag_lines)
        self.fast_exposure = remaining * (self.fast_exposure + steps * self.lag_exposure) + exposure(
            later * (follows + behind * FAST * ones)
        )
        self.lag_lines = remaining * self.lag_lines
        self.lag_exposure = remaining * self.lag_exposure + exposure(later * ones)

    def slow_of_hours(self, row: int, lengths: Floats, factor: Floats) -> Floats:
        """The slow level of a row before each of these hours without lines; `factor`: of each hour."""
        before, ones = np.cumsum(lengths) - lengths, geometric(lengths, SLOW)[1]
        parts = factor * ones / geometric(before + lengths, SLOW)[0]
        remaining = geometric(before, SLOW)[0]
        exposure = remaining * (self.slow_exposure[row] + np.cumsum(parts) - parts)
        return np.asarray(self.slow_lines[row] * remaining / np.maximum(exposure, 1.0))

    def levels(self, n: int, factor: Floats, learn: Bools) -> Levels:
        """The levels before each of `n` minutes without lines."""
        k = np.arange(n)[:, None]
        lines, exposure = self._slow_after(k, factor, learn)
        fast_lines, fast_exposure = self._fast_after(k, factor, learn)
        slow = lines / np.maximum(exposure, 1.0)
        return Levels(lines=lines, slow=slow, fast_lines=fast_lines, fast_exposure=fast_exposure)

    def _slow_after(self, k: Any, factor: Floats, learn: Bools) -> tuple[Floats, Floats]:
        """Slow lines and exposure after `k` minutes (m, 1): (m, rows)."""
        remaining, ones = _where(learn, *geometric(k, SLOW))
        return self.slow_lines * remaining, self.slow_exposure * remaining + factor * ones

    def _fast_after(self, k: Any, factor: Floats, learn: Bools) -> tuple[Floats, Floats]:
        """Fast lines and exposure after `k` minutes (m, 1): (m, rows)."""
        remaining, _ = _where(learn, *geometric(k, FAST))
        steps = np.where(learn, k, 0) * FAST
        full = factor / FAST
        return (
            remaining * (self.fast_lines + steps * self.lag_lines),
            full + remaining * (self.fast_exposure - full + steps * (self.lag_exposure - full)),
        )

    def _lag_after(self, k: Any, factor: Floats, learn: Bools) -> tuple[Floats, Floats]:
        """Lag lines and exposure after `k` minutes (m, 1): (m, rows)."""
        remaining, _ = _where(learn, *geometric(k, FAST))
        full = factor / FAST
        return remaining * self.lag_lines, full + remaining * (self.lag_exposure - full)

    def common_falls(self, usual: Floats) -> Floats | None:
        """The common factor before each minute without lines, at most 1; None if it is 1 in all."""
        lines, expected = self.recent_lines[HEAD:], self.recent_expected[HEAD:]
        # The expectation falls from minute to minute.
        bound = np.maximum(expected, usual[0, HEAD:] / RECENT)
        if np.count_nonzero(bound >= _RECENT_LEAST - 1e-6) < 5:
            return None
        falls = np.ones(len(usual))
        for k, more in enumerate(usual[:, HEAD:]):
            falls[k] = min(1.0, common_factor(lines, expected, _RECENT_LEAST))
            lines, expected = lines * (1.0 - RECENT), expected * (1.0 - RECENT) + more
        return falls

    def discount(self, rows: Bools) -> None:
        """Leave an hour's weight of the levels of these rows."""
        remaining = np.minimum(1.0, _FORGET_TO / np.maximum(self.slow_exposure, 1.0))
        self.slow_lines = np.where(rows, self.slow_lines * remaining, self.slow_lines)
        self.slow_exposure = np.where(rows, self.slow_exposure * remaining, self.slow_exposure)
        self.clear(rows, "fast_lines", "fast_exposure", "lag_lines", "lag_exposure")

    def scale(self, rows: Bools, ratio: Floats) -> None:
        self.slow_lines[rows] *= ratio[rows]

    def fold(self, rows: Any, into: int) -> None:
        """Add the lines of rows that will be forgotten."""
        self.slow_lines[into] += self.slow_lines[rows].sum()

    def pause(self) -> None:
        self.clear(slice(None), "recent_lines", "recent_expected")


def geometric(k: Any, weight: float) -> tuple[Any, Any]:
    """The rest of a sum that forgets after `k` minutes, and the decayed sum of `k` ones."""
    remaining = (1.0 - weight) ** k
    return remaining, (1.0 - remaining) / weight


def _where(learn: Bools, remaining: Any, ones: Any) -> tuple[Any, Any]:
    """The same for the rows of `learn`; the others stay."""
    if learn.all():
        return remaining, ones
    return np.where(learn, remaining, 1.0), np.where(learn, ones, 0.0)


def _add(values: Floats, weight: float, more: Floats, learn: Bools) -> Floats:
    return np.where(learn, values * (1.0 - weight) + more, values)


def _follow(fast: Floats, lag: Floats, learn: Bools) -> Floats:
    return np.where(learn, fast + FAST * (lag - fast), fast)


def _shrunk(lines: Floats, exposure: Floats, slow: Floats, dispersion: Floats) -> Floats:
    strength = _FEW * dispersion
    return (lines + strength) / (exposure + strength / np.maximum(slow, NOTHING))
