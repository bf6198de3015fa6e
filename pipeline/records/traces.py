"""Stack traces and other texts of several lines, as data (`config/traces.toml`): which physical lines
continue a record, and which begin one without a header."""

from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, get_args

import msgspec

from pipeline.settings.toml import shipped_value

Kind = Literal["continues", "below", "next", "crash", "signal", "error"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
FILE: Final = "traces.toml"


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of one kind in one language. The pattern is for the beginning of a line."""

    language: str
    kind: Kind
    pattern: str
    examples: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    line: tuple[TraceLine, ...]


@cache
def trace_lines() -> Sequence[TraceLine]:
    """All entries. Raises BadInput for a damaged file."""
    return shipped_value(FILE, _File).line


@cache
def pattern_of(*kinds: Kind) -> str:
    """A pattern for lines of any of these kinds."""
    return "^(?:" + "|".join(f"(?:{entry.pattern})" for entry in trace_lines() if entry.kind in kinds) + ")"
