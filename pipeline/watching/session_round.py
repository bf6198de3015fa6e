"""A round's work on sessions: adds events, closes sessions that are due, judges them, keeps their histories.

observations --> open sessions --due or surplus--> closed --within the budget--> judged --> findings
                                                      may go on after a gap --> session history
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from pipeline.logs import logger
from pipeline.settings import Settings
from pipeline.watching.callbacks import ANY_FAILURE, TRANSIENT, Callbacks, SessionJudge
from pipeline.watching.sessions.history import KEEP_MS, SessionHistory
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.sessions.open_sessions import (
    GRACE_S,
    OpenSession,
    Segment,
    events_by_session,
    split_name,
)
from pipeline.watching.state import LANES, WatcherState
from pipeline.watching.time_budget import AdaptiveBudget
from pipeline.watching.verdicts import holds_unfinished, named_in, of_session
from pipeline.watching.view import LOST, Changes, View

# Open sessions, and pasts of sessions with gaps; the longest idle one is closed first.
MAX_OPEN: Final = 100_000
MAX_CLOSED: Final = 5_000  # Sessions of one round and lane.
MAX_JUDGED: Final = 2_000_000  # Events of the sessions of one round; each gap counts those before it again.
MAX_PER_CALL: Final = 200_000  # Events of one call of the session model, which takes many times their memory.
MAX_OPEN_EVENTS: Final = 2_000_000  # In all open sessions: some 20 MiB in Redis.
MAX_HISTORY_EVENTS: Final = 2_000_000  # In all histories.
_NEVER_MS: Final = 1 << 52  # Later than every time, and exact as a score of a sorted set.
_GRACE_MS: Final = round(GRACE_S * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The settings of sessions."""

    max_open: int
    timeout_ms: int  # length of a gap
    # A session stays open for at least a gap, and much longer in a run of which only the end is awaited.
    open_ms: int

    @classmethod
    def of(cls, settings: Settings) -> "SessionLimits":
        timeout_ms = round(settings.watch.session_timeout_s * 1000)
        open_ms = max(timeout_ms, round((settings.internal.session_open_s or 0) * 1000))
        return cls(max_open=MAX_OPEN, timeout_ms=timeout_ms, open_ms=open_ms)


