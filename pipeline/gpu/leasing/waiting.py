"""A waiting need: registered, refreshed while its process lives, woken when granted, withdrawn otherwise.

A grant wakes only its own request (the channel gpu:told:<request>). The others sleep; now and then one of
them plans, in case a process changed the pool and did not. The request of a dead process is forgotten after
one TTL, after up to four of them in a crowd. No lease is handed on to a process that does not listen.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing.planner import Planner
from pipeline.gpu.leasing.pool_ledger import PoolLedger
from pipeline.gpu.policy.explain import device_views, why_it_waits
from pipeline.gpu.values import PoolLease, PoolPlan, PoolRequest, Snapshot
from pipeline.logs import logger

SLEEP_S: Final = (0.5, 1.5)  # jitter: waiting processes must not move in step
CROWD: Final = 20  # needs; of more each one looks for itself less often
FEW: Final = 8  # with more needs before it, a new one waits for its turn to plan


class Waiting:
    """Asks for needs. One per pool; several threads may ask at a time."""

    def __init__(self, ledger: PoolLedger, planner: Planner) -> None:
        self.ledger = ledger
        self.planner = planner

    def ask(
        self, request: PoolRequest, *, timeout_s: float | None, go_on: Callable[[], None] | None
    ) -> PoolLease:
        """The lease, once granted. `timeout_s`: 0 asks once, None waits for ever; `go_on` may raise to stop.

        Raises LeaseRefused when it is not granted in time, RedisUnavailable when Redis was away at the end.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        granted: PoolLease | None = None
        turn = _Turn(self.ledger, self.planner, request, waits=timeout_s != 0, stops=go_on is not None)
        try:
            while (granted := self._round(turn, end)) is None:
                remaining_s = None if end is None else end - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    granted = turn.last()
                    if granted is not None:
                        break
                    raise LeaseRefused(self._reason(request, timeout_s or 0.0))
                if go_on is not None:
                    go_on()
                turn.sleep(remaining_s)
            return granted
        finally:
            turn.news.close()
            if granted is None and turn.known_to_ledger:
                self._abandon(request)

    def _round(self, turn: "_Turn", end: float | None) -> PoolLease | None:
        try:
            return turn.ask()
        except RedisUnavailable as exc:
            if end is not None and time.monotonic() >= end:
                raise
            turn.redis_away(exc)
            return None

    def _reason(self, request: PoolRequest, timeout_s: float) -> str:
        return why_refused(self.planner.snapshot(), request, timeout_s)

    def _abandon(self, request: PoolRequest) -> None:
        """Stop waiting. Others get at once what the request kept from them: a reservation, a closed door."""
        try:
            self.ledger.abandon(request.request_id, request.holder)
            self.planner.after_change()
        except RedisUnavailable:
            logger(request=request.request_id).warning(
                "gpu.not_abandoned", why="Redis is away; it is forgotten"
            )


class _Turn:
    """One request while it is asked for: its last registration, and whether it was woken."""

    def __init__(
        self, ledger: PoolLedger, planner: Planner, request: PoolRequest, *, waits: bool, stops: bool
    ) -> None:
        self.ledger = ledger
        self.planner = planner
        self.request = request
        self.waits = waits
        self.stops = stops  # somebody may end the wait, and is asked every second
        self.polls_at = 0.0
        self.news = ledger.listen(request.request_id)
        self.known_to_ledger = False
        self.registered = -float("inf")
        self.planned = False
        self.woken = False
        self.granted: PoolLease | None = None  # as the grant told it
        self.is_away = False

    def ask(self) -> PoolLease | None:
        """One round: register again if it is time, then plan if it is our turn. Raises RedisUnavailable."""
        request, now = self.request, time.monotonic()
        if self.granted is not None:
            return self.granted
        offer = None if self.planned else self.planner.offer(request, limit=FEW if self.waits else None)
        if not self.waits and offer is None:
            return None
        self.known_to_ledger = True
        if offer is not None and not self.planned:
            return self._accept(offer, now)
        remember_ms = self.planner.remembered_ms(request)
        if self.woken or now - self.registered > remember_ms / 3000:
            known = (
                not self.woken
                and self.registered > 0
                and self.ledger.remember(request.request_id, remember_ms)
            )
            lease = None if known else self.ledger.wait(request, remember_ms)
            self.registered, self.woken, self.is_away = now, False, False
            if lease is not None:
                return lease
        if not self.planned:
            self.planned = True
            return self._own_lease(self.planner.first())
        if now < self.polls_at:
            return None
        self.polls_at = now + self._spread_s() / 2  # less than the shortest pause
        return self._own_lease(self.planner.poll())

    def _spread_s(self) -> float:
        """The mean pause. In a crowd it is longer, so that the crowd as a whole asks Redis no more often."""
        return max(1.0, self.planner.crowd / CROWD)

    def _accept(self, offer: tuple[int, PoolPlan], now: float) -> PoolLease | None:
        """Register and take the offer at once; if the pool has changed meanwhile, wait as any other need."""
        lease, granted = self.planner.take(self.request, offer)
        self.registered, self.planned = now, True
        if lease is not None:
            return lease
        if not granted and self.waits:
            granted = self.planner.first()
        return self._own_lease(granted)

    def _own_lease(self, granted: Sequence[PoolLease]) -> PoolLease | None:
        return next((lease for lease in granted if lease.lease_id == self.request.request_id), None)

    def last(self) -> PoolLease | None:
        """Time is up: a lease that another planner granted meanwhile. Raises RedisUnavailable."""
        if not self.known_to_ledger:
            return None
        return self.ledger.wait(self.request, self.planner.remembered_ms(self.request))

    def sleep(self, left_s: float | None) -> None:
        """Sleep until woken, or for about a second; never so long that the request would be forgotten."""
        mean_s = 1.0 if self.stops else self._spread_s()
        # The request of a dead process is soon forgotten, however long its lease would have lived.
        most_s = self.planner.remembered_ms(self.request) / 3000
        pause = min(random.uniform(*SLEEP_S) * mean_s, most_s)  # noqa: S311 - spreads load
        if left_s is not None:
            pause = min(pause, max(left_s, 0.01))
        if self.is_away:
            time.sleep(pause)
            return
        try:
            self.woken, lease = self.news.next(pause)
            if lease is not None and lease.holder == self.request.holder:
                self.granted = lease
        except RedisUnavailable as exc:
            self.redis_away(exc)

    def redis_away(self, error: RedisUnavailable) -> None:
        """Redis does not answer; it is asked again.

        The request registers anew, since Redis may have forgotten it. It listens anew, because the
        subscription may lead to a server that froze or is no master any more.
        """
        if not self.is_away:
            logger(request=self.request.request_id).warning("gpu.waits_for_redis", why=str(error))
        self.is_away, self.registered = True, -float("inf")
        self.news.drop()


def why_refused(snapshot: Snapshot, request: PoolRequest, timeout_s: float) -> str:
    """The reason why a need was not granted in time, in the words of `logweir gpu top`."""
    within = f"within {timeout_s:g} s" if timeout_s else "now"
    why = why_it_waits(snapshot, request, device_views(snapshot))
    return f"no GPU {within}: {why}; ask again later, `logweir gpu top` shows who has what"
