"""The GPU share of a scoring process: leased for the first batch, given back when asked for, lost, idle or
broken.

The right encloses the device: lease, renewals, host lock, CUDA; then the same backwards. CUDA's context ends
only with its process. So a process that gave back keeps its host lock and ends as soon as it is quiet; Celery
starts another one. The next holder waits for that lock. No batch waits for a GPU: without one it is scored on
the CPU.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final, Protocol

from pipeline.errors import BadInput, DeviceFailed, LeaseRefused, LogweirError, RedisUnavailable
from pipeline.gpu.leasing.renewal import LeaseInUse
from pipeline.gpu.node.host_lock import HOST_DIRECTORY, host_lock
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.own_models import ScoringReports
from pipeline.gpu.policy.scoring import scored_already, scored_devices, scoring_device
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, PoolLease, scoring_need
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.settings import Settings
from pipeline.upkeep import FaultSeries, start_thread

LOST_POLL_S: Final = 0.2  # A training notices the loss of its lease so soon.
POLL_S: Final = 0.05  # An idle process notices a request to yield so soon.
REFUSED_S: Final = 0.2  # Thousands of queued batches must not ask one by one.
BROKEN_S: Final = 30.0  # A device that cannot be used is not tried with every batch.
QUIET_S: Final = 0.3  # Without a batch for so long a process can end: its last answer has been sent.
LEAVING_S: Final = 2.0  # Batches that only pass through must not keep it for longer.
HARD: Final = 0.15  # of a TTL after the loss, which is noticed at 0.8: then the process ends, batch or not


class DeviceUser(Protocol):
    """The work of the process on the device."""

    def prepare(self) -> None:
        """Slow work that needs no device, before the lease is asked for."""

    def begin(self, lease: PoolLease) -> None:
        """Start to use the device. Raises LogweirError; LeaseRefused where our models may not be there."""

    def unload(self) -> None:
        """Leave the device, as far as a living process can."""

    @property
    def began(self) -> bool:
        """True when this process keeps memory there until it ends."""

    def end(self) -> None:
        """End this process now."""


def host_locks(lease: PoolLease, *, wait_s: float) -> ExitStack:
    """The host locks of a lease: the kernel frees them however the process ends. Raises LeaseRefused."""
    stack = ExitStack()
    alone = lease.need.mode is LeaseMode.EXCLUSIVE
    try:
        for part in lease.parts:
            stack.enter_context(host_lock(HOST_DIRECTORY, part.uuid, exclusive=alone, wait_s=wait_s))
    except BaseException:
        stack.close()
        raise
    return stack


def enrol(pool: Pool, lease: PoolLease) -> None:
    """Register this process with the lease before it uses the device.

    Raises LeaseRefused when the lease is lost.
    """
    if not pool.activate(lease, pids=(os.getpid(),), host=this_node()):
        raise LeaseRefused("the lease was lost before the device was begun; it is asked for again")


@contextmanager
def ended_after_loss(renewal: LeaseInUse, end: Callable[[], None]) -> Iterator[None]:
    """End the process when the body goes on too long after a lost lease: the device may be granted to
    others."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOST_POLL_S):
            if renewal.lost.is_set():
                if not ended.wait(HARD * renewal.lease.ttl_ms / 1000):
                    logger().error("share.lost_in_work")
                    end()
                return

    start_thread("gpu-lost", watch)
    try:
        yield
    finally:
        ended.set()


