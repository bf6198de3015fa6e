"""A lease of the pool while it is used: renewed in the background, watched, given back at the end.

The device cannot compare tokens, so its holder has to stop before the next one may start. Two threads see to that: one
renews, the other only looks at the clock, because a renewal can hang in a dead connection for longer than a lease lives.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.gpu.values import PoolLease, Renewed
from pipeline.logs import logger

BEAT_S: Final = (
    0.25  # the answer to a renewal says that somebody asks for the device: the wait for it begins here
)
SAFE: Final = 0.8  # of a TTL without a confirmed renewal: stop using the device
JOIN_S: Final = (
    1.0  # a renewal that hangs in a dead connection may outlive the body; it can change nothing any more
)


@dataclass(slots=True)
class Held:
    """A lease in use. `lost`: stop at once. `asked`: somebody wants it; give it back until `yield_by_ms` (Redis time)."""

    lease: PoolLease
    clean: bool = True
    lost: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    yield_by_ms: int | None = None
    _why: str = ""

    def why(self) -> str:
        """Why it is lost, else why it was asked for; "" while it is neither."""
        return self._why

    def dirty(self) -> None:
        """The holder will not be off the device when the body ends: nobody gets its part before its processes are gone."""
        self.clean = False


class Holder(Protocol):
    """What renews and takes back."""

    def renew(self, lease: PoolLease) -> Renewed:
        """One renewal."""

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:
        """Give back."""


@contextmanager
def holding(pool: Holder, lease: PoolLease, *, clean: bool = True) -> Iterator[Held]:
    """Renew while the body works; give back at the end, also when the body raises.

    A lost lease is not given back: it is somebody else's. Raises LeaseRefused when it had ended before this began,
    RedisUnavailable when that cannot be known.
    """
    watched = _Watched(pool, Held(lease, clean))
    log = logger(lease=lease.lease_id, holder=lease.holder, token=lease.token)
    try:
        watched.begin()
        yield watched.held
    finally:
        watched.end()
        if watched.held.lost.is_set():
            log.warning("gpu.lease_not_released", why=watched.held.why())
        else:
            try:
                pool.release(lease, clean=watched.held.clean)
            except RedisUnavailable:
                log.warning("gpu.lease_not_released", why="Redis is away; it expires")


class _Watched:
    """The two threads around one Held."""

    def __init__(self, pool: Holder, held: Held) -> None:
        self.pool = pool
        self.held = held
        self.ttl_s = held.lease.ttl_ms / 1000
        self.stop = threading.Event()
        self.guard = threading.Lock()
        self.confirmed = 0.0  # monotonic, from before the last confirmed renewal was sent
        self.threads: list[threading.Thread] = []
        self.log = logger(lease=held.lease.lease_id, holder=held.lease.holder, token=held.lease.token)

    def begin(self) -> None:
        """How old the grant is, nobody here knows; one renewal tells, before the device is touched."""
        if not self._renew():
            raise LeaseRefused(
                f"the GPU lease {self.held.lease.lease_id} has ended ({self.held.why()}); ask for another"
            )
        for work in (self._watch, self._beat):
            thread = threading.Thread(target=work, name=f"gpu-{work.__name__.strip('_')}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(JOIN_S)

    def _renew(self) -> bool:
        """Raises what the renewal raises."""
        sent = time.monotonic()
        answer = self.pool.renew(self.held.lease)
        if answer.lost:
            self._lose(answer.lost)
            return False
        self.confirmed = sent
        if answer.yield_by_ms is not None:
            self._ask(answer.yield_by_ms, answer.yield_why)
        return True

    def _beat(self) -> None:
        troubled = False
        while not self.stop.wait(min(self.ttl_s / 3, BEAT_S)) and not self.held.lost.is_set():
            try:
                if not self._renew():
                    return
                troubled = False
            except RedisUnavailable as exc:
                if not troubled:
                    self.log.warning("gpu.lease_not_renewed", why=str(exc))
                troubled = True
            except Exception:
                if not troubled:
                    self.log.exception("gpu.lease_not_renewed")
                troubled = True

    def _watch(self) -> None:
        while not self.stop.wait(max(0.0, left := self.confirmed + SAFE * self.ttl_s - time.monotonic())):
            if left <= 0:
                self._lose(f"not renewed for {SAFE * self.ttl_s:.1f} s, so it may have expired")
                return

    def _ask(self, by_ms: int, why: str) -> None:
        with self.guard:
            first = not self.held.asked.is_set()
            self.held.yield_by_ms = by_ms
            if not self.held.lost.is_set():
                self.held._why = why
        if first:
            self.held.asked.set()
            self.log.info("gpu.lease_asked_for", why=why)

    def _lose(self, why: str) -> None:
        with self.guard:
            if self.stop.is_set() or self.held.lost.is_set():
                return
            self.held._why = why
            self.held.lost.set()
        self.log.warning("gpu.lease_lost", why=why)
