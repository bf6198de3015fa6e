"""The watcher: turns stored batches' observations into sessions, rates and incidents, one round at a time.

    observations --> minute counts --a minute is complete--> RateRound --alarms----> rows, events
                 --> open sessions --closed--> SessionRound --verdicts-------------> rows, events
                 --> anomalous templates ------------------------------------------> events --> IncidentRound

One process watches at a time (lease `watch`). A round reads, decides, and writes all its changes in one step,
the rows for the sinks included. The rows then go to the sinks under ids of their own, so a second write of
them is harmless. After a crash the next round goes on from the state in Redis.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from pipeline.errors import BadPayload, LeaseRefused
from pipeline.logs import logger
from pipeline.settings import Settings
from pipeline.watching.alarm_budget import AlarmBudget
from pipeline.watching.callbacks import ANY_FAILURE, Callbacks, passes
from pipeline.watching.incident_round import IncidentRound
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.rate_round import RateRound
from pipeline.watching.rates.minute_counts import MOST_HELD, MOST_WAITING
from pipeline.watching.rows import FoundRows, WatcherFinding, finding_rows, template_of
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
from pipeline.watching.view import Changes, Spare, View

# Of one round. Small batches of many workloads are hundreds of observations a second, and a round costs as
# much as a hundred of them. Their rows and bytes bound the time of a round (state.py).
MAX_OBSERVATIONS: Final = 1_024
# Events of one round; the adaptive budget takes a part of them. Each event may belong to a session of its
# own, and Redis serves no other client while a round writes its changes.
MAX_EVENTS: Final = 40_000
_PARTS: Final = ("rates", "sessions", "incidents")


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
        self.alerts_per_day = settings.watch.alerts_per_day
        self.finite = settings.internal.session_open_s is not None  # a run: all lines come, then it ends
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
        began, spared = self.clock(), dict.fromkeys(_PARTS, Spare.NOTHING)
        while True:
            view, old_s = self._view(flood=flood and not end, end=end)
            try:
                changes, summary = self._changes(view, old_s, end=end and not view.more, spared=spared)
                changed = self.state.change(changes, token=token, view=None if any(spared.values()) else view)
                break
            except ANY_FAILURE as exc:
                failure = exc.__cause__ if isinstance(exc, _PartFailed) and exc.__cause__ else exc
                if passes(failure):
                    raise failure from None
                part = exc.part if isinstance(exc, _PartFailed) else ""
                logger().error("watch.failed", part=part or "the step", exc_info=failure)
                if view.read > 1:  # the next rounds find the one that fails
                    self.max_observations = 1
                    return RoundSummary(more=True)
                if not _spare_more(spared, part, new=view.read > 0):
                    return RoundSummary(unread=view.unread + view.read)
        if not changed:
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

    def _view(self, *, flood: bool, end: bool) -> tuple[View, float]:
        """The state at the beginning of a round, and the seconds for rates that are not live."""
        view = self.state.snapshot(self.max_observations, self.budget.of(MAX_EVENTS))
        most = MOST_WAITING + (MOST_HELD if self.finite else 0)
        if any(counts.waiting > most for counts in view.minute_counts.values()):
            return view.without_observations(), RATES_S  # all others wait for them
        return view, BUSY_OLD_S if flood or (view.more and not end) else RATES_S

    def _changes(
        self, view: View, old_s: float, *, end: bool, spared: Mapping[str, Spare]
    ) -> tuple[Changes, RoundSummary]:
        """The changes of all parts of a round. Raises _PartFailed."""
        began, changes = self.clock(), Changes.of(view)
        budget = AlarmBudget(per_day=self.alerts_per_day, workloads=view.workloads())

        def part(name: str, run: Callable[[View, Spare], Changes]) -> Changes:
            spare = spared[name]
            if spare in (Spare.NEW, Spare.ALL):
                changes.failed.update(view.sizes(name))
            if spare is Spare.ALL:
                return Changes()
            try:
                return run(view.unobserved() if spare is Spare.NEW else view, spare)
            except ANY_FAILURE as exc:
                raise _PartFailed(name) from exc

        rates = part(
            "rates",
            lambda view, spare: RateRound(
                state=self.state, view=view, clock=self.clock, budget_s=RATES_S, old_s=old_s,
                # The report of a run lists all findings, so none is reported again as an alarm.
                alarm_per_day=math.inf if self.finite else budget.share,
                finite=self.finite, end=end, spare=spare,
            ).run(),
        )  # fmt: skip
        rates_s = self.clock() - began
        sessions = part(
            "sessions",
            lambda view, spare: SessionRound(
                state=self.state, callbacks=self.callbacks, limits=self.limits, view=view,
                budget=self.budget, end=end, spare=spare,
            ).run(),
        )  # fmt: skip
        found = self._unmarked([*rates.found, *sessions.found])
        if spared["incidents"] >= Spare.WAITING:
            changes.failed.update(item.workload for item in found)
        incidents = part(
            "incidents",
            lambda view, spare: IncidentRound(
                state=self.state,
                view=view,
                found=() if spare is Spare.WAITING else found,
                expected=self.callbacks.expected,
                budget=budget,
                shape=self._shape(),
            ).run(),
        )
        for one in (rates, sessions, incidents):
            changes.merge(one)
        changes.rows = self._rows(found, changes)
        changes.failed[JOINT] += self.state.damaged
        changes.note_left_out(view)
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
        """The findings that no user has marked as normal. Where the marks cannot be looked up, all are."""
        by_workload: dict[str, list[tuple[int, WatcherFinding]]] = {}
        for item in found:
            number = template_of(item.workload, item.source, item.cause)
            by_workload.setdefault(item.workload, []).append((number, item))
        return [
            item
            for workload, numbered in by_workload.items()
            for normal in [self._normal([number for number, _ in numbered], workload)]
            for number, item in numbered
            if number not in normal
        ]

    def _normal(self, numbers: Sequence[int], workload: str) -> AbstractSet[int]:
        try:
            return self.callbacks.normal(numbers, workload)
        except ANY_FAILURE as exc:
            if passes(exc):
                raise
            logger(workload=workload).exception("watch.failed", part="marks")
            return frozenset()

    def _rows(self, found: Sequence[WatcherFinding], changes: Changes) -> list[FoundRows]:
        """The rows of the findings, without those that cannot be written as rows."""
        rows: list[FoundRows] = []
        for _, group in groupby(sorted(found, key=_row_group), _row_group):
            items = list(group)
            try:
                rows += finding_rows(items)
            except ANY_FAILURE:
                logger(workload=items[0].workload).exception("watch.failed", part="rows")
                changes.failed[items[0].workload] += len(items)
        return rows

    def deliver(self) -> None:
        """Write the rows of the outbox to the sinks. Rows that no sink can ever take are dropped, and counted
        as failed."""
        for entry in self.state.outbox():
            lost = 0
            try:
                batch_id, workload, rows = unpack_entry(entry)
            except BadPayload as exc:
                logger().warning("watch.damaged", what="rows", why=str(exc))
                lost = 1
            else:
                try:
                    self.callbacks.store(batch_id, workload, rows)
                except ANY_FAILURE as exc:
                    if passes(exc):
                        raise
                    logger(workload=workload, batch=batch_id).exception("watch.rejected")
                    lost = rows.height
            self.state.delivered(entry, lost=lost)


class _PartFailed(Exception):
    """A part of a round failed; its cause is why."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


def _row_group(item: WatcherFinding) -> tuple[str, str]:
    return item.workload, item.source


def _spare_more(spared: dict[str, Spare], part: str, *, new: bool) -> bool:
    """Let the part that failed do without more; all of them where it is not known. `new`: an observation was
    read. False where nothing is left to do without."""
    names = [part] if part else list(spared)
    if all(spared[name] is Spare.ALL for name in names):
        return False
    lowest = min(spared[name] for name in names)
    after = Spare.WAITING if not part or not new else Spare.NEW
    for name in names:
        spared[name] = max(spared[name], after, Spare(min(Spare.ALL, lowest + 1)))
    return True
