"""What a workload's rates are by its own past, and one minute of it judged: bursts, silences, a changed mix.

Each minute is compared with what the past expects for that hour, and only then learnt. Where the past is a baseline or
too short, nothing is told: what it scores then is how high normal scores go.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pipeline.models.rate_bursts import bursts
from pipeline.models.rate_math import Floats, common_factor
from pipeline.models.rate_mix import WINDOW, mixes
from pipeline.models.rate_past import FEW_GAPS, LASTING, NOTHING, PATIENCE, SLOW, Past, Sign, cause_of
from pipeline.models.rate_silences import due_now, gap_score, silences, silent
from pipeline.models.rate_table import HEAD, LEARNT, TOTAL
from pipeline.records import Reason

_FAST: Final = 1 / 120  # a slow swell is followed, so that a morning is no burst before the season is known
_NEAR: Final = 1 / 10


class Profile(Past):
    """Judges and learns minutes in the order they are given. `tell(cause, minute)` is asked before a sign is given."""

    def step(self, minute: int, counts: Mapping[int, int], *, judged: bool, per_day: float) -> list[Sign]:
        """Judge a closed minute (`judged`) and learn it."""
        x = self.table.spread(counts)
        t = self.table
        c = t.c
        if minute // 60 != t.hour:
            t.turn(minute, self.dispersion("10"))
            for peaks in (self.bursts, self.silences, self.mixes):
                peaks.forget(minute)
        slow = c["events"] / np.maximum(c["exposure"], 1.0)
        fast = c["fast_events"] / np.maximum(c["fast_exposure"], 1.0)
        usual = np.maximum(slow * c["shape"], NOTHING)
        mean = np.maximum(usual, fast * c["shape"])
        busy = bool(counts)
        near = common_factor(c["near"][HEAD:], c["near_exp"][HEAD:], 3.0)
        signs: list[Sign] = []
        if busy:
            up = max(1.0, near, common_factor(x[HEAD:], mean[HEAD:], 1.0))
            lifted = mean * up
            lifted[:HEAD] = mean[:HEAD]
            # What burst templates bring is theirs, not the workload's.
            own = np.where(c["hot"] > 0, np.maximum(x - mean, 0.0), 0.0)[HEAD:].sum()
            x[TOTAL] = max(0.0, x[TOTAL] - own)
            signs += bursts(self, minute, x, lifted, judged=judged, per_day=per_day)
        else:
            signs += bursts(self, minute, x, mean, judged=judged, per_day=per_day)
        signs += silences(self, minute, x, min(1.0, near), judged=judged, per_day=per_day)
        if minute // WINDOW != self.window:
            signs += mixes(self, minute, judged=judged, per_day=per_day)
            self.window = minute // WINDOW
        self._learn(minute, x, usual)
        return signs

    def _learn(self, minute: int, x: Floats, usual: Floats) -> None:
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
            ("fast_events", "fast_exposure", _FAST),
        ):
            c[events] = np.where(learn, c[events] * (1.0 - weight) + x, c[events])
            c[exposure] = np.where(learn, c[exposure] * (1.0 - weight) + c["shape"], c[exposure])
        c["near"] = c["near"] * (1.0 - _NEAR) + x
        c["near_exp"] = c["near_exp"] * (1.0 - _NEAR) + usual
        known = (learn | (c["hot"] > 0)) & (c["age"] >= 10.0)
        # Errors are learnt in bursts too, but cut at five standard deviations: what comes in bursts is found out.
        usual_most = usual + 5.0 * np.sqrt(usual * self.dispersion("1"))
        cut = np.where(held, np.minimum(x, usual_most), x)
        self._add_error("1", known, cut, usual, SLOW)
        c["block"] += cut
        c["block_exp"] += usual
        if minute % 10 == 9:
            self._add_error("10", known, c["block"], c["block_exp"], 10 * SLOW)
            c["block"][:] = c["block_exp"][:] = 0.0
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

    def _add_error(self, scale: str, rows: Any, seen: Floats, expected: Floats, weight: float) -> None:
        c = self.table.c
        var, exp = "var" + scale, "exp" + scale
        c[var] = np.where(rows, c[var] * (1.0 - weight) + (seen - expected) ** 2, c[var])
        c[exp] = np.where(rows, c[exp] * (1.0 - weight) + expected, c[exp])

    def skip(self, minute: int, n: int, *, judged: bool, per_day: float) -> list[Sign]:
        """`n` minutes of one hour without any line, from `minute` on: what `step` does for each, at once and roughly."""
        c, t = self.table.c, self.table
        t.turn(minute, self.dispersion("10"))
        c["elapsed"][TOTAL] += n * due_now(self, 1.0)[TOTAL]
        signs: list[Sign] = []
        score = float(
            gap_score(
                self,
            )[TOTAL]
        )
        bar = self.bar(Reason.RATE_SILENCE, per_day)
        if judged and c["gaps"][TOTAL] >= FEW_GAPS and c["age"][TOTAL] >= PATIENCE and score >= bar:
            c["mute"][TOTAL] = max(1.0, c["mute"][TOTAL])
            sign = silent(self, TOTAL, minute + n - 1, score, bar)
            if c["mute_told"][TOTAL] == 0 and self.tell(cause_of(sign), minute):
                c["mute_told"][TOTAL] = 1.0
                signs.append(sign)
        if c["mute"][TOTAL] > 0:
            c["mute"][TOTAL] += n
        else:
            for events, exposure, weight in (
                ("events", "exposure", SLOW),
                ("fast_events", "fast_exposure", _FAST),
            ):
                left = (1.0 - weight) ** n
                c[events] *= left
                c[exposure] = c[exposure] * left + c["shape"] * (1.0 - left) / weight
            t.count_season(minute, np.zeros(len(t)), np.ones(len(t), dtype=bool), n)
            left = (1.0 - SLOW) ** n
            c["active"][TOTAL] *= left
            c["lively"][TOTAL] = c["lively"][TOTAL] * left + (1.0 - left) / SLOW
        self.pause(minute + n)
        c["age"] += n
        return signs

    def pause(self, minute: int) -> None:
        """Forget what is under way: bursts end, sums and windows begin anew. Silences of templates are still waited for."""
        c, t = self.table.c, self.table
        for row in np.flatnonzero(c["hot"] > 0).tolist():
            self.ended("rate-burst" if row == TOTAL else f"rate-burst:{t.ids[row]}", minute)
        if self.mix_open:
            self.mix_open = 0.0
            self.ended("rate-mix", minute)
        for name in ("low", "high", "run", "run_exp", "top", "hot", "calm", "told", "near", "near_exp",
                     "block", "block_exp", "mix", "mix_exp"):  # fmt: skip
            c[name][:] = 0.0
