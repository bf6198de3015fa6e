"""States that a process keeps from the round that it wrote, so that its next round does not read them again.

Redis has all of them. They hold while Redis names the round that wrote them as its last one. A round takes
them out and puts them back after its step, so a round that fails loses them, and the next one reads.
"""

from dataclasses import dataclass, field
from typing import Final

from pipeline.watching.incidents.live import Incidents
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.sessions.growing import GrowingSession
from pipeline.watching.view import Changes, View

# Of open sessions, those that grew last. A session takes about 1 KiB, and each of its events some ten bytes.
MOST_SESSIONS: Final = 32_000
MOST_EVENTS: Final = 500_000
MOST_COUNTS: Final = 100_000  # of all workloads; more, as of a flood of new templates, are read again


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMemory:
    """States as a round left them. `round`: its name."""

    round: str
    minute_counts: dict[str, MinuteCounts] | None = None
    incidents: Incidents | None = None
    sessions: dict[str, GrowingSession] = field(
        default_factory=dict
    )  # by name; those that grew last are last

    @classmethod
    def after(cls, view: View, changes: Changes, name: str) -> "RoundMemory":
        """The states that this process keeps of the round of this name, which has written its changes."""
        counts = view.minute_counts
        for workload in changes.forgotten:
            counts.pop(workload, None)
        few = sum(one.waiting for one in counts.values()) <= MOST_COUNTS
        return cls(
            round=name,
            minute_counts=counts if few else None,
            incidents=changes.incidents_now,
            sessions=_grown(view.sessions, changes),
        )


def _grown(sessions: dict[str, GrowingSession], changes: Changes) -> dict[str, GrowingSession]:
    """The open sessions that grew last, and as many as there is room for."""
    for name in changes.over:
        sessions.pop(name, None)
    for name, (session, _) in changes.sessions.items():
        sessions.pop(name, None)
        if isinstance(session, GrowingSession):
            session.was = session.lane
            sessions[name] = session
    surplus = len(sessions) - MOST_SESSIONS
    events = changes.numbers.get("events", 0)  # of all that are open
    if events > MOST_EVENTS:
        events = sum(session.wire.events for session in sessions.values())
    for name in list(sessions) if surplus > 0 or events > MOST_EVENTS else ():
        if surplus <= 0 and events <= MOST_EVENTS:
            break
        events -= sessions.pop(name).wire.events
        surplus -= 1
    return sessions
