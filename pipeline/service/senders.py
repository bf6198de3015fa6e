"""Who sends to the intake: lines, refusals and the last sign of each sender, in Redis for a month.

A sender begins with a request that was not refused; later refusals count as well. A process counts in memory
and adds its counts every few seconds. Redis being away loses none of them, up to the bound of senders.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.service.cursors import page_of
from pipeline.service.values import HeardSender, SenderPage
from pipeline.settings import Settings

MAX_SENDERS: Final = 1_000
KEEP_S: Final = 30 * 86_400
PUSH_S: Final = 5.0
# A sender that was heard for an hour and then not for a quarter of one is silent; after a day it has left.
STEADY_MS: Final = 3_600_000
SILENT_MS: Final = 900_000
LEFT_MS: Final = 86_400_000
_SEPARATOR: Final = "\x1f"  # no name of a key has it, and no address


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
        self._strangers: dict[SentBy, int] = {}  # refusals of senders of which nothing else is counted
        self._lock = threading.Lock()

    def heard(
        self,
        sender: SentBy,
        *,
        lines: int = 0,
        refused: bool = False,
        duplicate: bool = False,
    ) -> None:
        """One more request."""
        with self._lock:
            counts = self._counts.get(sender)
            if counts is None and refused:
                # Apart, so that forged addresses leave the others their places.
                if sender in self._strangers or len(self._strangers) < MAX_SENDERS:
                    self._strangers[sender] = self._strangers.get(sender, 0) + 1
                return
            if counts is None:
                if len(self._counts) >= MAX_SENDERS:
                    return
                refusals = self._strangers.pop(sender, 0)
                counts = self._counts[sender] = _Counts(requests=refusals, refused=refusals)
            counts.lines += lines
            counts.requests += 1
            counts.refused += refused
            counts.duplicates += duplicate

    def push(self, client: "redis.Redis", settings: Settings) -> None:
        """Add them to Redis. Without Redis they stay for the next push."""
        with self._lock:
            counted, self._counts = self._counts, {}
            strangers, self._strangers = self._strangers, {}
            counted |= {sender: _Counts(requests=count, refused=count) for sender, count in strangers.items()}
        if not counted:
            return
        named = [
            argument
            for sender, c in counted.items()
            for argument in (_name(sender), c.lines, c.requests, c.refused, c.duplicates)
        ]
        keys = Keys(settings.redis.key_prefix)
        try:
            Scripts(client).run(
                "intake/heard", [keys.senders, keys.senders_heard], [MAX_SENDERS, KEEP_S, *named]
            )
        except (RedisUnavailable, redis.RedisError):
            with self._lock:  # refusals of strangers are worth no second try
                for sender in counted.keys() - strangers.keys():
                    c, now = counted[sender], self._counts.setdefault(sender, _Counts())
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
            facts = {field: int(value) for field, value in said.items()}
            first, last = (_moment(facts.pop(field)) for field in ("first_ms", "last_ms"))
            found.append(HeardSender(protocol=protocol, key=key, peer=peer, first=first, last=last, **facts))
    return sorted(found, key=lambda sender: sender.last, reverse=True)


def senders_page(client: "redis.Redis", settings: Settings, limit: int, cursor: str | None) -> SenderPage:
    """Some of them. Raises RedisUnavailable, BadInput for a cursor of another question."""
    # By what does not change, so that one that is heard between two pages keeps its place.
    rows = sorted(
        (((one.protocol, one.key, one.peer), one) for one in read_senders(client, settings)),
        key=lambda row: row[0],
    )
    page, following = page_of(rows, limit, cursor, "senders")
    return SenderPage(senders=page, next=following)


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


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _name(sender: SentBy) -> str:
    return _SEPARATOR.join((sender.protocol, sender.key, sender.peer))
