"""Messages to masked lines: variable parts become `<IP>`, `<NUM>`, ...; the hash of a masked line is
its `pattern_id`.

The masks are data (`config/masks.toml` and files of the user), ordered, each with an example that is
checked when they are loaded. They run as Polars string expressions over the distinct lines of a
batch, in Rust and in time linear in the text. Always true: a mask sees one line at a time, so it
never crosses a line end; masking a masked line changes nothing, unless it was joined of several,
which are one line then; a line's result does not depend on the batch around it.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from pipeline.drain.masking.digits import with_equal_digits
from pipeline.drain.masking.masks import TOKEN, Mask, read, shipped, with_switches
from pipeline.drain.masking.memo import Memo
from pipeline.drain.masking.multiline import EMPTY, LINE_END, cleaned, fold, limit, lines_of
from pipeline.drain.masking.passes import (
    Leg,
    Pass,
    Step,
    blind_from,
    compiled,
    legs_of,
    over_ones,
    run_all,
    shown,
    steps_of,
)
from pipeline.errors import BadMask
from pipeline.records.batch import digest
from pipeline.records.columns import LOOKED_AT, WORTH, kinds, per_distinct, repeats
from pipeline.records.verdict import pattern_ids

# Part of every version: raise it when the code below gives another masked line for the same masks.
ENGINE: Final = "1"

# Share of distinct messages of ones up to which these are worked on instead of the messages.
_FEW_SHAPES: Final = 0.25
# Fewer lines than these are too few to tell whether they repeat what came before. What no shape tells of them goes through
# all passes as it is: looking what they have in common takes longer.
_FEW_LINES: Final = 512
_MAX_ROUNDS: Final = 4  # of 90,000 random glueings of masks' examples none needed more than one
# Of one batch: where every line is new, looking for what is remembered is in vain, and so is remembering.
_MANY_SHAPES: Final = 1_000
# Remembered of a shape whose masked line depends on its digits; no masked line is empty.
_BY_DIGITS: Final = ""
# What is remembered: of a message where every digit is a 1, of what the legs leave of one, and of that as it is, which may
# look like one.
_SHAPE: Final = ""
_MESSAGE: Final = "\n\n"
_EXACT: Final = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSet:
    """Masks in their order, checked; immutable and safe to share between threads."""

    masks: tuple[Mask, ...]  # enabled and disabled ones
    version: str  # 16 hex digits; equal versions give equal masked lines
    tokens: tuple[str, ...]  # every `<NAME>` that can stand in a masked line, sorted
    passes: tuple[Pass, ...]
    legs: tuple[Leg, ...]  # the passes in front of `blind`
    blind: tuple[Pass, ...]  # the last passes, which see no difference between two digits
    steps: tuple[Step, ...]  # all passes, over messages of ones; none where they cannot run so
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def load(cls, path: Path | None = None, extra: Sequence[Path] = ()) -> "MaskSet":
        """Read `path` (None: the masks shipped with Logweir) and files of the user, whose masks run first.

        Raises BadMask with the name of the mask at fault.
        """
        main, switches = read(path or shipped())
        base = cls.of(with_switches(main, switches))
        if not extra:
            return base
        own: list[Mask] = []
        for file in extra:
            found, switched = read(file)
            own += found
            switches |= switched
        # A user who switches a mask off, or puts one in front, changes on purpose what the examples
        # of the others give; so those were checked above, among themselves.
        return cls.of(with_switches([*own, *main], switches), expect={mask.name for mask in own})

    @classmethod
    def of(cls, masks: Sequence[Mask], *, expect: Set[str] | None = None) -> "MaskSet":
        """The set of these masks. Raises BadMask when one of them, or their interplay, is wrong.

        `expect` names the masks whose `expect` counts; None: all.
        """
        for mask in masks:
            mask.check()
        made = cls._build(masks)
        made._check_tokens()
        tried = [mask for mask in masks if expect is None or mask.name in expect]
        made._check_examples([mask for mask in tried if mask.enabled])
        for mask in tried:
            if not mask.enabled:  # tried as if it alone were switched on
                cls._build([replace(m, enabled=m.enabled or m is mask) for m in masks])._check_examples(
                    [mask]
                )
        return made

    @classmethod
    def _build(cls, masks: Sequence[Mask]) -> "MaskSet":
        active = [mask for mask in masks if mask.enabled]
        texts = [mask.replacement for mask in active if not mask.keep]
        tokens = {token for text in texts for token in TOKEN.findall(text)}
        parts = [str(part) for m in active for part in (m.name, m.pattern, m.replacement, m.keep)]
        passes = compiled(active)
        blind_at = blind_from(passes)
        return cls(
            masks=tuple(masks),
            version=digest(ENGINE, *parts),
            tokens=tuple(sorted(tokens | {EMPTY, LINE_END})),
            passes=passes,
            legs=legs_of(passes[:blind_at]),
            blind=passes[blind_at:],
            steps=steps_of(passes),
        )

    def _check_tokens(self) -> None:
        for token, got in zip(self.tokens, self._mask_all(self.tokens), strict=True):
            if token != got:
                raise BadMask(f"token {token}: a mask turns it into {got!r}; give it a name without digits")

    def _check_examples(self, masks: Sequence[Mask]) -> None:
        once = self._mask_all([mask.example for mask in masks])
        for mask, got, again in zip(masks, once, self._mask_all(once), strict=True):
            blame = f"mask {mask.name}: pattern {mask.pattern!r}"
            if mask.expect is not None and got != mask.expect:
                raise BadMask(
                    f"{blame} makes {got!r} of its example {mask.example!r}, not {mask.expect!r}; "
                    "correct the pattern, its place or `expect`"
                )
            if got != again:
                raise BadMask(
                    f"{blame} gives {got!r}, which becomes {again!r} when masked again; let it spare tokens"
                )

    def _mask_all(self, messages: Sequence[str]) -> list[str]:
        return list(self._masked(pl.Series(messages, dtype=pl.String), self._settled)["masked"])

    def mask(self, messages: pl.Series) -> pl.DataFrame:
        """Columns `masked` (String) and `pattern_id` (UInt64), one row per message, in its order.

        A null message counts as empty. A message of many lines gives its first line and those of the
        following ones that are not stack frames.
        """
        column = messages.cast(pl.String).fill_null("").alias("message")
        many = column.str.contains("\n", literal=True) if self.steps else None
        if many is None or many.all():
            return self._masked(column, self._quickly)
        if not many.any():
            return self._by_shape(column)
        both = pl.concat(
            [self._by_shape(column.filter(~many)), self._masked(column.filter(many), self._quickly)]
        )
        place = pl.concat([(~many).arg_true(), many.arg_true()])
        return both.with_columns(place.alias("at")).sort("at").drop("at")

    def _by_shape(self, messages: pl.Series) -> pl.DataFrame:
        """`mask` of messages of one line each, of which many differ in nothing but their digits from one another, or from
        those of batches before."""
        small = messages.len() < _FEW_LINES
        if not small and not repeats(with_equal_digits(messages.head(LOOKED_AT)), _FEW_SHAPES):
            return self._masked(messages, self._quickly)
        shapes = with_equal_digits(messages, but_hex=True).alias("shape")
        few, which = kinds(shapes)
        if not small and few.len() > _FEW_SHAPES * messages.len():
            return self._masked(messages, self._quickly)
        return self._told(messages, few, which)

    def _told(self, messages: pl.Series, few: pl.Series, which: pl.Series) -> pl.DataFrame:
        """`mask` of messages by their shapes: those of `few`, and which of them each message has."""
        keys = (_MESSAGE + few).to_list()
        found = self.memo.known(keys)
        fresh = [at for at, known in enumerate(found) if known is None]
        if not fresh and _BY_DIGITS not in found:
            return with_ids(pl.DataFrame([pl.Series("masked", found, dtype=pl.String)]))[which]
        lines, relied = over_ones(self.steps, cleaned(few[fresh]))
        by_digits = np.array([known == _BY_DIGITS for known in found])
        by_digits[fresh] = ~relied.to_numpy()
        # What no shape tells is masked as it is, but settles together with what a shape told.
        exact = np.flatnonzero(by_digits[which.to_numpy()])
        rest, rest_rows = kinds(messages[exact])
        apart = rest.len() >= _FEW_LINES
        first = rest.clear() if apart or not exact.size else self._mask_lines(cleaned(rest))
        told = limit(lines.filter(relied))
        settled = self._again(pl.concat([told, first.alias(told.name)]), self._round)
        masked = np.array(found, dtype=object)
        masked[by_digits] = _BY_DIGITS
        masked[np.array(fresh, dtype=np.int64)[relied.to_numpy()]] = settled[: told.len()].to_list()
        self.memo.remember({keys[at]: masked[at] for at in fresh})
        table = with_ids(pl.DataFrame([pl.Series("masked", masked.tolist(), dtype=pl.String)]))
        rows = table[which]
        if not exact.size:
            return rows
        if apart:
            some = self._masked(messages[exact], self._quickly)
        else:
            some = with_ids(settled[told.len() :].alias("masked").to_frame())[rest_rows]
        return rows.with_columns([rows[name].scatter(exact, some[name]) for name in rows.columns])

    def mask_one(self, message: str) -> str:
        """The masked line of one message, pass by pass and with nothing remembered: the plain reference for `mask`."""
        return self._mask_all([message])[0]

    def _masked(self, messages: pl.Series, work: Callable[[pl.Series], pl.Series]) -> pl.DataFrame:
        """`mask`, with `work` from distinct cleaned lines to masked ones, row by row."""
        column = messages.cast(pl.String).fill_null("").alias("message").to_frame()
        distinct = column.unique()
        if distinct["message"].str.contains("\n", literal=True).any():
            lines = lines_of(distinct)
            texts = lines.select(pl.col("line").unique())
            done = texts.with_columns(self._parts(texts["line"], work))
            masked = fold(lines.join(done, on="line"))
        else:
            masked = distinct.with_columns(self._parts(distinct["message"], work).alias("masked"))
        masked = with_ids(masked)
        joined = column.join(masked, on="message", how="left", maintain_order="left")
        return joined.select("masked", "pattern_id")

    def _parts(self, lines: pl.Series, work: Callable[[pl.Series], pl.Series]) -> pl.Series:
        """The masked lines of distinct lines as they came."""
        return work(cleaned(lines).alias("clean")).alias("part")

    def _quickly(self, lines: pl.Series, leg: int = 0) -> pl.Series:
        """What `_settled` gives, of lines that have the first legs behind them.

        Lines that have become equal go on as one; in front of the passes that see no difference between two digits,
        lines that differ in nothing else are one too, and what comes of it is remembered.
        """
        if not leg and lines.len() < _FEW_LINES:
            return self._again(self._mask_lines(lines), self._round)
        if leg == len(self.legs):
            return per_distinct(lines, self._remembered)
        return per_distinct(lines, lambda few: self._quickly(self.legs[leg].run(few), leg + 1))

    def _remembered(self, lines: pl.Series) -> pl.Series:
        """Masked lines of what the legs left."""
        shapes = with_equal_digits(lines)
        if shapes.n_unique() > _MANY_SHAPES:
            # Lines with so little in common are many in the further rounds, too, and most pass a gate.
            return self._again(shown(run_all(self.blind, lines)), self._mask_lines)
        found = per_distinct(shapes, lambda few: self._recalled(few, _SHAPE))
        exact = (found == _BY_DIGITS).arg_true()
        if not exact.len():
            return found
        return found.scatter(exact, self._recalled(lines.gather(exact), _EXACT))

    def _recalled(self, lines: pl.Series, kind: str) -> pl.Series:
        """Masked lines of what the legs left, worked out where they are not remembered; of a shape where digits do not matter."""

        def work(keys: list[str]) -> list[str]:
            left = pl.Series("left", keys, dtype=pl.String).str.strip_prefix(kind)
            masked, with_digits = self._finished(left)
            return (masked.set(with_digits, _BY_DIGITS) if kind == _SHAPE else masked).to_list()

        keys = lines.to_list() if not kind else (kind + lines).to_list()
        return pl.Series(lines.name, self.memo.recall(keys, work), dtype=pl.String)

    def _finished(self, lines: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Masked lines of what the legs left, and which of them have digits that no mask took."""
        left = run_all(self.blind, lines)
        return self._again(shown(left), self._round), left.str.contains("[0-9]")

    def _round(self, lines: pl.Series) -> pl.Series:
        """What `_mask_lines` gives, by way of the legs where that is worth their gates."""
        if lines.len() < _FEW_LINES:
            if lines.str.contains("[0-9]").any():
                return self._mask_lines(lines)
            # Of a line without digits nothing is kept.
            return limit(run_all([step for step in self.passes if not step.keep], lines))
        for leg in self.legs:
            lines = leg.run(lines)
        return shown(run_all(self.blind, lines))

    def _settled(self, lines: pl.Series) -> pl.Series:
        """Masked cleaned lines, all passes on all of them."""
        return self._again(self._mask_lines(lines), self._mask_lines)

    def _again(self, masked: pl.Series, once_more: Callable[[pl.Series], pl.Series]) -> pl.Series:
        """Lines that were masked once, masked again until nothing changes.

        A token can stand where a digit glued to a word hid a boundary (`1user=bob`). The further rounds
        see distinct masked lines only, so they cost little.
        """
        for _ in range(_MAX_ROUNDS if masked.len() else 0):
            few, which = kinds(masked) if repeats(masked, WORTH) else (masked, None)
            again = once_more(few)
            if (few == again).all():
                break
            masked = again if which is None else again[which]
        return masked

    def _mask_lines(self, lines: pl.Series) -> pl.Series:
        """Cleaned lines after one round of all passes, in order."""
        return shown(run_all(self.passes, lines))


def with_ids(masked: pl.DataFrame) -> pl.DataFrame:
    """The frame with the `pattern_id` of its column `masked`."""
    few, which = kinds(masked["masked"]) if repeats(masked["masked"], WORTH) else (masked["masked"], None)
    ids = pl.Series("pattern_id", pattern_ids(few.to_list()), dtype=pl.UInt64)
    return masked.with_columns(ids if which is None else ids[which])
