"""What protocols of the intake say and want to hear, as data (config/protocols.toml)."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from pipeline.settings.toml import shipped_value

# The names of a hint in a protocol: the first of them that has a value counts.
Names = Mapping[str, tuple[str, ...]]


class Elasticsearch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers by path, and the beginnings of paths for which any object will do."""

    empty: frozenset[str]
    answers: Mapping[str, Mapping[str, Any]]


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file, whose comments say what its tables mean."""

    hints: Mapping[str, str]
    origins: Mapping[str, Names]
    splunk: Mapping[str, tuple[int, str]]
    elasticsearch: Elasticsearch


@cache
def tables() -> Tables:
    """Raises BadInput for a damaged file."""
    return shipped_value("protocols.toml", Tables)
