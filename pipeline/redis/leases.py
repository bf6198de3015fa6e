"""Fenced leases on single resources in Redis: training, a drain writer, the source, the watcher.

A lease is a holder, a deadline on Redis time and a fencing token that only grows. A holder that lost its
lease can neither renew nor release it, and the guarded resource (models/publish.lua, drain/learn.lua) refuses
an older token. See Kleppmann, "How to do distributed locking" (2016). GPUs have a pool of their own
(gpu/pool.py)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import redis

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.logs import logger
from pipeline.redis.arguments import named_arguments
from pipeline.redis.connection import answering, now_ms, text_map
from pipeline.redis.keeper import Keeper
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

TRAINING: Final = "training"  # every trainer, on any device; its token is the fence of a publish
DRAIN: Final = "drain"  # the single writer of the template tree
SOURCE: Final = (
    "source"  # polling the log indices of an OpenSearch: two pollers would read the same documents
)
NATS: Final = "nats"  # reading the stream of logs of Opni's services
COMPACTION: Final = "compaction"  # of stored results
WATCH: Final = "watch"  # folding observations into the state of watching
CONTROLLER: Final = "controller"  # deciding about trainings
RESOURCES: Final = (TRAINING, DRAIN, SOURCE, NATS, WATCH, COMPACTION, CONTROLLER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to use a resource until it is not renewed for `ttl_ms`."""

    resource: str
    holder: str
    token: int
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not granted: `why` is "held" or "quarantine"; worth asking again after `wait_ms`."""

    why: str
    wait_ms: int


@dataclass(slots=True)
class HeldLease:
    """A lease that a keeper renews. `lost` is set when the lease has ended."""

    lease: Lease
    lost: threading.Event


class GrantArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of leases/grant.lua by name."""

    resource: str
    holder: str
    ttl_ms: int
    floor: int  # the token is above it
    quarantine_ms: int  # 0: none


class RenewLeaseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of leases/renew.lua by name."""

    holder: str
    token: str
    ttl_ms: int


class Leases:
    """Grant, renew, release. One per process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self.ttl_ms = settings.internal.lease_ttl_ms

    def request(
        self, resource: str, holder: str, *, floor: int = 0, quarantine: bool = False
    ) -> Lease | Refused:
        """Ask once. The token granted is above `floor`, the highest token found in durable storage.

        `quarantine`: refuse for one TTL after Redis restarted or failed over, because an old holder may still
        run. Needed where the guarded resource cannot compare tokens; Redis itself can."""
        keys = [self.keys.lease(resource), self.keys.tokens, self.keys.epoch]
        args = GrantArgs(
            resource=resource,
            holder=holder,
            ttl_ms=self.ttl_ms,
            floor=floor,
            quarantine_ms=self.ttl_ms if quarantine else 0,
        )
        word, number = self.scripts.run("leases/grant", keys, [named_arguments(args)])
        if word == b"granted":
            return Lease(resource=resource, holder=holder, token=int(number), ttl_ms=self.ttl_ms)
        return Refused(why=word.decode(), wait_ms=int(number))

    def renew(self, lease: Lease) -> bool:
        """False when the lease is lost; it then stays lost."""
        args = RenewLeaseArgs(holder=lease.holder, token=str(lease.token), ttl_ms=lease.ttl_ms)
        keys = [self.keys.lease(lease.resource)]
        return bool(self.scripts.run("leases/renew", keys, [named_arguments(args)]))

    def release(self, lease: Lease) -> bool:
        """False when the lease belonged to another holder already."""
        args: list[Any] = [lease.holder, lease.token]
        return bool(self.scripts.run("leases/release", [self.keys.lease(lease.resource)], args))

    def holder_of(self, resource: str) -> str | None:
        """The holder of a resource now, for status; it may be out of date at once. Raises
        RedisUnavailable."""
        with answering():
            entry = text_map(self.client.hgetall(self.keys.lease(resource)))
        live = entry.get("holder") and int(entry.get("deadline", "0")) > now_ms(self.client)
        return entry["holder"] if live else None

    def clear_quarantine(self) -> None:
        """Forget all leases and the quarantine; their tokens stay the floor of the next ones.

        Only for the process that started this Redis privately and has seen every earlier worker end.
        """
        with answering():
            replid = str(self.client.info("replication")["master_replid"])
            self.client.hset(self.keys.epoch, mapping={"id": replid, "until_ms": 0})
            self.client.delete(*(self.keys.lease(name) for name in RESOURCES))

    @contextmanager
    def holding(self, lease: Lease, *, give_back: bool = True) -> Iterator[HeldLease]:
        """Renew in the background while the body works; release at the end unless `give_back` is False.

        `lost` is set when a renewal is refused, or when Redis was silent for so long that the lease may have
        expired."""
        log = logger(resource=lease.resource, token=lease.token)
        keeper = Keeper(
            lambda: "" if self.renew(lease) else "a renewal was refused",
            ttl_ms=lease.ttl_ms,
            beat_s=lease.ttl_ms / 3000,
            log=log,
            event=("lease.lost", "lease.not_renewed"),
        )
        keeper.start()
        try:
            yield HeldLease(lease, keeper.lost)
        finally:
            keeper.stop()
            try:
                if give_back:
                    self.release(lease)
            except RedisUnavailable:
                log.info("lease.not_released", why="Redis is away; it expires")


def granted(answer: Lease | Refused, resource: str) -> Lease:
    """The lease, or LeaseRefused with the time after which asking again makes sense."""
    if isinstance(answer, Refused):
        raise LeaseRefused(f"{resource} is {answer.why}; it may be free in {answer.wait_ms / 1000:.1f} s")
    return answer
