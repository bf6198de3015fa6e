"""Passes: neighbouring masks with one effect, compiled to a single expression over a column of lines.

A pass that keeps digits hides them from the passes behind it; `restore_digits` brings them back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import polars as pl

from pipeline.drain.masking.digits import alternatives, is_digit_invariant, reads_a_one, widened
from pipeline.drain.masking.masks import Mask
from pipeline.drain.masking.multiline import limit
from pipeline.records.columns import FEW_ROWS, spread

# Kept digits hide as noncharacters, which `cleaned` has removed from every text. The underscores keep a
# hidden digit inside a word from becoming a word boundary for the masks behind it.
HIDDEN: Final = {str(d): f"_{chr(0xFDD0 + d)}_" for d in range(10)}
# A later mask may have replaced one of the underscores; the digit comes back all the same.
SHOWN: Final = {mark: d for d, hidden in HIDDEN.items() for mark in (hidden, hidden.strip("_"))}
_HIDE: Final = str.maketrans(HIDDEN)
_MARKS: Final = re.compile("|".join(map(re.escape, SHOWN)))
_OPEN: Final = "\ufdda"
_CLOSE: Final = "\ufddb"
_KEPT_DIGITS: Final = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")

# A gate that most lines pass costs more than it saves; so many lines are sampled.
_LOOKED_AT: Final = 256
_GATED: Final = 1_024  # fewer lines are not worth that sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Neighbouring masks with one effect, as a single regular expression."""

    pattern: str
    replacement: str
    keep: bool
    seldom: bool
    # Matches every line whose digits may decide the effect of this pass; "": no line; None: not known.
    by_digits: str | None
    all_by_digits: bool  # the pass changes no line that `by_digits` does not match

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
class PassGroup:
    """Neighbouring passes; between two groups, equal lines are merged."""

    passes: tuple[Pass, ...]
    gate: str  # matches every line that one of the passes matches; "": no gate

    def run(self, lines: pl.Series) -> pl.Series:
        if not self.gate or self._open(lines):
            return run_all(self.passes, lines)
        # A line that no pass matches now stays unchanged, so no later pass of the group matches it either.
        hit = spread(lines, pl.col(lines.name).str.contains(self.gate))
        if hit.all():
            return run_all(self.passes, lines)
        return (
            lines.clone().scatter(hit.arg_true(), run_all(self.passes, lines.filter(hit)))
            if hit.any()
            else lines
        )

    def _open(self, lines: pl.Series) -> bool:
        """Whether most of many lines would pass the gate, judged by a sample of the first."""
        if lines.len() < _GATED:
            return False
        return int(lines.head(_LOOKED_AT).str.contains(self.gate).sum()) > _LOOKED_AT // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeStep:
    """Passes over shapes, behind a check for shapes whose lines may be masked differently."""

    by_digits: str  # "": nothing to check
    passes: tuple[Pass, ...]


def compiled(masks: Sequence[Mask]) -> tuple[Pass, ...]:
    """One pass per run of neighbours with the same effect. A mask with groups stays alone: joining renumbers
    groups."""

    def effect(item: tuple[int, Mask]) -> tuple[bool, str, int]:
        index, mask = item
        alone = not mask.keep and "$" in mask.replacement
        return mask.keep, "" if mask.keep else mask.replacement, index if alone else -1

    passes = []
    for (keep, replacement, _), run in groupby(enumerate(masks), key=effect):
        group = [mask for _, mask in run]
        pattern = "|".join(f"(?:{mask.pattern})" for mask in group)
        seldom = all(mask.seldom for mask in group)
        by_digits, all_by_digits = _digit_check(group, keep=keep)
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


def _digit_check(masks: Sequence[Mask], *, keep: bool) -> tuple[str | None, bool]:
    """`by_digits` and `all_by_digits` of neighbouring masks.

    A pattern that reaches beyond digits (`0x[0-9a-f]+`) needs `reads_a_one`, which matches less than the
    wider pattern."""
    parts = [part for mask in masks for part in ((mask.pattern,) if keep else alternatives(mask.pattern))]
    asking = [
        widened(part) if keep else reads_a_one(part) for part in parts if keep or not is_digit_invariant(part)
    ]
    parts_read = [f"(?:{part})" for part in asking if part is not None]
    return ("|".join(parts_read) if len(parts_read) == len(asking) else None), asking == [
        widened(part) for part in parts
    ]


