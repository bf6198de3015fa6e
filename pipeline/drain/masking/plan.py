"""Three ways to mask a column of lines, with equal results: exact, by groups, by digit shape.

`exact` runs every pass on every line. `by_groups` looks between groups of passes whether lines have become
equal, and goes on with one of each. `by_digit_shape` replaces every digit by 1 first: most lines of a log
differ in digits alone, so few *shapes* remain, and a two-generation cache remembers the masked line of each.
Passes that tell digits apart (a kept status code) are recognised, and lines that such a pass may touch are
masked exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl

from pipeline.drain.masking.digits import normalise_digits
from pipeline.drain.masking.memo import Memo
from pipeline.drain.masking.multiline import cleaned, limit
from pipeline.drain.masking.passes import (
    Pass,
    PassGroup,
    ShapeStep,
    digit_invariant_from,
    pass_groups_of,
    restore_digits,
    run_all,
    run_on_shapes,
    shape_steps_of,
)
from pipeline.records.columns import LOOKED_AT, WORTH, kinds, per_distinct, repeats

# Share of distinct shapes up to which shapes are masked instead of messages.
_FEW_SHAPES: Final = 0.25
# The first 512 messages show few repeats however few the shapes are, and may be those of one workload of
# many. So messages of an eighth of all places are looked at, too: of a sixth as many shapes as messages,
# equally frequent, they show so large a share. All shapes in vain cost a quarter of masking TrainTicket.
# Of fewer lines the first 512 are enough to go by, and a further look costs more than it saves.
_MANY_LINES: Final = 4_096
_AN_EIGHTH: Final = 8
_REPEATED: Final = 0.7
# Where messages of several workloads have too many shapes in all, those that share a shape with so many are
# masked by it, and the others as they are. Below this share of messages, one way for all costs less.
_OFTEN: Final = round(1 / _FEW_SHAPES)
_WORTH_PARTS: Final = 0.25
# Fewer lines cannot tell whether they repeat earlier lines, and searching them for equal lines costs more
# than it saves.
_FEW_LINES: Final = 512
_MAX_ROUNDS: Final = 4  # 90,000 random concatenations of examples needed at most one round.
# Above so many shapes in a batch, every line is new: lookups in the memo, and entries in it, are in vain.
_MANY_SHAPES: Final = 1_000
# The memo's value for a shape whose masked line depends on its digits. No masked line is empty.
_BY_DIGITS: Final = ""
# Prefixes of memo keys: a shape behind the groups, a shape of a whole message, a line behind the groups as it
# is.
_SHAPE: Final = ""
_MESSAGE: Final = "\n\n"
_EXACT: Final = "\n"
_STABLE: Final = "\n\n\n"  # a masked line that a further round leaves as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The passes of a mask set, arranged for each way of masking; immutable but for the memo."""

    passes: tuple[Pass, ...]
    groups: tuple[PassGroup, ...]  # the passes in front of `digit_invariant`
    digit_invariant: tuple[Pass, ...]  # the last passes, which see no difference between two digits
    shape_steps: tuple[ShapeStep, ...]  # all passes, for shapes; empty where shapes cannot be masked
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def of(cls, passes: tuple[Pass, ...]) -> "Plan":
        at = digit_invariant_from(passes)
        return cls(
            passes=passes,
            groups=pass_groups_of(passes[:at]),
            digit_invariant=passes[at:],
            shape_steps=shape_steps_of(passes),
        )


def exact(plan: Plan, lines: pl.Series) -> pl.Series:
    """Masked cleaned lines, by all passes on all lines."""
    return _until_stable(one_round(plan, lines), lambda lines_again: one_round(plan, lines_again))


def by_groups(plan: Plan, lines: pl.Series, group: int = 0) -> pl.Series:
    """The result of `exact` for lines that have passed the first `group` groups."""
    if not group and lines.len() < _FEW_LINES:
        return _until_stable(one_round(plan, lines), lambda lines_again: _next_round(plan, lines_again))
    if group == len(plan.groups):
        return per_distinct(lines, lambda few: _behind_groups(plan, few))
    return per_distinct(lines, lambda few: by_groups(plan, plan.groups[group].run(few), group + 1))


