"""Events that others follow: one bounded stream of Redis, read as CloudEvents 1.0.

The script that decides something also adds its event (`add_event` in redis/lua/_prelude.lua), so none is lost
and none is made up. The id of an event is its place in the stream: ids grow, and a reader goes on behind one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
import redis

from pipeline.errors import BadInput
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

KEPT: Final = 20_000  # as `add_event` keeps at least; about 10 MiB
READ_AT_ONCE: Final = 1_000
BEGIN: Final = "0-0"  # before every event
_ID: Final = re.compile(r"\d{1,15}-\d{1,20}")


class EventType(StrEnum):
    """What happens. docs/events.md has the fields of each."""

    MODEL_LIVE = "model.live"
    MODEL_REJECTED = "model.rejected"
    TRAINING_STARTED = "training.started"
    TRAINING_ENDED = "training.ended"
    LEASE_GRANTED = "lease.granted"
    LEASE_YIELD = "lease.yield"
    LEASE_ENDED = "lease.ended"
    INCIDENT_OPENED = "incident.opened"
    INCIDENT_CLOSED = "incident.closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """One event, with the attributes of CloudEvents 1.0. `subject`: the model version, training, lease or
    incident. `time`: when it was decided, by the clock of Redis."""

    specversion: str = "1.0"
    id: str
    source: str
    type: str
    subject: str
    time: datetime
    datacontenttype: str = "application/json"
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events, the oldest first. `last`: where the next page begins. `gap`: the stream no longer holds all
    events behind `since`."""

    events: list[CloudEvent] = field(default_factory=list)
    last: str = BEGIN
    gap: bool = False


def read_events(
    client: "redis.Redis",
    settings: Settings,
    *,
    since: str | None = None,
    limit: int = 100,
    types: Sequence[str] = (),
) -> EventPage:
    """The first `limit` events behind the id `since`, or the newest ones without it.

    `types`: names or patterns such as `model.*`; empty: all. Raises BadInput, RedisUnavailable."""
    check_event_types(types)
    stream, source = Keys(settings.redis.key_prefix).events, f"logweir:{settings.redis.key_prefix}"
    if since is None:
        return _newest(client, stream, source, limit, types)
    check_event_id(since)
    pipe = client.pipeline(transaction=False)
    pipe.xlen(stream)
    pipe.xrange(stream, count=1)
    with answering():
        size, first = pipe.execute()
    gap = size >= KEPT and since != BEGIN and event_place(since) < event_place(first[0][0].decode())
    found: list[CloudEvent] = []
    last = since
    while True:
        with answering():
            raw: Any = client.xrange(stream, min=f"({last}", count=READ_AT_ONCE)
        for name, fields in raw:
            last = name.decode()
            event = _event(last, fields, source)
            if _matches(event.type, types):
                found.append(event)
                if len(found) >= limit:
                    return EventPage(events=found, last=last, gap=gap)
        if len(raw) < READ_AT_ONCE:
            return EventPage(events=found, last=last, gap=gap)


def newest_event_id(client: "redis.Redis", settings: Settings) -> str:
    """The id of the newest event, BEGIN where there is none. Raises RedisUnavailable."""
    with answering():
        raw: Any = client.xrevrange(Keys(settings.redis.key_prefix).events, count=1)
    return raw[0][0].decode() if raw else BEGIN


def id_before(moment: datetime) -> str:
    """The id behind which the events since a moment stand."""
    ms = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000
    return f"{max(0, int(ms) - 1)}-{2**64 - 1}"


def is_event_id(text: str) -> bool:
    """Whether a text has the form of an id: milliseconds since 1970, a dash, a number."""
    return _ID.fullmatch(text) is not None and int(text.partition("-")[2]) < 2**64


def event_place(name: str) -> tuple[int, int]:
    """The place of an id in the stream; a greater one is newer."""
    ms, _, number = name.partition("-")
    return int(ms), int(number)


def check_event_id(text: str) -> None:
    """Raises BadInput."""
    if not is_event_id(text):
        raise BadInput(f"{text[:60]!r} is no id of an event; take `id` of one, such as 1795168801123-0")


def check_event_types(types: Sequence[str]) -> None:
    """Raises BadInput for a name or pattern that no event has."""
    for name in types:
        if not any(fnmatchcase(kind, name) for kind in EventType):
            raise BadInput(
                f"no event has the type {name[:60]!r}; use one of {', '.join(EventType)}, or model.*"
            )


def _newest(client: "redis.Redis", stream: str, source: str, limit: int, types: Sequence[str]) -> EventPage:
    found: list[CloudEvent] = []
    end, last = "+", ""
    while True:
        with answering():
            raw: Any = client.xrevrange(stream, max=end, min="-", count=READ_AT_ONCE)
        for name, fields in raw:
            last = last or name.decode()
            event = _event(name.decode(), fields, source)
            if _matches(event.type, types):
                found.append(event)
                if len(found) >= limit:
                    break
        if len(raw) < READ_AT_ONCE or len(found) >= limit:
            return EventPage(events=found[::-1], last=last or BEGIN)
        end = f"({raw[-1][0].decode()}"


def _matches(kind: str, types: Sequence[str]) -> bool:
    return not types or any(fnmatchcase(kind, name) for name in types)


def _event(name: str, fields: Mapping[bytes, bytes], source: str) -> CloudEvent:
    text = {key.decode(): value.decode("utf-8", "replace") for key, value in fields.items()}
    try:
        data = msgspec.json.decode(text.get("data", "{}"), type=dict[str, Any])
    except msgspec.MsgspecError:
        data = {"text": text["data"]}
    return CloudEvent(
        id=name,
        source=source,
        type=text.get("type", ""),
        subject=text.get("subject", ""),
        time=datetime.fromtimestamp(event_place(name)[0] / 1000, UTC),
        data=data,
    )
