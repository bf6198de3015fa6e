"""The node agent: reads the GPUs of this machine once per beat and reports them to the pool.

The driver may lose a device, go away, come back or hang in the kernel; the agent goes on beating and names
the fault in the devices' `why`. A device that was read once stays in the reports, unusable, while the driver
does not show it. Only a fresh reading names processes, because the pool frees memory by them.
"""

import os
import queue
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Protocol

from pipeline.errors import NoDriver
from pipeline.gpu.node.health import DeviceHealth, Patience, event_fault, next_health, reading_fault
from pipeline.gpu.node.inventory import devices, machine_size
from pipeline.gpu.node.mps_watch import MpsWatch
from pipeline.gpu.node.nvml import Nvml
from pipeline.gpu.node.readings import MachineReading, Reading
from pipeline.gpu.values import HEADROOM_MIB, Report
from pipeline.logs import logger
from pipeline.settings import Settings
from pipeline.upkeep import start_thread

ANSWER_S: Final = 5.0  # a beat waits so long for the driver; a first nvmlInit takes seconds
# Back-off of opening the driver anew while it is away or a device is lost; doubles.
REOPEN_S, REOPEN_MOST_S = 1.0, 60.0
SILENT: Final = "its driver does not answer"
NOT_SHOWN: Final = "its driver does not show it any more"


class Driver(Protocol):
    """The source of readings: nvml.Nvml."""

    @property
    def is_open(self) -> bool: ...
    def open(self) -> None: ...
    def close(self) -> None: ...
    def read(self) -> MachineReading: ...


class PoolPort(Protocol):
    """The receiver of reports: gpu/pool.py."""

    def report(self, report: Report, /) -> str:
        """ "" or why it is refused."""
        ...

    def sweep(self) -> object:
        """End overdue leases."""
        ...


