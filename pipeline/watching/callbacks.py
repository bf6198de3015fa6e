"""The watcher's dependencies, and which of their failures pass."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import polars as pl
import redis

from pipeline.errors import BadBundle, BadMask, BadSetting, Retryable
from pipeline.redis.connection import is_refusal
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.follow_ups import FollowUps
from pipeline.watching.sessions.joint import Places
from pipeline.watching.sessions.model import SessionVerdict

if TYPE_CHECKING:
    from pipeline.models.bundle import Manifest

# Polars' panics are no Exceptions.
ANY_FAILURE: Final = (Exception, pl.exceptions.PanicException)
_SURROUNDINGS: Final = (Retryable, BadBundle, BadMask, BadSetting, OSError, ImportError)


def passes(failure: BaseException) -> bool:
    """Whether waiting or an operator heals it. A round or a sink would raise anything else for ever."""
    if isinstance(failure, redis.ResponseError):
        return is_refusal(failure)
    return isinstance(failure, (*_SURROUNDINGS, redis.RedisError))


class SessionJudge(Protocol):
    """The part of `SessionModel` (sessions/model.py) that the watcher needs."""

    @property
    def ends(self) -> frozenset[int]:
        """Templates with which a session ends."""

    @property
    def places(self) -> Places:
        """The workloads and templates behind the events of a joint model."""

    @property
    def follow_ups(self) -> FollowUps:
        """What comes soon after what."""

    @property
    def shape(self) -> TraceShape:
        """Of a joint model: who calls whom."""

    @property
    def per_day(self) -> float:
        """The sessions that are judged in a day, as many as the training had."""

    @property
    def stateful(self) -> bool:
        """Whether a session after a gap is judged with everything before the gap."""

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        """One verdict for each session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the training of a workload's model expects of a day."""

    errors: Mapping[int, float] = field(default_factory=dict)  # error-like templates that it knows -> lines
    novel: float = 1.0  # new calm templates; 1 where nothing tells

    @classmethod
    def by(cls, manifest: "Manifest") -> "Expected":
        """What the manifest of a model says."""
        novel = manifest.stats.novel_per_day
        return cls(errors=dict(manifest.daily), novel=cls().novel if novel is None else novel)


def _nothing_known(_workload: str) -> Expected:
    return Expected()


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The watcher's way to models, sinks and marks."""

    # (workload, kind of key) -> (version, session model) of the live model version; None without one.
    session_model: Callable[[str, str], tuple[str, SessionJudge] | None]
    store: Callable[[str, str, pl.DataFrame], None]  # (batch id, workload, rows) into every sink
    # (template ids, workload) -> the ids that a user marked as normal.
    normal: Callable[[Sequence[int], str], AbstractSet[int]]
    expected: Callable[[str], Expected] = _nothing_known
