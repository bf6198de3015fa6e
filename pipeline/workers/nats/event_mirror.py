"""Events of the pipeline as messages of NATS, structured CloudEvents under `logweir.events.<type>`.

The cursor lies in Redis, and each message has the id of its event. The stream tells what it has last, so a
gateway that was killed, and a Redis that went back, repeat nothing however late they return.
"""

from typing import Final

import msgspec

from pipeline.ledger.ledger import Ledger
from pipeline.logs import logger
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import ensure_events, newest_message_id, publish_all, publish_once
from pipeline.nats.subjects import EVENTS_PREFIX
from pipeline.observe.events import BEGIN, CloudEvent, event_place, is_event_id, read_events
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys

AT_ONCE: Final = 200
PUBLISH_S: Final = 20.0
CURSOR: Final = "=events"  # beside the jobs of Opni (jobs.py)
HEADERS: Final = {"content-type": "application/cloudevents+json"}


class EventMirror:
    """Publishes what is new. Only the process that has the lease of the stream does."""

    def __init__(self, connection: NatsConnection, ledger: Ledger) -> None:
        self.connection = connection
        self.client, self.settings = ledger.client, ledger.settings
        self.key = Keys(self.settings.redis.key_prefix).nats_jobs

    def tend(self) -> None:
        """Raises RedisUnavailable, SourceUnavailable: the next call goes on where this one stopped."""
        with answering():
            raw = self.client.hget(self.key, CURSOR)
        since = raw.decode() if isinstance(raw, bytes) else BEGIN
        page = read_events(self.client, self.settings, since=since, limit=AT_ONCE)
        if page.gap:
            logger(role="nats").warning("nats.events_missed", since=since)
        if not page.events:
            return
        if self.connection.source.is_durable:
            self._publish(page.events)
            self._move(page.last)
        else:
            self._move(page.last)  # first, because at most once is promised
            messages = [_message(event, "") for event in page.events]
            self.connection.call(publish_once(self.connection.client, messages), PUBLISH_S)

    def _publish(self, events: list[CloudEvent]) -> None:
        source, connection = events[0].source, self.connection
        stream = ensure_events(connection, connection.source)
        newest = newest_message_id(connection, stream).removeprefix(f"{source} ")
        if is_event_id(newest):
            events = [event for event in events if event_place(event.id) > event_place(newest)]
        messages = [_message(event, f"{event.source} {event.id}") for event in events]
        # One by one: the newest that is stored then says that all before it are.
        connection.call(publish_all(connection.jetstream, messages, at_once=1), PUBLISH_S)

    def _move(self, last: str) -> None:
        with answering():
            self.client.hset(self.key, CURSOR, last)


def _message(event: CloudEvent, msg_id: str) -> tuple[str, bytes, str, dict[str, str]]:
    subject = event.type if msg_id else f"{EVENTS_PREFIX}{event.type}"
    return subject, msgspec.json.encode(event), msg_id, HEADERS
