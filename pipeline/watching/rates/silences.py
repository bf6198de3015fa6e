"""Silences: what kept coming and does not come any more, by the gaps of its own past."""

from typing import Any, Final

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import (
    DAYS_28,
    FEW_GAPS,
    OVER,
    PATIENCE,
    SEASONS,
    TOGETHER,
    Past,
    Sign,
    cause_of,
)
from pipeline.watching.rates.table import HEAD, OTHER, TOTAL
from pipeline.watching.rates.tail_bounds import Bools, Floats

GONE: Final = 2880.0  # minutes after which a silent template is no longer waited for
_STEADY: Final = 0.35  # least scale of the tail of gaps, in usual gaps: the clocks of heartbeats drift
MISSED: Final = 2.0  # lines expected in the gap: what used to come and hardly comes now is not missed
EMPTY: Final = 3.0  # minutes without a line before a silence can be


def silences(past: Past, minute: int, x: Floats, down: float, *, judged: bool, per_day: float) -> list[Sign]:
    """Templates are waited for only in minutes in which something else came: without any line, it is one silence."""
    c = past.table.c
    came = x > 0
    due = due_now(past, down)
    if not came[TOTAL]:
        due[HEAD:] = 0.0
    c["elapsed"] += due
    score = gap_score(past)
    bar = past.bar(Reason.RATE_SILENCE, per_day)
    _returned(past, minute, came, score, bar)
    patient = (c["gaps"] >= FEW_GAPS) & (c["age"] >= PATIENCE)
    patient[OTHER] = False
    patient &= missed(past, minute)
    quiet = patient & ~came & (due > 0) & (score >= bar) & (minute - c["last"] >= EMPTY)
    if judged:
        c["mute"][c["mute"] > 0] += 1.0
        c["mute"][quiet & (c["mute"] == 0)] = 1.0
    signs: list[Sign] = []
    rows: list[int] = []
    if judged:
        rows = np.flatnonzero((c["mute"] > 0) & (c["mute_told"] == 0) & quiet).tolist()
    for row in rows[:1] if TOTAL in rows else rows:
        sign = silent(past, row, minute, float(score[row]), bar)
        if past.tell(cause_of(sign), minute):
            c["mute_told"][row] = 1.0
            signs.append(sign)
    signs = _one_silence(past, signs, minute)
    given_up = c["mute"] >= GONE
    if given_up.any():
        for name in ("gaps", "gap_sum", "gap_sq", "gap_max", "mute", "mute_told", "elapsed"):
            c[name][given_up] = 0.0
    return signs


def missed(past: Past, minute: int) -> Bools:
    """Whether the level of each row expects lines enough in its running gap."""
    c = past.table.c
    expected = c["events"] / np.maximum(c["exposure"], 1.0) * c["shape"] * (minute - c["last"])
    return np.asarray(expected >= MISSED)


def due_now(past: Past, down: float) -> Floats:
    """The chance of a line in this minute, for each row."""
    c = past.table.c
    due = np.minimum(1.0, c["active"] / np.maximum(c["lively"], 1.0) * c["shape"])
    due[HEAD:] *= down
    return due


def gap_score(past: Past) -> Floats:
    """Nats by which the running gap is longer than the gaps of the past.

    `gaps` gaps none of which exceeded `gap_max` bound the chance of that by 1 / gaps; beyond it the tail is taken as
    exponential, with the scale that the gaps' spread and their maximum call for.
    """
    c = past.table.c
    beyond = c["elapsed"] - c["gap_max"]
    known = np.log(np.maximum(c["gaps"], 1.0))
    return np.where(beyond > 0, known + beyond / gap_scale(past), 0.0)


def gap_scale(past: Past) -> Floats:
    """Of the tail of gaps beyond the longest, in minutes in which a line was to be expected."""
    c = past.table.c
    n = np.maximum(c["gaps"], 1.0)
    mean = c["gap_sum"] / n
    spread = np.sqrt(np.maximum(c["gap_sq"] / n - mean**2, 0.0))
    return np.maximum(np.maximum(_STEADY, spread), (c["gap_max"] - mean) / np.log(n + 1.0))


def _returned(past: Past, minute: int, came: Any, score: Floats, bar: float) -> None:
    """Close the gaps of what came, and learn them unless they were told as silences."""
    c, t = past.table.c, past.table
    for row in np.flatnonzero(came & (c["mute"] > 0)).tolist():
        cause = "rate-silence" if row == TOTAL else f"rate-silence:{t.ids[row]}"
        past.ended(cause, minute)
    for row in np.flatnonzero(came & (score >= 3.0) & (c["gaps"] >= FEW_GAPS)).tolist():
        told = bool(c["mute_told"][row] > 0)
        past.silences.add(min(float(score[row]), bar + OVER) if told else score[row], minute, told=told)
    # What came back by itself counts as a gap just long enough to be told: one that pauses now and then is found out,
    # a long outage does not make it deaf. The first return of a template has no gap before it.
    if not came.any():
        return
    learn = came & (c["last"] > 0)
    known = np.log(np.maximum(c["gaps"], 1.0))
    most = c["gap_max"] + gap_scale(past) * np.maximum(bar - known, 1.0)
    gap = np.where(c["mute_told"] > 0, np.minimum(c["elapsed"], most), c["elapsed"])
    c["gap_max"] = np.where(learn, np.maximum(c["gap_max"] * (1.0 - DAYS_28), gap), c["gap_max"])
    c["gap_sum"][learn] += gap[learn]
    c["gap_sq"][learn] += gap[learn] ** 2
    c["gaps"][learn] += 1.0
    many = c["gaps"] > 20_000
    if many.any():
        for name in ("gaps", "gap_sum", "gap_sq"):
            c[name][many] *= 0.5
    for name in ("elapsed", "mute", "mute_told"):
        c[name][came] = 0.0
    c["last"][came] = float(minute)


def silent(past: Past, row: int, minute: int, score: float, bar: float) -> Sign:
    c, t = past.table.c, past.table
    began = int(c["last"][row]) + 1
    level = c["events"][row] / max(c["exposure"][row], 1.0) * c["shape"][row]
    return Sign(
        kind=Reason.RATE_SILENCE, template_id=None if row == TOTAL else t.ids[row], began=began, minute=minute,
        expected=float(level * (minute + 1 - began)), seen=0.0, nats=score, bar=bar,
        season=SEASONS[t.regimes()[row]],
    )  # fmt: skip


def _one_silence(past: Past, signs: list[Sign], minute: int) -> list[Sign]:
    """Many templates that stopped together are one silence of the workload."""
    if len(signs) <= TOGETHER:
        return signs
    one = Sign(
        kind=Reason.RATE_SILENCE, template_id=None, began=min(s.began for s in signs), minute=minute,
        expected=sum(s.expected for s in signs), seen=0.0, nats=max(s.nats for s in signs), bar=signs[0].bar,
        others=tuple(s.template_id for s in signs if s.template_id is not None)[:TOGETHER], season=signs[0].season,
    )  # fmt: skip
    return [one] if past.tell(cause_of(one), minute) else []
