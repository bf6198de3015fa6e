"""The GPU pool as its users see it: ask for devices, hold them, give them back.

`with pool.lease(need) as held:` is all that most code needs. Anyone who waits may plan (planner.py); what is true
stands in the ledger (pool_ledger.py), what would be fair in policy.py. A Pool has no thread and opens no connection by
itself, so it may be made before a fork.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import redis

from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing import renewal
from pipeline.gpu.leasing.planner import Planner
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.leasing.renewal import LeaseInUse
from pipeline.gpu.leasing.waiting import Waiting
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy import admission as refusing
from pipeline.gpu.policy import policy
from pipeline.gpu.values import Need, PoolLease, PoolRequest, Renewed, Report, Snapshot, Swept
from pipeline.logs import logger
from pipeline.settings import Settings

OPEN_S: Final = 0.2  # how old an answer of open_to_shared may be: it is asked for every batch
LOOKED_S: Final = (
    1.0  # how old a look may be that a need is let through by; it is refused by a fresh one only
)


class Pool:
    """All devices of all nodes, and who waits for them. One per process; threads may share it."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.ledger = PoolLedger(client, settings)
        self.planner = Planner(client, self.ledger, settings)
        self.waiting = Waiting(self.ledger, self.planner)
        self._guard = threading.Lock()
        self._looked: tuple[float, Snapshot] | None = None
        self._open: dict[Need, tuple[float, bool]] = {}

    # ---- asking -------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything at this moment. Raises RedisUnavailable."""
        snapshot = self.planner.snapshot()
        self._looked = (time.monotonic(), snapshot)
        return snapshot

    def refusal(self, need: Need) -> str:
        """Why this need can never be granted, in one sentence; "" when it can. Raises RedisUnavailable."""
        looked = self._looked
        if looked is not None and time.monotonic() - looked[0] < LOOKED_S:
            snapshot = looked[1]
            if not refusing.refusal(need, snapshot.devices, snapshot.tenants):
                return ""
        snapshot = self.snapshot()
        return refusing.refusal(need, snapshot.devices, snapshot.tenants)

    def open_to_shared(self, need: Need) -> bool:
        """True when a device would take this shared need now, or one like it is held. It never raises: no Redis, no GPU."""
        now = time.monotonic()
        with self._guard:
            at, known = self._open.get(need, (-OPEN_S, False))
        if now - at < OPEN_S:
            return known
        try:
            snapshot = self.planner.snapshot()
            answer = policy.served(snapshot, need) or policy.open_to_shared(snapshot, need)
        except RedisUnavailable:
            answer = False
        except Exception:  # noqa: BLE001 - batches are routed by this; the CPU takes them whatever is wrong with the pool
            logger().exception("gpu.not_looked")
            answer = False
        with self._guard:
            if len(self._open) > 64:  # needs come from settings and models: a few
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
        """A lease on what is needed. `timeout_s`: 0 asks once, None waits for ever.

        The same holder with the same `request_id` gets the lease that it has. `go_on` is called about every second
        while waiting and may raise. Whichever way this ends without a lease, nothing waits any more.
        Raises BadInput when the need can never be met, LeaseRefused when it is not met in time, RedisUnavailable.
        """
        ttl_ms = self.settings.internal.lease_ttl_ms if ttl_ms is None else ttl_ms
        if not holder or ttl_ms < 1 or (timeout_s is not None and not timeout_s >= 0):
            raise BadInput(
                f"holder {holder!r}, ttl_ms {ttl_ms}, timeout_s {timeout_s}: name a holder, and give times above 0"
            )
        if why := self.refusal(need):
            raise BadInput(why)
        request = PoolRequest(
            request_id=request_id or uuid.uuid4().hex, holder=holder, need=need, ttl_ms=ttl_ms
        )
        return self.waiting.ask(request, timeout_s=timeout_s, go_on=go_on)

    # ---- holding ------------------------------------------------------------------------------------

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
        """Ask, begin with these processes (this one), hold while the body works, give back.

        Raises what `request` and `holding` raise.
        """
        pids = (os.getpid(),) if pids is None else pids
        lease = self.request(
            need,
            holder=holder or f"{this_node()}:{os.getpid()}",
            timeout_s=timeout_s,
            request_id=request_id,
            go_on=go_on,
        )
        begun = False
        try:
            begun = self.activate(lease, pids=pids)
        finally:
            if not begun:
                self._give_up(lease)
        if not begun:
            raise LeaseRefused(f"the GPU lease {lease.lease_id} ended before it was used; ask for another")
        with self.holding(lease) as using:
            yield using

    @contextmanager
    def holding(self, lease: PoolLease, *, clean: bool = True) -> Iterator[LeaseInUse]:
        """Renew in the background while the body works; give back at the end unless it was lost (held.py).

        `clean`: the holder is off the device when the body ends; say `dirty()` when it turns out otherwise.
        Raises LeaseRefused when the lease has ended already, RedisUnavailable.
        """
        with renewal.holding(self, lease, clean=clean) as using:
            yield using

    def activate(self, lease: PoolLease, *, pids: Sequence[int], host: str = "") -> bool:
        """The holder begins, with these processes on that node (this one). False when the lease is lost."""
        return self.ledger.activate(lease, pids=pids, host=host or this_node())

    def renew(self, lease: PoolLease) -> Renewed:
        """One renewal; `holding` does it by itself. Raises RedisUnavailable."""
        return self.ledger.renew(lease)

    # ---- ending -------------------------------------------------------------------------------------

    def release(self, lease: PoolLease, *, clean: bool = True) -> bool:
        """Give back; whoever waits gets it at once. False when it was not ours any more. Raises RedisUnavailable."""
        done, waits = self.ledger.give_back(lease, clean=clean)
        if waits:
            self._others_turn()
        return done

    def release_by_id(self, lease_id: str, token: int) -> bool:
        """The same for another program, which knows the lease by its id and first token."""
        done = self.ledger.release_by_id(lease_id, token)
        self._others_turn()
        return done

    def revoke(self, lease_id: str, why: str) -> bool:
        """Take a lease away. False when there is none of that id. Raises RedisUnavailable."""
        done = self.ledger.revoke(lease_id, why)
        self._others_turn()
        return done

    def clear(self, uuid: str) -> int:
        """An operator says that nothing is left on a device; returns how many parts were freed."""
        freed = self.ledger.clear(uuid)
        self._others_turn()
        return freed

    def sweep(self) -> Swept:
        """End what is over, then grant what became free. Anybody may sweep; agents do. Raises RedisUnavailable."""
        swept = self.ledger.sweep()
        self._others_turn(changed=swept != Swept())
        return swept

    def report(self, report: Report) -> str:
        """What an agent sees on its node; "" or why it is refused. What it freed, the next sweep tells.

        Raises RedisUnavailable.
        """
        refused = self.ledger.report(report)
        self._others_turn(changed=False)
        return refused

    def _others_turn(self, *, changed: bool = True) -> None:
        """What was done is done, whatever comes of planning: those who wait plan for themselves, a little later."""
        try:
            self.planner.after_change(changed=changed)
        except RedisUnavailable:
            pass
        except Exception:  # noqa: BLE001 - a fault in planning must not stop who gives back
            logger().exception("gpu.not_planned")

    def _give_up(self, lease: PoolLease) -> None:
        try:
            self.release(lease)
        except RedisUnavailable:
            logger(lease=lease.lease_id).warning("gpu.lease_not_released", why="Redis is away; it expires")