def by_digit_shape(
    plan: Plan,
    messages: pl.Series,
    with_ids: Callable[[pl.DataFrame], pl.DataFrame],
    otherwise: Callable[[pl.Series], pl.DataFrame],
) -> pl.DataFrame | None:
    """Columns `masked` and `pattern_id` of messages of one line each. None where too few messages share their
    shapes.

    `with_ids` adds the pattern ids to a table of masked lines; `otherwise` masks many messages whose digits
    matter."""
    small = messages.len() < _FEW_LINES
    if not small and not _few_shapes(messages):
        return None
    shapes, which = kinds(normalise_digits(messages, but_hex=True).alias("shape"))
    if small or shapes.len() <= _FEW_SHAPES * messages.len():
        return _masked_shapes(plan, messages, (shapes, which), with_ids, otherwise)
    numbers = which.to_numpy()
    often = np.bincount(numbers) >= _OFTEN
    is_often = often[numbers]
    rows, others = np.flatnonzero(is_often), np.flatnonzero(~is_often)
    if rows.size < _WORTH_PARTS * messages.len():
        return None
    renumbered = pl.Series(np.cumsum(often)[numbers[rows]] - 1, dtype=pl.UInt32)
    shared = shapes.filter(pl.Series(often)), renumbered
    by_shape = _masked_shapes(plan, messages[rows], shared, with_ids, otherwise)
    masked = pl.concat([by_shape, otherwise(messages[others])])
    return masked[np.argsort(np.concatenate([rows, others]))]


def _masked_shapes(
    plan: Plan,
    messages: pl.Series,
    found: tuple[pl.Series, pl.Series],
    with_ids: Callable[[pl.DataFrame], pl.DataFrame],
    otherwise: Callable[[pl.Series], pl.DataFrame],
) -> pl.DataFrame:
    """`by_digit_shape` where shapes are few. `found`: the distinct ones, and the number of each message's."""
    shapes, which = found
    keys = (_MESSAGE + shapes).to_list()
    remembered = plan.memo.recalled(keys)
    fresh = [at for at, masked in enumerate(remembered) if masked is None]
    if not fresh and _BY_DIGITS not in remembered:
        return with_ids(pl.DataFrame([pl.Series("masked", remembered, dtype=pl.String)]))[which]
    lines, reliable = run_on_shapes(plan.shape_steps, cleaned(shapes[fresh]))
    by_digits = np.array([masked == _BY_DIGITS for masked in remembered])
    by_digits[fresh] = ~reliable.to_numpy()
    # Messages whose digits matter are masked as they are. Few of them share the further rounds with the fresh
    # shapes.
    rows = np.flatnonzero(by_digits[which.to_numpy()])
    texts, text_of_row = kinds(messages[rows])
    many = texts.len() >= _FEW_LINES
    first = texts.clear() if many or not rows.size else one_round(plan, cleaned(texts))
    from_shapes = limit(lines.filter(reliable))
    stable = _known_stable(plan, pl.concat([from_shapes, first.alias(from_shapes.name)]))
    masked = np.array(remembered, dtype=object)
    masked[by_digits] = _BY_DIGITS
    masked[np.array(fresh, dtype=np.int64)[reliable.to_numpy()]] = stable[: from_shapes.len()].to_list()
    plan.memo.remember({keys[at]: masked[at] for at in fresh})
    table = with_ids(pl.DataFrame([pl.Series("masked", masked.tolist(), dtype=pl.String)]))[which]
    if not rows.size:
        return table
    if many:
        some = otherwise(messages[rows])
    else:
        some = with_ids(stable[from_shapes.len() :].alias("masked").to_frame())[text_of_row]
    return table.with_columns([table[name].scatter(rows, some[name]) for name in table.columns])


