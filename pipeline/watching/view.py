"""The two values of a watcher's round: the state that it reads and the changes that it writes. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

import polars as pl

from pipeline.watching.incidents.live import Incidents
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.rates.minute_counts import SILENT_MS, MinuteCounts
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.sessions.growing import GrowingSession
from pipeline.watching.sessions.history import SessionHistory
from pipeline.watching.sessions.keys import JOINT
from pipeline.watching.sessions.open_sessions import OpenSession

# Prefixes of fields of `watching`, before the name of a session model.
LOST: Final = "lost "  # when histories were last dropped
UNKEPT: Final = "unkept "  # when events came that no live model judges


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The watcher's state in Redis at the beginning of a round."""

    now_ms: int
    in_flight: Mapping[Lane, int]  # per lane, when the oldest batch in flight was accepted
    head: int  # observations ever taken from the list
    unread: int  # observations behind those that were read
    observed: Sequence[Observation]
    read: int  # observations that were read, damaged ones included
    newest: str  # SHA-1 of the last of them, "" for none
    round: str  # name of the previous round, "" for none
    open: int  # sessions
    events: int  # in open sessions
    histories: int
    history_events: int
    lost_ms: Mapping[str, int]  # per model, when histories of sessions that may go on were last dropped
    unkept_ms: Mapping[str, int]  # per model, when events of its sessions were last not collected
    incidents_ms: int  # when incidents were updated last
    minute_counts: dict[str, MinuteCounts]  # per workload; the round of rates adds to them in place
    # Those that this process keeps (memory.py); the round changes them in place.
    incidents: Incidents | None = None
    sessions: dict[str, GrowingSession] = field(default_factory=dict)  # open ones, by name

    @property
    def more(self) -> bool:
        """Whether some observations were not read."""
        return self.unread > 0

    def workloads(self) -> int:
        """The number of workloads that had lines in the last day."""
        newest = [counts.newest_ms for counts in self.minute_counts.values()]
        newest_of_new = {one.workload for one in self.observed if one.workload not in self.minute_counts}
        return sum(self.now_ms - at_ms < SILENT_MS for at_ms in newest) + len(newest_of_new)

    def unobserved(self) -> "View":
        """The same state, with the observations read and empty."""
        return replace(self, observed=())

    def sizes(self, part: str) -> Counter[str]:
        """By workload, how much a part of the round gets from the observations: lines, events of sessions, or
        anomalous templates."""
        found: Counter[str] = Counter()
        for one in self.observed:
            lines = sum(n for _, _, n in one.rates.rows()) if part == "rates" else 0
            found[one.workload] += {"rates": lines, "sessions": one.events.height}.get(
                part, one.anomalies.height
            )
        return found

    def without_observations(self) -> "View":
        """The same state, as if no observation had been read."""
        return replace(self, observed=(), read=0, newest="", unread=self.unread + self.read)


class Spare(IntEnum):
    """What a part of a round does without, because it failed with it."""

    NOTHING = 0
    NEW = 1  # what this round has read
    WAITING = 2  # what was due before
    ALL = 3


@dataclass(slots=True, kw_only=True)
class Changes:
    """The changes of one round, or of one of its parts."""

    head: int = 0
    newest: str = ""  # `newest` and `round` of the view
    after: str = ""
    # Name -> (session, closes at ms).
    sessions: dict[str, tuple[GrowingSession | OpenSession, int]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)  # names of sessions that closed
    histories: dict[str, tuple[SessionHistory, int]] = field(
        default_factory=dict
    )  # name -> (history, expires at ms)
    forgotten_histories: set[str] = field(default_factory=set)  # names
    minute_counts: dict[str, MinuteCounts] = field(default_factory=dict)
    rates: dict[str, bytes] = field(default_factory=dict)
    distributions: dict[str, bytes] = field(default_factory=dict)  # of the numbers of a workload
    left_out: dict[str, bytes] = field(default_factory=dict)  # of a workload (left_out.py)
    grown: dict[str, int] = field(default_factory=dict)  # what was left out of all workloads, by kind
    # By workload: lines, events and findings that a failure cost, and events of sessions past a limit.
    failed: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    forgotten: list[str] = field(default_factory=list)  # workloads
    daily: dict[str, bytes] = field(default_factory=dict)  # templates of a workload that come every day
    rows: list[tuple[str, str, pl.DataFrame]] = field(default_factory=list)  # (batch id, workload, rows)
    incidents: bytes = b""  # b"" leaves them as they are
    incidents_now: Incidents | None = None  # as Redis has them after the round, None where that is not known
    events: list[tuple[str, str, str]] = field(default_factory=list)  # (type, subject, JSON)
    numbers: dict[str, int] = field(default_factory=dict)  # fields of the hash `watching`
    # The following are no changes in Redis.
    found: list[WatcherFinding] = field(default_factory=list)
    judged: int = 0  # sessions
    more: bool = False  # this part has more to do at once

    @classmethod
    def of(cls, view: View) -> "Changes":
        """The observations of the view count as read; nothing else changes."""
        return cls(head=view.head + view.read, newest=view.newest, after=view.round)

    def merge(self, part: "Changes") -> None:
        """Add the changes of a part of the round. No two parts change the same entry."""
        self.sessions |= part.sessions
        self.over |= part.over
        self.histories |= part.histories
        self.forgotten_histories |= part.forgotten_histories
        self.minute_counts |= part.minute_counts
        self.rates |= part.rates
        self.distributions |= part.distributions
        self.daily |= part.daily
        self.grown |= part.grown
        self.failed += part.failed
        self.cut += part.cut
        self.forgotten += part.forgotten
        self.incidents = self.incidents or part.incidents
        self.incidents_now = self.incidents_now or part.incidents_now
        self.events += part.events
        self.numbers |= part.numbers
        self.found += part.found
        self.judged += part.judged

    def note_left_out(self, view: View) -> None:
        """What was left out in this round, for those who read it. The last change of a round."""
        unnamed = {JOINT, *self.forgotten}
        for name in (+self.failed | +self.cut).keys() - unnamed:
            new = MinuteCounts(newest_ms=view.now_ms)
            counts = self.minute_counts[name] = view.minute_counts.setdefault(name, new)
            counts.left_out.failed += self.failed[name]
            counts.left_out.session_events += self.cut[name]
        for kind, lost in (("failed", self.failed), ("session_events", self.cut)):
            if n := sum(lost[name] for name in unnamed):
                self.grown[kind] = n
        for name, counts in self.minute_counts.items():
            growth = counts.left_out.growth()
            if growth:
                self.left_out[name] = counts.left_out.pack(view.now_ms)
            for kind, n in growth.items():
                self.grown[kind] = self.grown.get(kind, 0) + n