def shape_steps_of(passes: Sequence[Pass]) -> tuple[ShapeStep, ...]:
    """All passes as they run over shapes; empty when one of them is not understood."""
    steps: list[ShapeStep] = []
    for step in passes:
        if step.by_digits is None:
            return ()
        run = () if step.all_by_digits else (step,)
        if steps and (not step.by_digits or not steps[-1].passes):
            last = steps.pop()
            looks = [look for look in (last.by_digits, step.by_digits) if look]
            steps.append(ShapeStep(by_digits="|".join(looks), passes=last.passes + run))
        else:
            steps.append(ShapeStep(by_digits=step.by_digits, passes=run))
    return tuple(steps) if all(_compiles(step.by_digits) for step in steps) else ()


def digit_invariant_from(passes: Sequence[Pass]) -> int:
    """The index from which on every pass is digit-invariant. Passes that keep digits are not."""
    at = len(passes)
    while at and not passes[at - 1].keep and is_digit_invariant(passes[at - 1].pattern):
        at -= 1
    return at


def pass_groups_of(passes: Sequence[Pass]) -> tuple[PassGroup, ...]:
    """Stages of neighbours: passes whose masks say `seldom` share a gate. Passes that keep digits are joined
    already."""
    groups = []
    for (seldom, keep), run in groupby(passes, key=lambda step: (step.seldom, step.keep)):
        steps = tuple(run)
        gated = seldom and not keep and len(steps) > 1
        gate = "|".join(f"(?:{step.pattern})" for step in steps) if gated else ""
        groups.append(PassGroup(passes=steps, gate=gate if _compiles(gate) else ""))
    return tuple(groups)


def _compiles(pattern: str) -> bool:
    """Whether patterns that Polars accepts one by one are small enough together."""
    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError:
        return False
    return True


def run_all(passes: Sequence[Pass], lines: pl.Series) -> pl.Series:
    """Lines after these passes, in order."""
    for keep, run in groupby(passes, key=lambda step: step.keep):
        if keep:
            for step in run:
                lines = step.run(lines)
            continue
        # One query for all: starting a query costs more than a pass over a small batch.
        text = pl.col(lines.name)
        for step in run:
            text = text.str.replace_all(step.pattern, step.replacement)
        lines = spread(lines, text)
    return lines


def restore_digits(lines: pl.Series) -> pl.Series:
    """Lines after all passes, with their kept digits restored and their length bounded."""
    if lines.len() < FEW_ROWS:
        texts = [_MARKS.sub(lambda mark: SHOWN[mark[0]], text) for text in lines.to_list()]
        return limit(pl.Series(lines.name, texts, dtype=pl.String))
    hidden = lines.str.contains("[\ufdd0-\ufdd9]")
    if hidden.any():
        text = lines.filter(hidden).str.replace_many(list(SHOWN), list(SHOWN.values()), leftmost=True)
        lines = lines.clone().scatter(hidden.arg_true(), text)
    return limit(lines)


def _hide(lines: pl.Series, pattern: str) -> pl.Series:
    """Lines whose digits inside each match are hidden from later masks."""
    name = lines.name
    # Building an expression costs more than running it over a few lines, so one expression does both.
    marked = pl.col(name).str.replace_all(pattern, f"{_OPEN}${{0}}{_CLOSE}")
    column = spread(lines, marked)
    few = lines.len() < FEW_ROWS
    text = "\n".join(column.to_list()) if few else str(column.str.join("\n").item())
    if _OPEN not in text:
        return lines
    text = _KEPT_DIGITS.sub(_hidden_digits, text)
    if few:
        return pl.Series(name, text.split("\n"), dtype=pl.String)
    return pl.Series(name, [text]).str.split("\n").explode(empty_as_null=False)


def _hidden_digits(match: "re.Match[str]") -> str:
    return match[1].translate(_HIDE)


def run_on_shapes(steps: Sequence[ShapeStep], lines: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Shapes after all passes, and whether each stands for all of its lines: no digit decided anything, none
    is left."""
    if lines.is_empty():
        return lines, pl.Series(dtype=pl.Boolean)
    rows = lines.alias("line").to_frame()
    checks: list[str] = []
    for step in steps:
        text = pl.col("line")
        for one in step.passes:
            text = text.str.replace_all(one.pattern, one.replacement)
        columns = [text]
        if step.by_digits:
            checks.append(f"check {len(checks)}")
            columns.append(pl.col("line").str.contains(step.by_digits).alias(checks[-1]))
        rows = rows.with_columns(columns)
    has_digit = pl.col("line").str.contains("[0-9]")
    reliable = rows.select(~pl.any_horizontal(has_digit, *checks)).to_series()
    return rows["line"].alias(lines.name), reliable
