"""The watcher: from what stored batches said to sessions, rates and incidents, a round at a time.

    observations --> open sessions --over--> judged -----------------------> rows, events
                 --> pulses --a minute is complete--> rates --> alarms ----> rows, events
                 --> anomalous templates ----------------------------------------> events --> incidents

One watches at a time (lease `watch`). A round reads, decides, and changes everything in one step, the rows to be stored
among it; those are then written to the sinks under ids of their own, so that writing them twice is harmless. Whatever
dies in between, the next round goes on from what stands in Redis.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

import polars as pl
import redis

from pipeline.errors import BadPayload, LeaseRefused, Retryable, TooNew
from pipeline.logs import logger
from pipeline.records.batch import Purpose
from pipeline.settings import Settings
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.observation import Lane
from pipeline.watching.rates.minute_counts import MOST_WAITING, MinuteCounts
from pipeline.watching.rates.rates import Alarm, Rates
from pipeline.watching.rows import Found, rows_of, template_of
from pipeline.watching.sessions.history import KEEP_MS, Past
from pipeline.watching.sessions.model import SessionVerdict
from pipeline.watching.sessions.open_sessions import GRACE_S, Part, Session, gathered, names_of
from pipeline.watching.state import LANES, LOST, Changes, State, View, unpack_entry
from pipeline.watching.time_budget import RATES_S, ROUND_S, Share, Turns
from pipeline.watching.verdicts import events_of, holds_unfinished, named_in, of_alarm, of_session

MOST_OBSERVATIONS: Final = 16  # of one round: 160,000 lines, of which each session is read and written once
# The most, of which a round takes the share that the rounds before could do in their time (effort.py). Of events each may be of a session of
# its own, and Redis stands still while a round changes them.
MOST_EVENTS: Final = 40_000
MOST_CLOSED: Final = 5_000  # sessions of one round and lane
MOST_JUDGED: Final = 2_000_000  # events of the sessions of one round, those at each silence counted anew
MOST_AT_ONCE: Final = 200_000  # of those
MOST_OPEN_EVENTS: Final = 2_000_000  # in all open sessions: some 20 MiB in Redis
MOST_PAST_EVENTS: Final = 2_000_000  # in all pasts
MOST_RATED: Final = 50  # workloads whose rates one round looks at: some of their states have 100 KiB
MOST_WORKLOADS: Final = 10_000
MOST_RATE_BYTES: Final = 64 << 20  # of all their rates
FORGET_MS: Final = 30 * 86_400_000  # a workload without a line for so long
INCIDENTS_MS: Final = 30_000  # how often incidents are looked at when nothing happens
_FAR_MS: Final = 1 << 52  # past every time, and exact as a score
# What waiting heals. Whatever else a round or a sink raises, it would raise for ever.
_HEALS: Final = (Retryable, redis.RedisError, OSError)
# Polars' panics are no Exceptions.
_ODD: Final = (Exception, pl.exceptions.PanicException)


class Rules(Protocol):
    """models/sequences.Sequences: what normal sessions look like."""

    @property
    def ends(self) -> frozenset[int]:
        """Templates with which a session ends."""

    @property
    def carried(self) -> bool:
        """Whether sessions go on after a silence, and are judged with all before it."""

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        """A verdict for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a round asks for. `sequences(workload)`: those of the live version, and its name; None without any."""

    sequences: Callable[[str], tuple[str, Rules] | None]
    store: Callable[[str, str, pl.DataFrame], None]  # (batch id, workload, rows) into every sink
    # Those of these template ids of a workload that somebody called normal.
    normal: Callable[[Sequence[int], str], AbstractSet[int]]


@dataclass(slots=True, kw_only=True)
class Told:
    """What a round did."""

    observations: int = 0
    judged: int = 0  # sessions
    found: list[Found] = field(default_factory=list)
    more: bool = False  # another round has something to do at once
    left: int = 0  # observations that wait
    rates_s: float = 0.0  # that rates took
    behind: bool = False  # rates have more to do


class Watcher:
    """One per process. Raises RedisUnavailable, SinkUnavailable, ModelUnavailable: nothing of a round is lost then."""

    def __init__(
        self, state: State, settings: Settings, parts: Parts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = state
        self.parts = parts
        self.most_open = settings.max_open_sessions
        self.timeout_ms = round(settings.session_timeout_s * 1000)  # a silence
        # How long a session is open, which may be much longer where nobody waits for what is found.
        self.open_ms = max(self.timeout_ms, round((settings.session_open_s or 0) * 1000))
        self.clock = clock
        self.share = Share()
        self.turns = Turns()
        self.most = MOST_OBSERVATIONS  # fewer after a round that failed, to find the one that it fails with

    def round(self, token: int, *, end: bool = False) -> Told:
        """Fold the oldest observations in, and store what follows from them. `end`: nothing more will come, so every
        session is over and every minute complete. Raises LeaseRefused when another one watches: nothing was changed."""
        self.deliver()
        began = self.clock()
        view = self.state.look(self.most, self.share.of(MOST_EVENTS))
        if any(pulse.waiting > MOST_WAITING for pulse in view.pulses.values()):
            view = view.unread()
        try:
            changes, told = self._made(view, end=end and not view.more)
        except _HEALS:
            raise
        except _ODD:
            if not view.read:
                raise
            logger().exception("watch.failed")
            if view.read > 1:
                self.most = 1
                return Told(more=True)
            # It would fail for ever, and all others behind it would wait until they are dropped.
            changes, told = _blank(view), Told(observations=1, more=True)
        if not self.state.change(changes, token=token):
            raise LeaseRefused("another process watches now, or Redis lost what a round had read")
        self.most = min(MOST_OBSERVATIONS, 2 * self.most)
        took = self.clock() - began - told.rates_s
        allowed_s = max(ROUND_S - told.rates_s, ROUND_S - RATES_S)
        self.share.took(took, allowed_s, full=told.more and (view.read > 0 or not view.more))
        told.more |= told.behind
        self.deliver()
        return told

    def _made(self, view: View, *, end: bool) -> tuple[Changes, Told]:
        changes = _blank(view)
        told = Told(observations=view.read, more=view.more, left=view.left)
        over = self._sessions(view, changes, told, end=end)
        began = self.clock()
        told.found += self._rates(view, changes, told, end=end)
        told.rates_s = self.clock() - began
        pasts = self.state.pasts(list(over)) if view.pasts else {}
        over = self._fitting(over, pasts, changes, told, end=end)
        told.found += self._judged(over, pasts, view, changes, told, end=end)
        self._forget_pasts(pasts, view, changes, told)
        told.found = self._unmarked(told.found)
        changes.rows = rows_of(told.found)
        self._incidents(view, changes, told)
        return changes, told

    def _unmarked(self, found: Iterable[Found]) -> list[Found]:
        """What nobody has called normal."""
        by_workload: dict[str, list[tuple[int, Found]]] = {}
        for item in found:
            number = template_of(item.workload, item.source, item.cause)
            by_workload.setdefault(item.workload, []).append((number, item))
        return [
            item
            for workload, several in by_workload.items()
            for normal in [self.parts.normal([number for number, _ in several], workload)]
            for number, item in several
            if number not in normal
        ]

    def deliver(self) -> None:
        """Write to the sinks what was found and is not in them yet; what no sink can ever take is left out."""
        for entry in self.state.outbox():
            try:
                batch_id, workload, rows = unpack_entry(entry)
            except BadPayload as exc:
                logger().warning("watch.damaged", what="rows", why=str(exc))
            else:
                try:
                    self.parts.store(batch_id, workload, rows)
                except _HEALS:
                    raise
                except _ODD:
                    logger(workload=workload, batch=batch_id).exception("watch.rejected")
            self.state.delivered(entry)

    # ---- sessions --------------------------------------------------------------------------------

    def _sessions(self, view: View, changes: Changes, told: Told, *, end: bool) -> dict[str, Session]:
        """Take events in; returns the sessions that are over."""
        pieces = gathered(view.observed)
        touched = self.state.sessions(list(pieces))
        events, now_open = view.events, view.open + len(pieces) - len(touched)
        ends: dict[str, frozenset[int]] = {}
        for name, several in pieces.items():
            workload = several[0].seen.workload
            if workload not in ends:
                known = self.parts.sequences(workload)
                ends[workload] = frozenset() if known is None else known[1].ends
            key = name[len(workload) + 1 :]
            session = touched.setdefault(name, Session(workload=workload, key=key))
            for piece in several:
                events += session.add(piece)
            session.ended = session.ends_with(ends[workload])
        closed = self.share.of(MOST_CLOSED)
        names = self._due(view, closed, end=end)
        told.more |= len(names) >= closed
        surplus = max(
            now_open - self.most_open, math.ceil(now_open * (1 - MOST_OPEN_EVENTS / max(1, events)))
        )
        if surplus > len(names):
            names = self.state.longest_idle(surplus)
        # One that is going on is not over, whatever was expected of it; at the end all are.
        over = self.state.sessions([name for name in names if name not in touched])
        changes.over = set(names) - set(touched)
        if end:
            over |= touched
            changes.over |= set(touched)
        else:
            changes.sessions = {
                name: (session, session.due_ms(self.open_ms)) for name, session in touched.items()
            }
        events -= sum(len(session.at_ms) for session in over.values())
        left = now_open - len(changes.over)
        changes.numbers["events"] = max(0, events) if left > 0 else 0
        return over

    def _due(self, view: View, most: int, *, end: bool) -> list[str]:
        if end:
            return self.state.due(dict.fromkeys(LANES, _FAR_MS), most)
        if view.more:  # what is not read yet may be of any session
            return []
        grace = round(GRACE_S * 1000)
        until = {lane: min(view.now_ms, view.waiting.get(lane, _FAR_MS) + grace) for lane in LANES}
        return self.state.due(until, most)

    def _fitting(
        self,
        over: Mapping[str, Session],
        pasts: Mapping[str, Past],
        changes: Changes,
        told: Told,
        *,
        end: bool,
    ) -> dict[str, Session]:
        """Those that one round can judge, the first of them whatever it has; the others stay open until the next."""
        found: dict[str, Session] = {}
        room = self.share.of(MOST_JUDGED)
        for name, session in over.items():
            before = len(pasts[name].templates) if name in pasts else 0
            room -= session.weight(self.timeout_ms, before)
            if room >= 0 or not found:
                found[name] = session
                continue
            changes.over.discard(name)
            if end:  # else it stands as it was
                changes.sessions[name] = session, session.due_ms(self.open_ms)
            changes.numbers["events"] += len(session.at_ms)
            told.more = True
        return found

    def _judged(
        self,
        over: Mapping[str, Session],
        pasts: Mapping[str, Past],
        view: View,
        changes: Changes,
        told: Told,
        *,
        end: bool,
    ) -> list[Found]:
        """Those of the sessions that went wrong, by the model that is live now; where it has no rules, none. Of those that
        may go on the past is kept."""
        by_workload: dict[str, list[tuple[str, Session]]] = {}
        for name, session in over.items():
            by_workload.setdefault(session.workload, []).append((name, session))
        found = []
        for workload, sessions in by_workload.items():
            known = self.parts.sequences(workload)
            if known is None:
                changes.numbers[LOST + workload] = view.now_ms
                continue
            version, rules = known
            try:
                pulse = view.pulses.get(workload) if end else None
                until = None if pulse is None else pulse.end_ms(self.timeout_ms)
                lost_ms = view.lost_ms.get(workload, -KEEP_MS) + KEEP_MS
                cut = [
                    list(
                        session.parts(
                            self.timeout_ms,
                            carried=rules.carried,
                            past=pasts.get(name),
                            lost=session.accepted_ms <= lost_ms,
                        )
                    )
                    for name, session in sessions
                ]
                verdicts = _verdicts(rules, (part for parts in cut for part in parts))
                wrong, later = [], {}
                for (name, session), parts in zip(sessions, cut, strict=True):
                    # However often a session is judged again, of one cause it is told once.
                    causes = pasts[name].told if name in pasts else ()
                    for part in parts:
                        causes = causes if part.past else ()
                        verdict = next(verdicts)
                        if not verdict.anomalous or verdict.cause in causes:
                            continue
                        known_whole = not part.partial and (until is None or part.at_ms[-1] <= until)
                        if known_whole or holds_unfinished(verdict):
                            wrong.append((part, verdict))
                            causes += (verdict.cause,)
                    if parts and rules.carried and not (end or session.ended):
                        later[name] = parts[-1].then(causes), session.due_ms(self.open_ms) + KEEP_MS
                told.judged += sum(map(len, cut))
                if not rules.carried:
                    changes.numbers[LOST + workload] = view.now_ms
                texts = self.state.texts(x for part, verdict in wrong for x in named_in(part, verdict))
                found += [of_session(part, verdict, version, texts) for part, verdict in wrong]
                changes.pasts |= later
                changes.forgotten_pasts |= {name for name, _ in sessions if name in pasts} - set(later)
            except _HEALS:
                raise
            except _ODD:
                # These sessions are over without a verdict; those of others are judged.
                logger(workload=workload, version=version).exception("watch.failed")
        return found

    def _forget_pasts(self, known: Mapping[str, Past], view: View, changes: Changes, told: Told) -> None:
        """Those that are kept for long enough, and past the limits the oldest ones."""
        changed = {*changes.pasts, *changes.forgotten_pasts}
        new = [past for past, _ in changes.pasts.values()]
        gone = [known[name] for name in changed if name in known]
        count = view.pasts + len(new) - len(gone)
        events = view.past_events + sum(len(p.templates) for p in new) - sum(len(p.templates) for p in gone)
        # What was accepted while they were kept may go on with them: what waits, and what is open.
        until_ms = min([view.now_ms, *view.waiting.values()])
        old = self.state.forgettable(until_ms, MOST_CLOSED) if view.pasts and not view.more else []
        open_ = {*self.state.sessions(old), *changes.sessions} - changes.over
        names = [name for name in old if name not in changed and name not in open_]
        told.more |= len(old) >= MOST_CLOSED and bool(names)
        surplus = max(count - self.most_open, math.ceil(count * (1 - MOST_PAST_EVENTS / max(1, events))))
        if surplus > len(names):
            more = [name for name in self.state.oldest_pasts(surplus) if name not in changed]
            lost = set(more) - set(names)
            changes.numbers |= {LOST + names_of(name)[0]: view.now_ms for name in lost}
            names = list(dict.fromkeys(names + more))
        changes.forgotten_pasts |= set(names)
        events -= sum(len(past.templates) for past in self.state.pasts(names).values())
        changes.numbers["past_events"] = max(0, events) if count > len(names) else 0

    # ---- rates -----------------------------------------------------------------------------------

    def _rates(self, view: View, changes: Changes, told: Told, *, end: bool) -> list[Found]:
        pulses = view.pulses
        for seen in view.observed:
            if not seen.rates.is_empty():
                pulse = changes.pulses[seen.workload] = pulses.setdefault(seen.workload, MinuteCounts())
                pulse.observe(seen, judged=seen.purpose is Purpose.SCORE)
        # A batch that does not get on must not look like a silence, so the clock waits for it.
        minute = min(view.now_ms, view.waiting.get(Lane.FRESH, view.now_ms)) // 60_000
        due = []
        for workload, pulse in pulses.items():
            if pulse.ahead and not view.more:
                pulse.advance(view.waiting)
                changes.pulses[workload] = pulse
            if pulse.is_due(minute, view.now_ms) or (end and (pulse.waiting or pulse.after)):
                due.append(workload)
        # Whose rates were not looked at for longest: else the last of very many would never be.
        due.sort(key=lambda name: pulses[name].looked)
        told.behind = len(due) > MOST_RATED
        states = self.state.rates(due[:MOST_RATED])
        alarms: list[tuple[str, Alarm]] = []
        until = self.clock() + RATES_S

        def goes_on() -> bool:
            return self.clock() < until

        for n, workload in enumerate(due[:MOST_RATED]):
            if n and not goes_on():
                told.behind = True
                break
            pulse = changes.pulses[workload] = pulses[workload]
            rates = self._state_of(workload, states.get(workload))
            try:
                alarms += [
                    (workload, alarm) for alarm in pulse.judge(rates, minute, end=end, goes_on=goes_on)
                ]
                blob = changes.rates[workload] = rates.pack()
                pulse.size = len(blob)
            except _ODD:  # the others are watched; its counts of this minute are lost
                logger(workload=workload).exception("watch.failed")
                pulse.forget()
            told.behind |= pulse.behind or (end and bool(pulse.waiting or pulse.after))
        self._forget(view, pulses, changes)
        texts = self.state.texts(alarm.template_id for _, alarm in alarms if alarm.template_id is not None)
        return [of_alarm(workload, alarm, texts) for workload, alarm in alarms]

    def _state_of(self, workload: str, blob: bytes | None) -> Rates:
        try:
            return Rates.unpack(blob)
        except BadPayload as exc:
            logger(workload=workload).warning("watch.damaged", what="rates", why=str(exc))
            return Rates.unpack(None)

    def _forget(self, view: View, pulses: Mapping[str, MinuteCounts], changes: Changes) -> None:
        """Workloads that have gone, and past the limit those that were silent for longest."""
        oldest = sorted(pulses, key=lambda name: pulses[name].newest_ms)
        gone = {name for name in oldest if view.now_ms - pulses[name].newest_ms > FORGET_MS}
        surplus = max(0, len(oldest) - MOST_WORKLOADS)
        room = MOST_RATE_BYTES - sum(pulses[name].size for name in oldest[surplus:])
        while room < 0:
            room += pulses[oldest[surplus]].size
            surplus += 1
        gone |= set(oldest[:surplus])
        for name in gone:
            changes.pulses.pop(name, None)
            changes.rates.pop(name, None)
        changes.forgotten = sorted(gone)

    # ---- incidents -------------------------------------------------------------------------------

    def _incidents(self, view: View, changes: Changes, told: Told) -> None:
        events = events_of(view.observed, told.found)
        if not events and view.now_ms - view.incidents_ms < INCIDENTS_MS:
            return
        changes.numbers["incidents_ms"] = view.now_ms
        try:
            incidents = Incidents.unpack(self.state.incidents())
        except BadPayload as exc:
            logger().warning("watch.damaged", what="incidents", why=str(exc))
            incidents = Incidents()
        except TooNew as exc:
            logger().warning("watch.left_alone", what="incidents", why=str(exc))
            return
        try:
            incidents.add(events)
            incidents.close(datetime.fromtimestamp(view.now_ms / 1000, UTC))
            blob, still_open = incidents.pack(), sum(incident.open for incident in incidents.all())
        except Exception:  # noqa: BLE001 - sessions and rates are watched; these events are in no incident
            logger().exception("watch.failed")
            return
        changes.incidents = blob
        changes.numbers["incidents"] = still_open


def _verdicts(rules: Rules, parts: Iterable[Part]) -> Iterator[SessionVerdict]:
    """One for each, of some at a time: what is looked at takes many times the memory of the sessions."""
    some: list[tuple[int, ...]] = []
    held = 0
    for part in parts:
        some.append(part.whole)
        held += len(some[-1])
        if held >= MOST_AT_ONCE:
            yield from rules.judge(some)
            some, held = [], 0
    yield from rules.judge(some)


def _blank(view: View) -> Changes:
    """That these observations are seen, and nothing else."""
    return Changes(head=view.head + view.read, newest=view.newest, after=view.round)
