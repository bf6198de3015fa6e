"""The steps that people take with incidents: acknowledge, resolve, snooze, reopen."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import redis

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import record_change
from pipeline.service.incident_states import incident_state
from pipeline.service.incidents import read_incident
from pipeline.service.silences import SilenceCover, read_silences
from pipeline.service.values import Action, Decision, IncidentState, IncidentView
from pipeline.settings import Settings
from pipeline.units import span

MOST_DECISIONS: Final = 5_000
SNOOZE: Final = "1h"
MAX_SNOOZE: Final = timedelta(days=90)
MAX_MORE: Final = 1_000_000_000  # lines


_BECOMES: Final = {
    Action.ACKNOWLEDGE: IncidentState.ACKNOWLEDGED,
    Action.RESOLVE: IncidentState.RESOLVED,
    Action.SNOOZE: IncidentState.SNOOZED,
}


def decide_incident(
    client: "redis.Redis",
    settings: Settings,
    name: str,
    action: Action,
    *,
    by: str,
    seen: datetime | None = None,
    lasts: str | None = None,
    more: int | None = None,
    why: str = "",
    only: tuple[str, ...] = (),
) -> IncidentView:
    """Takes a step, and gives the incident as it is then. `seen`: the last line that the person saw;
    `lasts`: of a snooze, 15m, 1h, 7d; `more`: lines that end a snooze before.

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
            last_seen=incident.last if seen is None else min(_utc(seen), incident.last),
            workloads=tuple(incident.workloads),
            until=now + _snooze(lasts or SNOOZE) if action is Action.SNOOZE else None,
            why=why,
            until_count=incident.count + _more(more)
            if action is Action.SNOOZE and more is not None
            else None,
        )
        with answering():
            client.hset(key, incident.id, json.dumps(_entry(decision)))
            if client.hlen(key) > MOST_DECISIONS:
                _drop_oldest(client, key)
    record_change(
        client, settings, by=by, action=f"incident.{action}", target=incident.id,
        until=None if decision is None else decision.until, why=why,
        until_count=None if decision is None else decision.until_count,
    )  # fmt: skip
    state = incident_state(decision, now, incident)
    cover = SilenceCover(read_silences(client, settings, now), now)
    state, silenced_by = cover.state_of(state, incident.causes)
    return replace(incident, state=state, decision=decision, silences=silenced_by)


def _utc(at: datetime) -> datetime:
    try:
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError as exc:
        raise BadInput(f"seen {at.isoformat()} is no time of a log; give that of the last line") from exc


def _snooze(text: str) -> timedelta:
    try:
        length = span(text)
    except OverflowError:
        length = None
    if not length or length > MAX_SNOOZE:
        raise BadInput(
            f"{text[:40]!r} is no length of a snooze; write 15m, 1h or 7d, at most {MAX_SNOOZE.days}d"
        )
    return length


def _more(lines: int) -> int:
    if not 1 <= lines <= MAX_MORE:
        raise BadInput(f"a snooze of {lines:,} more lines is none; give 1 to {MAX_MORE:,}")
    return lines


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
        "until_count": decision.until_count,
    }
