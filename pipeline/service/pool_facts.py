"""A snapshot of the pool as facts for `gpu top`, `gpu leases` and `gpu tenants`.

Pure: everything is worked out from the one snapshot, so that the numbers of one picture belong together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.gpu.node import watchdog
from pipeline.gpu.policy.explain import (
    DeviceView,
    device_views,
    held_mib,
    open_door,
    outside_mib,
    state_of,
    until,
    wanted,
    why_it_waits,
)
from pipeline.gpu.policy.fairness import decayed, standings
from pipeline.gpu.policy.packing import Capacities
from pipeline.gpu.policy.shapes import FULL_SHARE
from pipeline.gpu.values import Device, Orphan, PoolLease, PoolRequest, Snapshot, Tenant

FORMS: Final = 8  # of recent needs, the commonest
CLOCK_WRONG_MS: Final = 60_000  # above what a report may have been under way, as when Redis hung


def pool_facts(s: Snapshot) -> dict[str, Any]:
    """Everything `gpu top` shows, JSON-ready. Sizes in MiB, times in seconds of the Redis clock."""
    views = device_views(s)
    usable = [view for view in views if view.device.usable]
    return {
        "at_ms": s.now_ms,
        "epoch": s.epoch,
        "quarantine_s": s.quarantine_ms / 1000,
        "summary": {
            "devices": len(views),
            "usable": len(usable),
            "nodes": len({view.device.node for view in views}),
            "schedulable_mib": sum(view.device.schedulable_mib for view in usable),
            "free_mib": sum(max(0, view.free_mib) for view in usable if open_door(s, view)),
            "leases": len(s.leases),
            "waiting": len(s.waiting),
        },
        "reservation": None
        if s.reservation is None
        else {
            "for": s.reservation.request_id,
            "devices": list(s.reservation.uuids),
            "starts_in_s": until(s, s.reservation.start_ms),
        },
        "devices": [_device(s, view) for view in views],
        "leases": lease_rows(s),
        "waiting": [_waits(s, request, views) for request in in_order(s)],
        "left": [_orphan_facts(s, x) for x in s.orphans],
        "nodes": [
            {
                "node": node.name,
                "driver": node.driver,
                "silent": node.silent,
                "heard_s_ago": (s.now_ms - node.beat_ms) / 1000,
                "clock_ahead_s": node.clock_ahead_ms / 1000,
                "clock_wrong": abs(node.clock_ahead_ms) > CLOCK_WRONG_MS,
            }
            for node in s.nodes
        ],
        "packing": _packing(s),
    }


def _packing(s: Snapshot) -> dict[str, Any]:
    """Recent needs that packing looks ahead by, and where the next of the commonest forms would go.

    Costs are in GPUs: `worth` is what later needs would get less, `fragments` what becomes unusable for them.
    """
    forms = sorted(s.demand, key=lambda form: (-s.demand[form], wanted(form)))[:FORMS]
    needs = sum(s.demand.values())
    if not forms:
        return {"needs": 0, "forms": []}
    capacities = Capacities(s)
    rows = []
    for form in forms:
        found = capacities.foresee(form)
        node, choice = found if found is not None else ("", None)
        rows.append(
            {
                "form": wanted(form),
                "share": s.demand[form] / needs,
                "node": node,
                "worth": None if choice is None else choice.worth / FULL_SHARE,
                "fragments": None if choice is None else choice.fragments / FULL_SHARE,
                "compared": 0 if choice is None else choice.compared,
            }
        )
    return {"needs": needs, "forms": rows}


def lease_rows(s: Snapshot) -> list[dict[str, Any]]:
    """The leases that live, oldest first, with what their processes really use where the driver says it."""
    devices = {device.uuid: device for device in s.devices}
    return [
        {
            "lease": lease.lease_id,
            "token": lease.token,
            "holder": lease.holder,
            "tenant": lease.need.tenant,
            "mode": lease.need.mode.value,
            "state": lease.state.value,
            "priority": lease.need.priority,
            "preemptible": lease.need.preemptible,
            "parts": [
                {
                    "device": part.uuid,
                    "token": part.token,
                    "memory_mib": part.memory_mib,
                    "compute_percent": part.compute_percent,
                    "used_mib": lease_used_mib(lease, devices.get(part.uuid)),
                }
                for part in lease.parts
            ],
            "age_s": (s.now_ms - lease.granted_ms) / 1000,
            "expires_in_s": (lease.deadline_ms - s.now_ms) / 1000,
            "yields_in_s": until(s, lease.yield_by_ms),
            "yield_why": lease.yield_why,
            "node": lease.host or _node_of(lease, devices),
            "pids": list(lease.pids),
        }
        for lease in sorted(s.leases, key=lambda x: (x.granted_ms, x.lease_id))
    ]


def tenant_rows(s: Snapshot) -> list[dict[str, Any]]:
    """Who may use the pool, in the order in which their needs of one priority come."""
    memory_mib, standing = held_mib(s), standings(s)
    names = sorted(standing, key=lambda name: (standing[name], name))
    found = []
    for name in names:
        tenant = s.tenants.get(name)
        usage = s.usage.get(name)
        found.append(
            {
                "tenant": name,
                "known": tenant is not None,
                "weight": 1.0 if tenant is None else tenant.weight,
                "quota_mib": None if tenant is None else tenant.quota_mib,
                "budget": None if tenant is None else _budget(tenant),
                "held_mib": memory_mib.get(name, 0),
                "leases": sum(lease.need.tenant == name for lease in s.leases),
                "waiting": sum(request.need.tenant == name for request in s.waiting),
                "used_share_s": 0.0 if usage is None else decayed(usage, s.now_ms, s.half_life_s).value,
                "standing": standing[name],
            }
        )
    return found


def _budget(tenant: Tenant) -> dict[str, Any] | None:
    budget = tenant.budget
    if budget is None:
        return None
    return {
        "gpu_hours": budget.gpu_hours,
        "per": budget.per.value,
        "used_gpu_hours": tenant.used_gpu_hours,
        "over": "refuse" if budget.refuses else "queue",
    }


def lease_used_mib(lease: PoolLease, device: Device | None) -> int | None:
    """Memory that the lease's processes use on the device; None where the driver does not say."""
    if device is None or not lease.pids or lease.host != device.node:
        return None
    return watchdog.used_by(device, lease.pids)


