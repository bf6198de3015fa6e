"""Whether a GPU may be leased: hysteresis with a doubling wait, as a pure step per reading.

A fault makes a device unhealthy at once. It recovers after several good probes in a row, over a wait that
doubles with each relapse, so a card with a loose contact is not leased every ten seconds. The faults are
those of the health check in NVIDIA's device plugin for Kubernetes (internal/rm/health.go). That check never
recovers, and of several slices of one GPU it marks only one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from pipeline.gpu.node.readings import DriverEvent, Reading

# Errors of a program, not of the device (same source): engine exception, memory page fault, stopped or
# preemptive clean-up, video processor exception, wrong use by an application.
IGNORED_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
# Words for operators, after NVIDIA's XID catalogue.
XID_WORDS: Final = {
    48: "double bit memory error",
    62: "internal micro-controller halted",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "its firmware failed",
    154: "the driver wants it recovered",
}
# NVML_GPU_RECOVERY_ACTION_*
ACTIONS: Final = {
    1: "a reset",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic to be drained",
    4: "to be drained and reset",
    5: "its IMEX domain to be recovered",
    6: "a reset of its bus",
    7: "a reboot of the system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Recovery takes `good` probes in a row over `first_s`, doubled at each relapse up to `most_s`.

    After `forget_s` without a fault the wait is `first_s` again.
    """

    good: int = 3
    first_s: float = 10.0
    most_s: float = 600.0
    forget_s: float = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """`fault` is "" for a healthy device. Seconds are of the agent's monotonic clock."""

    fault: str = ""
    since: datetime | None = None
    wait_s: float = 0.0  # duration of good probes before recovery
    good: int = 0
    good_since_s: float = 0.0
    healthy_since_s: float | None = None  # its last recovery; None: it has never failed

    @property
    def why(self) -> str:
        """For an operator; "" for a healthy device."""
        if not self.fault:
            return ""
        at = "" if self.since is None else f" at {self.since:%H:%M} UTC"
        return f"{self.fault}{at}; it is probed again"


def next_health(
    health: DeviceHealth, fault: str, *, now_s: float, at: datetime, patience: Patience
) -> DeviceHealth:
    """The health after one more probe; `fault` is "" for a good one."""
    if fault:
        return _failed(health, fault, now_s=now_s, at=at, patience=patience)
    if not health.fault:
        return health
    good_since_s = health.good_since_s if health.good else now_s
    good = health.good + 1
    if good >= patience.good and now_s - good_since_s >= health.wait_s:
        return DeviceHealth(wait_s=health.wait_s, healthy_since_s=now_s)
    return replace(health, good=good, good_since_s=good_since_s)


def _failed(
    health: DeviceHealth, fault: str, *, now_s: float, at: datetime, patience: Patience
) -> DeviceHealth:
    if health.fault:  # still, or again before it had recovered
        since = health.since if health.fault == fault else at
        return replace(health, fault=fault, since=since, good=0)
    trusted = health.healthy_since_s is None or now_s - health.healthy_since_s >= patience.forget_s
    wait_s = patience.first_s if trusted else min(health.wait_s * 2, patience.most_s)
    return DeviceHealth(fault=fault, since=at, wait_s=wait_s)


def xid_fault(xid: int | None) -> str:
    """The fault of an event; "" for errors of a program. None: a memory error event."""
    if xid is None:
        return "an uncorrectable memory error"
    if xid in IGNORED_XIDS:
        return ""
    return f"XID {xid} ({XID_WORDS[xid]})" if xid in XID_WORDS else f"XID {xid}"


def event_fault(uuid: str, events: Iterable[DriverEvent], gpus: Iterable[str]) -> str:
    """The first fault of this whole GPU. An event that names no GPU, or an unknown one, concerns all."""
    names = set(gpus)
    for event in events:
        if event.uuid == uuid or event.uuid is None or event.uuid not in names:
            fault = xid_fault(event.xid)
            if fault:
                return fault
    return ""


def reading_fault(reading: Reading, ecc_before: int) -> str:
    """The fault that a reading shows, or "". `ecc_before`: errors at the last reading, 0 the first time.

    So errors from before the agent count as new: their time is unknown.
    """
    if reading.recovery:
        action = ACTIONS.get(reading.recovery, f"recovery action {reading.recovery}")
        return f"its driver asks for {action}"
    fresh = (reading.ecc_errors or 0) - ecc_before
    if fresh > 0:
        return f"{fresh} uncorrectable memory error{'s' * (fresh > 1)}"
    if reading.blind:
        return f"its error events cannot be watched ({reading.blind})"
    return ""
