"""Fenced leases on single things in Redis: training, the drain writer, the source. GPUs have a pool of their own (pool.py).

A lease is holder + deadline on Redis time + a fencing token that only grows. Whoever lost it can neither renew nor
release, and what it guards (models/publish.lua, drain/learn.lua) compares the token again. Exclusive, or shared until somebody waits
to have it alone. See Kleppmann, "How to do distributed locking" (2016), on why the token is needed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import redis

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.logs import logger
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.redis.shards import of_shard
from pipeline.settings import MAX_SHARDS, Settings

# The resources that single leases are taken on.
# Whoever trains, on whatever device, holds this; its token is the fence of a publish.
TRAINING: Final = "training"
# The single writer of the template tree of shard 0; those of other shards are of_shard(DRAIN, n).
DRAIN: Final = "drain"
# Whoever polls the log indices of an OpenSearch: two would read the same documents at once.
SOURCE: Final = "source"
# Whoever folds observations into what is watched.
WATCH: Final = "watch"
RESOURCES: Final = (TRAINING, *(of_shard(DRAIN, n) for n in range(MAX_SHARDS)), SOURCE, WATCH)


class Mode(StrEnum):
    """How a resource is used."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to use a resource until it is not renewed for `ttl_ms`."""

    resource: str
    mode: Mode
    holder: str
    token: int
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not granted: `why` is "held" or "quarantine"; worth asking again after `wait_ms`."""

    why: str
    wait_ms: int


@dataclass(slots=True)
class Held:
    """A lease that a background thread renews. `lost` is set when the lease is gone."""

    lease: Lease
    lost: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """Who holds a resource now, for routing and status."""

    exclusive: str | None
    shared: int
    waiting: bool

    @property
    def open_to_shared(self) -> bool:
        """True when a shared lease would be granted."""
        return self.exclusive is None and not self.waiting


class Leases:
    """Grant, renew, release. One per process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(client)
        self.ttl_ms = settings.lease_ttl_ms

    def request(
        self, resource: str, mode: Mode, holder: str, *, floor: int = 0, quarantine: bool = False
    ) -> Lease | Refused:
        """Ask once. `floor`: the token given is above it (the highest token found in durable storage).

        `quarantine`: refuse for one TTL after Redis restarted or failed over, because an old holder may still be
        running. Needed where the guarded thing cannot compare tokens (a GPU); not where it can (Redis itself).
        """
        k = self.keys
        answer = self.scripts.run(
            "leases/grant",
            [k.lease(resource), k.shared(resource), k.tokens, k.epoch],
            [resource, mode.value, holder, self.ttl_ms, floor, self.ttl_ms if quarantine else 0],
        )
        word = answer[0].decode()
        if word == "granted":
            return Lease(
                resource=resource, mode=mode, holder=holder, token=int(answer[1]), ttl_ms=self.ttl_ms
            )
        return Refused(why=word, wait_ms=int(answer[1]))

    def renew(self, lease: Lease) -> bool:
        """False when the lease is lost; it then stays lost."""
        keys = [self.keys.lease(lease.resource), self.keys.shared(lease.resource)]
        args: list[Any] = [lease.mode.value, lease.holder, lease.token, lease.ttl_ms]
        return bool(self.scripts.run("leases/renew", keys, args))

    def release(self, lease: Lease) -> bool:
        """False when it was not ours any more."""
        keys = [self.keys.lease(lease.resource), self.keys.shared(lease.resource)]
        return bool(self.scripts.run("leases/release", keys, [lease.mode.value, lease.holder, lease.token]))

    def look(self, resource: str) -> LeaseView:
        """A snapshot; it may be old by the time it is read. Raises RedisUnavailable."""
        with answering():
            seconds, micros = self.client.time()
            now = int(seconds) * 1000 + int(micros) // 1000
            entry = text_map(self.client.hgetall(self.keys.lease(resource)))
            shared = int(self.client.zcount(self.keys.shared(resource), f"({now}", "+inf"))
        held = entry.get("holder") and int(entry.get("deadline", "0")) > now
        return LeaseView(
            exclusive=entry["holder"] if held else None,
            shared=shared,
            waiting=bool(entry.get("waiting")) and int(entry.get("waiting_until", "0")) > now,
        )

    def clear_quarantine(self) -> None:
        """Say that no earlier process can still hold a lease: none is held any more, and no quarantine is needed.

        Only for whoever started this Redis privately and has seen every earlier worker end.
        """
        with answering():
            replid = str(self.client.info("replication")["master_replid"])
            self.client.hset(self.keys.epoch, mapping={"id": replid, "until_ms": 0})
            # What dead workers held; their tokens stay the floor of the next ones.
            self.client.delete(
                *(key(name) for name in RESOURCES for key in (self.keys.lease, self.keys.shared))
            )

    @contextmanager
    def holding(self, lease: Lease, *, give_back: bool = True) -> Iterator[Held]:
        """Renew in the background while the body works; give back at the end, unless the holder keeps it.

        `lost` is set as soon as a renewal is refused, or when Redis was silent for so long that the lease may have
        expired: measured from before the last confirmed renewal was sent, so that we stop before others start.
        """
        held, stop = Held(lease), threading.Event()
        confirmed = time.monotonic()

        def lose() -> None:
            if not stop.is_set() and not held.lost.is_set():
                held.lost.set()
                logger(resource=lease.resource, token=lease.token).warning("lease.lost")

        def beat() -> None:
            nonlocal confirmed
            while not stop.wait(lease.ttl_ms / 3000) and not held.lost.is_set():
                sent = time.monotonic()
                try:
                    if not self.renew(lease):
                        lose()
                        return
                    confirmed = sent
                except RedisUnavailable:
                    continue  # the watch decides

        def watch() -> None:
            # A thread of its own: a renewal can hang in a dead connection for longer than the lease lives.
            while not stop.wait(left := confirmed + lease.ttl_ms * 0.8 / 1000 - time.monotonic()):
                if left <= 0:
                    lose()
                    return

        threads = [
            threading.Thread(target=work, name=f"lease-{lease.resource}", daemon=True)
            for work in (beat, watch)
        ]
        for thread in threads:
            thread.start()
        try:
            yield held
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            try:
                if give_back:
                    self.release(lease)
            except RedisUnavailable:
                logger(resource=lease.resource).warning("lease.not_released", why="Redis is away; it expires")


def granted(answer: Lease | Refused, resource: str) -> Lease:
    """The lease, or LeaseRefused with the time after which asking again makes sense."""
    if isinstance(answer, Refused):
        raise LeaseRefused(f"{resource} is {answer.why}; it may be free in {answer.wait_ms / 1000:.1f} s")
    return answer
