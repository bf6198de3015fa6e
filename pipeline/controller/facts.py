"""The inputs of a decision about a training: facts, rules, and the history of past attempts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Self

from pipeline.controller.drift import Drift
from pipeline.settings import Settings

# Bounds of what is recorded and shown, whatever is watched.
NAMES_RECORDED: Final = 50
NAME_CHARS: Final = 80
BACKOFF_MOST_S: Final = 3_600.0
REASON_CHARS: Final = 300
REST: Final = timedelta(hours=1)  # a training asks for the GPU and puts inference on the CPU
REST_MOST: Final = timedelta(days=2)  # a reference and a window of drift span a day each
RESTING: Final = frozenset(("outdated", "drift", "volume"))  # causes that wait for the rest


class AttemptOutcome(StrEnum):
    """How an attempt at a training ended."""

    COMPLETED = "completed"  # published
    CANDIDATE = "candidate"  # judged worse than the live model, kept
    CANCELLED = "cancelled"
    ROLLED_BACK = "rolled-back"  # an operator took its version back
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One training of this model that has ended, whoever asked for it."""

    at: datetime  # when it ended; aware UTC
    outcome: AttemptOutcome
    causes: tuple[str, ...]  # `Retrain.causes` of the decision; empty when an operator asked
    lines: Mapping[str, int]  # stored lines by workload at the request (`Facts.workloads` of that decision)
    reason: str = ""  # of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The effect of past attempts; `after` folds one more in. One per model, small, stored as JSON."""

    last: Attempt | None = None  # the last that did not fail
    vain: int = 0  # attempts in a row that a moved stream asked for again soon after the one before
    failures: int = 0  # in a row
    failed_at: datetime | None = None
    failure: str = ""

    def after(self, attempt: Attempt) -> "History":
        """The history once `attempt` has ended."""
        last = self.last
        if attempt.outcome is AttemptOutcome.FAILED:
            failure = truncated(attempt.reason, REASON_CHARS)
            return replace(self, failures=self.failures + 1, failed_at=attempt.at, failure=failure)
        if attempt.outcome is AttemptOutcome.ROLLED_BACK:
            # Only the age begins anew: otherwise the old version that serves again would be replaced at once.
            last = last or attempt
            return replace(self, last=replace(last, at=max(last.at, attempt.at), outcome=attempt.outcome))
        # A training of some workloads says nothing about the lines of the others.
        lines = {**(last.lines if last else {}), **attempt.lines}
        soon = last is not None and attempt.at - last.at < 2 * self.rest
        return History(
            last=replace(attempt, lines=lines, reason=""),
            vain=self.vain + 1 if soon and RESTING & set(attempt.causes) else 0,
        )

    @property
    def rest(self) -> timedelta:
        """The least time between two trainings that a moved stream asks for. It doubles while they do not
        help."""
        return min(REST_MOST, REST * 2.0 ** min(self.vain, 10))

    def not_after(self, now: datetime) -> "History":
        """The same, where a clock that was wrong has written times that are still to come."""
        last = self.last
        if last is not None and last.at > now:
            last = replace(last, at=now)
        failed_at = self.failed_at if self.failed_at is None else min(self.failed_at, now)
        return replace(self, last=last, failed_at=failed_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a decision rests on. Times are aware UTC."""

    now: datetime
    model: str  # "shared" or the workload whose own model it is.
    watching: bool  # The watchlist has an entry.
    workloads: Mapping[str, int] = field(default_factory=dict)  # Watched ones of this model -> stored lines.
    silent: tuple[str, ...] = ()  # Watchlist patterns that match no workload yet.
    trained: frozenset[str] = frozenset()  # Workloads of the live version's training.
    outdated: bool = False  # An older build made the live version, so that it answers no line.
    live_since: datetime | None = None  # Publication of the live version; None: no model.
    history: History = field(default_factory=History)
    busy: bool = False  # a training of this model is queued or runs
    drift: Drift | None = None  # None: not measured (no model)
    scheduled: datetime | None = None  # the latest time of `retrain_at` that is not after now
    scheduled_next: datetime | None = None

    @property
    def lines(self) -> int:
        """Stored lines of all these workloads."""
        return sum(self.workloads.values())

    @property
    def new_lines(self) -> int:
        """Lines stored since the last attempt; a workload that left takes nothing away from the others."""
        before: Mapping[str, int] = self.history.last.lines if self.history.last else {}
        return sum(max(0, lines - before.get(name, 0)) for name, lines in self.workloads.items())

    @property
    def since(self) -> datetime | None:
        """When the model last became what it is, or an attempt at a better one ended."""
        last = self.history.last
        return max((t for t in (self.live_since, last.at if last else None) if t is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainRules:
    """The settings a decision follows."""

    min_lines: int
    age_s: float
    volume_lines: int
    backoff_s: float
    drift_novelty: float = 0.05  # rise of the share of lines with a new template
    drift_unknown: float = 0.10  # rise of the share of unknown words
    drift_score: float = 0.25  # population stability index: the usual mark of a major shift

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(
            min_lines=settings.train.retrain_min_lines,
            age_s=settings.train.retrain_age_s,
            volume_lines=settings.internal.retrain_lines,
            backoff_s=settings.internal.retrain_backoff_s,
        )


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The facts that people see with a decision, bounded."""
    history, last = facts.history, facts.history.last
    return {
        "lines": facts.lines,
        "new_lines": facts.new_lines,
        "workload_count": len(facts.workloads),
        "silent": [truncated(name, NAME_CHARS) for name in facts.silent[:NAMES_RECORDED]],
        "live_since": iso(facts.live_since),
        "last": last
        and {"at": last.at.isoformat(), "outcome": last.outcome.value, "causes": list(last.causes)},
        "failures": history.failures,
        "failure": history.failure,
        "drift": facts.drift and asdict(facts.drift),
        "scheduled_next": iso(facts.scheduled_next),
    }


def backoff_s(failures: int, base_s: float) -> float:
    """Pause after so many failures in a row: base, doubled each time, an hour at most."""
    # The exponent is bounded because a float is: long before forty doublings every base has reached the most.
    return 0.0 if failures < 1 else min(BACKOFF_MOST_S, base_s * 2.0 ** min(failures - 1, 40))


def truncated(text: str, limit: int) -> str:
    """At most so many characters; a cut shows."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def iso(at: datetime | None) -> str | None:
    """ISO 8601, or None."""
    return None if at is None else at.isoformat()
