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


class TailWire(msgspec.Struct, frozen=True, array_like=True):
    """Wire form of an EmpiricalTail; arrays are little-endian."""

    values: bytes
    p: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalTail:
    """A step function: a positive score up to `values[i]` and above those before has the p-value `p[i]`. The
    last one is that of every greater score."""

    values: Floats
    p: Floats

    @classmethod
    def of(cls, vectors: Floats, new: int, others: Floats, times: Ints, *, total: int) -> Self:
        """From the left-out score of each kept count vector, and the number of sessions, of `total`, whose
        vector nobody else has; from the scores and numbers of sessions whose vector is not kept.

        A positive score has two causes. A session of a new vector that resembles others: its chance is that
        of such a session in training (Good-Turing). How far it deviates is known from as many cases as there
        are vectors, however many sessions have one: 1,000 equal sessions are one case. Or a session of one of
        the many vectors that are not kept, or of none that resembles any other. Of these each is a case.
        """
        related = np.sort(vectors[vectors < ISOLATED])
        order = np.argsort(others, kind="stable")
        values = np.unique(np.concatenate([related, others[others < ISOLATED]]))
        as_far = len(related) - np.searchsorted(related, np.append(values, ISOLATED))
        above = np.append(np.cumsum(times[order][::-1])[::-1], 0)
        seen = above[np.searchsorted(others[order], np.append(values, ISOLATED))]
        p = ((new + 1.0) * (1.0 + as_far) / (len(related) + 1.0) + seen) / (total + 1.0)
        return cls(values=values, p=np.minimum(1.0, p))

    def p_values(self, scores: Floats) -> Floats:
        """Of these scores; 1 for a score of 0."""
        return np.where(scores > 0, self.p[np.searchsorted(self.values, scores)], 1.0)

    def limit(self, level: float) -> float:
        """The highest score whose p-value is above `level`; infinite if training is too small for it."""
        normal = int((self.p > level).sum())
        return np.inf if normal == len(self.p) else float(self.values[normal - 1]) if normal else 0.0

    def to_wire(self) -> TailWire:
        return TailWire(self.values.astype("<f8").tobytes(), self.p.astype("<f8").tobytes())

    @classmethod
    def from_wire(cls, wire: TailWire) -> Self:
        """Raises ValueError."""
        values, p = np.frombuffer(wire.values, dtype="<f8"), np.frombuffer(wire.p, dtype="<f8")
        if len(p) != len(values) + 1 or not ((p > 0) & (p <= 1)).all() or not (np.diff(p) <= 0).all():
            raise ValueError("impossible p-values of a tail")
        if not (np.diff(values) > 0).all() or not (values > 0).all() or not np.isfinite(values).all():
            raise ValueError("scores out of order")
        return cls(values=values, p=p)


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
