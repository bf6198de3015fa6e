"""A lease of the pool while it is used: renewed in the background, watched, given back at the end.

A device cannot compare tokens, so its holder has to stop before the next one may start (redis/keeper.py).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.gpu.values import PoolLease, Renewed
from pipeline.logs import logger
from pipeline.redis.keeper import Keeper

BEAT_S: Final = 0.25  # a renewal's answer carries the request to yield: waiting for a device begins here


@dataclass(slots=True)
class LeaseInUse:
    """A lease that its holder works under.

    `lost`: stop at once. `asked`: another need waits for the device; give it back until `yield_by_ms` (Redis
    time).
    """

    lease: PoolLease
    clean: bool = True
    lost: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    yield_by_ms: int | None = None
    yield_why: str = ""
    keeper: Keeper | None = None

    def why(self) -> str:
        """Why the lease is lost, else why it was asked for; "" while it is neither."""
        return (self.keeper.why if self.keeper is not None else "") or self.yield_why

    def dirty(self) -> None:
        """The holder stays on the device: its part is taken until its processes end."""
        self.clean = False


class LeaseStore(Protocol):
    """Renews and takes back leases."""

    def renew(self, lease: PoolLease) -> Renewed:
        """One renewal."""

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:
        """Give back."""


def keeper_of(pool: LeaseStore, using: LeaseInUse) -> Keeper:
    """The keeper of this lease; it passes a request to yield on to `using`."""
    lease = using.lease
    log = logger(lease=lease.lease_id, holder=lease.holder, token=lease.token)

    def renew() -> str:
        answer = pool.renew(lease)
        if answer.yield_by_ms is not None and not answer.lost:
            using.yield_by_ms, using.yield_why = answer.yield_by_ms, answer.yield_why
            if not using.asked.is_set():
                using.asked.set()
                log.info("gpu.lease_asked_for", why=answer.yield_why)
        return answer.lost

    events = ("gpu.lease_lost", "gpu.lease_not_renewed")
    keeper = Keeper(renew, ttl_ms=lease.ttl_ms, beat_s=BEAT_S, log=log, event=events)
    using.keeper, using.lost = keeper, keeper.lost
    return keeper


@contextmanager
def holding(pool: LeaseStore, lease: PoolLease, *, clean: bool = True) -> Iterator[LeaseInUse]:
    """Renew while the body works; give back at the end, also when the body raises.

    A lost lease is not given back: it may be another holder's. Raises LeaseRefused when it had ended before
    this began, RedisUnavailable when that cannot be known.
    """
    using = LeaseInUse(lease, clean)
    keeper = keeper_of(pool, using)
    log = logger(lease=lease.lease_id, holder=lease.holder, token=lease.token)
    try:
        # The age of the grant is not known here; one renewal tells it before the device is touched.
        if not keeper.renew():
            raise LeaseRefused(f"the GPU lease {lease.lease_id} has ended ({keeper.why}); ask for another")
        keeper.start()
        yield using
    finally:
        keeper.stop()
        if using.lost.is_set():
            log.warning("gpu.lease_not_released", why=using.why())
        else:
            try:
                pool.release(lease, clean=using.clean)
            except RedisUnavailable:
                log.warning("gpu.lease_not_released", why="Redis is away; it expires")
