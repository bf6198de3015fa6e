"""Single-flight planning: one process at a time plans the whole pool and commits the plan for all.

A process that changes the pool plans once afterwards. While another process plans, a mark asks it for one
more plan. So no change is missed, and a thousand waiting needs do not make a thousand plans of one moment. A
plan is a proposal: the ledger commits it if nothing has changed since its snapshot, whichever process made
it.
"""

import threading
import time
import uuid
from dataclasses import replace
from typing import Final

import redis

from pipeline.gpu.leasing.accounts import Accounts
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.policy import fairness, policy
from pipeline.gpu.policy.pool_index import PoolIndex
from pipeline.gpu.values import Backfill, PoolLease, PoolPlan, PoolRequest, Snapshot
from pipeline.logs import logger
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

SLOT_MS: Final = 1_000  # A dead planner blocks the others for no longer.
POLL_MS: Final = 500  # Time alone changes what is possible (a quarantine ends, a node falls silent).
TRIES: Final = 8  # The pool may change between the snapshot and the commit.
ROUNDS_S: Final = 0.1  # A process plans for others so long; waiting processes go on from there.
PLAN_MEANWHILE: Final = b"again"


class Planner:
    """Plans and commits. Between two plans it keeps its name, and an index that saves time alone."""

    def __init__(self, client: "redis.Redis", ledger: PoolLedger, settings: Settings) -> None:
        keys = Keys(settings.redis.key_prefix)
        self.client = client
        self.ledger = ledger
        self.lease_ttl_ms = settings.internal.lease_ttl_ms
        self.backfill = Backfill(settings.gpu.backfill)
        self.yield_ms = round(settings.gpu.yield_s * 1000)
        self.tenants = fairness.parse_tenants(settings.gpu.tenants)
        self.accounts = Accounts(client, settings.redis.key_prefix)
        self.slot = keys.gpu("planning")
        self.recent = keys.gpu("planned")
        self.waiting = keys.gpu("waiting")
        self.name = uuid.uuid4().hex
        self.crowd = 0  # needs that waited when this process read the pool last
        self._index = PoolIndex()
        self._one_plan = threading.Lock()  # threads share the index

    def snapshot(self) -> Snapshot:
        """The whole pool at this moment, with the tenants and their budgets. Raises RedisUnavailable."""
        snapshot = self.ledger.snapshot()
        snapshot = replace(snapshot, tenants=self.accounts.of(self.tenants, snapshot))
        self.crowd = len(snapshot.waiting)
        return snapshot

    def remembered_ms(self, request: PoolRequest) -> int:
        """A waiting request is remembered so long after its holder asked last.

        Needs of a crowd are remembered longer, so that the crowd as a whole asks no more often.
        """
        return round(min(request.ttl_ms, self.lease_ttl_ms) * min(4.0, max(1.0, self.crowd / 250)))

    def plan(self) -> tuple[PoolLease, ...]:
        """Plan now, or leave a mark for the process that plans. Returns all leases granted here.

        Raises RedisUnavailable.
        """
        granted: list[PoolLease] = []
        began = time.monotonic()
        while self._enter():
            try:
                granted += self._commit()
            finally:
                planned_meanwhile = self._leave()
            if not planned_meanwhile:
                break
            if time.monotonic() - began > ROUNDS_S:
                self._hand_on()
                break
        return tuple(granted)

    def offer(self, request: PoolRequest, *, limit: int | None = None) -> tuple[int, PoolPlan] | None:
        """The epoch and plan of now with this request waiting; None when the plan would not grant it.

        None too when more than `limit` others wait. Changes nothing. The plan is empty for a request that has
        its lease already. Raises RedisUnavailable.
        """
        snapshot, name = self.snapshot(), request.request_id
        if any(lease.lease_id == name for lease in snapshot.leases):
            return snapshot.epoch, PoolPlan(reservation=snapshot.reservation)
        others = [other for other in snapshot.waiting if other.request_id != name]
        if limit is not None and len(others) > limit:
            return None
        waits = replace(request, since_ms=snapshot.now_ms)
        plan = self._planned(replace(snapshot, waiting=(*others, waits)))
        return (snapshot.epoch, plan) if _grants(plan, name) else None

    def take(
        self, request: PoolRequest, offer: tuple[int, PoolPlan]
    ) -> tuple[PoolLease | None, tuple[PoolLease, ...]]:
        """Register a request and commit its offer. Returns the lease that it had already, and all new ones.

        If the pool has changed meanwhile, plan anew, and commit only a plan that grants this request. A
        request that may not wait must cause no yield and no reservation. Raises LeaseRefused,
        RedisUnavailable.
        """
        epoch, plan = offer
        # Registering is one change of the pool.
        lease, commit = self.ledger.wait_and_commit(request, self.remembered_ms(request), epoch + 1, plan)
        if lease is not None or not commit.why:
            return lease, commit.leases
        return None, self._commit(only=request.request_id)

    def first(self) -> tuple[PoolLease, ...]:
        """Plan for a request that has just begun to wait; alone it needs no slot. Raises RedisUnavailable."""
        with answering():
            waits = self.client.hlen(self.waiting)
        return self._commit() if waits <= 1 else self.plan()

    def poll(self) -> tuple[PoolLease, ...]:
        """Plan if no process has for POLL_MS: the back-stop of every waiting process.

        Raises RedisUnavailable.
        """
        with answering():
            first = self.client.set(self.recent, self.name, nx=True, px=POLL_MS)
        return self.plan() if first else ()

    def after_change(self, *, changed: bool = True) -> tuple[PoolLease, ...]:
        """Plan if any need waits; without `changed` only as `poll` does. Raises RedisUnavailable."""
        with answering():
            waits = self.client.hlen(self.waiting)
        if not waits:
            return ()
        return self.plan() if changed else self.poll()

    def _planned(self, snapshot: Snapshot) -> PoolPlan:
        with self._one_plan:
            return policy.make_plan(
                snapshot, backfill=self.backfill, yield_ms=self.yield_ms, index=self._index
            )

    def _commit(self, only: str = "") -> tuple[PoolLease, ...]:
        why = ""
        for _ in range(TRIES):
            snapshot = self.snapshot()
            plan = self._planned(snapshot)
            if only and not _grants(plan, only):
                return ()
            if not plan.grants and not plan.yields and plan.reservation == snapshot.reservation:
                return ()
            commit = self.ledger.commit(snapshot.epoch, plan)
            if not commit.why:
                return commit.leases
            why = commit.why
            if why == "quarantine":
                return ()
        logger(tries=TRIES, why=why).warning("gpu.plan_not_taken")
        return ()

    def _enter(self) -> bool:
        """False: another process plans, and our mark asks it to plan once more."""
        with answering():
            while not self.client.set(self.slot, self.name, nx=True, px=SLOT_MS):
                if self.client.set(self.slot, PLAN_MEANWHILE, xx=True, keepttl=True):
                    return False
        return True

    def _leave(self) -> bool:
        """True when another process left a mark meanwhile.

        A planner slower than SLOT_MS may delete the slot of the next one here. Then two plan at a time, which
        costs one stale commit.
        """
        with answering():
            return bool(self.client.getdel(self.slot) == PLAN_MEANWHILE)

    def _hand_on(self) -> None:
        """The next poll of any process plans at once; this one has its own work to go back to."""
        with answering():
            self.client.delete(self.recent)


def _grants(plan: PoolPlan, request_id: str) -> bool:
    return any(grant.request_id == request_id for grant in plan.grants)
