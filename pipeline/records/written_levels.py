"""The severities of lines by the words and numbers of programs (config/levels.toml)."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final

import msgspec

from pipeline.records.levels import LEVELS
from pipeline.settings.toml import shipped_value

_SYSLOG_ALONE: Final = frozenset("67")


class _Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The numbers of the programs that count so; the head of the file says what the keys mean."""

    name: str
    numbers: Mapping[str, str]
    keys: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    alone: bool = False

    @cached_property
    def levels(self) -> Mapping[str, str]:
        return {number: level for level, numbers in self.numbers.items() for number in numbers.split()}

    @cached_property
    def marks(self) -> Sequence[frozenset[str]]:
        return [frozenset(keys.split()) for keys in self.beside]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: Mapping[str, tuple[str, ...]]
    scale: tuple[_Scale, ...]


@cache
def _file() -> _File:
    return shipped_value("levels.toml", _File)


@cache
def levels_by_word() -> Mapping[str, str]:
    """Lower-case words of any format to the spellings of LEVELS. Raises BadInput for a damaged file."""
    return {word: level for level, words in _file().words.items() for word in words}


def level_by_number(value: str, key: str, keys: Collection[str], values: Collection[str] = ()) -> str | None:
    """The level of a number that stands under `key` in a record with these `keys`, one of LEVELS.

    Dotted keys are those of nested objects. `values`: what the records of the same program have under `key`;
    one of 6 or 7 shows that they count as syslog does. None where no one can tell what the number means."""
    number = value.strip().removesuffix(".0")  # some collectors make all numbers fractions
    name, there = key.rpartition(".")[2].lower(), {other.lower() for other in keys}
    is_syslog = not _SYSLOG_ALONE.isdisjoint((number, *values))
    is_dotnet = key[:1].isupper() and not key.isupper()  # their names of properties
    scales = [scale for scale in _file().scale if number in scale.levels]
    for meant in (
        (scale for scale in scales if name in scale.keys),
        (scale for scale in scales if any(marks <= there for marks in scale.marks)),
        (scale for scale in scales if is_syslog and scale.name == "syslog"),
        (scale for scale in scales if is_dotnet and scale.name == "dotnet"),
        (scale for scale in scales if scale.alone),
    ):
        if (scale := next(meant, None)) is not None:
            return scale.levels[number]
    return None


def level_of_status(status: int) -> str:
    """The level of an answer over HTTP."""
    return "error" if status >= 500 else "warning" if status >= 400 else "info"


def level_of(value: Any) -> str | None:
    """One of LEVELS, None for other values."""
    word = value.strip().lower() if isinstance(value, str) else ""
    return word if word in LEVELS else levels_by_word().get(word)
