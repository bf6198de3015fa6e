"""A round's work on incidents: anomalous templates and the round's findings become events of incidents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from pipeline.errors import BadPayload, TooNew
from pipeline.logs import logger
from pipeline.records.left_out import KEPT_BACK
from pipeline.watching.alarm_budget import AlarmBudget
from pipeline.watching.callbacks import ANY_FAILURE, Expected, passes
from pipeline.watching.incidents.daily import DailyTemplates
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.incidents.transitions import incident_transitions
from pipeline.watching.incidents.values import TEMPLATE, IncidentEvent
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.sessions.keys import JOINT
from pipeline.watching.state import WatcherState
from pipeline.watching.verdicts import AHEAD_MS, MARKED_SCORE, Familiarity, events_of
from pipeline.watching.view import Changes, View

CALM: Final = 1  # neither an error nor a warning: it opens no incident
SEVERE: Final = 3  # at an error level or with an error word
INTERVAL_MS: Final = 30_000  # incidents are updated so often when nothing happens


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRound:
    """The work of one round on incidents."""

    state: WatcherState
    view: View
    found: Sequence[WatcherFinding]
    expected: Callable[[str], Expected]
    budget: AlarmBudget
    shape: TraceShape | None = None  # None: as it was known before

    def run(self) -> Changes:
        """Raises RedisUnavailable."""
        changes = Changes()
        expected = {name: self.expected(name) for name in {one.workload for one in self.view.observed}}
        familiar = self._familiar(changes, expected)
        events = events_of(
            self.view.observed, self.found, self.view.minute_counts, familiar=familiar, expected=expected
        )
        if not events and self.view.now_ms - self.view.incidents_ms < INTERVAL_MS:
            changes.incidents_now = self.view.incidents
            return changes
        changes.numbers["incidents_ms"] = self.view.now_ms
        incidents = self.view.incidents or self._read(changes)
        if incidents is None:
            return changes
        try:
            before = incidents.all()
            incidents.shape = self.shape or incidents.shape
            events, kept_back = within_budget(incidents, events, self.budget)
            if kept_back:
                changes.grown[KEPT_BACK] = kept_back
            incidents.add(events)
            incidents.close(datetime.fromtimestamp(self.view.now_ms / 1000, UTC))
            blob, after = incidents.pack(), incidents.all()
            transitions = incident_transitions(before, after)
        except ANY_FAILURE as exc:  # costs these events, not the round's sessions and rates
            if passes(exc):
                raise
            logger().exception("watch.failed", part="incidents")
            changes.failed.update(event.workload for event in events)
            return changes
        changes.incidents, changes.incidents_now = blob, incidents
        changes.events = transitions
        changes.numbers["incidents"] = sum(incident.open for incident in after)
        return changes

    def _familiar(
        self, changes: Changes, expected: Mapping[str, Expected]
    ) -> dict[tuple[str, int], Familiarity]:
        """The anomalous templates (batch id, template) of this round that come as often as usual, or with a
        new version; notes the days and the starts of this round."""
        starting = self.state.starting({i for one in self.view.observed for i in one.rates["template_id"]})
        observed = [
            one
            for one in self.view.observed
            if one.anomalies or not starting.isdisjoint(one.rates["template_id"])
        ]
        blobs = self.state.daily(sorted({one.workload for one in observed}))
        pasts = {one: self._daily(changes, one, blobs.get(one)) for one in {one.workload for one in observed}}
        found: dict[tuple[str, int], Familiarity] = {}
        for one in observed:
            past, latest_ms = pasts[one.workload], one.accepted_ms + AHEAD_MS
            for minute, template_id, _ in one.rates.rows():
                at_ms = 60_000 * minute
                if (
                    template_id in starting
                    and 0 <= at_ms <= latest_ms
                    and past.starts.note(template_id, at_ms)
                ):
                    changes.daily[one.workload] = b""
        for one in observed:
            past, latest_ms = pasts[one.workload], one.accepted_ms + AHEAD_MS
            for row in one.anomalies.named_rows():
                template_id, at_ms = row["template_id"], row["first"]
                if at_ms > latest_ms:  # of a broken clock
                    continue
                at_its_hour = past.at_its_hour(template_id, at_ms)
                past.note(template_id, at_ms, min(row["last"], latest_ms), row["n"])
                changes.daily[one.workload] = b""
                severe, marked = row["severity"] == SEVERE, row["score"] >= MARKED_SCORE
                per_day = expected[one.workload].errors.get(template_id, 0.0)
                if severe and not marked and at_its_hour and past.is_usual(template_id, at_ms, per_day):
                    found[one.batch_id, template_id] = Familiarity.EVERY_DAY
                elif not severe and row["new"] and not marked and past.starts.just_before(at_ms):
                    found[one.batch_id, template_id] = Familiarity.NEW_VERSION
        for workload in changes.daily:
            changes.daily[workload] = pasts[workload].pack()
        return found

    def _read(self, changes: Changes) -> Incidents | None:
        """None where a newer build has written them."""
        try:
            return Incidents.unpack(self.state.incidents())
        except BadPayload as exc:
            logger().warning("watch.damaged", what="incidents", why=str(exc))
            changes.failed[JOINT] += 1
            return Incidents()
        except TooNew as exc:
            logger().warning("watch.left_alone", what="incidents", why=str(exc))
            return None

    def _daily(self, changes: Changes, workload: str, blob: bytes | None) -> DailyTemplates:
        try:
            return DailyTemplates.unpack(blob)
        except BadPayload as exc:
            logger(workload=workload).warning("watch.damaged", what="daily templates", why=str(exc))
            changes.failed[workload] += 1
            return DailyTemplates()


def within_budget(
    incidents: Incidents, events: Sequence[IncidentEvent], budget: AlarmBudget
) -> tuple[list[IncidentEvent], int]:
    """The events, those that the alarm budget keeps back as calm ones, and how many findings these are."""
    judged, kept_back = [], 0
    for event in events:
        seen = [*incidents.sightings((event.workload, event.cause)), (event.first, event.count)]
        if event.severity > CALM and not budget.rings(event.chance, event.last, seen):
            judged.append(replace(event, severity=CALM))
            kept_back += event.count if event.kind != TEMPLATE else 1
        else:
            judged.append(event)
    return judged, kept_back
