"""Admission check: a need that can never be granted is refused at once, not after a day of waiting.

A device that is broken or held by others may come back, so only sizes, places and rules are reasons here.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Final

from pipeline.gpu.policy.fairness import is_name
from pipeline.gpu.values import FULL_PERCENT, Device, LeaseMode, Need, Tenant
from pipeline.units import listed

PRIORITIES: Final = range(-1000, 1001)


def refusal(need: Need, devices: Sequence[Device], tenants: Mapping[str, Tenant]) -> str:
    """The reason why the pool can never grant the need, with its remedy; "" when it can."""
    return (
        _bad_value(need)
        or _bad_tenant(need, tenants)
        or _no_room(need, devices)
        or _quota(need, devices, tenants)
    )


def _bad_value(need: Need) -> str:
    if need.devices < 1:
        return f"{need.devices} devices is no size of a need; ask for 1 or more"
    if need.memory_mib < 0:
        return f"{need.memory_mib:,} MiB is no size of memory; ask for 1 MiB or more"
    if need.memory_mib == 0 and need.mode is LeaseMode.SHARED:
        return (
            "a shared lease needs memory, and 0 MiB were asked for; "
            "name what the process takes, as in --memory 4GiB"
        )
    if not 0 <= need.compute_percent <= FULL_PERCENT:
        return f"{need.compute_percent} % is no share of a GPU; ask for 0 to {FULL_PERCENT}"
    if need.max_duration_s is not None and not 0 < need.max_duration_s < math.inf:
        return (
            f"a duration of {need.max_duration_s:g} s cannot be planned with; "
            "name more than 0 s, or none if nobody knows"
        )
    if need.priority not in PRIORITIES:
        return f"priority {need.priority} is out of range; use {PRIORITIES[0]} to {PRIORITIES[-1]}"
    return ""


def _bad_tenant(need: Need, tenants: Mapping[str, Tenant]) -> str:
    if not is_name(need.tenant):
        return (
            f"{need.tenant!r} is not a name of a tenant; "
            "use letters, digits, dots, dashes and underscores, at most 63"
        )
    if need.tenant in tenants:
        return ""
    names = ", ".join(sorted(tenants)) or "none"
    return (
        f"tenant {need.tenant!r} may not use the GPUs; known are {names}, "
        "and the setting gpu_tenants adds more"
    )


def _no_room(need: Need, devices: Sequence[Device]) -> str:
    if not devices:
        return (
            "this pool has no GPU; start `logweir up` on a machine with an NVIDIA GPU and its driver, "
            "or work on the CPU"
        )
    here = [device for device in devices if need.node in ("", device.node)]
    if not here:
        return f"no node {need.node!r} has a GPU; known are {listed(sorted({d.node for d in devices}))}"
    named = [device for device in here if need.device in ("", device.uuid)]
    place = f" of node {need.node}" if need.node else ""
    if not named:
        return f"no device{place} is called {need.device!r}; known are {listed(sorted(d.uuid for d in here))}"
    if need.devices > len(named):
        refused = f"one need cannot have {need.devices} devices"
        if need.device:
            return f"{refused} and name one of them; ask for 1, or leave the device open"
        there = f" on node {need.node}" if need.node else ""
        return f"{refused}: the pool has {len(named)}{there}; ask for fewer"
    large = [device for device in named if device.schedulable_mib >= need.memory_mib]
    if len(large) >= need.devices:
        return ""
    reasons = listed(
        [
            f"{device.name} {device.uuid} has {device.schedulable_mib:,} MiB for leases"
            for device in sorted(named, key=lambda d: (-d.schedulable_mib, d.node, d.index, d.uuid))
            if device.schedulable_mib < need.memory_mib
        ]
    )
    if large:
        return (
            f"{amount(need.memory_mib)} fit on {len(large)} of the {need.devices} devices asked for: "
            f"{reasons}; "
            "ask for less memory or fewer devices"
        )
    return f"{amount(need.memory_mib)} fit on no device{place}: {reasons}; ask for less memory"


def _quota(need: Need, devices: Sequence[Device], tenants: Mapping[str, Tenant]) -> str:
    quota = tenants[need.tenant].quota_mib
    if quota is None:
        return ""
    needed_mib = need.memory_mib * need.devices
    if need.mode is LeaseMode.EXCLUSIVE:
        sizes = (
            device.schedulable_mib
            for device in devices
            if need.node in ("", device.node)
            and need.device in ("", device.uuid)
            and device.schedulable_mib >= need.memory_mib
        )
        needed_mib = sum(heapq.nsmallest(need.devices, sizes))
    if needed_mib <= quota:
        return ""
    return (
        f"{amount(needed_mib)} is more than tenant {need.tenant!r} may hold at a time, {amount(quota)}; "
        "ask for less or raise its quota in the setting gpu_tenants"
    )


def amount(mib: int) -> str:
    """24 GiB, or 20,000 MiB where it is no whole number of GiB."""
    return f"{mib // 1024:,} GiB" if mib >= 1024 and mib % 1024 == 0 else f"{mib:,} MiB"
