"""Messages to masked lines: variable parts become `<IP>`, `<NUM>`, ...; the hash of a masked line is
its `pattern_id`.

The masks are data (`config/masks.toml` and files of the user), ordered, each with an example that is
checked when they are loaded. They run as Polars string expressions over the distinct lines of a
batch, in Rust and in time linear in the text. Always true: a mask sees one line at a time, so it
never crosses a line end; masking a masked line changes nothing, unless it was joined of several,
which are one line then; a line's result does not depend on the batch around it.
"""

import re
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.columns import per_distinct, spread
from pipeline.drain.alike import digits_alike, with_equal_digits
from pipeline.drain.digest import EMPTY, LINE_END, cleaned, fold, limit, lines_of
from pipeline.drain.memo import Memo
from pipeline.errors import BadMask
from pipeline.records import digest, pattern_ids

# Part of every version: raise it when the code below gives another masked line for the same masks.
ENGINE: Final = "1"

_NAME: Final = re.compile(r"[A-Z0-9_]+")
_TOKEN: Final = re.compile(r"<[A-Z0-9_]+>")
_GROUP: Final = re.compile(r"\$\{(\d+)\}")
_SWITCHES: Final = frozenset({"enabled", "keep", "seldom"})

# Kept digits hide as noncharacters, which `clean` has taken out of every text; the underscores make
# sure that a place inside a word is no word boundary for the masks that follow.
HIDDEN: Final = {str(d): f"_{chr(0xFDD0 + d)}_" for d in range(10)}
# A mask may have taken one of the underscores with it; the digit comes back all the same.
SHOWN: Final = {mark: d for d, hidden in HIDDEN.items() for mark in (hidden, hidden.strip("_"))}
_HIDE: Final = str.maketrans(HIDDEN)
_OPEN: Final = "\ufdda"
_CLOSE: Final = "\ufddb"
_KEPT: Final = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")

