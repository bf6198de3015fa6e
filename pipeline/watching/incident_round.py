"""A round's work on incidents: anomalous templates and the round's findings become events of incidents."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pipeline.errors import BadPayload, TooNew
from pipeline.logs import logger
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.incidents.transitions import incident_transitions
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.state import WatcherState
from pipeline.watching.verdicts import events_of
from pipeline.watching.view import Changes, View

INTERVAL_MS: Final = 30_000  # incidents are updated so often when nothing happens


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRound:
    """The work of one round on incidents."""

    state: WatcherState
    view: View
    found: Sequence[WatcherFinding]
    shape: TraceShape | None = None  # None: as it was known before

    def run(self) -> Changes:
        """Raises RedisUnavailable."""
        changes = Changes()
        events = events_of(self.view.observed, self.found, self.view.minute_counts)
        if not events and self.view.now_ms - self.view.incidents_ms < INTERVAL_MS:
            return changes
        changes.numbers["incidents_ms"] = self.view.now_ms
        incidents = self._read()
        if incidents is None:
            return changes
        try:
            before = incidents.all()
            incidents.shape = self.shape or incidents.shape
            incidents.add(events)
            incidents.close(datetime.fromtimestamp(self.view.now_ms / 1000, UTC))
            blob, after = incidents.pack(), incidents.all()
            transitions = incident_transitions(before, after)
        except Exception:  # noqa: BLE001 - costs these events, not the round's sessions and rates
            logger().exception("watch.failed")
            return changes
        changes.incidents = blob
        changes.events = transitions
        changes.numbers["incidents"] = sum(incident.open for incident in after)
        return changes

    def _read(self) -> Incidents | None:
        """None where a newer build has written them."""
        try:
            return Incidents.unpack(self.state.incidents())
        except BadPayload as exc:
            logger().warning("watch.damaged", what="incidents", why=str(exc))
            return Incidents()
        except TooNew as exc:
            logger().warning("watch.left_alone", what="incidents", why=str(exc))
            return None
