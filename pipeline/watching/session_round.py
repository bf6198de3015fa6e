"""A round's work on sessions: adds events, closes sessions that are due, judges them, keeps their histories.

observations --> open sessions --due or surplus--> closed --within the budget--> judged --> findings
                                                      may go on after a gap --> session history

Events of a kind of key that no live session model judges are not collected. A trace is judged in each of its
workloads, and as a whole by the joint session model. As a whole it is reported for the workload of the event
that is missing or wrong, where no part in that workload is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from pipeline.logs import logger
from pipeline.settings import Settings
from pipeline.watching.callbacks import ANY_FAILURE, Callbacks, SessionJudge, passes
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.sessions.follow_ups import Missing
from pipeline.watching.sessions.growing import GRACE_S, BatchEvents, GrowingSession, batch_events
from pipeline.watching.sessions.history import KEEP_MS, SessionHistory
from pipeline.watching.sessions.joint import EventNames
from pipeline.watching.sessions.keys import (
    JOINED,
    JOINT,
    SEPARATOR,
    kind_and_key,
    model_name,
    split_model_name,
)
from pipeline.watching.sessions.missing import with_missing
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.sessions.open_sessions import OpenSession, Segment, session_name, split_name
from pipeline.watching.state import LANES, WatcherState
from pipeline.watching.time_budget import AdaptiveBudget
from pipeline.watching.verdicts import holds_unfinished, named_in, of_session
from pipeline.watching.view import LOST, UNKEPT, Changes, Spare, View

# Open sessions, and pasts of sessions with gaps; the longest idle one is closed first.
MAX_OPEN: Final = 100_000
MAX_CLOSED: Final = 5_000  # Sessions of one round and lane.
MAX_JUDGED: Final = 2_000_000  # Events of the sessions of one round; each gap counts those before it again.
MAX_PER_CALL: Final = 200_000  # Events of one call of the session model, which takes many times their memory.
MAX_OPEN_EVENTS: Final = 2_000_000  # In all open sessions: some 20 MiB in Redis.
MAX_HISTORY_EVENTS: Final = 2_000_000  # In all histories.
# Models whose events are noted as not collected; each round reads all of these times.
MAX_UNKEPT: Final = 2_000
MAX_FAILURES: Final = 32  # of the sessions of a model in a round; beyond, the rest counts as failed
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
    """The work of one round on sessions. `end`: nothing more will come, so every session closes. `spare`:
    WAITING ends the sessions that are due without a verdict."""

    state: WatcherState
    callbacks: Callbacks
    limits: SessionLimits
    view: View
    budget: AdaptiveBudget
    end: bool
    spare: Spare = Spare.NOTHING
    changes: Changes = field(default_factory=Changes)
    open: int = 0  # sessions
    events: int = 0  # in open sessions
    # Of workload and kind: the live ones.
    models: dict[tuple[str, str], tuple[str, SessionJudge] | None] = field(default_factory=dict)
    # Of workload and kind: as of `_ends`, but for traces that are judged as parts.
    ends: dict[tuple[str, str], tuple[frozenset[int], bool]] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)  # judged sessions that closed before their time
    # Traces of which parts are reported, with the workloads of those.
    reported: dict[str, set[str]] = field(default_factory=dict)

    def run(self) -> Changes:
        """Raises RedisUnavailable, ModelUnavailable."""
        touched = self._add_events()
        if self.spare is Spare.WAITING:
            self._give_up_due(touched)
            return self.changes
        closed, early = self._close(touched)
        parts = {name: self._parts(session) for name, session in closed.items()}
        closed = self._closed_early(closed, early, parts)
        judged = [part for of_session in parts.values() for part in of_session]
        histories = self.state.histories(judged) if self.view.histories else {}
        closed = self._within_budget(closed, parts, histories)
        self._judge_all({part: one for name in closed for part, one in parts[name].items()}, histories)
        self._forget_histories(histories)
        return self.changes

    def _model(self, workload: str, kind: str) -> tuple[str, SessionJudge] | None:
        """(version, session model) of the sessions of one kind; of traces as wholes for JOINT."""
        of = workload, kind
        if of not in self.models:
            self.models[of] = self.callbacks.session_model(workload, kind)
        return self.models[of]

    def _parts(self, session: OpenSession) -> dict[str, OpenSession]:
        """The sessions that are judged of one that was collected, by name."""
        parts = session.parts()
        if session.workload == JOINT and self._model(JOINT, session.kind) is not None:
            parts[session_name(JOINT, session.entry)] = session.whole()
        return parts

    def _collected(self) -> dict[str, list[BatchEvents]]:
        """The new events of every session that a live model judges, by its name."""
        found: dict[str, list[BatchEvents]] = {}
        beginnings: dict[tuple[str, str], str | None] = {}
        for observation in self.view.observed:
            self.changes.cut[observation.workload] += observation.beyond
            by_head: dict[str, str | None] = {}  # by the text before the separator
            for entry, events in batch_events(observation).items():
                head, separator, _ = entry.partition(SEPARATOR)
                head = head if separator else ""
                if head not in by_head:
                    of = observation.workload, kind_and_key(entry)[0]
                    if of not in beginnings:
                        beginnings[of] = self._beginning(*of)
                    by_head[head] = beginnings[of]
                beginning = by_head[head]
                if beginning is not None:
                    found.setdefault(beginning + entry, []).append(events)
        unkept = dict.fromkeys(
            model_name(name, kind)
            for (workload, kind), beginning in beginnings.items()
            if beginning is None
            for name in ([workload, JOINT] if kind in JOINED else [workload])
        )
        self._note_unkept(unkept)
        return found

    def _note_unkept(self, models: Iterable[str]) -> None:
        """Events of sessions of these models are not collected."""
        noted = {UNKEPT + name for name in self.view.unkept_ms}
        noted |= {name for name in self.changes.numbers if name.startswith(UNKEPT)}
        for name in models:
            field_name = UNKEPT + name
            if field_name in noted or len(noted) < MAX_UNKEPT:
                noted.add(field_name)
                self.changes.numbers[field_name] = self.view.now_ms

    def _beginning(self, workload: str, kind: str) -> str | None:
        """What the names of the sessions begin with of which such keys tell; None where no model judges
        them."""
        joined = kind in JOINED
        if not (joined and self._model(JOINT, kind) is not None) and self._model(workload, kind) is None:
            return None
        return (JOINT if joined else workload) + SEPARATOR

    def _add_events(self) -> dict[str, GrowingSession]:
        """Add this round's events to their sessions; returns these sessions by name."""
        pieces = self._collected()
        touched = self.state.growing(list(pieces), self.view.sessions)
        self.open = self.view.open + len(pieces) - len(touched)
        self.events = self.view.events
        cut = self.changes.cut
        for name, of_batches in pieces.items():
            session = touched.get(name)
            if session is None:
                workload, entry = split_name(name)
                kind, key = kind_and_key(entry)
                session = touched[name] = GrowingSession(workload=workload, kind=kind, key=key)
            for piece in of_batches:
                added = session.add(piece)
                self.events += added
                cut[piece.observation.workload] += len(piece.at_ms) - added
            ends, joint = self._ends(session)
            session.wire.ended = bool(ends) and session.ends_with(ends, joint=joint)
        return touched

    def _ends(self, session: GrowingSession) -> tuple[frozenset[int], bool]:
        """The events that end sessions like it, and whether they are numbers of events of a trace."""
        of = session.workload, session.kind
        known = self.ends.get(of)
        if known is None:
            model = self._model(*of)
            if model is None and session.workload == JOINT:
                origins = session.wire.origins
                alone = self._model(origins[0][0], session.kind) if len(origins) == 1 else None
                return frozenset() if alone is None else alone[1].ends, False
            ends = frozenset[int]() if model is None else model[1].ends
            known = self.ends[of] = ends, session.workload == JOINT
        return known

    def _close(self, touched: Mapping[str, GrowingSession]) -> tuple[dict[str, OpenSession], set[str]]:
        """The sessions that close in this round, by name, and those of them that close before their time, for
        want of room."""
        changes, limits = self.changes, self.limits
        limit = self.budget.of(MAX_CLOSED)
        names = self._due(limit)
        changes.more = len(names) >= limit
        too_many_events = math.ceil(self.open * (1 - MAX_OPEN_EVENTS / max(1, self.events)))
        surplus, early = max(self.open - limits.max_open, too_many_events), set[str]()
        if surplus > len(names):
            due, names = set(names), self.state.longest_idle(surplus)
            early = set() if self.end else set(names) - due
        # A session with new events goes on, whenever it was due; at the end all sessions close.
        closed = self.state.whole(
            self.state.growing([name for name in names if name not in touched], self.view.sessions)
        )
        changes.over = set(names) - set(touched)
        if self.end:
            closed |= self.state.whole(touched)
            changes.over |= set(touched)
        else:
            changes.sessions = {name: (s, s.due_ms(limits.open_ms)) for name, s in touched.items()}
        self.events -= sum(len(session.at_ms) for session in closed.values())
        changes.numbers["events"] = max(0, self.events) if self.open > len(changes.over) else 0
        return closed, early

    def _due(self, limit: int) -> list[str]:
        if self.end:
            return self.state.due(dict.fromkeys(LANES, _NEVER_MS), limit)
        if self.view.more:  # an observation that was not read may belong to any session
            return []
        # A batch in flight may have events of every session that was open when it was accepted.
        in_flight = {lane: self.view.in_flight.get(lane, _NEVER_MS) + _GRACE_MS for lane in LANES}
        return self.state.due({lane: min(self.view.now_ms, in_flight[lane]) for lane in LANES}, limit)

    def _closed_early(
        self,
        closed: Mapping[str, OpenSession],
        early: set[str],
        parts: Mapping[str, Mapping[str, OpenSession]],
    ) -> dict[str, OpenSession]:
        """The closed sessions that are judged. One that closed early may have more events. While some were
        not read it gets no verdict, and otherwise nothing that is missing counts. What comes later lacks its
        beginning."""
        for name in early & closed.keys():
            for part, one in parts[name].items():
                model = self._model(one.workload, one.kind)
                if self.view.more or model is None or not model[1].stateful:
                    self._note_unkept([_model_of(part)])
                    self.changes.forgotten_histories.add(part)
                if one.workload != JOINT:
                    self.changes.cut[one.workload] += len(one.at_ms)
            self.early |= parts[name].keys()
        return {name: one for name, one in closed.items() if not (self.view.more and name in early)}

    def _give_up_due(self, touched: Mapping[str, GrowingSession]) -> None:
        names = set(self._due(self.budget.of(MAX_CLOSED))) - set(touched)
        self.changes.over = names
        self.changes.sessions = {name: (s, s.due_ms(self.limits.open_ms)) for name, s in touched.items()}
        self.changes.numbers["events"] = max(0, self.events) if self.open > len(names) else 0
        for name in names:
            self.changes.failed[split_name(name)[0]] += 1

    def _within_budget(
        self,
        closed: Mapping[str, OpenSession],
        parts: Mapping[str, Mapping[str, OpenSession]],
        histories: Mapping[str, SessionHistory],
    ) -> dict[str, OpenSession]:
        """The sessions that one round can judge, at least the first; the others stay open."""
        changes, judged = self.changes, dict[str, OpenSession]()
        room = self.budget.of(MAX_JUDGED)
        for name, session in closed.items():
            for part, one in parts[name].items():
                before = len(histories[part].templates) if part in histories else 0
                room -= one.weight(self.limits.timeout_ms, before)
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
        """Judge sessions by their live models, traces as wholes last. A failure costs the verdicts of the
        sessions that fail."""
        by_model: dict[str, dict[str, OpenSession]] = {}
        for name, session in closed.items():
            by_model.setdefault(model_name(session.workload, session.kind), {})[name] = session
        for of in sorted(by_model, key=lambda of: (split_model_name(of)[0] == JOINT, of)):
            sessions = by_model[of]
            live = self._model(*split_model_name(of))
            if live is None or not live[1].stateful:
                self.changes.numbers[LOST + of] = self.view.now_ms
            if live is None:
                continue
            self._judge_each(of, live, sessions, histories)

    def _judge_each(
        self,
        of: str,
        live: tuple[str, SessionJudge],
        sessions: Mapping[str, OpenSession],
        histories: Mapping[str, SessionHistory],
    ) -> None:
        """Judge together, and by halves where that fails, until only those that fail are left."""
        groups, failures = [sessions], 0
        while groups:
            group = groups.pop()
            try:
                self.changes.merge(self._judge(of, *live, group, histories))
            except ANY_FAILURE as exc:
                if passes(exc):
                    raise
                failures += 1
                if failures == 1:
                    logger(workload=split_model_name(of)[0], version=live[0]).exception("watch.failed")
                if len(group) > 1 and failures <= MAX_FAILURES:
                    names = list(group)
                    halves = names[: len(names) // 2], names[len(names) // 2 :]
                    groups += [{name: group[name] for name in half} for half in halves]
                    continue
                for session in group.values():
                    origins = [name for name, _ in session.origins] if session.workload == JOINT else []
                    self.changes.failed[next(iter(origins), session.workload)] += len(session.at_ms)

    def _judge(
        self,
        of: str,
        version: str,
        model: SessionJudge,
        sessions: Mapping[str, OpenSession],
        histories: Mapping[str, SessionHistory],
    ) -> Changes:
        """The findings of the sessions of one model, and the histories of the sessions that may go on."""
        changes, wrong = Changes(), list[tuple[Segment, SessionVerdict, str]]()
        until_ms = self._incomplete_until_ms(of, stateful=model.stateful)
        cut = [
            list(
                session.segments(
                    self.limits.timeout_ms,
                    stateful=model.stateful,
                    history=histories.get(name),
                    lost=session.accepted_ms <= until_ms,
                )
            )
            for name, session in sessions.items()
        ]
        complete_ms = self._complete_ms(split_model_name(of)[0])
        verdicts = _verdicts(model, chain.from_iterable(cut))
        for (name, session), segments in zip(sessions.items(), cut, strict=True):
            # A session that is judged several times reports each cause once.
            reported = histories[name].reported if name in histories else ()
            for segment in segments:
                reported = reported if segment.history else ()
                verdict = next(verdicts)
                ended = not segment.timed or segment.at_ms[-1] <= complete_ms
                complete = ended and not segment.partial and name not in self.early
                if complete:
                    missing = self._missing(model, segment)
                    verdict = with_missing(verdict, missing, first=bool(segment.places))
                if not verdict.anomalous or verdict.cause in reported:
                    continue
                if complete or holds_unfinished(verdict):
                    wrong.append((segment, verdict, session.entry))
                    reported += (verdict.cause,)
            if segments and model.stateful and not (self.end or session.ended):
                expires_ms = session.due_ms(self.limits.open_ms) + KEEP_MS
                changes.histories[name] = segments[-1].next_history(reported), expires_ms
            elif name in histories:
                changes.forgotten_histories.add(name)
        changes.judged = sum(map(len, cut))
        changes.found = self._in_words(wrong, version, model)
        return changes

    def _missing(self, model: SessionJudge, segment: Segment) -> list[Missing]:
        if not segment.timed:  # times of arrival tell nothing of what is late
            return []
        return model.follow_ups.missing(segment.templates, segment.at_ms, waited_ms=self.limits.timeout_ms)

    def _in_words(
        self, wrong: Sequence[tuple[Segment, SessionVerdict, str]], version: str, model: SessionJudge
    ) -> list[WatcherFinding]:
        """The findings; of a trace as a whole only for a workload in which no part of it is reported."""
        names = [EventNames({}, {**model.places, **segment.places}) for segment, _, _ in wrong]
        named = [named_in(segment, verdict) for segment, verdict, _ in wrong]
        templates = (
            name.template(event) for name, events in zip(names, named, strict=True) for event in events
        )
        texts = self.state.texts(template for template in templates if template is not None)
        found, told = [], dict[str, set[str]]()
        for (segment, verdict, entry), name in zip(wrong, names, strict=True):
            named_here = replace(name, texts=texts)
            finding = of_session(segment, verdict, version, named_here, per_day=model.per_day)
            workloads = told.setdefault(entry, set(self.reported.get(entry, ())))
            if not segment.places or finding.workload not in workloads:
                found.append(finding)
            workloads.add(finding.workload)
        self.reported |= told
        return found

    def _incomplete_until_ms(self, of: str, *, stateful: bool) -> int:
        """Sessions that were accepted by then may miss events, or a history."""
        unkept_ms, lost_ms = self.view.unkept_ms.get(of, -KEEP_MS), self.view.lost_ms.get(of, -KEEP_MS)
        if stateful:
            return max(unkept_ms, lost_ms) + KEEP_MS
        return unkept_ms + self.limits.open_ms + _GRACE_MS

    def _complete_ms(self, workload: str) -> float:
        """Sessions with later events may miss their end, because the logs break off there."""
        if not self.end:
            return math.inf
        counts = self.view.minute_counts
        known = counts.values() if workload == JOINT else [counts[workload]] if workload in counts else []
        ends_ms = [one.end_ms(self.limits.timeout_ms) for one in known]
        return min((end_ms for end_ms in ends_ms if end_ms is not None), default=math.inf)

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
        collected = {name: _collected_as(name) for name in expired}
        kept = self.state.growing(list(set(collected.values())), self.view.sessions)
        open_ = {*self.state.whole(kept), *changes.sessions} - changes.over
        names = [name for name in expired if name not in changed and collected[name] not in open_]
        changes.more |= len(expired) >= MAX_CLOSED and bool(names)
        too_many_events = math.ceil(count * (1 - MAX_HISTORY_EVENTS / max(1, events)))
        surplus = max(count - self.limits.max_open, too_many_events)
        if surplus > len(names):
            oldest = [name for name in self.state.oldest_histories(surplus) if name not in changed]
            lost = set(oldest) - set(names)
            changes.numbers |= {LOST + _model_of(name): view.now_ms for name in lost}
            names = list(dict.fromkeys(names + oldest))
        changes.forgotten_histories |= set(names)
        events -= _events(self.state.histories(names).values())
        changes.numbers["past_events"] = max(0, events) if count > len(names) else 0


def _collected_as(name: str) -> str:
    """The name under which the events of a judged session are collected."""
    return session_name(*split_name(name))


def _model_of(name: str) -> str:
    """The name of the model that judges a session."""
    workload, entry = split_name(name)
    return model_name(workload, kind_and_key(entry)[0])


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
