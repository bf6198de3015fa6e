"""The watcher: turns stored batches' observations into sessions, rates and incidents, one round at a time.

    observations --> minute counts --a minute is complete--> RateRound --alarms----> rows, events
                 --> open sessions --closed--> SessionRound --verdicts-------------> rows, events
                 --> anomalous templates ------------------------------------------> events --> IncidentRound

One process watches at a time (lease `watch`). A round reads, decides, and writes all its changes in one step,
the rows for the sinks included. The rows then go to the sinks under ids of their own, so a second write of
them is harmless. After a crash the next round goes on from the state in Redis.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from pipeline.errors import BadPayload, LeaseRefused
from pipeline.logs import logger
from pipeline.settings import Settings
from pipeline.watching.callbacks import ANY_FAILURE, TRANSIENT, Callbacks
from pipeline.watching.incident_round import IncidentRound
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.rate_round import RateRound
from pipeline.watching.rates.minute_counts import MOST_WAITING
from pipeline.watching.rows import WatcherFinding, finding_rows, template_of
from pipeline.watching.session_round import SessionLimits, SessionRound
from pipeline.watching.sessions.keys import JOINED, JOINT
from pipeline.watching.state import WatcherState, unpack_entry
from pipeline.watching.time_budget import (
    BUSY_OLD_S,
    RATES_S,
    ROUND_S,
    AdaptiveBudget,
    FairRotation,
    ObservationAge,
)
from pipeline.watching.view import Changes, View

# Of one round. Small batches of many workloads are hundreds of observations a second, and a round costs as
# much as a hundred of them. Their rows and bytes bound the time of a round (state.py).
MAX_OBSERVATIONS: Final = 1_024
# Events of one round; the adaptive budget takes a part of them. Each event may belong to a session of its
# own, and Redis serves no other client while a round writes its changes.
MAX_EVENTS: Final = 40_000


@dataclass(slots=True, kw_only=True)
class RoundSummary:
    """The result of one round."""

    observations: int = 0
    judged: int = 0  # sessions
    found: list[WatcherFinding] = field(default_factory=list)
    more: bool = False  # another round has something to do at once
    unread: int = 0  # observations that wait
    rates_s: float = 0.0  # time that rates took
    behind: bool = False  # rates have more to do
    only_behind: bool = False  # nothing but rates has more to do, and no observation waits


class Watcher:
    """One per process. Raises RedisUnavailable, SinkUnavailable, ModelUnavailable, with nothing changed."""

    def __init__(
        self,
        state: WatcherState,
        settings: Settings,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.callbacks = callbacks
        self.limits = SessionLimits.of(settings)
        self.clock = clock
        self.budget = AdaptiveBudget()
        self.rotation = FairRotation()
        self.age = ObservationAge()
        self.max_observations = MAX_OBSERVATIONS  # 1 after a failed round, to find the one that fails

    def round(self, token: int, *, end: bool = False, flood: bool = False) -> RoundSummary:
        """Add the oldest observations to the state, and store the findings. `end`: nothing more will come, so
        every session closes and every minute is complete. `flood`: lines on their way need the processor, so
        minutes of old logs wait. Raises LeaseRefused, and changes nothing, while another process watches.
        """
        self.deliver()
        began = self.clock()
        view = self.state.snapshot(self.max_observations, self.budget.of(MAX_EVENTS))
        old_s = BUSY_OLD_S if (flood or view.more) and not end else RATES_S
        if any(counts.waiting > MOST_WAITING for counts in view.minute_counts.values()):
            view, old_s = view.without_observations(), RATES_S  # all others wait for them
        failed = False
        try:
            changes, summary = self._changes(view, old_s, end=end and not view.more)
        except TRANSIENT:
            raise
        except ANY_FAILURE:
            if not view.read:
                raise
            logger().exception("watch.failed")
            if view.read > 1:
                self.max_observations = 1
                return RoundSummary(more=True)
            # This observation would fail for ever, and the list would drop all others behind it.
            changes, summary, failed = Changes.of(view), RoundSummary(observations=1, more=True), True
        if not self.state.change(changes, token=token, view=None if failed else view):
            raise LeaseRefused(
                "another process watches now, or Redis lost the state that this round had read"
            )
        self.max_observations = min(MAX_OBSERVATIONS, 2 * self.max_observations)
        took = self.clock() - began - summary.rates_s
        allowed_s = max(ROUND_S - summary.rates_s, ROUND_S - RATES_S)
        self.budget.record(took, allowed_s, full=summary.more and (view.read > 0 or not view.more))
        summary.only_behind = summary.behind and not summary.more and not summary.unread
        summary.more |= summary.behind
        self.deliver()
        return summary

    def _changes(self, view: View, old_s: float, *, end: bool) -> tuple[Changes, RoundSummary]:
        began = self.clock()
        rates = RateRound(
            state=self.state, view=view, clock=self.clock, budget_s=RATES_S, old_s=old_s, end=end
        ).run()
        rates_s = self.clock() - began
        sessions = SessionRound(
            state=self.state,
            callbacks=self.callbacks,
            limits=self.limits,
            view=view,
            budget=self.budget,
            end=end,
        ).run()
        found = self._unmarked([*rates.found, *sessions.found])
        incidents = IncidentRound(state=self.state, view=view, found=found, shape=self._shape()).run()
        changes = Changes.of(view)
        for part in (rates, sessions, incidents):
            changes.merge(part)
        changes.rows = finding_rows(found)
        return changes, RoundSummary(
            observations=view.read,
            judged=sessions.judged,
            found=found,
            more=view.more or sessions.more,
            unread=view.unread,
            rates_s=rates_s,
            behind=rates.more,
        )

    def _shape(self) -> TraceShape | None:
        """What the live model knows of traces; None where it knows none."""
        models = (self.callbacks.session_model(JOINT, kind) for kind in sorted(JOINED))
        return next((model.shape for _, model in filter(None, models)), None)

    def _unmarked(self, found: Iterable[WatcherFinding]) -> list[WatcherFinding]:
        """The findings that no user has marked as normal."""
        by_workload: dict[str, list[tuple[int, WatcherFinding]]] = {}
        for item in found:
            number = template_of(item.workload, item.source, item.cause)
            by_workload.setdefault(item.workload, []).append((number, item))
        return [
            item
            for workload, numbered in by_workload.items()
            for normal in [self.callbacks.normal([number for number, _ in numbered], workload)]
            for number, item in numbered
            if number not in normal
        ]

    def deliver(self) -> None:
        """Write the rows of the outbox to the sinks. Rows that no sink can ever take are dropped."""
        for entry in self.state.outbox():
            try:
                batch_id, workload, rows = unpack_entry(entry)
            except BadPayload as exc:
                logger().warning("watch.damaged", what="rows", why=str(exc))
            else:
                try:
                    self.callbacks.store(batch_id, workload, rows)
                except TRANSIENT:
                    raise
                except ANY_FAILURE:
                    logger(workload=workload, batch=batch_id).exception("watch.rejected")
            self.state.delivered(entry)
