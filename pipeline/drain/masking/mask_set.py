"""Messages to masked lines: variable parts become `<IP>`, `<NUM>`, ...; the hash of a masked line is its
`pattern_id`.

The masks are data (`config/masks.toml` and files of the user). Each mask has an example that is checked at
load. Masks run in order, as Polars string expressions over the distinct lines of a batch, in time linear in
the text.

Invariants: a mask sees one line at a time and never crosses a line end. Masking is idempotent, except for
messages of several lines, whose masked form is one line. The result of a line does not depend on its batch:
`mask` equals `mask_exactly`."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.drain.masking.masks import TOKEN, Mask, read, with_switches
from pipeline.drain.masking.memo import Memo
from pipeline.drain.masking.multiline import EMPTY, LINE_END, cleaned, fold, lines_of
from pipeline.drain.masking.passes import compiled
from pipeline.drain.masking.plan import Plan, by_digit_shape, by_groups, exact
from pipeline.errors import BadMask
from pipeline.records.batch import digest
from pipeline.records.columns import WORTH, kinds, repeats
from pipeline.records.verdict import pattern_ids
from pipeline.settings.toml import shipped_file

# Part of every version: raise it when the code gives another masked line for the same masks.
ENGINE: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSet:
    """Checked masks in their order; immutable and safe to share between threads."""

    masks: tuple[Mask, ...]  # enabled and disabled ones
    version: str  # 16 hex digits; equal versions give equal masked lines
    tokens: tuple[str, ...]  # every `<NAME>` that can stand in a masked line, sorted
    plan: Plan

    @classmethod
    def load(cls, path: Path | None = None, extra: Sequence[Path] = ()) -> "MaskSet":
        """Reads `path` (None: the masks shipped with Logweir) and files of the user, whose masks run first.

        Raises BadMask with the name of the mask at fault.
        """
        main, switches = read(path or shipped_file("masks.toml"))
        base = cls.of(with_switches(main, switches))
        if not extra:
            return base
        user_masks: list[Mask] = []
        for file in extra:
            more, switched = read(file)
            user_masks += more
            switches |= switched
        # User masks and switches may change the results of shipped examples on purpose. `base` has checked
        # those.
        return cls.of(
            with_switches([*user_masks, *main], switches), expect={mask.name for mask in user_masks}
        )

    @classmethod
    def of(cls, masks: Sequence[Mask], *, expect: Set[str] | None = None) -> "MaskSet":
        """The set of these masks. Raises BadMask for a wrong mask or a wrong interplay.

        `expect` names the masks whose `expect` is checked; None: all.
        """
        for mask in masks:
            mask.check()
        result = cls._build(masks)
        result._check_tokens()
        tried = [mask for mask in masks if expect is None or mask.name in expect]
        result._check_examples([mask for mask in tried if mask.enabled])
        for mask in tried:
            if not mask.enabled:  # checked as if it alone were switched on
                alone = cls._build([replace(m, enabled=m.enabled or m is mask) for m in masks])
                alone._check_examples([mask])
        return result

    @classmethod
    def _build(cls, masks: Sequence[Mask]) -> "MaskSet":
        active = [mask for mask in masks if mask.enabled]
        texts = [mask.replacement for mask in active if not mask.keep]
        tokens = {token for text in texts for token in TOKEN.findall(text)}
        parts = [str(part) for m in active for part in (m.name, m.pattern, m.replacement, m.keep)]
        return cls(
            masks=tuple(masks),
            version=digest(ENGINE, *parts),
            tokens=tuple(sorted(tokens | {EMPTY, LINE_END})),
            plan=Plan.of(compiled(active)),
        )

    def without_memory(self) -> "MaskSet":
        """The same set with an empty memo, as a fresh process has it."""
        return replace(self, plan=replace(self.plan, memo=Memo()))

    def _check_tokens(self) -> None:
        for token, got in zip(self.tokens, self._exact(self.tokens), strict=True):
            if token != got:
                raise BadMask(f"token {token}: a mask turns it into {got!r}; give it a name without digits")

    def _check_examples(self, masks: Sequence[Mask]) -> None:
        once = self._exact([mask.example for mask in masks])
        for mask, got, twice in zip(masks, once, self._exact(once), strict=True):
            blame = f"mask {mask.name}: pattern {mask.pattern!r}"
            if mask.expect is not None and got != mask.expect:
                raise BadMask(
                    f"{blame} makes {got!r} of its example {mask.example!r}, not {mask.expect!r}; "
                    "correct the pattern, its place or `expect`"
                )
            if got != twice:
                raise BadMask(
                    f"{blame} gives {got!r}, which becomes {twice!r} when masked again; let it spare tokens"
                )

    def mask_one(self, message: str) -> str:
        """The masked line of one message, as `mask_exactly` gives it."""
        return self._exact([message])[0]

    def mask_exactly(self, messages: pl.Series) -> pl.DataFrame:
        """The result of `mask` by every pass on every line and without memory: the reference."""
        return _masked(messages, lambda lines: exact(self.plan, lines))

    def _exact(self, messages: Sequence[str]) -> list[str]:
        return list(self.mask_exactly(pl.Series(messages, dtype=pl.String))["masked"])

    def mask(self, messages: pl.Series) -> pl.DataFrame:
        """Columns `masked` (String) and `pattern_id` (UInt64), one row per message, in order.

        A null message counts as empty. Of a message of several lines, the first line and those following
        lines count that are no stack frames."""
        column = messages.cast(pl.String).fill_null("").alias("message")
        many = column.str.contains("\n", literal=True) if self.plan.shape_steps else None
        if many is None or many.all():
            return self._by_groups(column)
        if not many.any():
            return self._single_lines(column)
        both = pl.concat([self._single_lines(column.filter(~many)), self._by_groups(column.filter(many))])
        place = pl.concat([(~many).arg_true(), many.arg_true()])
        return both.with_columns(place.alias("at")).sort("at").drop("at")

    def _single_lines(self, messages: pl.Series) -> pl.DataFrame:
        """`mask` of messages of one line each: by digit shapes where these are few, else by groups."""
        by_shape = by_digit_shape(self.plan, messages, with_ids, self._by_groups)
        return self._by_groups(messages) if by_shape is None else by_shape

    def _by_groups(self, messages: pl.Series) -> pl.DataFrame:
        return _masked(messages, lambda lines: by_groups(self.plan, lines))


def _masked(messages: pl.Series, mask_lines: Callable[[pl.Series], pl.Series]) -> pl.DataFrame:
    """`MaskSet.mask`, where `mask_lines` turns distinct cleaned lines into masked lines, row by row."""

    def parts(lines: pl.Series) -> pl.Series:
        return mask_lines(cleaned(lines).alias("clean")).alias("part")

    few, which = kinds(messages.cast(pl.String).fill_null("").alias("message"))
    distinct = few.to_frame()
    if few.str.contains("\n", literal=True).any():
        lines = lines_of(distinct)
        texts = lines.select(pl.col("line").unique())
        folded = fold(lines.join(texts.with_columns(parts(texts["line"])), on="line"))
        masked = distinct.join(folded, on="message", how="left", maintain_order="left")
    else:
        masked = distinct.with_columns(parts(few).alias("masked"))
    return with_ids(masked).select("masked", "pattern_id")[which]


def with_ids(masked: pl.DataFrame) -> pl.DataFrame:
    """The frame with the `pattern_id` of its column `masked`."""
    few, which = kinds(masked["masked"]) if repeats(masked["masked"], WORTH) else (masked["masked"], None)
    ids = pl.Series("pattern_id", pattern_ids(few.to_list()), dtype=pl.UInt64)
    return masked.with_columns(ids if which is None else ids[which])
