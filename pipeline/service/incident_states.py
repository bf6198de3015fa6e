"""The decisions of people about incidents: acknowledged, resolved, snoozed.

A decision is kept beside the incident, for the watcher rewrites incidents as more lines come. It holds what
was known when it was made: a resolved incident whose causes come back later has regressed, and a line that
was stored late does not undo a decision that was made of a later moment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import redis

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import record_change
from pipeline.service.incidents import read_incident
from pipeline.service.values import IncidentView
from pipeline.settings import Settings
from pipeline.units import span

MOST_DECISIONS: Final = 5_000
SNOOZE: Final = "1h"
MAX_SNOOZE: Final = timedelta(days=90)


class IncidentState(StrEnum):
    """Where an incident is in the hands of people."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    SNOOZED = "snoozed"
    RESOLVED = "resolved"
    REGRESSED = "regressed"  # resolved, and its causes have come back
    ENDED = "ended"  # nobody decided, and nothing came for a while


class Action(StrEnum):
    """The steps that a person can take."""

    ACKNOWLEDGE = "acknowledge"
    RESOLVE = "resolve"
    SNOOZE = "snooze"
    REOPEN = "reopen"  # as if nobody had decided


_BECOMES: Final = {
    Action.ACKNOWLEDGE: IncidentState.ACKNOWLEDGED,
    Action.RESOLVE: IncidentState.RESOLVED,
    Action.SNOOZE: IncidentState.SNOOZED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One person's decision. `last_seen` and `workloads`: of the incident as that person saw it. `until`: the
    end of a snooze."""

    state: IncidentState
    by: str
    at: datetime
    last_seen: datetime
    workloads: tuple[str, ...]
    until: datetime | None = None
    why: str = ""


def incident_state(incident: IncidentView, decision: Decision | None, now: datetime) -> IncidentState:
    """The state at one moment. A snooze ends at its time, or when the incident reaches another workload."""
    undecided = IncidentState.OPEN if incident.open else IncidentState.ENDED
    if decision is None:
        return undecided
    match decision.state:
        case IncidentState.RESOLVED if incident.last > decision.last_seen:
            return IncidentState.REGRESSED
        case IncidentState.SNOOZED:
            over = decision.until is not None and now >= decision.until
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


def decide_incident(
    client: "redis.Redis",
    settings: Settings,
    name: str,
    action: Action,
    *,
    by: str,
    seen: datetime | None = None,
    lasts: str | None = None,
    why: str = "",
    only: tuple[str, ...] = (),
) -> tuple[IncidentView, Decision | None]:
    """Takes a step, and gives the incident with its decision. `seen`: the last line that the person saw;
    `lasts`: of a snooze, 15m, 1h, 7d.

    Raises BadInput, NotFound, RedisUnavailable."""
    now = utc_now()
    incident = read_incident(client, settings, now, name, only).incident
    key = Keys(settings.redis.key_prefix).incident_states
    decision = None
    if action is Action.REOPEN:
        with answering():
            client.hdel(key, incident.id)
    else:
        decision = Decision(
            state=_BECOMES[action],
            by=by,
            at=now,
            last_seen=incident.last if seen is None else min(seen, incident.last),
            workloads=tuple(incident.workloads),
            until=now + _snooze(lasts or SNOOZE) if action is Action.SNOOZE else None,
            why=why,
        )
        with answering():
            client.hset(key, incident.id, json.dumps(_entry(decision)))
            if client.hlen(key) > MOST_DECISIONS:
                _drop_oldest(client, key)
    record_change(
        client, settings, by=by, action=f"incident.{action}", target=incident.id,
        until=None if decision is None else decision.until, why=why,
    )  # fmt: skip
    return incident, decision


def _snooze(text: str) -> timedelta:
    try:
        length = span(text)
    except OverflowError:
        length = None
    if not length or length > MAX_SNOOZE:
        raise BadInput(f"a snooze of {text[:40]!r} is none; write 15m, 1h or 7d, at most {MAX_SNOOZE.days}d")
    return length


def _drop_oldest(client: "redis.Redis", key: str) -> None:
    entries: Mapping[str, str] = text_map(client.hgetall(key))
    oldest = sorted(entries, key=lambda name: str(json.loads(entries[name])["at"]))
    client.hdel(key, *oldest[: len(entries) - MOST_DECISIONS])


def _entry(decision: Decision) -> dict[str, Any]:
    return {
        "state": decision.state,
        "by": decision.by,
        "at": decision.at.isoformat(),
        "last_seen": decision.last_seen.isoformat(),
        "workloads": list(decision.workloads),
        "until": decision.until and decision.until.isoformat(),
        "why": decision.why,
    }


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
    )
