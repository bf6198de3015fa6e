"""Keys of senders. Redis keeps the SHA-256 of a key, never the key: it is shown once, when it is made.

Without any key the intake serves this machine only. As soon as there is one, every request needs one.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import redis

from pipeline.controller.watchlist import check_pattern, covers
from pipeline.errors import BadInput
from pipeline.producer import check_name
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

MAX_KEYS: Final = 1_000
MAX_KEY_NAME: Final = 60
FRESH_S: Final = 1.0  # a revoked key is taken for so long
SEND: Final = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderKey:
    """The rights of a key. `workload`: the one of all its lines. `patterns`: workloads it may send for, as in
    `logweir watch`; empty: all."""

    name: str
    digest: str
    created: datetime
    workload: str = ""
    patterns: tuple[str, ...] = ()
    scope: str = SEND

    def forbids(self, workloads: Iterable[str]) -> str | None:
        """The first workload that it may not send for, None where there is none."""
        if not self.patterns:
            return None
        return next((name for name in workloads if not covers(self.patterns, name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The keys at one moment."""

    by_digest: dict[str, SenderKey]

    def find(self, texts: Iterable[str]) -> SenderKey | None:
        """The key that one of these texts is."""
        digests = (key_digest(text) for text in texts)
        return next((self.by_digest[d] for d in digests if d in self.by_digest), None)


class SenderKeys:
    """Add, list, revoke, and the keys as they were lately. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.key = Keys(settings.redis.key_prefix).sender_keys
        self._seen: tuple[float, KeyRing] | None = None

    def add(self, name: str, *, workload: str = "", patterns: Iterable[str] = ()) -> str:
        """A new key, in the only place where it is ever said. Raises BadInput."""
        if not name or len(name) > MAX_KEY_NAME or not name.isprintable():
            raise BadInput(f"{name[:40]!r} is no name of a key; use 1 to {MAX_KEY_NAME} printable characters")
        if workload:
            check_name("workload", workload)
        secret = "lw_" + secrets.token_urlsafe(32)
        entry = {
            "digest": key_digest(secret),
            "scope": SEND,
            "workload": workload,
            "patterns": [check_pattern(pattern) for pattern in patterns],
            "created_ms": now_ms(self.client),
        }
        with answering():
            if int(self.client.hlen(self.key)) >= MAX_KEYS:
                raise BadInput(f"there are {MAX_KEYS:,} keys, the limit; revoke one that is not used")
            if not self.client.hsetnx(self.key, name, json.dumps(entry)):
                raise BadInput(f"there is a key {name!r} already; revoke it first, or choose another name")
        return secret

    def revoke(self, name: str) -> bool:
        """False when there was no such key."""
        with answering():
            return bool(self.client.hdel(self.key, name))

    def look(self) -> list[SenderKey]:
        """All keys, by name."""
        with answering():
            raw = text_map(self.client.hgetall(self.key))
        return [_key(name, json.loads(text)) for name, text in sorted(raw.items())]

    def lately(self) -> KeyRing:
        """The keys as they were within the last second."""
        if (ring := self.recent()) is None:
            ring = KeyRing(by_digest={key.digest: key for key in self.look()})
            self._seen = (time.monotonic(), ring)
        return ring

    def recent(self) -> KeyRing | None:
        """As `lately`, None where Redis would have to be asked."""
        if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
            return None
        return self._seen[1]


def key_digest(secret: str) -> str:
    """A key has 256 random bits, so a plain hash keeps it secret."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _key(name: str, entry: dict[str, Any]) -> SenderKey:
    return SenderKey(
        name=name,
        digest=entry["digest"],
        created=datetime.fromtimestamp(entry["created_ms"] / 1000, UTC),
        workload=entry["workload"],
        patterns=tuple(entry["patterns"]),
        scope=entry["scope"],
    )
