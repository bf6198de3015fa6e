"""Whether a GPU may be leased: pure, one step per look.

A fault makes a device unhealthy at once. It recovers only after several good probes in a row, over at least a wait that
doubles each time it fails again, so that a card with a loose contact is not handed out every ten seconds.
What counts as a fault follows the health check of NVIDIA's device plugin for Kubernetes (internal/rm/health.go), with
two differences: it has no way back from unhealthy, and of several slices of one GPU it marks only one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from pipeline.gpu.node.readings import Event, Reading

# Errors of a program, not of the device (same source): engine exception, memory page fault, stopped or preemptive
# clean-up, video processor exception, wrong use by an application.
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
    """How a device gets trust back: `good` probes in a row over `first_s`, doubled at each relapse up to `most_s`.
    After `forget_s` without a fault it starts from `first_s` again."""

    good: int = 3
    first_s: float = 10.0
    most_s: float = 600.0
    forget_s: float = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`fault` is "" for a healthy device. Seconds are of the agent's monotonic clock."""

    fault: str = ""
    since: datetime | None = None
    wait_s: float = 0.0  # how long good probes must go on
    good: int = 0
    good_since_s: float = 0.0
    healthy_since_s: float | None = None  # when it recovered last; None: it has never failed

    @property
    def why(self) -> str:
        """For an operator; "" for a healthy device."""
        if not self.fault:
            return ""
        at = "" if self.since is None else f" at {self.since:%H:%M} UTC"
        return f"{self.fault}{at}; it is probed again"


def step(health: Health, fault: str, *, now_s: float, at: datetime, patience: Patience) -> Health:
    """The health after one more probe; `fault` is what was wrong with it, "" nothing."""
    if fault:
        return _failed(health, fault, now_s=now_s, at=at, patience=patience)
    if not health.fault:
        return health
    good_since_s = health.good_since_s if health.good else now_s
    good = health.good + 1
    if good >= patience.good and now_s - good_since_s >= health.wait_s:
        return Health(wait_s=health.wait_s, healthy_since_s=now_s)
    return replace(health, good=good, good_since_s=good_since_s)


def _failed(health: Health, fault: str, *, now_s: float, at: datetime, patience: Patience) -> Health:
    if health.fault:  # still, or again before it had recovered
        since = health.since if health.fault == fault else at
        return replace(health, fault=fault, since=since, good=0)
    trusted = health.healthy_since_s is None or now_s - health.healthy_since_s >= patience.forget_s
    wait_s = patience.first_s if trusted else min(health.wait_s * 2, patience.most_s)
    return Health(fault=fault, since=at, wait_s=wait_s)


def xid_fault(xid: int | None) -> str:
    """An event as a fault; "" for those that say something about a program only. None: a memory error event."""
    if xid is None:
        return "an uncorrectable memory error"
    if xid in IGNORED_XIDS:
        return ""
    return f"XID {xid} ({XID_WORDS[xid]})" if xid in XID_WORDS else f"XID {xid}"


def event_fault(uuid: str, events: Iterable[Event], known: Iterable[str]) -> str:
    """The first fault that concerns this whole GPU. An event that names no GPU, or one nobody knows, concerns all."""
    names = set(known)
    for event in events:
        if event.uuid == uuid or event.uuid is None or event.uuid not in names:
            fault = xid_fault(event.xid)
            if fault:
                return fault
    return ""


def reading_fault(reading: Reading, ecc_before: int) -> str:
    """What a reading shows to be wrong. `ecc_before`: errors counted when it was read last, 0 the first time: errors
    from before the agent are probed as new ones, because nobody knows when they were."""
    if reading.recovery:
        action = ACTIONS.get(reading.recovery, f"recovery action {reading.recovery}")
        return f"its driver asks for {action}"
    fresh = (reading.ecc_errors or 0) - ecc_before
    if fresh > 0:
        return f"{fresh} uncorrectable memory error{'s' * (fresh > 1)}"
    if reading.blind:
        return f"its error events cannot be watched ({reading.blind})"
    return ""
