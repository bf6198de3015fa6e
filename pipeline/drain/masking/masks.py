"""One mask, and the files that hold masks (`config/masks.toml` and files of the user).

This file checks every entry alone; `mask_set.py` checks how masks work together.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.errors import BadMask
from pipeline.settings.toml import read_toml

TOKEN: Final = re.compile(r"<[A-Z0-9_]+>")
_NAME: Final = re.compile(r"[A-Z0-9_]+")
_GROUP: Final = re.compile(r"\$\{(\d+)\}")
_SWITCHES: Final = frozenset({"enabled", "keep", "seldom"})

# The longest shipped pattern has about 600 characters. Polars bounds a compiled pattern at 10 MiB.
_MAX_PATTERN: Final = 5_000
_MAX_EXAMPLE: Final = 1_000  # `check` tries a line end at every place of it
_SHOWN_PATTERN: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """One entry of a masks file, as written there."""

    name: str
    pattern: str
    example: str
    expect: str | None = None  # the result of the whole set for `example`
    replace: str = ""  # empty: `<NAME>`
    enabled: bool = True
    keep: bool = False
    seldom: bool = False  # a hint for speed

    @property
    def replacement(self) -> str:
        """The text that replaces a match; `${1}` is the first group."""
        return self.replace or f"<{self.name}>"

    def check(self) -> None:
        """Raises BadMask when the entry cannot be used on its own."""
        if not _NAME.fullmatch(self.name):
            raise BadMask(f"mask {self.name!r}: a name has only A-Z, 0-9 and _; rename it")
        if not self.example or "\n" in self.example:
            raise self._bad("needs an example of one line that it matches")
        if len(self.pattern) > _MAX_PATTERN or len(self.example) > _MAX_EXAMPLE:
            raise self._bad(
                f"is longer than {_MAX_PATTERN:,} characters, or its example than {_MAX_EXAMPLE:,}; make "
                "several masks of it"
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
        # With an empty first alternative the number of groups does not depend on the match.
        groups = pl.select(pl.lit("").str.extract_groups(f"(?:)|(?:{self.pattern})")).to_series()
        count = len(groups.struct.fields)
        for number in _GROUP.findall(self.replace):
            if int(number) > count:
                raise self._bad(f"has {count} groups, but `replace` names ${{{number}}}; correct one of them")
        literal = _GROUP.sub("", self.replace)
        if "$" in literal:
            raise self._bad("has a `replace` with a bare $; write groups as ${1}")
        if self.replace and literal == self.replace and not TOKEN.search(literal):
            raise self._bad("has a `replace` without a token; write one such as <NUM>")

    def _matches(self, texts: list[str]) -> list[list[str]]:
        found: list[list[str]] = pl.Series(texts).str.extract_all(self.pattern).to_list()
        return found

    def _bad(self, why: str) -> BadMask:
        shown = self.pattern if len(self.pattern) <= _SHOWN_PATTERN else self.pattern[:_SHOWN_PATTERN] + "..."
        return BadMask(f"mask {self.name}: pattern {shown!r} {why}")


def read(path: Path) -> tuple[list[Mask], dict[str, bool]]:
    """The masks of a file, and its switches: mask name -> enabled. Raises BadMask."""
    try:
        data = read_toml(path)
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
    names = [field.name for field in fields(Mask)]
    for key, value in entry.items():
        if key not in names:
            raise BadMask(f"mask {name} in {path}: unknown key {key!r}; known are {', '.join(names)}")
        if not isinstance(value, bool if key in _SWITCHES else str):
            kind = "true or false" if key in _SWITCHES else "text in quotes"
            raise BadMask(f"mask {name} in {path}: `{key}` has to be {kind}, not {value!r}")
    for key in ("name", "pattern", "example"):
        if key not in entry:
            raise BadMask(f"mask {name} in {path}: `{key}` is missing; add it")
    return Mask(**entry)


def with_switches(masks: Sequence[Mask], switches: dict[str, bool]) -> list[Mask]:
    """The masks with the switches applied. Raises BadMask for a name that is unknown or stands twice."""
    names = [mask.name for mask in masks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadMask(f"mask {twice[0]}: two entries have this name; rename one of them")
    if unknown := sorted(set(switches) - set(names)):
        raise BadMask(f"enable/disable names {unknown[0]!r}, which is no mask; known are {', '.join(names)}")
    return [replace(mask, enabled=switches.get(mask.name, mask.enabled)) for mask in masks]
