"""Minutes without any line, many at once: what `Profile.step` does for each of them, in closed form.

Without lines nothing is learnt but that nothing came, so levels decay, sums of evidence fall and gaps grow, all by simple
recurrences over minutes (rows of the matrices here) and templates (columns). A stretch ends where something else would
happen: at the end of an hour, where a silence would be found, a mix would be judged, or an alarm that lasts gets to its
next state. These minutes are left to `step`, so a stretch is the same as its minutes one by one, to rounding.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import (
    DAYS_28,
    FAST,
    FEW_GAPS,
    FEW_TIMES,
    LASTING,
    NEAR,
    NEAR_LEAST,
    NOTHING,
    PATIENCE,
    SLOW,
    YOUNG,
    Past,
    fast_level,
    size_of,
)
from pipeline.watching.rates.bursts import CAPPED, RATIOS
from pipeline.watching.rates.mix import MIX_LINES, WINDOW
from pipeline.watching.rates.silences import EMPTY, GONE, MISSED, gap_scale
from pipeline.watching.rates.table import HEAD, OTHER, REGIMES, SLOT_CAP, TOTAL, slot_of
from pipeline.watching.rates.tail_bounds import Bools, Floats, common_factor

_LEAST: Final = 3  # minutes; fewer are cheaper one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waited:
    """The workload's own silence and that of its rows without a place: (minutes, 2)."""

    ratio: Floats  # lines per minute in which there could have been one
    due: Floats  # the chance of a line in each minute
    learn: Bools  # (2,)


def idle(past: Past, minute: int, most: int, *, judged: bool, per_day: float) -> int:
    """Judge and learn up to `most` minutes without any line from `minute` on; how many of them. 0: that one needs `step`."""
    if most < _LEAST or bool((past.table.c["hot"] > 0).any()):
        return 0
    past.turn(minute)
    held = _held(past)
    n = _undisturbed(past, minute, most, held, judged=judged, per_day=per_day)
    if n < _LEAST:
        return 0
    waited = _waited(past, n, ~held[:HEAD])
    n = _until_silent(past, minute, waited, held, judged=judged, per_day=per_day)
    if n < _LEAST:
        return 0
    _pass(past, minute, n, held, waited, judged=judged)
    return n


def _held(past: Past) -> Bools:
    """Rows that learn nothing, because an alarm of theirs lasts; `_undisturbed` ends where that changes."""
    c = past.table.c
    held = np.asarray((c["mute"] > 0) & (c["mute"] < LASTING))
    if held[TOTAL] or past.mix_open:
        held[:] = True
    return held


