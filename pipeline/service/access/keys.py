"""Keys of senders and of people who ask. Redis keeps the SHA-256 of a key, never the key: it is shown once,
when it is made.

Without a key that may send, the intake serves this machine only. As soon as there is one, every request to it
needs one. The API always needs a key.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import redis

from pipeline.controller.watchlist import check_pattern, covers
from pipeline.errors import BadInput
from pipeline.gpu.policy.fairness import is_name
from pipeline.gpu.values import TENANT
from pipeline.producer import check_workload
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.upkeep import start_awaited_task

MAX_KEYS: Final = 1_000
MAX_KEY_NAME: Final = 60
FRESH_S: Final = 1.0  # a revoked key is taken for so long
SEND: Final = "send"  # lines, to the intake
READ: Final = "read"
MARK: Final = "mark"
OPERATE: Final = "operate"  # trainings, models, watchlist, dead letters, GPU leases
ADMIN: Final = "admin"  # keys and the audit log
INFER: Final = "infer"  # questions to the served models of one tenant
GPU: Final = "gpu"  # leases of one tenant of the GPU pool
SCOPES: Final = (SEND, READ, MARK, OPERATE, ADMIN, INFER, GPU)
_OF_TENANTS: Final = frozenset({INFER, GPU})
# A scope of the API brings those before it.
_BRINGS: Final = {
    READ: (READ,),
    MARK: (READ, MARK),
    OPERATE: (READ, MARK, OPERATE, GPU),
    ADMIN: (READ, MARK, OPERATE, ADMIN, GPU),
}
_SCHEMES: Final = frozenset({"bearer", "splunk", "apikey", "basic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderKey:
    """The rights of a key. `workload`: the one of all its lines. `patterns`: workloads it may send for, as in
    `logweir watch`; empty: all. `tenant`: whose models it asks, with the scope `infer`, and whose leases it
    has, with `gpu`."""

    name: str
    digest: str
    created: datetime
    workload: str = ""
    patterns: tuple[str, ...] = ()
    scopes: tuple[str, ...] = (SEND,)
    expires: datetime | None = None
    tenant: str = ""

    def may(self, scope: str) -> bool:
        """Whether it is good for this, alone or by a scope that brings it."""
        return any(scope in _BRINGS.get(own, (own,)) for own in self.scopes)

    @property
    def bound_tenant(self) -> str:
        """The only tenant whose leases it may ask for, see and end; "" where all are open or none."""
        return self.tenant if GPU in self.scopes and not self.may(OPERATE) else ""

    def holds(self, now: datetime) -> bool:
        """False once it has expired."""
        return self.expires is None or now < self.expires

    def forbids(self, workloads: Iterable[str]) -> str | None:
        """The first workload that it may not send for, None where there is none."""
        if not self.patterns:
            return None
        return next((name for name in workloads if not covers(self.patterns, name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The keys at one moment."""

    by_digest: dict[str, SenderKey]
    sending: bool = field(init=False)  # whether some key may send

    def __post_init__(self) -> None:
        # Each request asks, and there may be a thousand keys.
        sending = any(key.may(SEND) for key in self.by_digest.values())
        object.__setattr__(self, "sending", sending)

    def find(self, texts: Iterable[str]) -> SenderKey | None:
        """The key that one of these texts is, unless it has expired."""
        now = datetime.now(UTC)
        found = (self.by_digest.get(key_digest(text)) for text in texts)
        return next((key for key in found if key is not None and key.holds(now)), None)


class SenderKeys:
    """Add, list, revoke, and the keys as they were lately. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.key = Keys(settings.redis.key_prefix).sender_keys
        self._seen: tuple[float, KeyRing] | None = None
        self._reading: asyncio.Task[KeyRing] | None = None

    def add(
        self,
        name: str,
        *,
        workload: str = "",
        patterns: Iterable[str] = (),
        scopes: Iterable[str] = (SEND,),
        lasts: timedelta | None = None,
        tenant: str = "",
    ) -> str:
        """A new key, in the only place where it is ever said. Raises BadInput."""
        wanted = tuple(dict.fromkeys(scopes))
        if not wanted or not set(wanted) <= set(SCOPES):
            raise BadInput(f"{', '.join(wanted)[:60]!r} is no scope of a key; use {', '.join(SCOPES)}")
        if not name or len(name) > MAX_KEY_NAME or not name.isprintable():
            raise BadInput(f"{name[:40]!r} is no name of a key; use 1 to {MAX_KEY_NAME} printable characters")
        if workload:
            check_workload(workload)
        if tenant and (not _OF_TENANTS & set(wanted) or not is_name(tenant)):
            raise BadInput(
                f"tenant {tenant[:60]!r} is not usable; use letters, digits, dots, dashes and underscores, at "
                "most 63, with the scope infer or gpu"
            )
        secret = "lw_" + secrets.token_urlsafe(32)
        created_ms = now_ms(self.client)
        expires_ms = None if lasts is None else created_ms + int(lasts.total_seconds() * 1000)
        entry = {
            "digest": key_digest(secret),
            "scopes": wanted,
            "expires_ms": expires_ms,
            "workload": workload,
            "patterns": [check_pattern(pattern) for pattern in patterns],
            "created_ms": created_ms,
            "tenant": (tenant or TENANT) if _OF_TENANTS & set(wanted) else "",
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

    async def ring(self) -> KeyRing:
        """As `lately`, beside the event loop. Of many requests one asks Redis."""
        if (ring := self.recent()) is not None:
            return ring
        if self._reading is None or self._reading.done():
            self._reading = start_awaited_task("keys", asyncio.to_thread(self.lately))
        return await asyncio.shield(self._reading)

    def recent(self) -> KeyRing | None:
        """As `lately`, None where Redis would have to be asked."""
        if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
            return None
        return self._seen[1]


def key_digest(secret: str) -> str:
    """A key has 256 random bits, so a plain hash keeps it secret."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _key(name: str, entry: dict[str, Any]) -> SenderKey:
    expires_ms = entry["expires_ms"]
    return SenderKey(
        name=name,
        digest=entry["digest"],
        created=datetime.fromtimestamp(entry["created_ms"] / 1000, UTC),
        expires=datetime.fromtimestamp(expires_ms / 1000, UTC) if expires_ms else None,
        workload=entry["workload"],
        patterns=tuple(entry["patterns"]),
        scopes=tuple(entry["scopes"]),
        tenant=entry.get("tenant", ""),  # an older build wrote none
    )


def authorization_texts(authorization: str) -> Iterator[str]:
    """The texts that may be the key: of Basic the password, or the user beside an empty one."""
    scheme, _, value = authorization.strip().partition(" ")
    value = value.strip()
    if scheme.lower() not in _SCHEMES or not value:
        return
    yield value
    if scheme.lower() in ("basic", "apikey"):
        try:
            user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return
        yield password or user
