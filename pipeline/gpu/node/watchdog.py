"""Watchdog: compares the memory that a lease's processes use, by the driver, with the leased memory.

It is the only enforcement that works for every program: an allocator's limit sees neither CUDA's own memory
nor that of libraries, and a program may ignore its environment. The figures are one beat of the agent old, so
it warns first and asks for an end when the excess stays. The parent of the program acts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pipeline.errors import RedisUnavailable
from pipeline.gpu.values import Device, Snapshot
from pipeline.logs import logger

GRACE_S: Final = 10.0  # ten beats of an agent: a peak while a model is loaded is given back within seconds


class Word(StrEnum):
    """The action for a device."""

    OK = "ok"
    WARN = "warn"  # over, for not longer than the grace
    KILL = "kill"
    UNKNOWN = "unknown"  # the driver does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageVerdict:
    """The state of one device of a lease. `why` is one sentence with the figures, "" for OK."""

    uuid: str
    word: Word
    leased_mib: int
    used_mib: int | None = None
    why: str = ""


def used_by(device: Device, pids: Collection[int]) -> int | None:
    """MiB that these processes use there; 0 when the driver lists none of them, None when it does not say.

    The driver lists pids of the host, so processes in another pid namespace seem to use nothing; so may MPS
    clients, which it may count to the MPS server. A limit of MPS, or the agent's figures, hold them.
    """
    if device.processes is None:
        return None
    sizes = [process.used_mib for process in device.processes if process.pid in pids]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def judge_usage(
    uuid: str,
    device: Device | None,
    *,
    pids: Collection[int],
    leased_mib: int,
    tolerance_mib: int,
    over_s: float | None,
    grace_s: float = GRACE_S,
) -> UsageVerdict:
    """The action for one device now.

    `device` None: no fresh report of it. `over_s`: duration of the excess without a break; None: there was
    none. The first sight of an excess ends nothing, however small the grace.
    """
    used = None if device is None else used_by(device, pids)
    if used is None:
        why = "its agent is silent" if device is None else "its driver does not say what each process uses"
        return UsageVerdict(
            uuid=uuid,
            word=Word.UNKNOWN,
            leased_mib=leased_mib,
            why=f"what is used of {uuid} cannot be compared with the lease: {why}",
        )
    if used <= leased_mib + tolerance_mib:
        return UsageVerdict(uuid=uuid, word=Word.OK, leased_mib=leased_mib, used_mib=used)
    last = over_s is not None and over_s >= grace_s
    excess_s = 0.0 if over_s is None else over_s
    return UsageVerdict(
        uuid=uuid,
        word=Word.KILL if last else Word.WARN,
        leased_mib=leased_mib,
        used_mib=used,
        why=f"{used} MiB are used of {uuid} and {leased_mib} MiB are leased, "
        + (f"for {excess_s:.0f} s" if last else f"and it is ended in {max(grace_s - excess_s, 0.0):.0f} s")
        + f"; lease at least {used} MiB, or make it use less",
    )


def fresh(snapshot: Snapshot) -> list[Device]:
    """The devices with current figures: not those of a silent node."""
    silent = {node.name for node in snapshot.nodes if node.silent}
    return [device for device in snapshot.devices if device.node not in silent]


class Watchdog:
    """Watches one lease. `leased`: MiB by uuid; `pids`: its processes; `reading`: the agents' last reports.

    `lambda: fresh(pool.snapshot())` fits as `reading`: only the agents ask the driver.
    """

    def __init__(
        self,
        pids: Callable[[], Collection[int]],
        leased: Mapping[str, int],
        reading: Callable[[], Sequence[Device]],
        *,
        tolerance_mib: int = 0,
        grace_s: float = GRACE_S,
    ) -> None:
        self.pids = pids
        self.leased = leased
        self.reading = reading
        self.tolerance_mib = tolerance_mib
        self.grace_s = grace_s
        self._over_since: dict[str, float] = {}
        self._said: dict[str, Word] = {}

    def check(self, now: float) -> list[UsageVerdict]:
        """One verdict per device, in the order of `leased`. `now`: seconds of a monotonic clock.

        A change is logged once. While Redis is away all devices are unknown; that raises nothing.
        """
        try:
            devices = {device.uuid: device for device in self.reading()}
        except RedisUnavailable:
            devices = {}
        pids = self.pids()
        return [self._judge(uuid, devices.get(uuid), pids, now) for uuid in self.leased]

    def _judge(self, uuid: str, device: Device | None, pids: Collection[int], now: float) -> UsageVerdict:
        since = self._over_since.get(uuid)
        verdict = judge_usage(
            uuid,
            device,
            pids=pids,
            leased_mib=self.leased[uuid],
            tolerance_mib=self.tolerance_mib,
            over_s=None if since is None else now - since,
            grace_s=self.grace_s,
        )
        if verdict.word in (Word.WARN, Word.KILL):
            self._over_since.setdefault(uuid, now)
        else:
            self._over_since.pop(uuid, None)  # an excess counts only while it is seen
        if self._said.get(uuid, Word.OK) is not verdict.word:
            self._said[uuid] = verdict.word
            log = logger(device=uuid, leased_mib=verdict.leased_mib, used_mib=verdict.used_mib)
            if verdict.word is Word.OK:
                log.info("gpu.within_lease")
            else:
                log.warning(f"gpu.watch_{verdict.word}", why=verdict.why)
        return verdict
