"""How counts scatter: variance over mean of single minutes and of blocks of ten minutes.

An error counts only outside of what the slow level, the fast level and the workload as a whole let expect.
"""

from typing import Final

import numpy as np

from pipeline.watching.rates.baseline import SLOW
from pipeline.watching.rates.columns import Columns
from pipeline.watching.rates.tail_bounds import Bools, Floats

BLOCK: Final = 10  # minutes
_UNLEARN: Final = 0.05  # of the errors that is left when the seasonality kind changes
_PRIOR_DISPERSION: Final = 2.0  # of counts of which little is known: log lines come in clumps
_PRIOR_EVENTS: Final = 10.0  # expected lines that outweigh it


def dispersion(error: Floats, expected: Floats) -> Floats:
    """Variance over mean, at least 1, from sums of squared errors and of expectations."""
    return np.maximum(1.0, (error + _PRIOR_DISPERSION * _PRIOR_EVENTS) / (expected + _PRIOR_EVENTS))


class Scatter(Columns):
    error1: Floats  # decayed squared errors of minutes, and their expectations
    expected1: Floats
    error10: Floats  # of blocks
    expected10: Floats
    block: Floats  # lines of the running block; the least and the most expected of it
    block_low: Floats
    block_high: Floats

    def of_minutes(self) -> Floats:
        return dispersion(self.error1, self.expected1)

    def of_blocks(self) -> Floats:
        return dispersion(self.error10, self.expected10)

    def advance(self, minute: int, counts: Floats, low: Floats, high: Floats, learnt: Bools) -> None:
        """Learn one minute, of which between `low` and `high` was expected, in the rows of `learnt`."""
        error = (counts - np.clip(counts, low, high)) ** 2
        self.error1 = _learnt(self.error1, error, learnt, 1.0 - SLOW)
        self.expected1 = _learnt(self.expected1, high, learnt, 1.0 - SLOW)
        self.block += counts
        self.block_low += low
        self.block_high += high
        if minute % BLOCK == BLOCK - 1:
            self._end_block(learnt)

    def advance_idle(self, low: Floats, high: Floats, learnt: Bools) -> None:
        """Minutes without lines, all (minutes, rows). Their blocks have passed by `advance_idle_block`."""
        n = len(low)
        weight = np.where(learnt, ((1.0 - SLOW) ** np.arange(n - 1, -1, -1))[:, None], 0.0)
        old = (1.0 - SLOW) ** learnt.sum(axis=0)
        self.error1 = self.error1 * old + (weight * low**2).sum(axis=0)
        self.expected1 = self.expected1 * old + (weight * high).sum(axis=0)

    def advance_idle_block(self, until: int, low: Floats, high: Floats, learnt: Bools) -> None:
        """The minutes without lines of one block, up to `until`: the fast level needs each block's error."""
        self.block_low += low.sum(axis=0)
        self.block_high += high.sum(axis=0)
        if until % BLOCK == 0:
            self._end_block(learnt[-1])

    def _end_block(self, learnt: Bools) -> None:
        error = (self.block - np.clip(self.block, self.block_low, self.block_high)) ** 2
        self.error10 = _learnt(self.error10, error, learnt, 1.0 - SLOW * BLOCK)
        self.expected10 = _learnt(self.expected10, self.block_high, learnt, 1.0 - SLOW * BLOCK)
        self.pause()

    def unlearn(self, rows: Bools) -> None:
        """Discount errors made under another seasonality kind."""
        for values in (self.error1, self.expected1, self.error10, self.expected10):
            values[rows] *= _UNLEARN

    def pause(self) -> None:
        self.clear(slice(None), "block", "block_low", "block_high")


def _learnt(values: Floats, more: Floats, rows: Bools, keep: float) -> Floats:
    return np.where(rows, values * keep + more, values)
