"""CUSUM statistics of rises to twice and to eight times the level; single minutes find 16 times the level."""

from typing import Any, Final

import numpy as np

from pipeline.watching.rates.columns import Columns
from pipeline.watching.rates.tail_bounds import Bools, Floats, log_likelihood_ratio

RATIOS: Final = 2.0, 8.0


class Cusum(Columns):
    twofold: Floats  # nats
    eightfold: Floats
    began: Floats  # epoch minute at which the rise under way began; its lines and its expectation
    lines: Floats
    expected: Floats

    def advance(self, minute: int, counts: Floats, mean: Floats, size: Floats) -> Floats:
        """Add one minute: `counts` where `mean` is expected. Returns the higher of the two statistics."""
        rises = self.highest() >= 1.0
        self.twofold = np.maximum(0.0, self.twofold + log_likelihood_ratio(counts, mean, size, RATIOS[0]))
        self.eightfold = np.maximum(0.0, self.eightfold + log_likelihood_ratio(counts, mean, size, RATIOS[1]))
        self.began = np.where(rises, self.began, float(minute))
        self.lines = np.where(rises, self.lines, 0.0) + counts
        self.expected = np.where(rises, self.expected, 0.0) + mean
        return self.highest()

    def advance_idle(self, minute: int, mean: Floats, size: Floats, live: Any) -> Floats:
        """Minutes without lines: `mean` (minutes, rows), `size` (minutes, rows of `live`).

        Only the rows of `live` have a statistic above 0. Returns the highest of each minute, in these rows.
        """
        sums = []
        for name, ratio in zip(("twofold", "eightfold"), RATIOS, strict=True):
            falls = size * np.log1p((ratio - 1.0) * mean[:, live] / (mean[:, live] + size))
            values = getattr(self, name)
            sums.append(np.maximum(0.0, values[live] - np.cumsum(falls, axis=0)))
            values[live] = sums[-1][-1]
        highest: Floats = np.maximum(*sums)
        rises = np.zeros(len(self.lines), dtype=bool)
        rises[live] = highest[-2] >= 1.0
        self.began[~rises] = float(minute + len(mean) - 1)
        self.lines[~rises] = 0.0
        self.expected = np.where(rises, self.expected + mean.sum(axis=0), mean[-1])
        return highest

    def highest(self) -> Floats:
        return np.maximum(self.twofold, self.eightfold)

    def cap(self, limit: Floats) -> None:
        """Cut the statistics: a sum far above its threshold would end or be learnt by its length."""
        self.twofold = np.minimum(self.twofold, limit)
        self.eightfold = np.minimum(self.eightfold, limit)

    def end(self, rows: Bools) -> None:
        self.clear(rows, "twofold", "eightfold")

    def pause(self) -> None:
        self.clear(slice(None), "twofold", "eightfold", "lines", "expected")
