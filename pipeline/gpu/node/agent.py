"""The node agent: one look at the GPUs of this machine per beat, told to the pool.

Whatever the driver does (lose a device, go away, come back, hang in the kernel), the agent goes on beating and says what
is wrong in the devices' `why`. A device that it has once seen stays in its reports, unusable, while the driver does not
show it: nobody wonders where it went. Processes are only told from a look that is fresh: the pool frees memory by them.
"""

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Protocol

from pipeline.errors import NoDriver
from pipeline.gpu.node.health import Health, Patience, event_fault, reading_fault, step
from pipeline.gpu.node.inventory import devices
from pipeline.gpu.node.nvml import Nvml
from pipeline.gpu.node.readings import Reading, Seen
from pipeline.gpu.values import HEADROOM_MIB, Report
from pipeline.logs import logger
from pipeline.settings import Settings

LOOK_S: Final = 5.0  # how long a beat waits for the driver; a first nvmlInit takes seconds
# How often the driver is opened anew while it is away or a device is lost; doubles.
REOPEN_S, REOPEN_MOST_S = 1.0, 60.0
SILENT: Final = "its driver does not answer"
GONE: Final = "its driver does not show it any more"


class Driver(Protocol):
    """What is asked for readings: nvml.Nvml."""

    @property
    def is_open(self) -> bool: ...
    def open(self) -> None: ...
    def close(self) -> None: ...
    def read(self) -> Seen: ...


class Pool(Protocol):
    """What is told: gpu/pool.py."""

    def report(self, report: Report, /) -> str:
        """ "" or why it is refused."""
        ...

    def sweep(self) -> object:
        """End what is overdue."""
        ...


class Agent:
    """One per node; a second one is refused by the pool and takes over when the first falls silent. One thread calls."""

    def __init__(
        self,
        pool: Pool,
        settings: Settings,
        node: str,
        *,
        driver: Driver | None = None,
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
        # Less than the pool waits for a beat, so that a driver that hangs does not silence the node.
        self._looker = _Looker(
            driver or Nvml(),
            limit_s=min(LOOK_S, settings.internal.gpu_node_ttl_ms / 2_000),
            monotonic=monotonic,
        )
        self._version = ""
        self._known: dict[str, Reading] = {}  # whole GPUs and slices, as they were read last
        self._health: dict[str, Health] = {}  # of whole GPUs
        self._errors: dict[str, int] = {}  # uncorrectable ones, as counted last
        self._refused = self._away = False
        self._strange: tuple[str, ...] = ()

    def beat(self) -> Report:
        """Look, tell the pool, let it sweep. Raises RedisUnavailable."""
        report = self.look()
        refused = self.pool.report(report)
        if bool(refused) != self._refused:
            self._refused = bool(refused)
            if refused:
                logger(node=self.node, agent=self.name).warning("agent.refused", why=refused)
            else:
                logger(node=self.node, agent=self.name).info("agent.took_over")
        self.pool.sweep()
        return report

    def look(self) -> Report:
        """The machine as it is now, or as far as it can be told."""
        at = datetime.fromtimestamp(self._clock(), UTC)
        found = self._looker.look()
        if isinstance(found, Seen):
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
            ),
            driver=self._version,
        )

    def _learn(self, seen: Seen, at: datetime) -> None:
        before, now = self._known, {one.uuid: one for one in seen.readings}
        whole = {uuid for uuid, one in (before | now).items() if not one.parent}
        faults: dict[str, str] = {}
        for uuid in whole:
            if uuid in now:
                event = event_fault(uuid, seen.events, whole)
                faults[uuid] = event or reading_fault(now[uuid], self._errors.get(uuid, 0))
                self._errors[uuid] = now[uuid].ecc_errors or self._errors.get(uuid, 0)
            else:
                why = seen.lost.get(uuid)
                faults[uuid] = GONE if why is None else f"{SILENT} ({why})"
        # A slice that is gone was destroyed by somebody, unless its whole GPU is gone with it.
        kept = {uuid: _unread(one) for uuid, one in before.items() if (one.parent or uuid) not in now}
        self._known = kept | now
        self._version = seen.driver
        self._looker.reopen = bool(seen.unnamed) or not whole <= now.keys()
        if self._away:
            self._away = False
            logger(node=self.node).info("agent.driver_back", driver=seen.driver)
        # What has never been read has no size, so the pool cannot be told of it; an operator can.
        strange = (
            *seen.unnamed,
            *(f"{uuid}: {why}" for uuid, why in seen.lost.items() if uuid not in before),
        )
        if strange and strange != self._strange:
            logger(node=self.node).warning("agent.device_unread", why="; ".join(strange))
        self._strange = strange
        self._judge(faults, at)

    def _miss(self, why: str, at: datetime) -> None:
        """No look was had at all."""
        if not self._away:
            self._away = True
            log = logger(node=self.node)
            (log.warning if self._known else log.info)("agent.driver_away", why=why)
        self._known = {uuid: _unread(one) for uuid, one in self._known.items()}
        self._judge(dict.fromkeys(self._health, why), at)

    def _judge(self, faults: dict[str, str], at: datetime) -> None:
        now_s = self._monotonic()
        for uuid, fault in faults.items():
            before = self._health.get(uuid, Health())
            health = step(before, fault, now_s=now_s, at=at, patience=self._patience)
            self._health[uuid] = health
            if health.fault and health.fault != before.fault:
                logger(node=self.node, device=uuid).warning("gpu.unhealthy", why=health.fault)
            elif before.fault and not health.fault:
                logger(node=self.node, device=uuid).info("gpu.recovered", after=before.fault)


