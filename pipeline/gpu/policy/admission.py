"""Admission check: a need that can never be granted is refused at once, not after a day of waiting.

A device that is broken or held by others may come back, so only sizes, places and rules are reasons here.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from pipeline.gpu.policy.device_names import names_model, names_node
from pipeline.gpu.policy.fairness import is_name
from pipeline.gpu.policy.packing import device_matches
from pipeline.gpu.values import FULL_PERCENT, Device, DeviceKind, LeaseMode, Need, Node, Tenant
from pipeline.units import listed, plural

PRIORITIES: Final = range(-1000, 1001)
KINDS: Final = {DeviceKind.GPU: "GPU", DeviceKind.SLICE: "MIG slice"}


def refusal(
    need: Need, devices: Sequence[Device], tenants: Mapping[str, Tenant], nodes: Sequence[Node] = ()
) -> str:
    """The reason why the pool can never grant the need, with its remedy; "" when it can."""
    if why := _bad_value(need) or _bad_tenant(need, tenants) or _no_room(need, devices):
        return why
    forms = _forms(need, devices)
    reasons = [
        _no_room(form, devices) or _no_node(form, devices, nodes) or _quota(form, devices, tenants, nodes)
        for form in forms
    ]
    if "" in reasons:
        return ""
    return reasons[0] if reasons else _no_kind(need, devices)


def _forms(need: Need, devices: Sequence[Device]) -> list[Need]:
    """The need with the kind of its devices settled, as packing does it; none where no kind has enough."""
    if need.device_kind is not DeviceKind.ANY or need.device:
        return [need]
    if need.mode is LeaseMode.SHARED and need.devices == 1:
        return [need]
    enough = [
        form
        for form in (replace(need, device_kind=kind) for kind in (DeviceKind.GPU, DeviceKind.SLICE))
        if sum(device_matches(device, form) for device in devices) >= need.devices
    ]
    return enough[:1] if need.mode is LeaseMode.EXCLUSIVE else enough


def _no_kind(need: Need, devices: Sequence[Device]) -> str:
    """Together the kinds have enough devices, and devices of one need are of one kind."""
    gpus, slices = (
        sum(device_matches(device, replace(need, device_kind=kind)) for device in devices)
        for kind in (DeviceKind.GPU, DeviceKind.SLICE)
    )
    return (
        f"the {need.devices} devices of one need are of one kind, and {plural(gpus, 'GPU')} and "
        f"{plural(slices, 'MIG slice')} serve it; ask for fewer"
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
    if need.cpu_milli < 0 or need.node_memory_mib < 0:
        return (
            f"{need.cpu_milli / 1000:g} cores and {need.node_memory_mib:,} MiB of a node are no size; "
            "ask for 0 or more of each"
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
    here = [device for device in devices if names_node(device.node, need.node)]
    if not here:
        return f"no node {need.node!r} has a GPU; known are {listed(sorted({d.node for d in devices}))}"
    named = [device for device in here if need.device in ("", device.uuid)]
    place = f" of node {need.node}" if need.node else ""
    if not named:
        return f"no device{place} is called {need.device!r}; known are {listed(sorted(d.uuid for d in here))}"
    fitting = [device for device in named if of_form(device, need)]
    if not fitting:
        return _no_form(need, named, place)
    if need.devices > len(fitting) and len(fitting) < len(named):
        return (
            f"one need cannot have {need.devices} {form_words(need)}: the pool has {len(fitting)}{place}; "
            "ask for fewer"
        )
    named = fitting
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


def of_form(device: Device, need: Need) -> bool:
    """Whether the device is of the kind and of a model that the need accepts."""
    if need.device_kind not in (DeviceKind.ANY, device.kind):
        return False
    return not need.model or names_model(device.name, need.model)


def _no_form(need: Need, named: Sequence[Device], place: str) -> str:
    """No device has the kind and the model."""
    names = listed(sorted({f"{device.name} ({KINDS[device.kind]})" for device in named}))
    return f"there is no {form_words(need, 1)}{place}; known are {names}; ask for one of those"


def form_words(need: Need, count: int = 2) -> str:
    """The devices that a need accepts: `GPUs`, `MIG slices of model A100`, `devices`."""
    noun = KINDS.get(need.device_kind, "device") + ("" if count == 1 else "s")
    return noun + (f" of model {need.model}" if need.model else "")


def _no_node(need: Need, devices: Sequence[Device], nodes: Sequence[Node]) -> str:
    """Too few devices are on nodes that are large enough, or on one node where the need wants that."""
    if not (need.same_node or need.cpu_milli or need.node_memory_mib):
        return ""
    sizes = {node.name: node for node in nodes}
    by_node = Counter(device.node for device in devices if device_matches(device, need))
    counts = [min(count, _parts(sizes.get(name), need)) for name, count in by_node.items()]
    best, in_all = max(counts), sum(counts)
    if need.same_node and best < need.devices:
        with_room = " with room for it" if need.cpu_milli or need.node_memory_mib else ""
        return (
            f"no node has {need.devices} {form_words(need)}{with_room}: the most on one is {best}; "
            "ask for fewer, or leave out --same-node"
        )
    if in_all >= need.devices:
        return ""
    wish = f"{need.cpu_milli / 1000:g} cores and {amount(need.node_memory_mib)} of its node"
    return (
        f"{wish} for each device fit for {in_all} of the {need.devices} devices asked for; "
        "ask for less CPU or memory of the node"
    )


def _parts(node: Node | None, need: Need) -> int:
    """For how many devices of the need an empty node has CPU and memory."""
    bounds = [need.devices]
    if node is not None and node.cpu_milli and need.cpu_milli:
        bounds.append(node.cpu_milli // need.cpu_milli)
    if node is not None and node.memory_mib and need.node_memory_mib:
        bounds.append(node.memory_mib // need.node_memory_mib)
    return min(bounds)


def _quota(
    need: Need, devices: Sequence[Device], tenants: Mapping[str, Tenant], nodes: Sequence[Node]
) -> str:
    quota = tenants[need.tenant].quota_mib
    if quota is None:
        return ""
    needed_mib = need.memory_mib * need.devices
    if need.mode is LeaseMode.EXCLUSIVE:
        needed_mib = _least_mib(need, devices, nodes)
    if needed_mib <= quota:
        return ""
    return (
        f"{amount(needed_mib)} is more than tenant {need.tenant!r} may hold at a time, {amount(quota)}; "
        "ask for less or raise its quota in the setting gpu_tenants"
    )


def _least_mib(need: Need, devices: Sequence[Device], nodes: Sequence[Node]) -> int:
    """Memory of the smallest devices that the empty pool could give together, in MiB."""
    named = {node.name: node for node in nodes}
    by_node: dict[str, list[int]] = defaultdict(list)
    for device in devices:
        if device_matches(device, need):
            by_node[device.node].append(device.schedulable_mib)
    parts = [heapq.nsmallest(_parts(named.get(name), need), sizes) for name, sizes in by_node.items()]
    if need.same_node:
        return min(sum(sizes) for sizes in parts if len(sizes) == need.devices)
    return sum(heapq.nsmallest(need.devices, chain.from_iterable(parts)))


def amount(mib: int) -> str:
    """24 GiB, or 20,000 MiB where it is no whole number of GiB."""
    return f"{mib // 1024:,} GiB" if mib >= 1024 and mib % 1024 == 0 else f"{mib:,} MiB"