# The longest of ours has 593. What a pattern compiles to is bounded by Polars, at 10 MiB.
_MAX_PATTERN: Final = 5_000
_MAX_EXAMPLE: Final = 1_000  # a line end is tried at every place of it
_SHOWN_PATTERN: Final = 120
_MAX_ROUNDS: Final = 4  # of 90,000 random glueings of masks' examples none needed more than one
# Of one batch: where every line is new, looking for what is remembered is in vain, and so is remembering.
_MANY_SHAPES: Final = 1_000
# A gate that most lines pass costs more than it saves; these many tell.
_LOOKED_AT: Final = 256
_GATED: Final = 1_024  # fewer lines are not worth that look
# Remembered of a shape whose masked line depends on its digits; no masked line is empty.
_BY_DIGITS: Final = ""
# What is remembered of a shape, where every digit is a 1, and of a line as it is, which may look like one.
_SHAPE: Final = ""
_EXACT: Final = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """One entry of a masks file, as written there."""

    name: str
    pattern: str
    example: str
    expect: str | None = None  # what the whole set makes of `example`
    replace: str = ""  # empty: `<NAME>`
    enabled: bool = True
    keep: bool = False
    seldom: bool = False  # for speed alone

    @property
    def replacement(self) -> str:
        """What stands where the pattern matched; `${1}` is its first group."""
        return self.replace or f"<{self.name}>"

    def check(self) -> None:
        """Raises BadMask when the entry cannot be used, whatever stands around it."""
        if not _NAME.fullmatch(self.name):
            raise BadMask(f"mask {self.name!r}: a name has only A-Z, 0-9 and _; rename it")
        if not self.example or "\n" in self.example:
            raise self._bad("needs an example of one line that it matches")
        if len(self.pattern) > _MAX_PATTERN or len(self.example) > _MAX_EXAMPLE:
            raise self._bad(
                f"is longer than {_MAX_PATTERN:,} characters, or its example than {_MAX_EXAMPLE:,}; make several masks of it"
            )
        try:
            found = self._matches([self.example, "", " ", "x", "0", "."])
        except pl.exceptions.ComputeError as exc:
            lines = [line.strip() for line in str(exc).splitlines()]
            why = next((line for line in lines if line.startswith("error:")), lines[0])
            raise self._bad(f"is not a Rust regular expression ({why}); correct it") from exc
        if any(match == "" for row in found for match in row):
            raise self._bad(
                "can match the empty string; let it need at least one character, for example + for *"
            )
        if not found[0]:
            raise self._bad(f"does not match its example {self.example!r}; correct one of them")
        # A line end at every place of the example, between its characters and instead of each.
        text, places = self.example, range(len(self.example) + 1)
        cut = [text[:i] + "\n" + text[i + skip :] for i in places for skip in (0, 1)]
        if any("\n" in match for row in self._matches(["\n", *cut]) for match in row):
            raise self._bad(r"can match a line end; write [ \t] for \s, and \n inside every [^...]")
        if "\n" in self.replace:
            raise self._bad("has a `replace` with a line end; a masked line is one line")
        if self.keep and self.replace:
            raise self._bad("keeps what it matches, so it cannot have `replace`; remove one of the two")
        self._check_groups()

    def _check_groups(self) -> None:
        # The first empty alternative makes the count independent of what the example fills.
        groups = pl.select(pl.lit("").str.extract_groups(f"(?:)|(?:{self.pattern})")).to_series()
        known = len(groups.struct.fields)
        for number in _GROUP.findall(self.replace):
            if int(number) > known:
                raise self._bad(f"has {known} groups, but `replace` names ${{{number}}}; correct one of them")
        rest = _GROUP.sub("", self.replace)
        if "$" in rest:
            raise self._bad("has a `replace` with a bare $; write groups as ${1}")
        if self.replace and rest == self.replace and not _TOKEN.search(rest):
            raise self._bad("has a `replace` without a token; write one such as <NUM>")

    def _matches(self, texts: list[str]) -> list[list[str]]:
        found: list[list[str]] = pl.Series(texts).str.extract_all(self.pattern).to_list()
        return found

    def _bad(self, why: str) -> BadMask:
        shown = self.pattern if len(self.pattern) <= _SHOWN_PATTERN else self.pattern[:_SHOWN_PATTERN] + "..."
        return BadMask(f"mask {self.name}: pattern {shown!r} {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Neighbouring masks with one effect, as a single regular expression."""

    pattern: str
    replacement: str
    keep: bool
    seldom: bool

    def run(self, lines: pl.Series) -> pl.Series:
        text = pl.col(lines.name)
        if not self.keep:
            return spread(lines, text.str.replace_all(self.pattern, self.replacement))
        hit = spread(lines, text.str.contains(self.pattern))
        return (
            lines.clone().scatter(hit.arg_true(), _hide(lines.filter(hit), self.pattern))
            if hit.any()
            else lines
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """Neighbouring passes between two looks at whether lines have become equal."""

    passes: tuple[_Pass, ...]
    gate: str  # matches every line that one of them matches, "" when they are not looked for at once

    def run(self, lines: pl.Series) -> pl.Series:
        if not self.gate or self._open(lines):
            return _run(self.passes, lines)
        # The first of the passes that matches a line meets it as it is here: where none does, all leave it alone.
        hit = spread(lines, pl.col(lines.name).str.contains(self.gate))
        if hit.all():
            return _run(self.passes, lines)
        return (
            lines.clone().scatter(hit.arg_true(), _run(self.passes, lines.filter(hit)))
            if hit.any()
            else lines
        )

    def _open(self, lines: pl.Series) -> bool:
        """Whether most of many lines would pass the gate, as far as the first of them tell."""
        if lines.len() < _GATED:
            return False
        return int(lines.head(_LOOKED_AT).str.contains(self.gate).sum()) > _LOOKED_AT // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSet:
    """Masks in their order, checked; immutable and safe to share between threads."""

    masks: tuple[Mask, ...]  # enabled and disabled ones
    version: str  # 16 hex digits; equal versions give equal masked lines
    tokens: tuple[str, ...]  # every `<NAME>` that can stand in a masked line, sorted
    passes: tuple[_Pass, ...]
    legs: tuple[_Leg, ...]  # the passes in front of `blind`
    blind: tuple[_Pass, ...]  # the last passes, which see no difference between two digits
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def load(cls, path: Path | None = None, extra: Sequence[Path] = ()) -> "MaskSet":
        """Read `path` (None: the masks shipped with Logweir) and files of the user, whose masks run first.

        Raises BadMask with the name of the mask at fault.
        """
        main, switches = _read(path or shipped())
        base = cls.of(_set(main, switches))
        if not extra:
            return base
        own: list[Mask] = []
        for file in extra:
            found, switched = _read(file)
            own += found
            switches |= switched
        # A user who switches a mask off, or puts one in front, changes on purpose what the examples
        # of the others give; so those were checked above, among themselves.
        return cls.of(_set([*own, *main], switches), expect={mask.name for mask in own})

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
        tokens = {token for text in texts for token in _TOKEN.findall(text)}
        parts = [str(part) for m in active for part in (m.name, m.pattern, m.replacement, m.keep)]
        passes = _compile(active)
        blind_from = _blind_from(passes)
        return cls(
            masks=tuple(masks),
            version=digest(ENGINE, *parts),
            tokens=tuple(sorted(tokens | {EMPTY, LINE_END})),
            passes=passes,
            legs=_legs(passes[:blind_from]),
            blind=passes[blind_from:],
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
        return self._masked(messages, self._quickly)

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
        kinds = masked.select(pl.col("masked").unique())
        ids = pl.Series("pattern_id", pattern_ids(kinds["masked"].to_list()), dtype=pl.UInt64)
        masked = masked.join(kinds.with_columns(ids), on="masked")
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
        if leg == len(self.legs):
            return per_distinct(lines, self._remembered)
        return per_distinct(lines, lambda few: self._quickly(self.legs[leg].run(few), leg + 1))

    def _remembered(self, lines: pl.Series) -> pl.Series:
        """Masked lines of what the legs left."""
        shapes = with_equal_digits(lines)
        if shapes.n_unique() > _MANY_SHAPES:
            # Lines with so little in common are many in the further rounds, too, and most pass a gate.
            return self._again(_shown(_run(self.blind, lines)), self._mask_lines)
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
        left = _run(self.blind, lines)
        return self._again(_shown(left), self._round), left.str.contains("[0-9]")

    def _round(self, lines: pl.Series) -> pl.Series:
        """What `_mask_lines` gives, by way of the legs."""
        for leg in self.legs:
            lines = leg.run(lines)
        return _shown(_run(self.blind, lines))

    def _settled(self, lines: pl.Series) -> pl.Series:
        """Masked cleaned lines, all passes on all of them."""
        return self._again(self._mask_lines(lines), self._mask_lines)

    def _again(self, masked: pl.Series, once_more: Callable[[pl.Series], pl.Series]) -> pl.Series:
        """Lines that were masked once, masked again until nothing changes.

        A token can stand where a digit glued to a word hid a boundary (`1user=bob`). The further rounds
        see distinct masked lines only, so they cost little.
        """
        for _ in range(_MAX_ROUNDS):
            kinds = masked.unique()
            again = once_more(kinds)
            moved = kinds != again
            if not moved.any():
                break
            masked = masked.replace(kinds.filter(moved), again.filter(moved))
        return masked

    def _mask_lines(self, lines: pl.Series) -> pl.Series:
        """Cleaned lines after one round of all passes, in order."""
        return _shown(_run(self.passes, lines))


def shipped() -> Path:
    """The masks file that belongs to this code: of the checkout, else of the installation.

    Raises BadMask when neither is there.
    """
    places = [
        Path(__file__).parents[2] / "config",
        Path(sysconfig.get_path("data")) / "share" / "logweir",
        Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / "share" / "logweir",
        Path(sys.prefix) / "share" / "logweir",
    ]
    for place in places:
        if (place / "masks.toml").is_file():
            return place / "masks.toml"
    raise BadMask(
        f"masks.toml is in none of {', '.join(map(str, places))}; reinstall logweir or name a masks file"
    )


def _read(path: Path) -> tuple[list[Mask], dict[str, bool]]:
    """Masks of a file, and what it switches on or off."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise BadMask(f"masks file {path} cannot be read: {exc}; correct it or name another") from exc
    entries = data.pop("mask", [])
    switches: dict[str, bool] = {}
    for key, state in (("enable", True), ("disable", False)):
        names = data.pop(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadMask(f"masks file {path}: `{key}` has to be a list of mask names, not {names!r}")
        switches |= dict.fromkeys(names, state)
    if data:
        raise BadMask(f"masks file {path}: unknown key {min(data)!r}; known are mask, enable, disable")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadMask(f"masks file {path}: masks have to be written as [[mask]] tables")
    return [_mask(path, entry) for entry in entries], switches


def _mask(path: Path, entry: dict[str, Any]) -> Mask:
    name = entry.get("name", "without a name")
    known = [field.name for field in fields(Mask)]
    for key, value in entry.items():
        if key not in known:
            raise BadMask(f"mask {name} in {path}: unknown key {key!r}; known are {', '.join(known)}")
        if not isinstance(value, bool if key in _SWITCHES else str):
            kind = "true or false" if key in _SWITCHES else "text in quotes"
            raise BadMask(f"mask {name} in {path}: `{key}` has to be {kind}, not {value!r}")
    for key in ("name", "pattern", "example"):
        if key not in entry:
            raise BadMask(f"mask {name} in {path}: `{key}` is missing; add it")
    return Mask(**entry)


def _set(masks: Sequence[Mask], switches: dict[str, bool]) -> list[Mask]:
    """The masks with the switches applied; every name stands once."""
    names = [mask.name for mask in masks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadMask(f"mask {twice[0]}: two entries have this name; rename one of them")
    if unknown := sorted(set(switches) - set(names)):
        raise BadMask(f"enable/disable names {unknown[0]!r}, which is no mask; known are {', '.join(names)}")
    return [replace(mask, enabled=switches.get(mask.name, mask.enabled)) for mask in masks]


def _compile(masks: Sequence[Mask]) -> tuple[_Pass, ...]:
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
        passes.append(_Pass(pattern=pattern, replacement=replacement, keep=keep, seldom=seldom))
    return tuple(passes)


def _blind_from(passes: Sequence[_Pass]) -> int:
    """The first pass from which on none sees a difference between two digits; those that keep digits do."""
    at = len(passes)
    while at and not passes[at - 1].keep and digits_alike(passes[at - 1].pattern):
        at -= 1
    return at


def _legs(passes: Sequence[_Pass]) -> tuple[_Leg, ...]:
    """Neighbours that seldom match are looked for at once; of those that keep digits there is one pass already."""
    legs = []
    for (seldom, keep), run in groupby(passes, key=lambda step: (step.seldom, step.keep)):
        steps = tuple(run)
        gated = seldom and not keep and len(steps) > 1
        gate = "|".join(f"(?:{step.pattern})" for step in steps) if gated else ""
        legs.append(_Leg(passes=steps, gate=gate if _compiles(gate) else ""))
    return tuple(legs)


def _compiles(pattern: str) -> bool:
    """Whether masks that are each small enough for Polars are so together."""
    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError:
        return False
    return True


def _run(passes: Sequence[_Pass], lines: pl.Series) -> pl.Series:
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


def _shown(lines: pl.Series) -> pl.Series:
    """Lines behind all passes, with the kept digits and of bounded length."""
    shown = lines.str.contains("[\ufdd0-\ufdd9]")
    if shown.any():
        whole = lines.filter(shown).str.replace_many(list(SHOWN), list(SHOWN.values()), leftmost=True)
        lines = lines.clone().scatter(shown.arg_true(), whole)
    return limit(lines)


def _hide(lines: pl.Series, pattern: str) -> pl.Series:
    """Lines whose digits inside each match are out of reach of the masks that follow."""
    name = lines.name
    marked = spread(lines, pl.col(name).str.replace_all(pattern, f"{_OPEN}${{0}}{_CLOSE}"))
    text = _KEPT.sub(_beyond_reach, str(marked.str.join("\n").item()))
    return pl.Series(name, [text]).str.split("\n").explode(empty_as_null=False)


def _beyond_reach(match: "re.Match[str]") -> str:
    return match[1].translate(_HIDE)
