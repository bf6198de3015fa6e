"""How far a stream of NATS is read, in Redis for a day: `logweir senders` and the metrics show it."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
import redis

from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

KEEP_S: Final = 86_400


class StreamProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One stream as its reader last said it. `lines`: taken in since the reader began."""

    stream: str  # "" without JetStream
    subjects: str
    servers: str
    sequence: int  # of the next message to take in
    end: int  # behind the last message
    lines: int
    reader: str
    at_ms: int  # the reader's clock, ms since 1970

    @property
    def name(self) -> str:
        """As people write it."""
        return self.stream or self.subjects

    @property
    def lag(self) -> int:
        """Messages that wait in the stream."""
        return max(0, self.end - self.sequence)


_DECODER: Final = msgspec.json.Decoder(StreamProgress)


def report_stream(client: "redis.Redis", settings: Settings, name: str, progress: StreamProgress) -> None:
    """Says how far a stream is read. Raises RedisUnavailable."""
    key = Keys(settings.redis.key_prefix).nats
    with answering():
        client.hset(key, name, msgspec.json.encode(progress))
        client.expire(key, KEEP_S)


def read_streams(texts: Iterable[str | bytes]) -> list[StreamProgress]:
    """The streams as Redis holds them, those with the greatest lag first."""
    found = []
    for text in texts:
        with suppress(msgspec.DecodeError):
            found.append(_DECODER.decode(text))
    return sorted(found, key=lambda one: (-one.lag, one.name))


def stored_streams(client: "redis.Redis", settings: Settings) -> list[StreamProgress]:
    """All streams that were read within a day. Raises RedisUnavailable."""
    with answering():
        return read_streams(text_map(client.hgetall(Keys(settings.redis.key_prefix).nats)).values())