class _Looker:
    """Asks the driver in a thread, one look at a time: while one hangs, no other is begun."""

    def __init__(self, driver: Driver, *, limit_s: float, monotonic: Callable[[], float]) -> None:
        self.driver = driver
        self.limit_s = limit_s
        self.reopen = False  # something is wrong that a fresh connection to the driver may see mended
        self._monotonic = monotonic
        self._answer: queue.SimpleQueue[Seen | Exception] | None = None
        self._late = False  # the look outlived the beat that began it
        self._again_s = 0.0
        self._pause_s = REOPEN_S
        self._last: Exception | None = None

    def look(self) -> Seen | Exception | None:
        """None: the driver has not answered in time; the look is waited for, shortly, the next times."""
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
        self._last = None if isinstance(found, Seen) else found
        if self._last is not None:
            self._pause(now_s)
        elif not self.reopen:
            self._pause_s = REOPEN_S
        if isinstance(found, Seen) and self._late:
            # Begun before the report before this one: what it saw of processes may be from before a lease ended.
            return replace(found, readings=tuple(replace(r, processes=None) for r in found.readings))
        return found

    def _begin(self, now_s: float) -> None:
        fresh = self.reopen and now_s >= self._again_s
        if fresh:
            self._pause(now_s)
        answer: queue.SimpleQueue[Seen | Exception] = queue.SimpleQueue()
        # A daemon: one that hangs in the kernel must not keep the agent from ending.
        thread = threading.Thread(target=_ask, args=(self.driver, answer, fresh), name="nvml", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the machine has no thread left; a later look may get one
            answer.put(NoDriver(f"the NVIDIA driver cannot be asked ({exc})"))
        self._answer, self._late = answer, False

    def _pause(self, now_s: float) -> None:
        self._again_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * 2, REOPEN_MOST_S)


def _ask(driver: Driver, answer: "queue.SimpleQueue[Seen | Exception]", fresh: bool) -> None:
    try:
        if fresh:
            driver.close()
        if not driver.is_open:
            driver.open()
        answer.put(driver.read())
    except NoDriver as exc:
        driver.close()
        answer.put(exc)
    except Exception as exc:  # noqa: BLE001 - the edge of a thread: its silence would look like a driver that hangs
        logger().exception("agent.look_failed")
        answer.put(exc)


def _unread(one: Reading) -> Reading:
    """What is still known of a device that was not read: not its processes, and nothing that changes."""
    return replace(one, processes=None, utilisation_percent=None, temperature_c=None)