def _undisturbed(past: Past, minute: int, most: int, held: Bools, *, judged: bool, per_day: float) -> int:
    """How many minutes nothing but time changes in, silences of the workload aside."""
    c, t = past.table.c, past.table
    n = min(most, 60 - minute % 60)
    # A cumulative sum above all that matters is cut to it, which moves with the bar.
    if max(float(c["low"].max()), float(c["high"].max())) > past.least(Reason.RATE_BURST, per_day) + CAPPED:
        return 0
    if past.mix_open:
        n = min(n, int(LASTING - 1 - past.mix_open))
    if judged:
        mute = c["mute"][c["mute"] > 0]
        for end in (LASTING, GONE):
            before = mute[mute < end]
            if len(before):
                n = min(n, int(end - 1 - before.max()))
    # A window with too few lines is forgotten unseen.
    if float(c["mix"][1:].sum()) >= MIX_LINES - 1.0:
        n = min(n, 0 if minute // WINDOW != past.window else WINDOW - minute % WINDOW)
    learnt = t.season[(t.season >= 0) & ~held]
    if len(learnt):
        # A slot that is full is halved, and a season that has enough is believed: after that minute.
        full = t.minutes[learnt, slot_of(minute)].max()
        n = min(n, int(SLOT_CAP - full) + 1)
        known = t.minutes.sum(axis=1, dtype=np.float64)[learnt]
        for days in REGIMES:
            before = known[known < days * 1440]
            if len(before):
                n = min(n, math.ceil(days * 1440 - before.max()))
    return n


def _waited(past: Past, n: int, learn: Bools) -> _Waited:
    c = past.table.c
    learn = learn & (c["mute"][:HEAD] == 0)
    left, gone = _geometric(np.arange(n)[:, None], SLOW)
    active, lively = c["active"][:HEAD], c["lively"][:HEAD]
    active = active * np.where(learn, left, 1.0)
    lively = lively * np.where(learn, left, 1.0) + np.where(learn, gone, 0.0)
    ratio = active / np.maximum(lively, 1.0)
    return _Waited(ratio=ratio, due=np.minimum(1.0, ratio * c["shape"][:HEAD]), learn=learn)


def _until_silent(
    past: Past, minute: int, waited: _Waited, held: Bools, *, judged: bool, per_day: float
) -> int:
    """Minutes before the one in which the silence of the workload would be found or told."""
    c = past.table.c
    n = len(waited.due)
    if not judged or c["gaps"][TOTAL] < FEW_GAPS or c["age"][TOTAL] + n - 1 < PATIENCE:
        return n
    until = 0.0
    if c["mute"][TOTAL] > 0:
        if c["mute_told"][TOTAL] > 0:
            return n
        until = past.causes.get(Reason.RATE_SILENCE.value, [0.0, 0.0, 0.0])[1]
    k = np.arange(n)
    beyond = c["elapsed"][TOTAL] + np.cumsum(waited.due[:, TOTAL]) - c["gap_max"][TOTAL]
    if beyond[-1] <= 0:
        return n
    score = np.where(beyond > 0, math.log(max(c["gaps"][TOTAL], 1.0)) + beyond / gap_scale(past)[TOTAL], 0.0)
    left, gone = (np.ones(n), np.zeros(n)) if held[TOTAL] else _geometric(k, SLOW)
    level = (
        c["events"][TOTAL] * left / np.maximum(c["exposure"][TOTAL] * left + c["shape"][TOTAL] * gone, 1.0)
    )
    empty = minute + k - c["last"][TOTAL]
    quiet = (waited.due[:, TOTAL] > 0) & (empty >= EMPTY) & (level * c["shape"][TOTAL] * empty >= MISSED)
    quiet &= (c["age"][TOTAL] + k >= PATIENCE) & (minute + k >= until)
    quiet &= score >= past.least(Reason.RATE_SILENCE, per_day)
    if not quiet.any():
        return n
    regular = c["gaps"] >= FEW_GAPS
    others = float((c["active"] / np.maximum(c["lively"], 1.0))[HEAD:][regular[HEAD:]].sum())
    a_day = 1440 * (others + waited.ratio[:, regular[:HEAD]].sum(axis=1))
    for at in np.flatnonzero(quiet).tolist():
        if score[at] >= past.silence_bar(float(a_day[at]), float(c["age"][TOTAL]) + at, per_day):
            return int(at)
    return n


def _pass(past: Past, minute: int, n: int, held: Bools, waited: _Waited, *, judged: bool) -> None:
    """Let these minutes pass."""
    c, t = past.table.c, past.table
    learn = ~held
    levels = _Levels.of(past, n, learn)
    expected = np.maximum(levels.slow * c["shape"], NOTHING)
    down = _down(past, expected)
    live = np.flatnonzero((c["low"] > 0) | (c["high"] > 0) | (c["top"] > 0))
    known = learn & (c["age"] + np.arange(n)[:, None] >= 10.0)
    mean, low, fall = _expected(past, minute, levels, usual=expected, down=down, known=known, live=live)
    _let_fall(past, minute, mean, fall, live)
    c["record"] *= (1.0 - DAYS_28) ** n
    c["elapsed"][:HEAD] += waited.due[:n].sum(axis=0)
    if judged:
        c["mute"][c["mute"] > 0] += n
    _window(past, minute, expected)
    _learn_levels(past, n, learn)
    left = (1.0 - NEAR) ** np.arange(n - 1, -1, -1)
    c["near"] *= (1.0 - NEAR) ** n
    c["near_exp"] = c["near_exp"] * (1.0 - NEAR) ** n + left @ expected
    weight = np.where(known, ((1.0 - SLOW) ** np.arange(n - 1, -1, -1))[:, None], 0.0)
    old = (1.0 - SLOW) ** known.sum(axis=0)
    c["var1"] = c["var1"] * old + (weight * low**2).sum(axis=0)
    c["exp1"] = c["exp1"] * old + (weight * mean).sum(axis=0)
    some = np.flatnonzero(waited.learn)
    left, gone = _geometric(n, SLOW)
    c["active"][some] *= left
    c["lively"][some] = c["lively"][some] * left + gone
    t.count_season(minute, np.zeros(len(t)), learn, n)
    if past.mix_open:
        past.mix_open += n
    c["age"] += n


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """The levels before each minute, (minutes, rows)."""

    events: Floats
    slow: Floats
    fast_events: Floats
    fast_exposure: Floats

    @classmethod
    def of(cls, past: Past, n: int, learn: Bools) -> "_Levels":
        k = np.arange(n)[:, None]
        events, exposure = _slow_after(past, k, learn)
        fast_events, fast_exposure, *_ = _fast_after(past, k, learn)
        slow = events / np.maximum(exposure, 1.0)
        return cls(events=events, slow=slow, fast_events=fast_events, fast_exposure=fast_exposure)


def _learn_levels(past: Past, n: int, learn: Bools) -> None:
    k = np.array([[n]])
    after = (*_slow_after(past, k, learn), *_fast_after(past, k, learn))
    names = ("events", "exposure", "fast_events", "fast_exposure", "lag_events", "lag_exposure")
    for name, values in zip(names, after, strict=True):
        past.table.c[name] = values[0].copy()


def _slow_after(past: Past, k: Any, learn: Bools) -> tuple[Floats, Floats]:
    """Events and exposure after `k` minutes (m, 1): (m, rows)."""
    c = past.table.c
    left, gone = _for(learn, *_geometric(k, SLOW))
    return c["events"] * left, c["exposure"] * left + c["shape"] * gone


def _fast_after(past: Past, k: Any, learn: Bools) -> tuple[Floats, Floats, Floats, Floats]:
    """Both stages of the fast sums after `k` minutes (m, 1): fast events, fast exposure, lag events, lag exposure."""
    c = past.table.c
    left, _ = _for(learn, *_geometric(k, FAST))
    steps = np.where(learn, k, 0) * FAST
    full = c["shape"] / FAST
    return (
        left * (c["fast_events"] + steps * c["lag_events"]),
        full + left * (c["fast_exposure"] - full + steps * (c["lag_exposure"] - full)),
        left * c["lag_events"],
        full + left * (c["lag_exposure"] - full),
    )


def _geometric(k: Any, weight: float) -> tuple[Any, Any]:
    """What is left after `k` minutes of a sum that forgets, and the sum of `k` ones."""
    left = (1.0 - weight) ** k
    return left, (1.0 - left) / weight


def _for(learn: Bools, left: Any, gone: Any) -> tuple[Any, Any]:
    """The same, for rows that learn; the others stay as they are."""
    if learn.all():
        return left, gone
    return np.where(learn, left, 1.0), np.where(learn, gone, 0.0)


def _down(past: Past, expected: Floats) -> Floats | None:
    """By how much less all templates together came than expected before each minute, None for not at all."""
    c = past.table.c
    near, near_exp = c["near"][HEAD:], c["near_exp"][HEAD:]
    # The expectation falls from minute to minute.
    most = np.maximum(near_exp, expected[0, HEAD:] / NEAR)
    if np.count_nonzero(most >= NEAR_LEAST - 1e-6) < 5:
        return None
    down = np.ones(len(expected))
    for k, more in enumerate(expected[:, HEAD:]):
        down[k] = min(1.0, common_factor(near, near_exp, NEAR_LEAST))
        near, near_exp = near * (1.0 - NEAR), near_exp * (1.0 - NEAR) + more
    return down


def _expected(
    past: Past, minute: int, levels: _Levels, *, usual: Floats, down: Floats | None, known: Bools, live: Any
) -> tuple[Floats, Floats, tuple[Floats, Floats]]:
    """The most and the least that is expected of each minute, and by how much the cumulative sums of the rows `live` fall
    in it. What is learnt of blocks of ten minutes is part of what is expected of the next."""
    c = past.table.c
    n = len(usual)
    mean, low = np.empty_like(usual), np.empty_like(usual)
    fall = np.zeros((n, len(live))), np.zeros((n, len(live)))
    unsure = past.unsure()[live]
    begin = 0
    while begin < n:
        some = slice(begin, min(n, begin + 10 - (minute + begin) % 10))
        dispersion = past.dispersion("10")
        fast = fast_level(levels.fast_events[some], levels.fast_exposure[some], levels.slow[some], dispersion)
        fast *= c["shape"]
        mean[some] = np.maximum(usual[some], fast)
        low[some] = np.minimum(usual[some], np.maximum(fast, NOTHING))
        if down is not None:
            low[some, HEAD:] *= down[some, None]
        if len(live):
            high = mean[some][:, live]
            size = size_of(high, levels.events[some][:, live], unsure, dispersion[live])
            for ratio, falls in zip(RATIOS, fall, strict=True):
                falls[some] = size * np.log1p((ratio - 1.0) * high / (high + size))
        c["block_low"] += low[some].sum(axis=0)
        c["block_exp"] += mean[some].sum(axis=0)
        if (minute + some.stop) % 10 == 0:
            past.add_error("10", known[some.stop - 1], c["block"], (c["block_low"], c["block_exp"]))
            c["block"][:] = c["block_low"][:] = c["block_exp"][:] = 0.0
        begin = some.stop
    return mean, low, fall


def _let_fall(past: Past, minute: int, mean: Floats, fall: tuple[Floats, Floats], live: Any) -> None:
    """What the cumulative sums come to, and the heights of those that are over."""
    c = past.table.c
    n = len(mean)
    rising = np.zeros(len(c["low"]), dtype=bool)
    tops = np.zeros_like(c["top"])
    if len(live):
        low, high = (
            np.maximum(0.0, c[name][live] - np.cumsum(falls, axis=0))
            for name, falls in zip(("low", "high"), fall, strict=True)
        )
        sums = np.maximum(low, high)
        rising[live] = sums[-2] >= 1.0
        c["low"][live], c["high"][live] = low[-1], high[-1]
        tops[live] = _tops(past, minute, sums, live)
    c["top"] = tops
    c["since"][~rising] = float(minute + n - 1)
    c["run"][~rising] = 0.0
    c["run_exp"] = np.where(rising, c["run_exp"] + mean.sum(axis=0), mean[-1])
    c["peak"][:] = 0.0
    c["calm"][:] = 0.0


def _tops(past: Past, minute: int, sums: Floats, live: Any) -> Floats:
    """The highest score of each episode that goes on. What is over before counts among the highest of the past."""
    c = past.table.c
    n = len(sums)
    often = (c["gaps"][live] >= FEW_TIMES) | (live == TOTAL)
    # From which minute on there is past enough for it to be judged.
    grown = np.where(often & (live != OTHER), np.clip(YOUNG - c["age"][live], 0, n), n).astype(np.int64)
    first = sums[np.minimum(grown, n - 1), np.arange(len(live))]
    top = np.where(grown == 0, np.maximum(c["top"][live], sums[0]), np.where(grown < n, first, 0.0))
    over = sums < 1.0
    ended = over[-1]
    after = over.argmax(axis=0)
    told = ended & (after >= grown) & (top >= 3.0)
    for row in np.flatnonzero(told).tolist():
        record = c["record"][live[row]] * (1.0 - DAYS_28) ** (after[row] + 1)
        past.bursts.add(float(top[row] - record), minute + int(after[row]), told=False)
    return np.where(ended, 0.0, top)


def _window(past: Past, minute: int, expected: Floats) -> None:
    """What is expected of the running window of the mix; one that had lines enough is not among these minutes."""
    c = past.table.c
    window = (minute + len(expected) - 1) // WINDOW
    begin = 0
    if window != past.window:
        begin = max(0, window * WINDOW - minute)
        c["mix"][:] = 0.0
        c["mix_exp"][:] = 0.0
        past.window = window
    c["mix_exp"] += expected[begin:].sum(axis=0)