class GpuShare:
    """One per scoring process. `using()` is for the thread that works, the keeper thread does the rest."""

    def __init__(
        self,
        pool: Pool,
        settings: Settings,
        *,
        holder: str,
        place: DeviceUser,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.holder = holder
        self.place = place
        self.clock = clock
        self.reports = ScoringReports(pool.client, settings, holder)
        self.need = scoring_need(settings, node=this_node())
        self.several = settings.gpu.infer_processes > 1  # on this machine, with a device each
        self.idle_s = settings.gpu.idle_s
        self.ttl_s = settings.internal.lease_ttl_ms / 1000
        self._turn = threading.Lock()  # held while a batch is in hand, or while the device is given back
        self._held: LeaseInUse | None = None
        self._lease = ExitStack()
        self._locks = ExitStack()
        self._touching = False  # from before CUDA is begun until our models are off the device
        self._used = clock()  # a batch of ours ended
        self._passed = clock()  # any batch ended
        self._not_before = 0.0
        self._left_at: float | None = None  # since when this process only waits to end
        self._lost_at: float | None = None
        self._broken: Exception | None = None
        self._keeper: threading.Thread | None = None
        self._stop = threading.Event()

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Around one batch: True when the device is ours for it."""
        with self._turn:
            on_device = self._take()
            try:
                yield on_device
            finally:
                self._passed = self.clock()
                if on_device:
                    self._used = self._passed
                if self._held is not None and (self._over() or self._broken is not None):
                    self._give_back()

    def announce(self) -> None:
        """Tell the pool from now on that this process scores, and why it has no device."""
        self.reports.start()

    def fail(self, error: Exception) -> None:
        """The device failed in the current batch: it is given back afterwards, and not tried for a while."""
        self._broken = error
        self._pause("share.device_failed", error)

    @property
    def held(self) -> LeaseInUse | None:
        """The lease in use, or None."""
        return self._held

    def close(self) -> None:
        """Give back, at the end of the process."""
        self._stop.set()
        self.reports.close()
        with self._turn:
            self._leave()
            if self._held is not None:
                self._give_back()

    def _take(self) -> bool:
        if self._left_at is not None or self.clock() < self._not_before:
            return False
        if self._held is None:
            self._try()
        if self._held is not None and self._over():
            self._give_back()
        return self._held is not None

    def _try(self) -> None:
        try:
            self._begin()
            return
        except (LeaseRefused, RedisUnavailable) as exc:
            logger().debug("share.refused", why=str(exc))
            self.reports.refused(str(exc))
            metrics.lease_refused("share")
            self._not_before = self.clock() + REFUSED_S
        except BadInput as exc:
            self._pause("share.impossible", exc)
        except Exception as exc:  # noqa: BLE001 - drivers raise anything; the CPU can score the batch
            self._pause("share.failed", exc)
        if self._held is not None:
            self._give_back()

    def _pause(self, event: str, exc: Exception) -> None:
        expected = isinstance(exc, LogweirError)
        logger().warning(event, why=str(exc), exc_info=not expected)
        self.reports.refused(str(exc), BROKEN_S)
        self._not_before = self.clock() + BROKEN_S

    def _begin(self) -> None:
        """Lease, lock, placement, start. After an error `_held` says whether a lease has to be given back."""
        self._keep()
        self.place.prepare()
        start = self.clock()
        lease = self._lease_of_own()
        metrics.lease_waited("share", self.clock() - start)
        self._broken = self._lost_at = None
        self._held = self._lease.enter_context(self.pool.holding(lease))  # from here on the keeper sees it
        enrol(self.pool, lease)
        try:
            self._locks = host_locks(lease, wait_s=0)
        except LeaseRefused as exc:  # as a rule for long, by a process that the pool does not know
            raise DeviceFailed(str(exc)) from exc
        self._touching = True
        try:
            self.place.begin(lease)
        except LeaseRefused as exc:  # by the placement: another lease would meet the same
            raise DeviceFailed(str(exc)) from exc
        self.reports.lease = lease
        logger(token=lease.token, device=lease.parts[0].uuid).info("share.taken")

    def _lease_of_own(self) -> PoolLease:
        """Of a device that no other scoring process has: a device has one copy of a model.

        Raises as `Pool.request` does.
        """
        snapshot = self.pool.snapshot()
        if why := scored_already(snapshot, self.need, self.holder):
            raise LeaseRefused(why)
        need = self.need
        if self.several or scored_devices(snapshot, need, self.holder):
            need = replace(need, device=scoring_device(snapshot, need, self.holder))
        return self.pool.request(need, holder=self.holder)

    def _over(self) -> bool:
        renewal = self._held
        return renewal is not None and (renewal.lost.is_set() or renewal.asked.is_set())

    def _give_back(self) -> None:
        """Under `_turn`. The device first, then the right to it."""
        renewal, self._held = self._held, None
        why = (renewal.why() if renewal else "") or ("broken" if self._broken is not None else "not used")
        if self.reports.lease is not None:
            self.reports.refused(f"gave its device back: {why}")
        self._unload()
        if self._broken is not None and renewal is not None and self.place.began:
            renewal.dirty()  # it may still work there: the device stays closed until this process ends
        try:
            self._lease.close()
        except Exception:  # noqa: BLE001 - it expires by itself
            logger().exception("share.not_given_back")
        self._lease = ExitStack()
        self._lost_at = self._broken = None
        if self.place.began:
            self._leave()  # with the host lock, which goes when CUDA's context does
        else:
            self._locks.close()
        logger().info("share.given_back", why=why)

    def _leave(self) -> None:
        self._left_at = self._left_at or self.clock()

    def _unload(self) -> None:
        try:
            self.place.unload()
        except Exception:  # noqa: BLE001 - a driver that fails here must not keep the lease alive
            logger().exception("share.not_unloaded")
        self._touching = False

    def _keep(self) -> None:
        if self._keeper is None:
            self._keeper = start_thread("gpu-share", self._keeping)

    def _keeping(self) -> None:
        faults = FaultSeries("share.keeper")
        while not self._stop.wait(POLL_S):
            with faults.outlived():
                self.tick()

    def tick(self) -> None:
        """One round of the keeper: give back a lease that is asked for, lost or idle; end an idle process."""
        now, renewal = self.clock(), self._held
        if renewal is not None and renewal.lost.is_set():
            self._lost_at = self._lost_at or now
        if self._turn.acquire(blocking=False):
            try:
                if self._held is not None and (self._over() or now - self._used > self.idle_s):
                    self._give_back()
                if self._may_end(now):
                    self.place.end()
            finally:
                self._turn.release()
        elif self._lost_at is not None and now - self._lost_at > HARD * self.ttl_s and self._touching:
            # The device may soon be granted to others, and the batch goes on; the ledger still has the batch.
            logger().error("share.lost_in_a_batch")
            self.place.end()

    def _may_end(self, now: float) -> bool:
        left_at = self._left_at
        if left_at is None or not self.place.began:
            return False
        return now - self._passed > QUIET_S or now - left_at > LEAVING_S