class Agent:
    """One per node; the pool refuses a second one until the first falls silent. One thread calls."""

    def __init__(
        self,
        pool: PoolPort,
        settings: Settings,
        node: str,
        *,
        driver: Driver | None = None,
        mps: MpsWatch | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.node = node
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._patience = patience or Patience()
        self._clock, self._monotonic = clock, monotonic
        # Less than the pool waits for a beat, so that a hung driver does not silence the node.
        self._driver = _DriverThread(
            driver or Nvml(),
            limit_s=min(ANSWER_S, settings.internal.gpu_node_ttl_ms / 2_000),
            monotonic=monotonic,
        )
        self._mps = mps
        self._version = ""
        self._size = machine_size()
        self._known: dict[str, Reading] = {}  # whole GPUs and slices, as they were read last
        self._health: dict[str, DeviceHealth] = {}  # of whole GPUs
        self._errors: dict[str, int] = {}  # uncorrectable ones, as counted last
        self._refused = self._away = False
        self._strange: tuple[str, ...] = ()

    def beat(self) -> Report:
        """Observe, report, sweep. Raises RedisUnavailable."""
        report = self.observe()
        refused = self.pool.report(report)
        if bool(refused) != self._refused:
            self._refused = bool(refused)
            if refused:
                logger(node=self.node, agent=self.name).warning("agent.refused", why=refused)
            else:
                logger(node=self.node, agent=self.name).info("agent.took_over")
        self.pool.sweep()
        return report

    def observe(self) -> Report:
        """The machine as it is now, as far as the driver answers."""
        at = datetime.fromtimestamp(self._clock(), UTC)
        found = self._driver.read()
        if isinstance(found, MachineReading):
            self._learn(found, at)
        else:
            self._miss(SILENT if found is None else str(found), at)
        return Report(
            node=self.node,
            agent=self.name,
            clock_ms=int(self._clock() * 1000),
            devices=devices(
                self._known.values(),
                node=self.node,
                headroom_mib=HEADROOM_MIB,
                why={uuid: health.why for uuid, health in self._health.items()},
                mps={} if self._mps is None else self._mps.look(self._known.keys()),
            ),
            driver=self._version,
            cpu_milli=self._size[0],
            memory_mib=self._size[1],
        )

    def _learn(self, machine: MachineReading, at: datetime) -> None:
        before, now = self._known, {one.uuid: one for one in machine.readings}
        gpus = {uuid for uuid, one in (before | now).items() if not one.parent}
        faults: dict[str, str] = {}
        for uuid in gpus:
            if uuid in now:
                event = event_fault(uuid, machine.events, gpus)
                faults[uuid] = event or reading_fault(now[uuid], self._errors.get(uuid, 0))
                self._errors[uuid] = now[uuid].ecc_errors or self._errors.get(uuid, 0)
            else:
                why = machine.lost.get(uuid)
                faults[uuid] = NOT_SHOWN if why is None else f"{SILENT} ({why})"
        # A missing slice was destroyed, unless its whole GPU is missing too.
        unread = {uuid: _unread(one) for uuid, one in before.items() if (one.parent or uuid) not in now}
        self._known = unread | now
        self._version = machine.driver
        self._driver.reopen = bool(machine.unnamed) or not gpus <= now.keys()
        if self._away:
            self._away = False
            logger(node=self.node).info("agent.driver_back", driver=machine.driver)
        # A device that was never read has no size, so only the log can name it.
        strange = (
            *machine.unnamed,
            *(f"{uuid}: {why}" for uuid, why in machine.lost.items() if uuid not in before),
        )
        if strange and strange != self._strange:
            logger(node=self.node).warning("agent.device_unread", why="; ".join(strange))
        self._strange = strange
        self._judge(faults, at)

    def _miss(self, why: str, at: datetime) -> None:
        """There was no reading at all."""
        if not self._away:
            self._away = True
            log = logger(node=self.node)
            (log.warning if self._known else log.info)("agent.driver_away", why=why)
        self._known = {uuid: _unread(one) for uuid, one in self._known.items()}
        self._judge(dict.fromkeys(self._health, why), at)

    def _judge(self, faults: dict[str, str], at: datetime) -> None:
        now_s = self._monotonic()
        for uuid, fault in faults.items():
            before = self._health.get(uuid, DeviceHealth())
            health = next_health(before, fault, now_s=now_s, at=at, patience=self._patience)
            self._health[uuid] = health
            if health.fault and health.fault != before.fault:
                logger(node=self.node, device=uuid).warning("gpu.unhealthy", why=health.fault)
            elif before.fault and not health.fault:
                logger(node=self.node, device=uuid).info("gpu.recovered", after=before.fault)


class _DriverThread:
    """Asks the driver in a thread of its own, single-flight: while one reading hangs, no other begins."""

    def __init__(self, driver: Driver, *, limit_s: float, monotonic: Callable[[], float]) -> None:
        self.driver = driver
        self.limit_s = limit_s
        self.reopen = False  # a fresh connection to the driver may help
        self._monotonic = monotonic
        self._answer: queue.SimpleQueue[MachineReading | Exception] | None = None
        self._late = False  # the reading outlived the beat that began it
        self._again_s = 0.0
        self._pause_s = REOPEN_S
        self._last: Exception | None = None

    def read(self) -> MachineReading | Exception | None:
        """None: the driver has not answered in time; the next calls wait for that reading, briefly."""
        now_s, wait_s = self._monotonic(), self.limit_s
        if self._answer is not None:
            wait_s = min(wait_s, 0.05)
        elif self._last is not None and now_s < self._again_s:
            return self._last
        else:
            self._begin(now_s)
        assert self._answer is not None  # noqa: S101 - for the type checker
        try:
            found = self._answer.get(timeout=wait_s)
        except queue.Empty:
            self._late = True
            return None
        self._answer = None
        self._last = None if isinstance(found, MachineReading) else found
        if self._last is not None:
            self._pause(now_s)
        elif not self.reopen:
            self._pause_s = REOPEN_S
        if isinstance(found, MachineReading) and self._late:
            # It began before the previous report, so its processes may be older than the end of a lease.
            return replace(found, readings=tuple(replace(r, processes=None) for r in found.readings))
        return found

    def _begin(self, now_s: float) -> None:
        fresh = self.reopen and now_s >= self._again_s
        if fresh:
            self._pause(now_s)
        answer: queue.SimpleQueue[MachineReading | Exception] = queue.SimpleQueue()
        # A daemon thread: one that hangs in the kernel must not keep the agent from ending.
        try:
            start_thread("nvml", _ask, self.driver, answer, fresh)
        except RuntimeError as exc:  # the machine has no thread left; a later reading may get one
            answer.put(NoDriver(f"the NVIDIA driver cannot be asked ({exc})"))
        self._answer, self._late = answer, False

    def _pause(self, now_s: float) -> None:
        self._again_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * 2, REOPEN_MOST_S)


def _ask(driver: Driver, answer: "queue.SimpleQueue[MachineReading | Exception]", fresh: bool) -> None:
    try:
        if fresh:
            driver.close()
        if not driver.is_open:
            driver.open()
        answer.put(driver.read())
    except NoDriver as exc:
        driver.close()
        answer.put(exc)
    except Exception as exc:  # noqa: BLE001 - the edge of a thread: its silence would look like a hung driver
        logger().exception("agent.look_failed")
        answer.put(exc)


def _unread(one: Reading) -> Reading:
    """The lasting facts of a device that was not read now: no processes, no load, no temperature."""
    return replace(one, processes=None, utilisation_percent=None, temperature_c=None)
