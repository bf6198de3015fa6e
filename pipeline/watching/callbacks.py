"""The watcher's dependencies, and which of their failures pass."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol

import polars as pl
import redis

from pipeline.errors import BadBundle, BadMask, BadSetting, Retryable
from pipeline.redis.connection import is_refusal
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.sessions.follow_ups import FollowUps
from pipeline.watching.sessions.joint import Places
from pipeline.watching.sessions.model import SessionVerdict

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


def _nothing_usual(_workload: str) -> Mapping[int, float]:
    return {}


def _one_a_day(_workload: str) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The watcher's way to models, sinks and marks."""

    # (workload, kind of key) -> (version, session model) of the live model version; None without one.
    session_model: Callable[[str, str], tuple[str, SessionJudge] | None]
    store: Callable[[str, str, pl.DataFrame], None]  # (batch id, workload, rows) into every sink
    # (template ids, workload) -> the ids that a user marked as normal.
    normal: Callable[[Sequence[int], str], AbstractSet[int]]
    # workload -> error-like templates that its training knows, with their lines a day.
    usual: Callable[[str], Mapping[int, float]] = _nothing_usual
    # workload -> new calm templates that its training expects in a day.
    novel: Callable[[str], float] = _one_a_day