def in_order(s: Snapshot) -> list[PoolRequest]:
    """Waiting needs: the reserved one, then by priority, fair share and age."""
    first = s.reservation.request_id if s.reservation else ""
    standing = standings(s)
    return sorted(
        s.waiting,
        key=lambda r: (r.request_id != first, -r.need.priority, standing[r.need.tenant], r.since_ms),
    )


def _device(s: Snapshot, view: DeviceView) -> dict[str, Any]:
    device = view.device
    return {
        "device": device.uuid,
        "node": device.node,
        "index": device.index,
        "name": device.name,
        "parent": device.parent,
        "total_mib": device.total_mib,
        "schedulable_mib": device.schedulable_mib,
        "leased_mib": view.leased_mib,
        "leased_percent": view.leased_percent,
        "free_mib": view.free_mib,
        "used_mib": device.used_mib,
        "outside_mib": outside_mib(view),
        "utilisation_percent": device.utilisation_percent,
        "temperature_c": device.temperature_c,
        "mps": None if device.mps is None else {"own": device.mps.own, "clients": device.mps.clients},
        "usable": device.usable,
        "door_closed_for": s.reservation.request_id
        if s.reservation is not None and device.uuid in s.reservation.uuids
        else None,
        "state": state_of(s, view),
        "leases": [lease.lease_id for lease in view.leases],
    }


def _waits(s: Snapshot, request: PoolRequest, views: Sequence[DeviceView]) -> dict[str, Any]:
    need = request.need
    return {
        "request": request.request_id,
        "holder": request.holder,
        "tenant": need.tenant,
        "mode": need.mode.value,
        "memory_mib": need.memory_mib,
        "compute_percent": need.compute_percent,
        "devices": need.devices,
        "priority": need.priority,
        "node": need.node,
        "device": need.device,
        "device_kind": need.device_kind.value,
        "model": need.model,
        "cpu_milli": need.cpu_milli,
        "node_memory_mib": need.node_memory_mib,
        "same_node": need.same_node,
        "waits_s": (s.now_ms - request.since_ms) / 1000,
        "why": why_it_waits(s, request, views),
    }


def _orphan_facts(s: Snapshot, x: Orphan) -> dict[str, Any]:
    device = next((device for device in s.devices if device.uuid == x.uuid), None)
    return {
        "opens_by_itself": device is not None and device.processes is not None,
        "lease": x.lease_id,
        "device": x.uuid,
        "memory_mib": x.memory_mib,
        "pids": list(x.pids),
        "why": x.why,
        "for_s": (s.now_ms - x.since_ms) / 1000,
    }


def _node_of(lease: PoolLease, devices: Mapping[str, Device]) -> str:
    return next((devices[part.uuid].node for part in lease.parts if part.uuid in devices), "")
