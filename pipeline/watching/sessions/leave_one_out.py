"""What scores mean: the tail of the scores that normal sessions of training have when they are left out of it.

A score's p-value is the share of left-out normal sessions with one at least as high, the new one counted with them
(conformal: Vovk, Gammerman, Shafer 2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NEVER: Final = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Scores above 0 of left-out sessions, ascending, and how many sessions have each; `total` counts all sessions."""

    values: Floats
    sessions: Ints
    total: int
    chance: float = 1.0  # that there is anything to score in a normal session

    @classmethod
    def of(cls, scores: Floats, sessions: Ints, *, total: int, chance: float = 1.0) -> Self:
        """From the left-out score of each distinct session (or kind) and how many sessions it stands for."""
        scored = (scores > 0) & (scores < NEVER)
        values, at = np.unique(scores[scored], return_inverse=True)
        found = np.bincount(at, weights=sessions[scored], minlength=len(values)).astype(np.int64)
        return cls(values=values, sessions=found, total=total, chance=chance)

    def p_values(self, scores: Floats) -> Floats:
        """Of these scores; 1 where there is nothing to score."""
        above = np.append(np.cumsum(self.sessions[::-1])[::-1], 0)
        p = self.chance * (1.0 + above[np.searchsorted(self.values, scores)]) / (self.total + 1.0)
        return np.where(scores > 0, p, 1.0)

    def limit(self, level: float) -> float:
        """The highest score that is still normal: p-values of higher ones are at most `level`. None is too high where too few
        sessions were left out to say that of any."""
        if self.chance / (self.total + 1.0) > level:
            return NEVER
        normal = self.values[self.p_values(self.values) > level]
        return float(normal[-1]) if len(normal) else 0.0

    def pack(self) -> list[Any]:
        """For msgpack."""
        values, sessions = self.values.astype("<f8").tobytes(), self.sessions.astype("<i8").tobytes()
        return [values, sessions, self.total, self.chance]

    @classmethod
    def unpack(cls, fields: Sequence[Any]) -> Self:
        """Raises ValueError or TypeError when these are not what `pack` makes."""
        packed, counts, total, chance = fields
        values, sessions = np.frombuffer(packed, dtype="<f8"), np.frombuffer(counts, dtype="<i8")
        if len(values) != len(sessions) or type(total) is not int or not 0 <= total < 1 << 62:
            raise ValueError("a tail of different lengths")
        if not (np.diff(values) > 0).all() or not (values > 0).all() or not np.isfinite(values).all():
            raise ValueError("scores out of order")
        if not (sessions >= 0).all() or not 0.0 <= float(chance) <= 1.0:
            raise ValueError("a tail that cannot be")
        return cls(values=values, sessions=sessions, total=total, chance=float(chance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """An exponential tail, where too few left-out sessions score at all to count those above: `chance` that one does,
    and their mean score, `prior` taken as one of them."""

    chance: float
    mean: float

    @classmethod
    def of(cls, scores: Floats, sessions: int, *, total: int, prior: float) -> Self:
        """From left-out scores, of which `sessions` of `total` have one above 0."""
        scored = scores[scores > 0]
        mean = (float(scored.sum()) + prior) / (len(scored) + 1.0)
        return cls(chance=min(1.0, (sessions + 1.0) / (total + 1.0)), mean=mean)

    def p_values(self, scores: Floats) -> Floats:
        """Of these scores; 1 where there is nothing to score."""
        return np.where(scores > 0, self.chance * np.exp(-scores / self.mean), 1.0)

    def limit(self, level: float) -> float:
        """The highest score that is still normal."""
        return max(0.0, self.mean * float(np.log(self.chance / level)))

    @classmethod
    def unpack(cls, fields: Sequence[Any]) -> Self:
        """Raises ValueError or TypeError when these are not chance and mean."""
        chance, mean = (float(number) for number in fields)
        if not 0 < chance <= 1 or not 0 < mean < 1e9:
            raise ValueError("a chance that cannot be")
        return cls(chance=chance, mean=mean)
