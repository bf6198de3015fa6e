"""Bursts: more lines than the past explains, in one minute or little by little, and what of them is told and learnt."""

from typing import Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import (
    DAYS_28,
    FEW_TIMES,
    LASTING,
    NOTHING,
    OVER,
    SEASONS,
    TOGETHER,
    YOUNG,
    Past,
    Sign,
    cause_of,
    size_of,
)
from pipeline.watching.rates.table import LEARNT, OTHER, TOLD, TOTAL, UNTOLD
from pipeline.watching.rates.tail_bounds import Floats, evidence, tail

_CALM: Final = 15.0  # quiet minutes in a row that end a burst
RATIOS: Final = 2.0, 8.0  # that the cumulative sums look for; between them 16 is found by single minutes
_AGAIN: Final = 5.0  # nats that a burst adds to what the next one of the same template needs
CAPPED: Final = 4 * _AGAIN  # nats past what is needed; more of a cumulative sum says nothing


def bursts(past: Past, minute: int, x: Floats, mean: Floats, *, judged: bool, per_day: float) -> list[Sign]:
    """Judge one minute: `x` lines where `mean` were expected, by row. Returns what is to be told."""
    c = past.table.c
    events, unsure = c["events"], past.unsure()
    size1 = size_of(mean, events, unsure, past.dispersion("1"))
    size10 = size_of(mean, events, unsure, past.dispersion("10"))
    now = tail(x, mean, size1)
    rises = np.maximum(c["low"], c["high"]) >= 1.0
    c["low"] = np.maximum(0.0, c["low"] + evidence(x, mean, size10, RATIOS[0]))
    c["high"] = np.maximum(0.0, c["high"] + evidence(x, mean, size10, RATIOS[1]))
    sums = np.maximum(c["low"], c["high"])
    c["since"] = np.where(rises, c["since"], float(minute))
    c["run"] = np.where(rises, c["run"], 0.0) + x
    c["run_exp"] = np.where(rises, c["run_exp"], 0.0) + mean
    score = np.maximum(now, sums)

    grown = (c["age"] >= YOUNG) & (c["gaps"] >= FEW_TIMES)
    grown[TOTAL] = c["age"][TOTAL] >= YOUNG
    grown[OTHER] = False
    bar = past.bar(Reason.RATE_BURST, per_day)
    excess = score - c["record"]
    new = grown & (c["hot"] == 0) & (excess >= bar) & (x > mean)
    signs: list[Sign] = []
    c["told"][new] = UNTOLD if judged else LEARNT
    c["hot"][c["hot"] > 0] += 1.0
    c["hot"][new] = 1.0
    c["top"] = np.where(grown, np.maximum(c["top"], score), 0.0)
    c["peak"] = np.where(c["hot"] > 0, np.maximum(c["peak"], x), 0.0)
    # A sum that has said enough stays where it is, so that what it learns or ends is not measured by its length.
    for name in ("low", "high"):
        c[name] = np.minimum(c[name], c["record"] + bar + CAPPED)
    if judged:
        signs = _told_bursts(past, minute, x, mean, now=now, sums=sums, excess=excess, bar=bar)
    _settle(past, minute, now=now, sums=sums, mean=mean, size=size1, bar=bar)
    return signs


def _told_bursts(
    past: Past, minute: int, x: Floats, mean: Floats, *, now: Floats, sums: Floats, excess: Floats, bar: float
) -> list[Sign]:
    """The signs of bursts that go on and have not been told; many at once are one of the workload."""
    c, t = past.table.c, past.table
    rows = np.flatnonzero((c["hot"] > 0) & (c["told"] == UNTOLD) & (excess >= bar) & (x > mean))
    made: list[tuple[int, Sign]] = []
    for row in rows.tolist():
        sudden = now[row] > sums[row]
        sign = Sign(
            kind=Reason.RATE_BURST,
            template_id=None if row == TOTAL else t.ids[row],
            began=minute if sudden else int(c["since"][row]),
            minute=minute,
            expected=float(mean[row] if sudden else c["run_exp"][row]),
            seen=float(x[row] if sudden else c["run"][row]),
            nats=float(excess[row]),
            bar=bar,
            season=SEASONS[t.regimes()[row]],
        )
        made.append((row, sign))
    if c["told"][TOTAL] == TOLD:  # the workload's burst has been told; these are part of it
        c["told"][rows] = TOLD
        return []
    if len(made) > TOGETHER:
        made.sort(key=lambda m: (-m[1].nats, m[0]))
        first = made[0][1]
        one = Sign(
            kind=Reason.RATE_BURST, template_id=None, minute=minute, bar=bar, nats=first.nats,
            began=min(sign.began for _, sign in made), season=first.season,
            expected=sum(sign.expected for row, sign in made if row != TOTAL),
            seen=sum(sign.seen for row, sign in made if row != TOTAL),
            others=tuple(t.ids[row] for row, _ in made if row != TOTAL)[:TOGETHER],
        )  # fmt: skip
        told = past.tell(cause_of(one), minute)
        c["told"][rows] = TOLD
        return [one] if told else []
    signs = []
    for row, sign in made:
        if past.tell(cause_of(sign), minute):
            c["told"][row] = TOLD
            signs.append(sign)
    return signs


def _settle(
    past: Past, minute: int, *, now: Floats, sums: Floats, mean: Floats, size: Floats, bar: float
) -> None:
    """End bursts that are over, and keep the height of what was normal."""
    c, t = past.table.c, past.table
    c["record"] *= 1.0 - DAYS_28
    hot = c["hot"] > 0
    if hot.any():
        wide = 1.5 * c["near_exp"] + 3.0 * np.sqrt(c["near_exp"] * past.dispersion("1")) + 1e-9
        calm = (now < 2.0) & (c["near"] <= wide)
        c["calm"] = np.where(hot & calm, c["calm"] + 1.0, 0.0)
    else:
        c["calm"][:] = 0.0
    over = hot & (c["calm"] >= _CALM)
    again = tail(c["peak"], mean, size) if over.any() else now
    small = ~hot & (c["top"] > 0) & (sums < 1.0)
    for row in np.flatnonzero(over | (small & (c["top"] >= 3.0))).tolist():
        told = bool(over[row]) and c["told"][row] != LEARNT
        top, record = float(c["top"][row]), float(c["record"][row])
        if over[row]:
            cause = "rate-burst" if row == TOTAL else f"rate-burst:{t.ids[row]}"
            past.ended(cause, minute)
            # As high as it would score now that its clumps are known.
            height = min(top, max(bar, float(again[row])))
            # What comes back again and again belongs to the workload; twice may be one fault, not repaired.
            habit = not told or past.causes.get(cause, [0.0])[0] >= 3
            c["record"][row] = max(record, height) if habit else record + _AGAIN
            top = min(top, record + bar + OVER) if told else height
        past.bursts.add(top - record, minute, told=told)
    c["top"][over | small] = 0.0
    if not hot.any():
        return
    for name in ("low", "high", "hot", "calm", "told"):
        c[name][over] = 0.0
    # What lasts is the new level, with an hour's weight, so that it is soon put right.
    lasting = (c["hot"] == LASTING) & (c["told"] != LEARNT)
    past.discount(lasting)
    grown = np.maximum(c["run"], 0.0) / np.maximum(c["run_exp"], NOTHING)
    c["events"][lasting] *= grown[lasting]
    late = c["hot"] >= LASTING
    c["low"][late] = c["high"][late] = 0.0