@dataclass(slots=True, kw_only=True)
class SessionRound:
    """The work of one round on sessions. `end`: nothing more will come, so every session closes."""

    state: WatcherState
    callbacks: Callbacks
    limits: SessionLimits
    view: View
    budget: AdaptiveBudget
    end: bool
    changes: Changes = field(default_factory=Changes)
    open: int = 0  # sessions
    events: int = 0  # in open sessions

    def run(self) -> Changes:
        """Raises RedisUnavailable, ModelUnavailable."""
        closed = self._close(self._add_events())
        histories = self.state.histories(list(closed)) if self.view.histories else {}
        closed = self._within_budget(closed, histories)
        self._judge_all(closed, histories)
        self._forget_histories(histories)
        return self.changes

    def _add_events(self) -> dict[str, OpenSession]:
        """Add this round's events to their sessions; returns these sessions by name."""
        pieces = events_by_session(self.view.observed)
        touched = self.state.sessions(list(pieces))
        self.open = self.view.open + len(pieces) - len(touched)
        self.events = self.view.events
        ends: dict[str, frozenset[int]] = {}
        for name, of_batches in pieces.items():
            workload, key = split_name(name)
            if workload not in ends:
                model = self.callbacks.session_model(workload)
                ends[workload] = frozenset() if model is None else model[1].ends
            session = touched.setdefault(name, OpenSession(workload=workload, key=key))
            for piece in of_batches:
                self.events += session.add(piece)
            session.ended = session.ends_with(ends[workload])
        return touched

    def _close(self, touched: Mapping[str, OpenSession]) -> dict[str, OpenSession]:
        """The sessions that close in this round, by name."""
        changes, limits = self.changes, self.limits
        limit = self.budget.of(MAX_CLOSED)
        names = self._due(limit)
        changes.more = len(names) >= limit
        too_many_events = math.ceil(self.open * (1 - MAX_OPEN_EVENTS / max(1, self.events)))
        surplus = max(self.open - limits.max_open, too_many_events)
        if surplus > len(names):
            names = self.state.longest_idle(surplus)
        # A session with new events goes on, whenever it was due; at the end all sessions close.
        closed = self.state.sessions([name for name in names if name not in touched])
        changes.over = set(names) - set(touched)
        if self.end:
            closed |= touched
            changes.over |= set(touched)
        else:
            changes.sessions = {name: (s, s.due_ms(limits.open_ms)) for name, s in touched.items()}
        self.events -= sum(len(session.at_ms) for session in closed.values())
        changes.numbers["events"] = max(0, self.events) if self.open > len(changes.over) else 0
        return closed

    def _due(self, limit: int) -> list[str]:
        if self.end:
            return self.state.due(dict.fromkeys(LANES, _NEVER_MS), limit)
        if self.view.more:  # an observation that was not read may belong to any session
            return []
        # A batch in flight may have events of every session that was open when it was accepted.
        in_flight = {lane: self.view.in_flight.get(lane, _NEVER_MS) + _GRACE_MS for lane in LANES}
        return self.state.due({lane: min(self.view.now_ms, in_flight[lane]) for lane in LANES}, limit)

    def _within_budget(
        self, closed: Mapping[str, OpenSession], histories: Mapping[str, SessionHistory]
    ) -> dict[str, OpenSession]:
        """The sessions that one round can judge, at least the first; the others stay open."""
        changes, judged = self.changes, dict[str, OpenSession]()
        room = self.budget.of(MAX_JUDGED)
        for name, session in closed.items():
            before = len(histories[name].templates) if name in histories else 0
            room -= session.weight(self.limits.timeout_ms, before)
            if room >= 0 or not judged:
                judged[name] = session
                continue
            changes.over.discard(name)
            if self.end:  # otherwise Redis has the session unchanged
                changes.sessions[name] = session, session.due_ms(self.limits.open_ms)
            changes.numbers["events"] += len(session.at_ms)
            changes.more = True
        return judged

    def _judge_all(self, closed: Mapping[str, OpenSession], histories: Mapping[str, SessionHistory]) -> None:
        """Judge each workload's sessions by its live model. A failure costs the verdicts of one workload."""
        by_workload: dict[str, dict[str, OpenSession]] = {}
        for name, session in closed.items():
            by_workload.setdefault(session.workload, {})[name] = session
        for workload, sessions in by_workload.items():
            live = self.callbacks.session_model(workload)
            if live is None or not live[1].stateful:
                self.changes.numbers[LOST + workload] = self.view.now_ms
            if live is None:
                continue
            try:
                self.changes.merge(self._judge(workload, *live, sessions, histories))
            except TRANSIENT:
                raise
            except ANY_FAILURE:
                logger(workload=workload, version=live[0]).exception("watch.failed")

    def _judge(
        self,
        workload: str,
        version: str,
        model: SessionJudge,
        sessions: Mapping[str, OpenSession],
        histories: Mapping[str, SessionHistory],
    ) -> Changes:
        """The findings of one workload's sessions, and the histories of the sessions that may go on."""
        changes, wrong = Changes(), list[tuple[Segment, SessionVerdict]]()
        lost_ms = self.view.lost_ms.get(workload, -KEEP_MS) + KEEP_MS
        cut = [
            list(
                session.segments(
                    self.limits.timeout_ms,
                    stateful=model.stateful,
                    history=histories.get(name),
                    lost=session.accepted_ms <= lost_ms,
                )
            )
            for name, session in sessions.items()
        ]
        complete_ms = self._complete_ms(workload)
        verdicts = _verdicts(model, chain.from_iterable(cut))
        for (name, session), segments in zip(sessions.items(), cut, strict=True):
            # A session that is judged several times reports each cause once.
            reported = histories[name].reported if name in histories else ()
            for segment in segments:
                reported = reported if segment.history else ()
                verdict = next(verdicts)
                if not verdict.anomalous or verdict.cause in reported:
                    continue
                complete = not segment.partial and segment.at_ms[-1] <= complete_ms
                if complete or holds_unfinished(verdict):
                    wrong.append((segment, verdict))
                    reported += (verdict.cause,)
            if segments and model.stateful and not (self.end or session.ended):
                expires_ms = session.due_ms(self.limits.open_ms) + KEEP_MS
                changes.histories[name] = segments[-1].next_history(reported), expires_ms
            elif name in histories:
                changes.forgotten_histories.add(name)
        changes.judged = sum(map(len, cut))
        texts = self.state.texts(x for segment, verdict in wrong for x in named_in(segment, verdict))
        changes.found = [of_session(segment, verdict, version, texts) for segment, verdict in wrong]
        return changes

    def _complete_ms(self, workload: str) -> float:
        """Sessions with later events may miss their end, because the logs break off there."""
        counts = self.view.minute_counts.get(workload) if self.end else None
        end_ms = None if counts is None else counts.end_ms(self.limits.timeout_ms)
        return math.inf if end_ms is None else end_ms

    def _forget_histories(self, histories: Mapping[str, SessionHistory]) -> None:
        """Forget the histories that have expired, and the oldest ones past the limits."""
        view, changes = self.view, self.changes
        changed = {*changes.histories, *changes.forgotten_histories}
        new = [history for history, _ in changes.histories.values()]
        old = [histories[name] for name in changed if name in histories]
        count = view.histories + len(new) - len(old)
        events = view.history_events + _events(new) - _events(old)
        # Batches in flight and open sessions may go on with a history that has expired since.
        until_ms = min([view.now_ms, *view.in_flight.values()])
        expired = self.state.expired(until_ms, MAX_CLOSED) if view.histories and not view.more else []
        open_ = {*self.state.sessions(expired), *changes.sessions} - changes.over
        names = [name for name in expired if name not in changed and name not in open_]
        changes.more |= len(expired) >= MAX_CLOSED and bool(names)
        too_many_events = math.ceil(count * (1 - MAX_HISTORY_EVENTS / max(1, events)))
        surplus = max(count - self.limits.max_open, too_many_events)
        if surplus > len(names):
            oldest = [name for name in self.state.oldest_histories(surplus) if name not in changed]
            lost = set(oldest) - set(names)
            changes.numbers |= {LOST + split_name(name)[0]: view.now_ms for name in lost}
            names = list(dict.fromkeys(names + oldest))
        changes.forgotten_histories |= set(names)
        events -= _events(self.state.histories(names).values())
        changes.numbers["past_events"] = max(0, events) if count > len(names) else 0


def _events(histories: Iterable[SessionHistory]) -> int:
    return sum(len(history.templates) for history in histories)


def _verdicts(model: SessionJudge, segments: Iterable[Segment]) -> Iterator[SessionVerdict]:
    """One verdict for each segment, from calls of bounded size."""
    batch: list[tuple[int, ...]] = []
    events = 0
    for segment in segments:
        batch.append(segment.prefix)
        events += len(batch[-1])
        if events >= MAX_PER_CALL:
            yield from model.judge(batch)
            batch, events = [], 0
    yield from model.judge(batch)
