"""Incidents that opened or closed between two states, as events for others to follow. Pure."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from pipeline.observe.events import EventType
from pipeline.watching.incidents.values import Incident

WORKLOADS: Final = 20  # that an event names


def incident_transitions(before: Iterable[Incident], after: Iterable[Incident]) -> list[tuple[str, str, str]]:
    """(type, incident, data as JSON) of each change, the oldest incident first.

    An incident that was over when it was found, as in old lines, only closes. One that leaves the state while
    it is open closes with the reason why: the grouping has joined its causes to another one, or it made room.
    """
    old, new = {i.id: i for i in before}, {i.id: i for i in after}
    found = []
    changed = [i for i in new.values() if old.get(i.id) is not i]
    for incident in sorted(changed, key=lambda i: (i.first, i.id)):
        known = old.get(incident.id)
        was_open = known is not None and known.open
        if incident.open and not was_open:
            found.append(_transition(EventType.INCIDENT_OPENED, incident, ""))
        elif not incident.open and (known is None or was_open):
            found.append(_transition(EventType.INCIDENT_CLOSED, incident, "its causes are over"))
    left = [i for i in old.values() if i.open and i.id not in new]
    homes = {cause.key: i.id for i in new.values() for cause in i.causes} if left else {}
    for incident in sorted(left, key=lambda i: (i.first, i.id)):
        home = next((homes[c.key] for c in incident.causes if c.key in homes), "")
        why = f"its causes belong to {home} now" if home else "it made room for newer ones"
        found.append(_transition(EventType.INCIDENT_CLOSED, incident, why))
    return found


def _transition(kind: EventType, incident: Incident, why: str) -> tuple[str, str, str]:
    data: dict[str, Any] = {
        "incident": incident.id,
        "title": incident.title,
        "severity": incident.severity,
        "workloads": incident.workloads[:WORKLOADS],
        "causes": len(incident.causes) + incident.more,
        "count": incident.count,
        "first": incident.first,
        "last": incident.last,
        "seen_before": incident.seen_before,
    }
    if kind is EventType.INCIDENT_CLOSED:
        data["why"] = why
    return kind.value, incident.id, msgspec.json.encode(data).decode()
