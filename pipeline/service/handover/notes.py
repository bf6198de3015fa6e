"""Notes of people on an incident, the oldest first: what they saw, tried and agreed on.

A note is text, is never changed, and stands in the audit log by its author and length
alone. An incident has few of them, and they go when nobody has written one for TTL.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import redis

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import record_change
from pipeline.service.handover.values import IncidentNote
from pipeline.service.incidents import read_incident
from pipeline.settings import Settings

MOST_NOTES: Final = 100  # of an incident; they are read with its page
MOST_CHARS: Final = 2_000  # of a note
TTL: Final = timedelta(days=90)


def read_notes(client: "redis.Redis", settings: Settings, incident: str) -> list[IncidentNote]:
    """Notes on the incident with this id, the oldest first. Raises RedisUnavailable."""
    with answering():
        raw: Any = client.lrange(Keys(settings.redis.key_prefix).incident_notes(incident), 0, -1)
    return [_note(json.loads(entry)) for entry in raw]


def notes_of(
    client: "redis.Redis", settings: Settings, name: str, only: tuple[str, ...] = ()
) -> list[IncidentNote]:
    """Notes on an incident by its id, or the beginning of it. `only`: the workloads that the reader sees.

    Raises BadInput, NotFound, RedisUnavailable."""
    return read_notes(client, settings, read_incident(client, settings, utc_now(), name, only).incident.id)


def add_note(
    client: "redis.Redis", settings: Settings, name: str, text: str, *, by: str, only: tuple[str, ...] = ()
) -> IncidentNote:
    """Writes a note on an incident. `only`: the workloads that the author sees.

    Raises BadInput, NotFound, RedisUnavailable."""
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise BadInput("a note without a text says nothing; write one")
    if len(text) > MOST_CHARS:
        raise BadInput(f"the note has {len(text):,} characters; write at most {MOST_CHARS:,}")
    incident = read_incident(client, settings, utc_now(), name, only).incident
    key = Keys(settings.redis.key_prefix).incident_notes(incident.id)
    note = IncidentNote(by=by, at=utc_now(), text=text)
    entry = json.dumps({"by": by, "at": note.at.isoformat(), "text": text})
    with answering():
        if client.llen(key) >= MOST_NOTES:
            raise BadInput(f"the incident has {MOST_NOTES} notes, which is the most; write elsewhere")
        pipe = client.pipeline()
        pipe.rpush(key, entry)
        pipe.ltrim(key, 0, MOST_NOTES - 1)  # two may have counted at once
        pipe.expire(key, TTL)
        pipe.execute()
    record_change(client, settings, by=by, action="incident.note", target=incident.id, chars=len(text))
    return note


def _note(entry: dict[str, str]) -> IncidentNote:
    at = datetime.fromisoformat(entry["at"]).astimezone(UTC)
    return IncidentNote(by=entry["by"], at=at, text=entry["text"])
