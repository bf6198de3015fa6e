"""A changed mix: lines of a window divide over the templates otherwise than was expected, by divergence."""

import math
from typing import Any, Final

import numpy as np

from pipeline.models.rate_math import divergence
from pipeline.models.rate_past import LASTING, MIX_LEAST, YOUNG, Past, Sign
from pipeline.models.rate_table import LEARNT, TOTAL
from pipeline.records import Reason

WINDOW: Final = 15  # minutes of the mix
_MIX_LINES: Final = 100.0
_MIX_PAST: Final = 24  # windows: six hours


def mixes(past: Past, minute: int, *, judged: bool, per_day: float) -> list[Sign]:
    """Judge the window that ended: how its lines divide over the templates, against what was expected."""
    c = past.table.c
    ripe = (c["age"] >= YOUNG) & ((c["hot"] == 0) | (c["told"] == LEARNT)) & (c["mute"] == 0)
    ripe[TOTAL] = False
    seen, expected = c["mix"], c["mix_exp"]
    big = ripe & (expected >= 5.0)
    rest = ripe & ~big
    p = np.append(seen[big], seen[rest].sum())
    q = np.append(expected[big], max(float(expected[rest].sum()), 1e-9))
    lines = float(p.sum())
    signs: list[Sign] = []
    if np.count_nonzero(big) >= 3 and lines >= _MIX_LINES:
        far = divergence(p, q)
        chance = np.count_nonzero(big) / (8.0 * lines)  # of JS, when the counts are multinomial
        score = math.log(max(far, 1e-12) / (past.usual + chance))
        signs = _told_mix(past, minute, score, big, lines=lines, judged=judged, per_day=per_day)
        if not past.mix_open or past.mix_open >= LASTING:
            past.windows += 1
            # An average of two days of windows; a plain one until there are as many.
            weight = max(1.0 / past.windows, 1.0 / 192)
            past.usual += weight * (max(0.0, far - chance) - past.usual)
    c["mix"][:] = 0.0
    c["mix_exp"][:] = 0.0
    return signs


def _told_mix(
    past: Past, minute: int, score: float, big: Any, *, lines: float, judged: bool, per_day: float
) -> list[Sign]:
    c, t = past.table.c, past.table
    ready = past.windows >= _MIX_PAST
    bar = past.bar(Reason.RATE_MIX, per_day)
    changed = ready and score >= bar
    if past.mix_open:
        if score < MIX_LEAST:
            past.mix_open = 0.0
            past.ended("rate-mix", minute)
        return []
    if not judged or not changed:
        if ready:
            past.mixes.add(score + 3.0, minute, told=False)
        return []
    past.mix_open = 1.0
    past.mixes.add(score + 3.0, minute, told=True)
    shares = c["mix_exp"] * (lines / max(float(c["mix_exp"][big].sum()), 1e-9))
    moved = np.where(big, np.abs(c["mix"] - shares), 0.0)
    first = [int(row) for row in np.argsort(-moved, kind="stable")[:3] if moved[row] > 0]
    began = past.window * WINDOW
    sign = Sign(
        kind=Reason.RATE_MIX, template_id=None, began=began, minute=minute - 1,
        expected=float(shares[first[0]]) if first else 0.0, seen=float(c["mix"][first[0]]) if first else 0.0,
        nats=math.log(past.windows) + score - bar, bar=math.log(past.windows),
        others=tuple(t.ids[row] for row in first),
    )  # fmt: skip
    return [sign] if past.tell("rate-mix", minute) else []
