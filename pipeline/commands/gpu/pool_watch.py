"""Watches the pool while a program runs in a lease, and registers the program's processes with the lease.

A thread of its own: Redis may take longer to answer than a lease lives, and the program's supervisor must
notice that.
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from pipeline.errors import RedisUnavailable
from pipeline.gpu.node import mps
from pipeline.gpu.node.watchdog import fresh
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, PoolLease, Snapshot
from pipeline.logs import logger
from pipeline.upkeep import FaultSeries, UpkeepThread

POLL_S: Final = 1.0
OLD_S: Final = 5.0  # An older snapshot says nothing about now.
JOIN_S: Final = 1.0  # A snapshot that hangs in a dead connection can change nothing.
# A shell script may start thousands of short processes; beyond this, only those on devices are registered.
NOTED: Final = 256


class PoolWatch:
    """Takes a snapshot about every second until the end of its `with`."""

    def __init__(
        self,
        pool: Pool,
        lease: PoolLease,
        pids: Callable[[], Sequence[int]],
        *,
        node: str,
        daemon: mps.Daemon | None = None,
    ) -> None:
        """`daemon`: the MPS daemon whose limits apply to the program."""
        self.pool, self.lease, self.pids, self.node, self.daemon = pool, lease, pids, node, daemon
        self.noted: set[int] = set()
        self.unlimited = ""  # why the daemon's limits may not hold, once that is known
        self._asked: set[int] = set()
        self._seen: tuple[float, Snapshot] | None = None
        self._wake = threading.Event()
        self._ended = False
        self._thread = UpkeepThread("gpu-look", self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(JOIN_S)

    def at_once(self) -> None:
        """Register new processes now, not in a second."""
        self._wake.set()

    def devices(self) -> list[Device]:
        """The devices of the last snapshot; none when it is too old."""
        newest = self._seen
        return [] if newest is None or time.monotonic() - newest[0] > OLD_S else fresh(newest[1])

    def seconds_until(self, at_ms: int) -> float | None:
        """From now to a moment of the Redis clock, also while Redis is away; None before the first
        snapshot."""
        newest = self._seen
        return None if newest is None else (at_ms - newest[1].now_ms) / 1000 - (time.monotonic() - newest[0])

    def _run(self) -> None:
        faults = FaultSeries("gpu.not_looked", RedisUnavailable, log=logger(lease=self.lease.lease_id))
        while not self._ended:
            with faults.outlived():  # it must go on while the program does
                began = time.monotonic()
                snapshot = self.pool.snapshot()
                self._seen = (began, snapshot)
                self._note(snapshot)
                self._ask_mps(snapshot)
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _on_devices(self, snapshot: Snapshot) -> set[int]:
        """All processes that the driver sees on the devices of the lease."""
        uuids = {part.uuid for part in self.lease.parts}
        return {p.pid for device in snapshot.devices if device.uuid in uuids for p in device.processes or ()}

    def _ask_mps(self, snapshot: Snapshot) -> None:
        """Check once that the program's processes on a device are clients of the daemon."""
        if self.daemon is None or self.unlimited:
            return
        new = (self._on_devices(snapshot) & set(self.pids())) - self._asked
        if new:
            self._asked |= new
            self.unlimited = mps.why_not(self.daemon, new)

    def _note(self, snapshot: Snapshot) -> None:
        on_devices = self._on_devices(snapshot)
        now = set(self.pids())
        new = now - self.noted if len(self.noted) < NOTED else (now & on_devices) - self.noted
        if new and not self._ended:
            self.pool.activate(self.lease, pids=sorted(new), host=self.node)
            self.noted |= new
