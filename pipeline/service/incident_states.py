"""The state of an incident in the hands of people, by the decision that somebody made of it.

A decision is kept beside the incident, for the watcher rewrites incidents as more lines come. It holds what
was known when it was made: a resolved incident whose causes come back later has regressed, and a line that
was stored late does not undo a decision that was made of a later moment.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import redis

from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.service.values import Decision, IncidentState
from pipeline.settings import Settings


class HasCourse(Protocol):
    """What of an incident its state depends on. `count`: of its lines."""

    @property
    def open(self) -> bool: ...
    @property
    def last(self) -> datetime: ...
    @property
    def workloads(self) -> Sequence[str]: ...
    @property
    def count(self) -> int: ...


def incident_state(
    decision: Decision | None,
    now: datetime,
    incident: HasCourse,
) -> IncidentState:
    """The state of an incident at one moment.

    A snooze ends at its time, after so many more lines, or when the incident reaches another workload."""
    undecided = IncidentState.OPEN if incident.open else IncidentState.ENDED
    if decision is None:
        return undecided
    match decision.state:
        case IncidentState.RESOLVED if incident.last > decision.last_seen:
            return IncidentState.REGRESSED
        case IncidentState.SNOOZED:
            over = decision.until is not None and now >= decision.until
            over = over or (decision.until_count is not None and incident.count >= decision.until_count)
            spread = not set(incident.workloads) <= set(decision.workloads)
            return undecided if over or spread else IncidentState.SNOOZED
        case IncidentState.ACKNOWLEDGED if not incident.open:
            return IncidentState.ENDED
        case _:
            return decision.state


def read_decisions(client: "redis.Redis", settings: Settings) -> dict[str, Decision]:
    """The decision of each incident that has one, by its id. Raises RedisUnavailable."""
    with answering():
        raw = text_map(client.hgetall(Keys(settings.redis.key_prefix).incident_states))
    return {name: _decision(json.loads(entry)) for name, entry in raw.items()}


def _decision(entry: Mapping[str, Any]) -> Decision:
    def moment(text: str) -> datetime:
        return datetime.fromisoformat(text).astimezone(UTC)

    return Decision(
        state=IncidentState(entry["state"]),
        by=entry["by"],
        at=moment(entry["at"]),
        last_seen=moment(entry["last_seen"]),
        workloads=tuple(entry["workloads"]),
        until=moment(entry["until"]) if entry["until"] else None,
        why=entry["why"],
        until_count=entry.get("until_count"),
    )
