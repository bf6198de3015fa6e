"""New templates that come often at once, such as an interface that goes up and down: each is reported once.

Nothing is known of the rate of a new template, so it cannot burst. But where a workload has been watched for
a while, one that comes FLAPS times within SPAN minutes in its first hour is worth a look, whatever it says.
"""

import math
from dataclasses import replace
from typing import Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import YOUNG
from pipeline.watching.rates.columns import DROP, HEAD, ROWS, TOTAL, Columns
from pipeline.watching.rates.detection import (
    LAST_MINUTE,
    TOGETHER,
    Detection,
    MinuteContext,
    merged_group,
)
from pipeline.watching.rates.tail_bounds import Floats, tail_nats
from pipeline.watching.rates.thresholds import FOUND_PER_DAY

FLAPS: Final = 100.0  # lines
SPAN: Final = 10.0  # minutes
WATCHED: Final = 240.0  # minutes of history; before them most templates are new
_CLUMP: Final = 20.0  # a new template is expected to come once, in clumps of so many lines
_CAUSE: Final = f"{Reason.RATE_BURST}:new"  # of the pause that all of them have in common


class Newcomers(Columns):
    opened: Floats  # epoch minute at which the window of a young template began; LAST_MINUTE: it was reported
    lines: Floats  # of the window
    found: Floats  # 1: reported, but no alarm so far

    def advance(self, at: MinuteContext, counts: Floats) -> list[Detection]:
        """Count one minute, and report the new templates that came often enough in their window."""
        young = (counts > 0) & (at.baseline.age < YOUNG)
        young[:HEAD] = False
        # In a full table a template is perhaps one that was forgotten.
        if not young.any() or at.baseline.age[TOTAL] < WATCHED or len(counts) > ROWS - DROP:
            return []
        over = young & (at.minute - self.opened >= SPAN)
        self.opened[over] = at.minute
        self.clear(over, "lines")
        self.lines[young] += counts[young]
        rows = np.flatnonzero(young & (self.lines >= FLAPS) & (self.opened < LAST_MINUTE)).tolist()
        if not rows or not at.judged:
            return []
        found = [(row, self._detection(at, row)) for row in rows]
        found = [(row, one) for row, one in found if not self.found[row] or one.per_day <= at.alarm_per_day]
        # One change brings several, so those that follow within the pause after the first are part of it.
        if not all(self.found[row] for row, _ in found):
            if not at.backoff.admit(_CAUSE, at.minute):
                return []
            at.backoff.ended(_CAUSE, at.minute)
        for row, one in found:
            self.found[row] = 1.0
            self.opened[row] = LAST_MINUTE if one.per_day <= at.alarm_per_day else self.opened[row]
        return merged_group([one for _, one in found], _merged)

    def _detection(self, at: MinuteContext, row: int) -> Detection:
        lines = np.array([self.lines[row], FLAPS])
        nats, threshold = tail_nats(lines, np.ones(2), np.full(2, 1.0 / (_CLUMP - 1.0))).tolist()
        return at.detection(
            Reason.RATE_BURST,
            row,
            began=int(self.opened[row]),
            expected=0.0,
            observed=float(self.lines[row]),
            nats=nats,
            threshold=threshold,
            per_day=FOUND_PER_DAY[Reason.RATE_BURST] * math.exp(threshold - nats),
        )


def _merged(found: list[Detection]) -> Detection:
    """Many new templates at once as one detection of the workload."""
    named = sorted(found, key=lambda one: -one.seen)
    return replace(
        named[0],
        template_id=None,
        began=min(one.began for one in found),
        seen=sum(one.seen for one in found),
        others=tuple(one.template_id for one in named if one.template_id is not None)[:TOGETHER],
    )