def _few_shapes(messages: pl.Series) -> bool:
    """Whether the first messages, or some of all places, repeat their shapes."""
    if repeats(normalise_digits(messages.head(LOOKED_AT)), _FEW_SHAPES):
        return True
    if messages.len() < _MANY_LINES:
        return False
    shapes = normalise_digits(messages.gather_every(_AN_EIGHTH))
    return shapes.n_unique() <= _REPEATED * shapes.len()


def _behind_groups(plan: Plan, lines: pl.Series) -> pl.Series:
    """Masked lines of lines that have passed all groups, by the memo where shapes are few."""
    shapes = normalise_digits(lines)
    if shapes.n_unique() > _MANY_SHAPES:
        # Lines with so little in common are many in the further rounds, too, and most of them open a gate.
        once = restore_digits(run_all(plan.digit_invariant, lines))
        return _until_stable(once, lambda lines_again: one_round(plan, lines_again))
    masked = per_distinct(shapes, lambda few: _recalled(plan, few, _SHAPE))
    by_digits = (masked == _BY_DIGITS).arg_true()
    if not by_digits.len():
        return masked
    return masked.scatter(by_digits, _recalled(plan, lines.gather(by_digits), _EXACT))


def _recalled(plan: Plan, lines: pl.Series, prefix: str) -> pl.Series:
    """Masked lines from the memo, computed where the memo lacks them; `_BY_DIGITS` for shapes whose digits
    matter."""

    def compute(keys: Sequence[str]) -> list[str]:
        texts = pl.Series("line", keys, dtype=pl.String).str.strip_prefix(prefix)
        lines = run_all(plan.digit_invariant, texts)
        masked = _until_stable(restore_digits(lines), lambda lines_again: _next_round(plan, lines_again))
        return (masked if prefix else masked.set(lines.str.contains("[0-9]"), _BY_DIGITS)).to_list()

    keys = (prefix + lines).to_list() if prefix else lines.to_list()
    return pl.Series(lines.name, plan.memo.recall(keys, compute), dtype=pl.String)


def _known_stable(plan: Plan, masked: pl.Series) -> pl.Series:
    """Masked lines, masked again until nothing changes; the memo tells which a round left as they were."""
    keys = [_STABLE + text for text in masked.to_list()]
    rows = [row for row, known in enumerate(plan.memo.recalled(keys)) if known is None]
    if not rows:
        return masked
    lines = masked[rows]
    once = per_distinct(lines, lambda few: _next_round(plan, few))
    same = (lines == once).to_list()
    plan.memo.remember({keys[row]: keys[row] for row, stays in zip(rows, same, strict=True) if stays})
    if all(same):
        return masked
    again = _until_stable(once, lambda lines_again: _next_round(plan, lines_again), rounds=_MAX_ROUNDS - 1)
    return masked.clone().scatter(rows, again)


def _until_stable(
    masked: pl.Series, mask_again: Callable[[pl.Series], pl.Series], *, rounds: int = _MAX_ROUNDS
) -> pl.Series:
    """Masked lines, masked again until nothing changes.

    A token can stand where a digit beside a word hid a boundary (`1user=bob`). Further rounds work on
    distinct masked lines, so they cost little."""
    for _ in range(rounds if masked.len() else 0):
        few, which = kinds(masked) if repeats(masked, WORTH) else (masked, None)
        lines_again = mask_again(few)
        if (few == lines_again).all():
            break
        masked = lines_again if which is None else lines_again[which]
    return masked


def one_round(plan: Plan, lines: pl.Series) -> pl.Series:
    """Cleaned lines after one round of all passes, in order."""
    return restore_digits(run_all(plan.passes, lines))


def _next_round(plan: Plan, lines: pl.Series) -> pl.Series:
    """The result of `one_round`, through the gates of the groups where the lines are worth them."""
    if lines.len() < _FEW_LINES:
        if lines.str.contains("[0-9]").any():
            return one_round(plan, lines)
        # A line without digits has nothing to keep.
        return limit(run_all([step for step in plan.passes if not step.keep], lines))
    for group in plan.groups:
        lines = group.run(lines)
    return restore_digits(run_all(plan.digit_invariant, lines))
