"""The live versions, the fates of versions and their faults, as values that need nothing of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live version of a model. `previous`: the version that a rollback takes, "" without one."""

    version: str
    generation: int
    token: int
    published: str
    model: str = "shared"  # SHARED of redis/keys.py
    previous: str = ""
    how: str = "published"
    published_ms: int = 0
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The fate of a version: "candidate", "published", "promoted" or "rolled-back", since when and why."""

    state: str
    reason: str = ""
    at: str = ""
    judgement: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A version that the processes of a machine cannot read, and why."""

    version: str
    machine: str
    reason: str
