"""A changed mix: lines of a window divide over the templates otherwise than was expected, by their likelihood.

Each template's count is compared with its expectation, scaled as the whole window is, under the scatter that its own
windows had (a share that scatters more than multinomially: Dirichlet-multinomial in the limit of many templates). The
sum of these deviances (G statistic) is compared with the sums of earlier windows, as a gamma variable of their mean and
variance: templates that move together make that variance wide, so they are no surprise.
"""

from typing import Any, Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import LASTING, YOUNG, Past, Sign
from pipeline.watching.rates.table import LEARNT, TOTAL
from pipeline.watching.rates.tail_bounds import Floats, common_factor, deviance, gamma_tail

WINDOW: Final = 15  # minutes of the mix
MIX_LINES: Final = 100.0  # of a window that is judged
_MIX_PAST: Final = 24  # windows: six hours
_EXPECTED: Final = 5.0  # lines of a template in a window before it speaks
_MOST: Final = 8.0  # nats that one template adds at most: one that runs wild is a burst, no change of the mix
_NORMAL: Final = 0.5  # nats of a count that scatters as it should: half of a squared normal
_LEAST_SCALE: Final = (
    0.1  # with fewer lines than that of the usual ones, what is left is another kind of work
)
_OVER: Final = 3.0  # nats; below, the mix is as usual windows are
_PRIOR: Final = 12.0  # windows' worth of what perfect counts would give
_TWO_DAYS: Final = 192.0  # windows


def mixes(past: Past, minute: int, *, judged: bool, per_day: float) -> list[Sign]:
    """Judge the window that ended: how its lines divide over the templates, against what was expected."""
    c = past.table.c
    ripe = (c["age"] >= YOUNG) & ((c["hot"] == 0) | (c["told"] == LEARNT)) & (c["mute"] == 0)
    ripe[TOTAL] = False
    big = ripe & (c["mix_exp"] >= _EXPECTED)
    seen = c["mix"]
    lines = float(seen[big].sum())
    signs: list[Sign] = []
    scatter = past.dispersion("15")
    scale = _scale(seen[big], c["mix_exp"][big], scatter[big]) if lines >= MIX_LINES else 0.0
    if np.count_nonzero(big) >= 3 and scale >= _LEAST_SCALE:
        expected = np.maximum(c["mix_exp"] * scale, 1e-9)
        # Errors of the levels are among those of the windows, so only what is young adds its own.
        spread = scatter - 1.0 + expected / (c["events"] + 1.0)
        own = np.minimum(deviance(seen, expected, expected / np.maximum(spread, 1e-9)), _MOST)
        usual = (c["far15"] + _PRIOR * _NORMAL) / (c["seen15"] + _PRIOR)
        far = own * np.minimum(1.0, _NORMAL / usual)
        mean = float(far[big].mean())
        score = _surprise(past, mean, int(np.count_nonzero(big)))
        moved = np.where(big, far, 0.0)
        signs = _told_mix(past, minute, score, moved, expected, judged=judged, per_day=per_day)
        if not past.mix_open or past.mix_open >= LASTING:
            past.windows += 1
            # Sums of two days of windows; all of them until there are as many.
            weight = max(1.0 / past.windows, 1.0 / _TWO_DAYS)
            past.usual += weight * (mean - past.usual)
            past.usual_sq += weight * (mean**2 - past.usual_sq)
            past.learn_mix(big, (seen - expected) ** 2, expected, own)
    c["mix"][:] = 0.0
    c["mix_exp"][:] = 0.0
    return signs


def _scale(seen: Floats, expected: Floats, scatter: Floats) -> float:
    """How many times the expected lines the window has, told by its templates together."""
    if len(seen) < 5:
        return float(seen.sum() / expected.sum())
    return common_factor(seen, expected, _EXPECTED, scatter)


def _surprise(past: Past, mean: float, templates: int) -> float:
    """Nats of a mean deviance this high by the windows before; never more than independent templates allow."""
    n = min(past.windows, _TWO_DAYS)
    # Half a nat and half of that squared by template: what a squared normal has.
    usual = (n * past.usual + _PRIOR * _NORMAL) / (n + _PRIOR)
    variance = n * max(0.0, past.usual_sq - past.usual**2) + _PRIOR * _NORMAL / templates
    variance = max(variance / (n + _PRIOR), usual / templates)
    return gamma_tail(mean, usual, variance)


def _told_mix(
    past: Past, minute: int, score: float, moved: Floats, expected: Floats, *, judged: bool, per_day: float
) -> list[Sign]:
    c, t = past.table.c, past.table
    ready = past.windows >= _MIX_PAST
    bar = past.bar(Reason.RATE_MIX, per_day)
    if past.mix_open:
        if score < _OVER:
            past.mix_open = 0.0
            past.ended("rate-mix", minute)
        return []
    told = judged and ready and score >= bar
    if ready:
        past.mixes.add(min(score, bar + _OVER) if told else score, minute, told=told)
    if not told:
        return []
    past.mix_open = 1.0
    change = np.where(moved > 0, np.abs(c["mix"] - expected), 0.0)
    first: list[Any] = [int(row) for row in np.argsort(-change, kind="stable")[:3] if change[row] > 0]
    sign = Sign(
        kind=Reason.RATE_MIX, template_id=None, began=past.window * WINDOW, minute=minute - 1,
        expected=float(expected[first[0]]) if first else 0.0, seen=float(c["mix"][first[0]]) if first else 0.0,
        nats=score, bar=bar, others=tuple(t.ids[row] for row in first),
    )  # fmt: skip
    return [sign] if past.tell("rate-mix", minute) else []
