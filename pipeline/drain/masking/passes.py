"""The passes that masks are compiled to: neighbours with one effect as a single expression over a column of lines.

A pass that keeps digits hides them from the passes that follow; `shown` brings them back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import polars as pl

from pipeline.drain.masking.digits import alternatives, digits_alike, unsure, widened
from pipeline.drain.masking.masks import Mask
from pipeline.drain.masking.multiline import limit
from pipeline.records.columns import spread

# Kept digits hide as noncharacters, which `clean` has taken out of every text; the underscores make
# sure that a place inside a word is no word boundary for the masks that follow.
HIDDEN: Final = {str(d): f"_{chr(0xFDD0 + d)}_" for d in range(10)}
# A mask may have taken one of the underscores with it; the digit comes back all the same.
SHOWN: Final = {mark: d for d, hidden in HIDDEN.items() for mark in (hidden, hidden.strip("_"))}
_HIDE: Final = str.maketrans(HIDDEN)
_OPEN: Final = "\ufdda"
_CLOSE: Final = "\ufddb"
_KEPT: Final = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")

# A gate that most lines pass costs more than it saves; these many tell.
_LOOKED_AT: Final = 256
_GATED: Final = 1_024  # fewer lines are not worth that look


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Neighbouring masks with one effect, as a single regular expression."""

    pattern: str
    replacement: str
    keep: bool
    seldom: bool
    # Matches every line whose digits may decide what this pass does to it, "" where none may; None: not known.
    by_digits: str | None
    all_by_digits: bool  # and no line that this does not match is changed

    def run(self, lines: pl.Series) -> pl.Series:
        text = pl.col(lines.name)
        if not self.keep:
            return spread(lines, text.str.replace_all(self.pattern, self.replacement))
        if lines.len() < _GATED:
            return _hide(lines, self.pattern)
        hit = spread(lines, text.str.contains(self.pattern))
        return (
            lines.clone().scatter(hit.arg_true(), _hide(lines.filter(hit), self.pattern))
            if hit.any()
            else lines
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Neighbouring passes between two looks at whether lines have become equal."""

    passes: tuple[Pass, ...]
    gate: str  # matches every line that one of them matches, "" when they are not looked for at once

    def run(self, lines: pl.Series) -> pl.Series:
        if not self.gate or self._open(lines):
            return run_all(self.passes, lines)
        # The first of the passes that matches a line meets it as it is here: where none does, all leave it alone.
        hit = spread(lines, pl.col(lines.name).str.contains(self.gate))
        if hit.all():
            return run_all(self.passes, lines)
        return (
            lines.clone().scatter(hit.arg_true(), run_all(self.passes, lines.filter(hit)))
            if hit.any()
            else lines
        )

    def _open(self, lines: pl.Series) -> bool:
        """Whether most of many lines would pass the gate, as far as the first of them tell."""
        if lines.len() < _GATED:
            return False
        return int(lines.head(_LOOKED_AT).str.contains(self.gate).sum()) > _LOOKED_AT // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Passes over lines of ones, behind a look for those that may fare otherwise with other digits."""

    by_digits: str  # "": the passes ask nothing
    passes: tuple[Pass, ...]


def compiled(masks: Sequence[Mask]) -> tuple[Pass, ...]:
    """One pass per run of neighbours with the same effect; groups would be renumbered, so those stay alone."""

    def effect(item: tuple[int, Mask]) -> tuple[bool, str, int]:
        index, mask = item
        alone = not mask.keep and "$" in mask.replacement
        return mask.keep, "" if mask.keep else mask.replacement, index if alone else -1

    passes = []
    for (keep, replacement, _), run in groupby(enumerate(masks), key=effect):
        ours = [mask for _, mask in run]
        pattern = "|".join(f"(?:{mask.pattern})" for mask in ours)
        seldom = all(mask.seldom for mask in ours)
        by_digits, all_by_digits = _asking(ours, keep=keep)
        passes.append(
            Pass(
                pattern=pattern,
                replacement=replacement,
                keep=keep,
                seldom=seldom,
                by_digits=by_digits,
                all_by_digits=all_by_digits,
            )
        )
    return tuple(passes)


def _asking(masks: Sequence[Mask], *, keep: bool) -> tuple[str | None, bool]:
    """`by_digits` of neighbours, and whether that is all that they look for: each asks about digits, and its wider one
    matches wherever it does. (`unsure` has less in common with a pattern that reaches beyond digits: `0x[0-9a-f]+`.)"""
    parts = [part for mask in masks for part in ((mask.pattern,) if keep else alternatives(mask.pattern))]
    asking = [widened(part) if keep else unsure(part) for part in parts if keep or not digits_alike(part)]
    known = [f"(?:{part})" for part in asking if part is not None]
    return ("|".join(known) if len(known) == len(asking) else None), asking == [
        widened(part) for part in parts
    ]


def steps_of(passes: Sequence[Pass]) -> tuple[Step, ...]:
    """The passes as they run over lines of ones; nothing when that is not known of all of them."""
    steps: list[Step] = []
    for step in passes:
        if step.by_digits is None:
            return ()
        run = () if step.all_by_digits else (step,)
        if steps and (not step.by_digits or not steps[-1].passes):
            last = steps.pop()
            looks = [look for look in (last.by_digits, step.by_digits) if look]
            steps.append(Step(by_digits="|".join(looks), passes=last.passes + run))
        else:
            steps.append(Step(by_digits=step.by_digits, passes=run))
    return tuple(steps) if all(_compiles(step.by_digits) for step in steps) else ()


def blind_from(passes: Sequence[Pass]) -> int:
    """The first pass from which on none sees a difference between two digits; those that keep digits do."""
    at = len(passes)
    while at and not passes[at - 1].keep and digits_alike(passes[at - 1].pattern):
        at -= 1
    return at


def legs_of(passes: Sequence[Pass]) -> tuple[Leg, ...]:
    """Neighbours that seldom match are looked for at once; of those that keep digits there is one pass already."""
    legs = []
    for (seldom, keep), run in groupby(passes, key=lambda step: (step.seldom, step.keep)):
        steps = tuple(run)
        gated = seldom and not keep and len(steps) > 1
        gate = "|".join(f"(?:{step.pattern})" for step in steps) if gated else ""
        legs.append(Leg(passes=steps, gate=gate if _compiles(gate) else ""))
    return tuple(legs)


def _compiles(pattern: str) -> bool:
    """Whether masks that are each small enough for Polars are so together."""
    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError:
        return False
    return True


def run_all(passes: Sequence[Pass], lines: pl.Series) -> pl.Series:
    """Lines behind these passes, in order."""
    for keep, run in groupby(passes, key=lambda step: step.keep):
        if keep:
            for step in run:
                lines = step.run(lines)
            continue
        # One query for all of them: starting a query costs more than a pass over a small batch.
        text = pl.col(lines.name)
        for step in run:
            text = text.str.replace_all(step.pattern, step.replacement)
        lines = spread(lines, text)
    return lines


def shown(lines: pl.Series) -> pl.Series:
    """Lines behind all passes, with the kept digits and of bounded length."""
    kept = lines.str.contains("[\ufdd0-\ufdd9]")
    if kept.any():
        whole = lines.filter(kept).str.replace_many(list(SHOWN), list(SHOWN.values()), leftmost=True)
        lines = lines.clone().scatter(kept.arg_true(), whole)
    return limit(lines)


def _hide(lines: pl.Series, pattern: str) -> pl.Series:
    """Lines whose digits inside each match are out of reach of the masks that follow."""
    name = lines.name
    # Getting an expression ready costs more than running it over a few lines, so it is used once.
    marked = pl.col(name).str.replace_all(pattern, f"{_OPEN}${{0}}{_CLOSE}")
    whole = str(spread(lines, marked).str.join("\n").item())
    if _OPEN not in whole:
        return lines
    text = _KEPT.sub(_beyond_reach, whole)
    return pl.Series(name, [text]).str.split("\n").explode(empty_as_null=False)


def _beyond_reach(match: "re.Match[str]") -> str:
    return match[1].translate(_HIDE)


def over_ones(steps: Sequence[Step], lines: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Lines of ones behind all passes, and of which of them lines with other digits are masked alike."""
    if lines.is_empty():
        return lines, pl.Series(dtype=pl.Boolean)
    rows = lines.alias("line").to_frame()
    asked: list[str] = []
    for step in steps:
        text = pl.col("line")
        for one in step.passes:
            text = text.str.replace_all(one.pattern, one.replacement)
        columns = [text]
        if step.by_digits:
            asked.append(f"asked {len(asked)}")
            columns.append(pl.col("line").str.contains(step.by_digits).alias(asked[-1]))
        rows = rows.with_columns(columns)
    left = pl.col("line").str.contains("[0-9]")
    relied = rows.select(~pl.any_horizontal(left, *asked)).to_series()
    return rows["line"].alias(lines.name), relied
