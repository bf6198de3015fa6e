"""What keys of records and columns of tables mean (config/keys.toml)."""

from collections.abc import Mapping
from functools import cache

import msgspec

from pipeline.settings.toml import shipped_value


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The records of one program."""

    marks: tuple[str, ...]
    noise: str
    level: str | None = None
    error: str = ""


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What collectors write around the line of a program."""

    lines: tuple[str, ...]
    shipped: str
    shipping: str


class PackedLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collector whose records are envelopes, whatever else they say."""

    lines: tuple[str, ...]
    mark: str


class KnownKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file, whose comments say what its tables mean."""

    roles: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    shape: tuple[Shape, ...]
    envelope: Envelope
    packed: tuple[PackedLine, ...]


@cache
def known_keys() -> KnownKeys:
    """Raises BadInput for a damaged file."""
    return shipped_value("keys.toml", KnownKeys)
