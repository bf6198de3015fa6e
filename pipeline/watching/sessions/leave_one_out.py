"""Tails of scores: p-values from the scores of normal training sessions that are left out of training.

The p-value of a score is the share of left-out normal sessions that score at least as high, the new session
counted among them (conformal prediction: Vovk, Gammerman, Shafer 2005).
"""

from dataclasses import dataclass
from typing import Annotated, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ISOLATED: Final = np.inf  # score of a left-out session that has nothing in common with any other
_Chance = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TailWire(msgspec.Struct, frozen=True, array_like=True):
    """Wire form of an EmpiricalTail; arrays are little-endian."""

    values: bytes
    sessions: bytes
    total: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    chance: _Chance


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalTail:
    """Positive left-out scores, ascending, and the sessions at each; `total` counts all sessions."""

    values: Floats
    sessions: Ints
    total: int
    chance: float = 1.0  # that a normal session has a positive score

    @classmethod
    def of(cls, scores: Floats, sessions: Ints, *, total: int, chance: float = 1.0) -> Self:
        """From left-out scores and the number of sessions that each stands for."""
        scored = (scores > 0) & (scores < ISOLATED)
        values, at = np.unique(scores[scored], return_inverse=True)
        found = np.bincount(at, weights=sessions[scored], minlength=len(values)).astype(np.int64)
        return cls(values=values, sessions=found, total=total, chance=chance)

    def p_values(self, scores: Floats) -> Floats:
        """Of these scores; 1 for a score of 0."""
        above = np.append(np.cumsum(self.sessions[::-1])[::-1], 0)
        p = self.chance * (1.0 + above[np.searchsorted(self.values, scores)]) / (self.total + 1.0)
        return np.where(scores > 0, p, 1.0)

    def limit(self, level: float) -> float:
        """The highest score whose p-value is above `level`; infinite if there are too few sessions for it."""
        if self.chance / (self.total + 1.0) > level:
            return np.inf
        normal = self.values[self.p_values(self.values) > level]
        return float(normal[-1]) if len(normal) else 0.0

    def to_wire(self) -> TailWire:
        values, sessions = self.values.astype("<f8").tobytes(), self.sessions.astype("<i8").tobytes()
        return TailWire(values, sessions, self.total, self.chance)

    @classmethod
    def from_wire(cls, wire: TailWire) -> Self:
        """Raises ValueError."""
        values, sessions = np.frombuffer(wire.values, dtype="<f8"), np.frombuffer(wire.sessions, dtype="<i8")
        if len(values) != len(sessions) or not (sessions >= 0).all():
            raise ValueError("a tail with impossible numbers of sessions")
        if not (np.diff(values) > 0).all() or not (values > 0).all() or not np.isfinite(values).all():
            raise ValueError("scores out of order")
        return cls(values=values, sessions=sessions, total=wire.total, chance=wire.chance)


class ExponentialTail(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A tail where too few left-out sessions score: the chance of a positive score, and their mean."""

    chance: Annotated[float, msgspec.Meta(gt=0, le=1)]
    mean: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]

    @classmethod
    def of(cls, scores: Floats, sessions: int, *, total: int, prior: float) -> Self:
        """From left-out scores; `sessions` of `total` have a positive one. `prior` counts as one more."""
        scored = scores[scores > 0]
        mean = (float(scored.sum()) + prior) / (len(scored) + 1.0)
        return cls(chance=min(1.0, (sessions + 1.0) / (total + 1.0)), mean=mean)

    def p_values(self, scores: Floats) -> Floats:
        """Of these scores; 1 for a score of 0."""
        return np.where(scores > 0, self.chance * np.exp(-scores / self.mean), 1.0)

    def limit(self, level: float) -> float:
        """The highest score whose p-value is above `level`."""
        return max(0.0, self.mean * float(np.log(self.chance / level)))
