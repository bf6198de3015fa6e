"""A round's work on incidents: anomalous templates and the round's findings become events of incidents."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pipeline.errors import BadPayload, TooNew
from pipeline.logs import logger
from pipeline.watching.incidents.daily import DailyTemplates
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.incidents.transitions import incident_transitions
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.state import WatcherState
from pipeline.watching.verdicts import AHEAD_MS, events_of
from pipeline.watching.view import Changes, View

SEVERE: Final = 3  # at an error level or with an error word
MARKED_SCORE: Final = 1.0  # of lines that a person marked as anomalous
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
        usual = self._usual(changes)
        events = events_of(self.view.observed, self.found, self.view.minute_counts, usual=usual)
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

    def _usual(self, changes: Changes) -> set[tuple[str, int]]:
        """The anomalous templates (batch, template) of this round that come every day; notes those of
        today."""
        usual: set[tuple[str, int]] = set()
        observed = [one for one in self.view.observed if one.anomalies]
        blobs = self.state.daily(sorted({one.workload for one in observed}))
        known: dict[str, DailyTemplates] = {}
        for one in observed:
            if one.workload not in known:
                known[one.workload] = _unpack_daily(one.workload, blobs.get(one.workload))
            daily = known[one.workload]
            for row in one.anomalies.named_rows():
                template_id, at_ms = row["template_id"], row["first"]
                latest_ms = one.accepted_ms + AHEAD_MS
                if at_ms > latest_ms:  # of a broken clock
                    continue
                if daily.note(template_id, at_ms, min(row["last"], latest_ms)):
                    changes.daily[one.workload] = b""
                by_level_alone = row["severity"] == SEVERE and not row["new"] and row["score"] < MARKED_SCORE
                if by_level_alone and daily.is_usual(template_id, at_ms):
                    usual.add((one.batch_id, template_id))
        for workload in changes.daily:
            changes.daily[workload] = known[workload].pack()
        return usual

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


def _unpack_daily(workload: str, blob: bytes | None) -> DailyTemplates:
    try:
        return DailyTemplates.unpack(blob)
    except BadPayload as exc:
        logger(workload=workload).warning("watch.damaged", what="daily templates", why=str(exc))
        return DailyTemplates()
