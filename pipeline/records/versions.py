"""The live versions, the fates of versions and their faults, as values that need nothing of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_SHARED: Final = "shared"  # SHARED of redis/keys.py, which lies on the same floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live version of a model. `previous`: the version that a rollback takes, "" without one."""

    version: str
    generation: int
    token: int
    published: str
    model: str = _SHARED
    previous: str = ""
    how: str = "published"
    published_ms: int = 0
    history: tuple[str, ...] = ()


def outdated_words(live: Live) -> str:
    """That an older build made a live version: what happens to lines, and the remedy."""
    shared = live.model == _SHARED
    whose, train = (
        ("", "logweir train") if shared else (f" of {live.model}", f"logweir train --workload {live.model}")
    )
    so = "lines are stored without a verdict" if shared else "the shared model answers"
    return (
        f"an older build made the live model{whose}, {live.version}, and this one cannot read it; {so} until "
        f"`{train}` has learnt a new one"
    )


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
