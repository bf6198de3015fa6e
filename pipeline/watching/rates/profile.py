"""What a workload's rates are by its own past, and one minute of it judged: bursts, silences, a changed mix.

Each minute is compared with what the past expects for that hour, and only then learnt. Where the past is a baseline or
too short, nothing is told: what it scores then is how high normal scores go.
"""

import math
from collections.abc import Mapping

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import (
    FAST,
    FEW_GAPS,
    LASTING,
    NEAR,
    NEAR_LEAST,
    NOTHING,
    PATIENCE,
    SLOW,
    Past,
    Sign,
    cause_of,
    fast_level,
)
from pipeline.watching.rates.bursts import bursts
from pipeline.watching.rates.idle import idle
from pipeline.watching.rates.mix import WINDOW, mixes
from pipeline.watching.rates.silences import due_now, gap_score, missed, silences, silent
from pipeline.watching.rates.table import HEAD, LEARNT, TOTAL
from pipeline.watching.rates.tail_bounds import Floats, common_factor


class Profile(Past):
    """Judges and learns minutes in the order they are given. `tell(cause, minute)` is asked before a sign is given."""

    def step(self, minute: int, counts: Mapping[int, int], *, judged: bool, per_day: float) -> list[Sign]:
        """Judge a closed minute (`judged`) and learn it."""
        x = self.table.spread(counts)
        t = self.table
        c = t.c
        self.turn(minute)
        slow = c["events"] / np.maximum(c["exposure"], 1.0)
        fast = fast_level(c["fast_events"], c["fast_exposure"], slow, self.dispersion("10"))
        usual = np.maximum(slow * c["shape"], NOTHING)
        mean = np.maximum(usual, fast * c["shape"])
        near = common_factor(c["near"][HEAD:], c["near_exp"][HEAD:], NEAR_LEAST)
        high = mean.copy()
        if counts:
            high[HEAD:] *= max(1.0, near, common_factor(x[HEAD:], mean[HEAD:], 1.0))
            # What burst templates bring is theirs, not the workload's.
            hot = c["hot"] > 0
            if hot.any():
                own = np.where(hot, np.maximum(x - mean, 0.0), 0.0)[HEAD:].sum()
                x[TOTAL] = max(0.0, x[TOTAL] - own)
        signs = bursts(self, minute, x, high, judged=judged, per_day=per_day)
        signs += silences(self, minute, x, min(1.0, near), judged=judged, per_day=per_day)
        if minute // WINDOW != self.window:
            signs += mixes(self, minute, judged=judged, per_day=per_day)
            self.window = minute // WINDOW
        low = np.minimum(usual, np.maximum(fast * c["shape"], NOTHING))
        low[HEAD:] *= min(1.0, near)
        self._learn(minute, x, usual, low, high)
        return signs

    def _learn(self, minute: int, x: Floats, usual: Floats, low: Floats, high: Floats) -> None:
        c, t = self.table.c, self.table
        held = (c["hot"] > 0) & (c["told"] != LEARNT) & (c["hot"] < LASTING)
        held |= (c["mute"] > 0) & (c["mute"] < LASTING)
        if held[TOTAL]:
            held[:] = True
        if self.mix_open:
            self.mix_open += 1.0
            if self.mix_open < LASTING:
                held[:] = True
            elif self.mix_open == LASTING + 1.0:
                self.discount(np.ones(len(x), dtype=bool))
        learn = ~held
        for events, exposure, weight in (
            ("events", "exposure", SLOW),
            ("lag_events", "lag_exposure", FAST),
        ):
            c[events] = np.where(learn, c[events] * (1.0 - weight) + x, c[events])
            c[exposure] = np.where(learn, c[exposure] * (1.0 - weight) + c["shape"], c[exposure])
        for lag, fast in (("lag_events", "fast_events"), ("lag_exposure", "fast_exposure")):
            c[fast] = np.where(learn, c[fast] + FAST * (c[lag] - c[fast]), c[fast])
        c["near"] = c["near"] * (1.0 - NEAR) + x
        c["near_exp"] = c["near_exp"] * (1.0 - NEAR) + usual
        known = (learn | (c["hot"] > 0)) & (c["age"] >= 10.0)
        # Errors are learnt in bursts too, but cut at five standard deviations: what comes in bursts is found out.
        cut = x
        if held.any():
            most = high + 5.0 * np.sqrt(high * self.dispersion("1"))
            cut = np.where(held, np.minimum(x, most), x)
        self.add_error("1", known, cut, (low, high))
        c["block"] += cut
        c["block_low"] += low
        c["block_exp"] += high
        if minute % 10 == 9:
            self.add_error("10", known, c["block"], (c["block_low"], c["block_exp"]))
            c["block"][:] = c["block_low"][:] = c["block_exp"][:] = 0.0
        busy = x[TOTAL] > 0
        waited = learn & (c["mute"] == 0)
        if not busy:
            waited[HEAD:] = False
        c["active"] = np.where(waited, c["active"] * (1.0 - SLOW) + (x > 0), c["active"])
        c["lively"] = np.where(waited, c["lively"] * (1.0 - SLOW) + 1.0, c["lively"])
        c["mix"] += x
        c["mix_exp"] += usual
        t.count_season(minute, x, learn)
        c["age"] += 1.0

    def idle(self, minute: int, most: int, *, judged: bool, per_day: float) -> int:
        """Up to `most` minutes without any line, in which nothing is told: as `step` for each, at once. Returns how many
        they were; with 0 it is that minute which needs `step`."""
        return idle(self, minute, most, judged=judged, per_day=per_day)

    def skip(self, minute: int, n: int, *, judged: bool, per_day: float) -> list[Sign]:
        """`n` minutes of one hour without any line, from `minute` on: what `step` does for each, at once and roughly."""
        c, t = self.table.c, self.table
        t.turn(minute, self.dispersion("10"))
        c["elapsed"][TOTAL] += n * due_now(self, 1.0)[TOTAL]
        signs: list[Sign] = []
        score = float(gap_score(self)[TOTAL])
        patient = c["gaps"][TOTAL] >= FEW_GAPS and c["age"][TOTAL] >= PATIENCE
        bar = math.inf
        if judged and patient and score >= self.least(Reason.RATE_SILENCE, per_day):
            bar = self.bar(Reason.RATE_SILENCE, per_day)
        if score >= bar and missed(self, minute + n - 1)[TOTAL]:
            c["mute"][TOTAL] = max(1.0, c["mute"][TOTAL])
            sign = silent(self, TOTAL, minute + n - 1, score, bar)
            if c["mute_told"][TOTAL] == 0 and self.tell(cause_of(sign), minute):
                c["mute_told"][TOTAL] = 1.0
                signs.append(sign)
        if c["mute"][TOTAL] > 0:
            c["mute"][TOTAL] += n
        else:
            self._skip_levels(n)
            t.count_season(minute, np.zeros(len(t)), np.ones(len(t), dtype=bool), n)
            left = (1.0 - SLOW) ** n
            c["active"][TOTAL] *= left
            c["lively"][TOTAL] = c["lively"][TOTAL] * left + (1.0 - left) / SLOW
        self.pause(minute + n)
        c["age"] += n
        return signs

    def _skip_levels(self, n: int) -> None:
        """What `n` minutes without any line make of the levels: the recursions of `_learn` in closed form."""
        c = self.table.c
        left = (1.0 - SLOW) ** n
        c["events"] *= left
        c["exposure"] = c["exposure"] * left + c["shape"] * (1.0 - left) / SLOW
        left, full = (1.0 - FAST) ** n, c["shape"] / FAST
        c["fast_events"] = left * (c["fast_events"] + n * FAST * c["lag_events"])
        more = n * FAST * (c["lag_exposure"] - full)
        c["fast_exposure"] = full + left * (c["fast_exposure"] - full + more)
        c["lag_events"] *= left
        c["lag_exposure"] = full + left * (c["lag_exposure"] - full)

    def pause(self, minute: int) -> None:
        """Forget what is under way: bursts end, sums and windows begin anew. Silences of templates are still waited for."""
        c, t = self.table.c, self.table
        for row in np.flatnonzero(c["hot"] > 0).tolist():
            self.ended("rate-burst" if row == TOTAL else f"rate-burst:{t.ids[row]}", minute)
        if self.mix_open:
            self.mix_open = 0.0
            self.ended("rate-mix", minute)
        for name in ("low", "high", "run", "run_exp", "top", "hot", "calm", "told", "near", "near_exp",
                     "block", "block_low", "block_exp", "mix", "mix_exp"):  # fmt: skip
            c[name][:] = 0.0
