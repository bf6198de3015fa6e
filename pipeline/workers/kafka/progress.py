"""How far each partition of Kafka is read, in Redis for a day: `logweir senders` and the metrics show it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
import redis

from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

KEEP_S: Final = 86_400
_CLEANED: Final = 1_000  # more partitions than these, and old ones are looked for at each report


class PartitionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One partition as its reader last said it. `lines`: taken in since the reader took it over."""

    topic: str
    partition: int
    servers: str
    offset: int  # of the next record to take in
    end: int  # behind the last record in Kafka
    lines: int
    reader: str
    token: int
    at_ms: int  # the reader's clock, ms since 1970

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.topic}/{self.partition}"

    @property
    def lag(self) -> int:
        """Records that wait in Kafka."""
        return max(0, self.end - self.offset)


_DECODER: Final = msgspec.json.Decoder(PartitionProgress)


def report(client: "redis.Redis", settings: Settings, partitions: Mapping[str, PartitionProgress]) -> None:
    """Says how far these partitions are, by the keys of their cursors. Raises RedisUnavailable."""
    if not partitions:
        return
    key = Keys(settings.redis.key_prefix).kafka
    with answering():
        client.hset(key, mapping={name: msgspec.json.encode(one) for name, one in partitions.items()})
        client.expire(key, KEEP_S)
        if client.hlen(key) > max(_CLEANED, 2 * len(partitions)):
            newest = max(one.at_ms for one in partitions.values())
            before = newest - KEEP_S * 1000
            entries = text_map(client.hgetall(key))
            if old := [name for name, text in entries.items() if _is_older(text, before)]:
                client.hdel(key, *old)


def _is_older(text: str, ms: int) -> bool:
    found = read_partitions([text])
    return not found or found[0].at_ms < ms


def read_partitions(texts: Iterable[str | bytes]) -> list[PartitionProgress]:
    """The partitions as Redis holds them, those with the greatest lag first."""
    found = []
    for text in texts:
        with suppress(msgspec.DecodeError):
            found.append(_DECODER.decode(text))
    return sorted(found, key=lambda one: (-one.lag, one.topic, one.partition))


def stored_partitions(client: "redis.Redis", settings: Settings) -> list[PartitionProgress]:
    """All partitions that were read within a day. Raises RedisUnavailable."""
    with answering():
        return read_partitions(text_map(client.hgetall(Keys(settings.redis.key_prefix).kafka)).values())
