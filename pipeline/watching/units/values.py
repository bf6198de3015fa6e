"""What is said of ranked units. Programs that only read answers import it, so it needs no columns."""

from dataclasses import dataclass
from enum import StrEnum


class UnitEvidence(StrEnum):
    """What speaks for a sick unit."""

    NEW = "new"
    COUNTS = "counts"
    ACTIVE = "active"
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
    """A unit in its place. `p_value`: the share of normal units with as much evidence. `sick`: None where no
    level can be asked. `first`, `last`: seconds since the epoch, None without a timed line."""

    unit: str
    evidence: float
    p_value: float
    sick: bool | None
    reasons: tuple[UnitReason, ...]
    lines: int
    flagged: int
    findings: int
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRanking:
    """The sickest first, at most as many as were asked for. `judged`, `normal`: units of each.

    `among`: without normal units, the judged ones were compared with each other. `threshold`: of the
    evidence, None where `level` is below `least_level`."""

    units: tuple[RankedUnit, ...]
    judged: int
    normal: int
    among: bool
    level: float
    least_level: float
    threshold: float | None
    sick: int
