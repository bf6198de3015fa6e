"""The GPU pool as its users see it: ask for devices, hold them, give them back.

`with pool.lease(need) as using:` is all that most code needs. The ledger holds the facts
(leasing/pool_ledger.py), the policy decides (policy/policy.py), and every waiting process may plan
(leasing/planner.py). A Pool has no thread and opens no connection by itself, so it may be made before a fork.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import redis

from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import renewal
from pipeline.gpu.leasing.planner import Planner
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.leasing.renewal import LeaseInUse
from pipeline.gpu.leasing.waiting import Waiting
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy import admission, policy
from pipeline.gpu.policy.budgets import why_exhausted
from pipeline.gpu.values import Need, PoolLease, PoolRequest, Renewed, Report, Snapshot, Swept
from pipeline.logs import logger
from pipeline.settings import Settings

OPEN_S: Final = 0.2  # maximum age of an answer of open_to_shared, which every batch asks for
FRESH_S: Final = 1.0  # maximum age of a snapshot that admits a need; only a new one refuses it


class Pool:
    """All devices of all nodes, and the needs that wait for them. One per process; threads may share it."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.ledger = PoolLedger(client, settings)
        self.planner = Planner(client, self.ledger, settings)
        self.waiting = Waiting(self.ledger, self.planner)
        self._guard = threading.Lock()
        self._latest: tuple[float, Snapshot] | None = None
        self._open: dict[Need, tuple[float, bool]] = {}

    def snapshot(self) -> Snapshot:
        """The whole pool at this moment. Raises RedisUnavailable."""
        snapshot = self.planner.snapshot()
        self._latest = (time.monotonic(), snapshot)
        return snapshot

    def refusal(self, need: Need) -> str:
        """The reason why this need can never be granted; "" when it can. Raises RedisUnavailable."""
        latest = self._latest
        if latest is not None and time.monotonic() - latest[0] < FRESH_S:
            snapshot = latest[1]
            if not admission.refusal(need, snapshot.devices, snapshot.tenants, snapshot.nodes):
                return ""
        snapshot = self.snapshot()
        return admission.refusal(need, snapshot.devices, snapshot.tenants, snapshot.nodes)

    def _over_budget(self, need: Need) -> str:
        """The reason why a budget that refuses refuses this need; "" otherwise."""
        latest = self._latest  # as refusal() has read it
        tenant = None if latest is None else latest[1].tenants.get(need.tenant)
        if tenant is None or tenant.budget is None or not tenant.budget.refuses:
            return ""
        snapshot = self.snapshot()
        why = why_exhausted(snapshot.tenants[need.tenant], snapshot.now_ms)
        return f"no GPU now: {why}" if why else ""

    def open_to_shared(self, need: Need) -> bool:
        """Whether a device would take this shared need now, or a lease like it is held.

        Never raises: False without Redis.
        """
        now = time.monotonic()
        with self._guard:
            at, cached = self._open.get(need, (-OPEN_S, False))
        if now - at < OPEN_S:
            return cached
        try:
            snapshot = self.planner.snapshot()
            answer = policy.served(snapshot, need) or policy.open_to_shared(snapshot, need)
        except RedisUnavailable:
            answer = False
        except Exception:  # noqa: BLE001 - this routes batches; the CPU takes them while the pool fails
            logger().exception("gpu.not_looked")
            answer = False
        with self._guard:
            if len(self._open) > 64:  # needs come from settings and models: few are expected
                self._open.clear()
            self._open[need] = (time.monotonic(), answer)
        return answer

    def request(
        self,
        need: Need,
        *,
        holder: str,
        request_id: str = "",
        ttl_ms: int | None = None,
        timeout_s: float | None = 0.0,
        go_on: Callable[[], None] | None = None,
    ) -> PoolLease:
        """A lease for the need. `timeout_s`: 0 asks once, None waits for ever. Idempotent by `request_id` and
        holder.

        `go_on` is called about every second while waiting and may raise. Without a lease at the end, the
        request no longer waits. Raises BadInput when the need can never be met, LeaseRefused when it is not
        met in time or its budget is used up, RedisUnavailable.
        """
        ttl_ms = self.settings.internal.lease_ttl_ms if ttl_ms is None else ttl_ms
        if not holder or ttl_ms < 1 or (timeout_s is not None and not timeout_s >= 0):
            raise BadInput(
                f"holder {holder!r}, ttl_ms {ttl_ms}, timeout_s {timeout_s}: name a holder, and give times "
                "above 0"
            )
        if why := self.refusal(need):
            raise BadInput(why)
        if why := self._over_budget(need):
            raise LeaseRefused(why)
        request = PoolRequest(
            request_id=request_id or uuid.uuid4().hex, holder=holder, need=need, ttl_ms=ttl_ms
        )
        return self.waiting.ask(request, timeout_s=timeout_s, go_on=go_on)

    @contextmanager
    def lease(
        self,
        need: Need,
        *,
        holder: str | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        pids: Sequence[int] | None = None,
        go_on: Callable[[], None] | None = None,
    ) -> Iterator[LeaseInUse]:
        """Ask, begin with these processes (default: this one), hold while the body works, give back.

        Raises as `request` and `holding` do.
        """
        pids = (os.getpid(),) if pids is None else pids
        lease = self.request(
            need,
            holder=holder or f"{this_node()}:{os.getpid()}",
            timeout_s=timeout_s,
            request_id=request_id,
            go_on=go_on,
        )
        active = False
        try:
            active = self.activate(lease, pids=pids)
        finally:
            if not active:
                self._give_up(lease)
        if not active:
            raise LeaseRefused(f"the GPU lease {lease.lease_id} ended before it was used; ask for another")
        with self.holding(lease) as using:
            yield using

    @contextmanager
    def holding(self, lease: PoolLease, *, clean: bool = True) -> Iterator[LeaseInUse]:
        """Renew in the background while the body works; give back at the end unless the lease was lost.

        `clean`: the holder is off the device when the body ends; `dirty()` corrects that later. Raises
        LeaseRefused when the lease has ended already, RedisUnavailable.
        """
        with renewal.holding(self, lease, clean=clean) as using:
            yield using

    def activate(self, lease: PoolLease, *, pids: Sequence[int], host: str = "") -> bool:
        """The holder begins, with these processes on `host` (default: this node).

        False when the lease is lost.
        """
        return self.ledger.activate(lease, pids=pids, host=host or this_node())

    def renew(self, lease: PoolLease) -> Renewed:
        """One renewal; `holding` renews by itself. Raises RedisUnavailable."""
        return self.ledger.renew(lease)

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:
        """Give back, and plan for waiting needs.

        False when the lease was no longer ours. Raises RedisUnavailable.
        """
        released, waits = self.ledger.give_back(lease, clean=clean)
        if waits:
            self._plan_for_others(self.planner.plan)
        return released

    def release_by_id(self, lease_id: str, token: int) -> bool:
        """The same for another program, which knows the lease by its id and first token."""
        released = self.ledger.release_by_id(lease_id, token)
        self._plan_for_others()
        return released

    def revoke(self, lease_id: str, why: str) -> bool:
        """Take a lease away. False when no lease has that id. Raises RedisUnavailable."""
        revoked = self.ledger.revoke(lease_id, why)
        self._plan_for_others()
        return revoked

    def clear(self, uuid: str) -> int:
        """An operator says that no orphaned process is on a device; returns how many parts that freed."""
        freed = self.ledger.clear(uuid)
        self._plan_for_others()
        return freed

    def sweep(self) -> Swept:
        """End what has run out, then grant what became free.

        Agents sweep; any process may. Raises RedisUnavailable.
        """
        swept = self.ledger.sweep()
        self._plan_for_others(partial(self.planner.after_change, changed=swept != Swept()))
        return swept

    def report(self, report: Report) -> str:
        """Store an agent's report; "" or why it is refused. The next sweep names what it freed.

        Raises RedisUnavailable.
        """
        refused = self.ledger.report(report)
        self._plan_for_others(partial(self.planner.after_change, changed=False))
        return refused

    def _plan_for_others(self, plan: Callable[[], object] | None = None) -> None:
        """Plan after a change.

        A failure is no fault of the change: waiting processes plan a little later themselves.
        """
        try:
            (plan or self.planner.after_change)()
        except RedisUnavailable:
            pass
        except Exception:  # noqa: BLE001 - a fault in planning must not stop a release
            logger().exception("gpu.not_planned")

    def _give_up(self, lease: PoolLease) -> None:
        try:
            self.release(lease)
        except RedisUnavailable:
            logger(lease=lease.lease_id).warning("gpu.lease_not_released", why="Redis is away; it expires")
