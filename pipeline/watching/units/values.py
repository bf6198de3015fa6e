"""What is said of ranked units. Programs that only read answers import it, so it needs no columns."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LEAST_NORMAL: Final = 5  # units, to say that one is unusual


class UnitEvidence(StrEnum):
    """What speaks for an unusual unit."""

    NEW = "new"
    COUNTS = "counts"
    SESSIONS = "sessions"
    FLAGGED = "flagged"
    TIME = "time"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReason:
    """One reason. `nats`: -log of how often a normal unit has as much. `templates`: those it names."""

    evidence: UnitEvidence
    nats: float
    text: str
    templates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedUnit:
    """A unit in its place. `p_value`: the share of normal units with as much evidence. `unusual`: None where
    fewer normal units than `LEAST_NORMAL` are known. `first`, `last`: seconds since the epoch, None without a
    timed line."""

    unit: str
    evidence: float
    p_value: float
    unusual: bool | None
    reasons: tuple[UnitReason, ...]
    lines: int
    flagged: int
    findings: int
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRanking:
    """The most unusual first, at most as many as were asked for. `judged`, `normal`: units of each.

    `among`: without normal units, the judged ones were compared with each other. `unusual`: how many are;
    None where fewer than `LEAST_NORMAL` normal units are known. 0 is an answer: where all are normal, it is
    given in 95 % of the cases."""

    units: tuple[RankedUnit, ...]
    judged: int
    normal: int
    among: bool
    level: float
    unusual: int | None
