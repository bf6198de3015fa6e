"""The watcher's dependencies, and the failures of a dependency that pass by themselves."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol

import polars as pl
import redis

from pipeline.errors import Retryable
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.follow_ups import FollowUps
from pipeline.watching.sessions.joint import Places
from pipeline.watching.sessions.model import SessionVerdict

# Waiting heals these. A round or a sink that raises anything else would raise it for ever.
TRANSIENT: Final = (Retryable, redis.RedisError, OSError)
# Polars' panics are no Exceptions.
ANY_FAILURE: Final = (Exception, pl.exceptions.PanicException)


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
    def stateful(self) -> bool:
        """Whether a session after a gap is judged with everything before the gap."""

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        """One verdict for each session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The watcher's way to models, sinks and marks."""

    # (workload, kind of key) -> (version, session model) of the live model version; None without one.
    session_model: Callable[[str, str], tuple[str, SessionJudge] | None]
    store: Callable[[str, str, pl.DataFrame], None]  # (batch id, workload, rows) into every sink
    # (template ids, workload) -> the ids that a user marked as normal.
    normal: Callable[[Sequence[int], str], AbstractSet[int]]
