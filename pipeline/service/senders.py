"""Who sends to the intake: lines, refusals and the last sign of each sender, in Redis for a month.

A process counts in memory and adds its counts every few seconds. Redis being away loses none of them, up to
the bound of senders. Once a minute a few lines of a sender go along. The sweep of a worker takes them and
adds their formats, because this process has no parser.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.records.pushed import PushedRecords
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.service.values import HeardSender
from pipeline.settings import Settings

MAX_SENDERS: Final = 1_000
KEEP_S: Final = 30 * 86_400
PUSH_S: Final = 5.0
# A sender that was heard for an hour and then not for a quarter of one is silent; after a day it has left.
STEADY_MS: Final = 3_600_000
SILENT_MS: Final = 900_000
LEFT_MS: Final = 86_400_000
# A sender shows so many records, so often; a push shows so many senders.
SAMPLE: Final = 20
SAMPLE_S: Final = 60.0
SAMPLED: Final = 100
_SAMPLE_CHARS: Final = 1_000
_SAMPLES_KEPT: Final = 200  # in Redis, where no worker takes them
_SAMPLES_S: Final = 300
_SEPARATOR: Final = "\x1f"  # no name of a key has it, and no address


# Raw texts that a worker is to parse, and how many records had their fields from the protocol.
Sample = tuple[list[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    """The protocol, the name of the sender's key, and its address."""

    protocol: str
    key: str
    peer: str


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    requests: int = 0
    refused: int = 0
    duplicates: int = 0


class SenderCounts:
    """Counts of this process since its last push. Safe for threads."""

    def __init__(self) -> None:
        self._counts: dict[SentBy, _Counts] = {}
        self._samples: dict[SentBy, Sample] = {}
        self._sampled: dict[SentBy, float] = {}  # when each was last
        self._lock = threading.Lock()

    def heard(
        self,
        sender: SentBy,
        *,
        lines: int = 0,
        refused: bool = False,
        duplicate: bool = False,
        records: PushedRecords | None = None,
    ) -> None:
        """One more request. `records`: those that are in by it."""
        with self._lock:
            if (counts := self._counts.get(sender)) is None:
                if len(self._counts) >= MAX_SENDERS:
                    return
                counts = self._counts[sender] = _Counts()
            counts.lines += lines
            counts.requests += 1
            counts.refused += refused
            counts.duplicates += duplicate
            if (
                records is not None
                and records.height
                and sender not in self._samples
                and len(self._samples) < SAMPLED
            ):
                now = time.monotonic()
                if now - self._sampled.get(sender, -SAMPLE_S) >= SAMPLE_S:
                    self._sampled[sender] = now
                    self._samples[sender] = _sample(records)

    def push(self, client: "redis.Redis", settings: Settings) -> None:
        """Add them to Redis. Without Redis they stay for the next push."""
        with self._lock:
            counted, self._counts = self._counts, {}
            samples, self._samples = self._samples, {}
            if len(self._sampled) > MAX_SENDERS:
                self._sampled.clear()
        if not counted:
            return
        named = [
            argument
            for sender, c in counted.items()
            for argument in (_name(sender), c.lines, c.requests, c.refused, c.duplicates)
        ]
        try:
            Scripts(client).run(
                "intake/heard", [Keys(settings.redis.key_prefix).senders], [MAX_SENDERS, KEEP_S, *named]
            )
            _push_samples(client, settings, samples)
        except (RedisUnavailable, redis.RedisError):
            with self._lock:
                for sender, c in counted.items():
                    now = self._counts.setdefault(sender, _Counts())
                    now.lines += c.lines
                    now.requests += c.requests
                    now.refused += c.refused
                    now.duplicates += c.duplicates


def read_senders(client: "redis.Redis", settings: Settings) -> Sequence[HeardSender]:
    """All senders, the one that was heard last first. Raises RedisUnavailable."""
    with answering():
        raw = text_map(client.hgetall(Keys(settings.redis.key_prefix).senders))
    found = []
    for name, text in raw.items():
        with suppress(ValueError):
            protocol, key, peer = name.split(_SEPARATOR)
            said = json.loads(text)
            formats = _shares(said.pop("formats", {}))
            facts = {field: int(value) for field, value in said.items()}
            first, last = (_moment(facts.pop(field)) for field in ("first_ms", "last_ms"))
            found.append(
                HeardSender(
                    protocol=protocol, key=key, peer=peer, first=first, last=last, formats=formats, **facts
                )
            )
    return sorted(found, key=lambda sender: sender.last, reverse=True)


def has_fallen_silent(sender: HeardSender, now: datetime) -> bool:
    """Whether it was steady, and nothing has come for a while; False once it has left."""
    quiet_ms = (now - sender.last).total_seconds() * 1000
    steady_ms = (sender.last - sender.first).total_seconds() * 1000
    return steady_ms >= STEADY_MS and SILENT_MS <= quiet_ms < LEFT_MS


def silent_senders(texts: Iterable[bytes], now_ms: int) -> int:
    """How many of the senders, as Redis holds them, are silent."""
    count = 0
    for text in texts:
        with suppress(ValueError, KeyError, TypeError):
            facts = json.loads(text)
            quiet_ms = now_ms - int(facts["last_ms"])
            steady = int(facts["last_ms"]) - int(facts["first_ms"]) >= STEADY_MS
            count += steady and SILENT_MS < quiet_ms < LEFT_MS
    return count


def _sample(records: PushedRecords) -> Sample:
    raws = records.raws or records.messages
    texts = [
        raw[:_SAMPLE_CHARS]
        for raw, message in zip(raws[:SAMPLE], records.messages[:SAMPLE], strict=True)
        if message is None and raw is not None
    ]
    return texts, min(SAMPLE, records.height) - len(texts)


def _push_samples(client: "redis.Redis", settings: Settings, samples: Mapping[SentBy, Sample]) -> None:
    if not samples:
        return
    key = Keys(settings.redis.key_prefix).samples
    packed = [json.dumps([_name(sender), *sample]) for sender, sample in samples.items()]
    # They are worth no second try.
    with suppress(redis.RedisError), client.pipeline(transaction=True) as pipe:
        pipe.rpush(key, *packed)
        pipe.ltrim(key, -_SAMPLES_KEPT, -1)
        pipe.expire(key, _SAMPLES_S)
        pipe.execute()


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return {name: round(count / total, 3) for name, count in ranked}


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _name(sender: SentBy) -> str:
    return _SEPARATOR.join((sender.protocol, sender.key, sender.peer))
