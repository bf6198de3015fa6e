"""Who plans, and when: one process at a time makes a plan of the whole pool and commits it for everybody.

Whoever changes something plans once afterwards; when somebody plans already, a mark asks for one more plan, so that no
change goes unseen and a thousand waiting needs do not make a thousand plans of the same moment. A plan is only a
proposal: the ledger takes it when nothing has changed since it was looked at, whoever made it.
"""

import time
import uuid
from dataclasses import replace
from typing import Final

import redis

from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.policy import fairness, policy
from pipeline.gpu.values import Backfill, PoolLease, PoolPlan, PoolRequest, Snapshot
from pipeline.logs import logger
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

SLOT_MS: Final = 1_000  # a planner that died keeps the others out for no longer
POLL_MS: Final = 500  # time alone changes what is possible (a quarantine ends, a node falls silent)
TRIES: Final = 8  # the pool may change between the look and the commit
ROUNDS_S: Final = 0.1  # so long one process plans for others; those who wait go on where it stops
AGAIN: Final = b"again"


class Planner:
    """Plans and commits. It keeps nothing between two plans but its name."""

    def __init__(self, client: "redis.Redis", ledger: PoolLedger, settings: Settings) -> None:
        keys = Keys(settings.redis.key_prefix)
        self.client = client
        self.ledger = ledger
        self.lease_ttl_ms = settings.internal.lease_ttl_ms
        self.backfill = Backfill(settings.gpu.backfill)
        self.yield_ms = round(settings.gpu.yield_s * 1000)
        self.tenants = fairness.parse_tenants(settings.gpu.tenants)
        self.slot = keys.gpu("planning")
        self.recent = keys.gpu("planned")
        self.waiting = keys.gpu("waiting")
        self.name = uuid.uuid4().hex

    def snapshot(self) -> Snapshot:
        """Everything at this moment, with the tenants of the settings. Raises RedisUnavailable."""
        return replace(self.ledger.snapshot(), tenants=self.tenants)

    def remembered_ms(self, request: PoolRequest) -> int:
        """For how long a waiting request is remembered without being asked for again."""
        return min(request.ttl_ms, self.lease_ttl_ms)

    def plan(self) -> tuple[PoolLease, ...]:
        """Plan now, or leave a mark for who plans at the moment. Returns what was granted here, to whomever.

        Raises RedisUnavailable.
        """
        granted: list[PoolLease] = []
        began = time.monotonic()
        while self._enter():
            try:
                granted += self._commit()
            finally:
                again = self._leave()
            if not again:
                break
            if time.monotonic() - began > ROUNDS_S:
                self._hand_on()
                break
        return tuple(granted)

    def offer(self, request: PoolRequest, *, most: int | None = None) -> tuple[int, PoolPlan] | None:
        """What would be planned now, at which epoch, had this request been waiting; None when it would not be granted,
        or when more than `most` others wait.

        Nothing is changed. The plan is empty for a request that has its lease already. Raises RedisUnavailable.
        """
        snapshot, name = self.snapshot(), request.request_id
        if any(lease.lease_id == name for lease in snapshot.leases):
            return snapshot.epoch, PoolPlan(reservation=snapshot.reservation)
        others = [other for other in snapshot.waiting if other.request_id != name]
        if most is not None and len(others) > most:
            return None
        now = snapshot.now_ms
        waits = replace(request, since_ms=now, until_ms=now + self.remembered_ms(request))
        plan = self._planned(replace(snapshot, waiting=(*others, waits)))
        return (snapshot.epoch, plan) if _grants(plan, name) else None

    def take(
        self, request: PoolRequest, offer: tuple[int, PoolPlan]
    ) -> tuple[PoolLease | None, tuple[PoolLease, ...]]:
        """Register a request and commit what it was offered; registering is one change of the pool. The lease that it
        had already, and what was granted.

        When the pool has changed otherwise, plan anew, and commit only what grants this request: it may not wait for
        another chance. Nobody is asked to yield, and nothing reserved, for one who will be gone.
        Raises LeaseRefused, RedisUnavailable.
        """
        epoch, plan = offer
        lease, done = self.ledger.wait_and_commit(request, self.remembered_ms(request), epoch + 1, plan)
        if lease is not None or not done.why:
            return lease, done.leases
        return None, self._commit(only=request.request_id)

    def first(self) -> tuple[PoolLease, ...]:
        """Plan for who has just begun to wait. Alone it needs no turn. Raises RedisUnavailable."""
        with answering():
            waits = self.client.hlen(self.waiting)
        return self._commit() if waits <= 1 else self.plan()

    def poll(self) -> tuple[PoolLease, ...]:
        """Plan when nobody has for a while: the back-stop of everybody who waits. Raises RedisUnavailable."""
        with answering():
            mine = self.client.set(self.recent, self.name, nx=True, px=POLL_MS)
        return self.plan() if mine else ()

    def after_change(self, *, changed: bool = True) -> tuple[PoolLease, ...]:
        """Plan when anybody waits for what has just become free; where that is not known, when nobody has for a while.

        Raises RedisUnavailable.
        """
        with answering():
            waits = self.client.hlen(self.waiting)
        if not waits:
            return ()
        return self.plan() if changed else self.poll()

    def _planned(self, snapshot: Snapshot) -> PoolPlan:
        return policy.make_plan(snapshot, backfill=self.backfill, yield_ms=self.yield_ms)

    def _commit(self, only: str = "") -> tuple[PoolLease, ...]:
        why = ""
        for _ in range(TRIES):
            snapshot = self.snapshot()
            plan = self._planned(snapshot)
            if only and not _grants(plan, only):
                return ()
            if not plan.grants and not plan.yields and plan.reservation == snapshot.reservation:
                return ()
            done = self.ledger.commit(snapshot.epoch, plan)
            if not done.why:
                return done.leases
            why = done.why
            if why == "quarantine":
                return ()
        logger(tries=TRIES, why=why).warning("gpu.plan_not_taken")
        return ()

    def _enter(self) -> bool:
        """False: somebody else plans, and has our mark to plan once more."""
        with answering():
            while not self.client.set(self.slot, self.name, nx=True, px=SLOT_MS):
                if self.client.set(self.slot, AGAIN, xx=True, keepttl=True):
                    return False
        return True

    def _leave(self) -> bool:
        """True when somebody left a mark meanwhile.

        A planner slower than SLOT_MS may take away the slot of the next one here. Then two plan at a time, which
        costs a stale commit and nothing else.
        """
        with answering():
            return bool(self.client.getdel(self.slot) == AGAIN)

    def _hand_on(self) -> None:
        """The next poll of anybody plans at once: we have a lease to use, or a batch to go back to."""
        with answering():
            self.client.delete(self.recent)


def _grants(plan: PoolPlan, request_id: str) -> bool:
    return any(grant.request_id == request_id for grant in plan.grants)
