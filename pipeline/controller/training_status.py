"""A training as its users see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.records.batch import LearntFrom
from pipeline.redis.keys import SHARED
from pipeline.units import plural

_SHOWN: Final = 5  # kinds of sessions that are not judged


class TrainingState(StrEnum):
    """Where a training is."""

    NONE = "none"
    QUEUED = "queued"
    FETCHING = "fetching"
    TRAINING = "training"
    JUDGING = "judging"
    PUBLISHING = "publishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({TrainingState.COMPLETED, TrainingState.FAILED, TrainingState.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A training as users see it. Times in seconds, moments in ms of Redis time (0: not yet)."""

    state: TrainingState = TrainingState.NONE
    request_id: str = ""
    model: str = SHARED
    asked_by: str = ""
    why: str = ""
    answers: tuple[str, ...] = ()
    reason: str = ""  # of a failure, or why a completed training's model was not published
    percent: float = 0.0
    elapsed_s: float = 0.0
    remaining_s: float = 0.0
    epoch: int = 0
    loss: float = 0.0
    lines: int = 0  # records read
    patterns: int = 0  # distinct masked lines learnt from
    workloads: Mapping[str, int] = field(default_factory=dict)  # records used of each
    learnt_from: Mapping[str, LearntFrom] = field(default_factory=dict)  # of each of these workloads
    unjudged: tuple[str, ...] = ()  # sessions that its version does not judge, and why
    stored: Mapping[str, int] = field(default_factory=dict)  # lines stored of each when it began
    version: str = ""
    published: bool = False
    device: str = ""
    attempt: int = 1
    retry_of: str = ""
    retried_as: str = ""
    created_ms: int = 0
    started_ms: int = 0
    ended_ms: int = 0
    not_before_ms: int = 0

    @property
    def not_judged(self) -> list[str]:
        """Of `unjudged` the first few, and the number of the others."""
        more = len(self.unjudged) - _SHOWN
        others = [f"and {plural(more, 'more kind')} of sessions"] if more > 0 else []
        return [*self.unjudged[:_SHOWN], *others]

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def running(self) -> bool:
        return self.state not in (TrainingState.NONE, TrainingState.QUEUED) and not self.ended
