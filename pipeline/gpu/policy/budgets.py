"""Budgets: GPU-hours that a tenant may use in a day, a week or a month. Pure.

Periods are those of UTC; a week begins on Monday. A device counts by the share that a lease has of it, as
usage records do. Leases that live count up to now, so a budget ends while they run. They are not ended for
it: no new lease is granted to the tenant until the next period.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.errors import BadInput
from pipeline.gpu.values import (
    FULL_PERCENT,
    BudgetPeriod,
    Device,
    LeaseMode,
    LeasePart,
    PoolLease,
    Snapshot,
    Tenant,
    TenantBudget,
)

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
_BUDGET: Final = re.compile(r"(\d{1,7}(?:\.\d{1,6})?)/(day|week|month)")


def parse_budget(text: str, *, refuses: bool = False) -> TenantBudget:
    """From `100/month`, `12.5/week` or `8/day`. Raises BadInput."""
    found = _BUDGET.fullmatch(text.strip())
    if found is None:
        raise BadInput(
            f"--gpu-hours {text!r} is no budget; write hours and a period, as in 100/month, 25/week or 4.5/day"
        )
    return TenantBudget(gpu_hours=float(found[1]), per=BudgetPeriod(found[2]), refuses=refuses)


def period_of(per: BudgetPeriod, now_ms: int) -> tuple[datetime, datetime]:
    """The first moment of the period around `now_ms`, and of the next one."""
    day = datetime.fromtimestamp(now_ms / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if per is BudgetPeriod.DAY:
        return day, day + timedelta(days=1)
    if per is BudgetPeriod.WEEK:
        first = day - timedelta(days=day.weekday())
        return first, first + timedelta(days=7)
    first = day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1)


def days_of(per: BudgetPeriod, now_ms: int) -> Iterator[int]:
    """The days of the period up to now, as numbers of days since 1970."""
    first, _ = period_of(per, now_ms)
    return iter(range(int(first.timestamp() * 1000) // DAY_MS, now_ms // DAY_MS + 1))


def with_use(
    tenants: Mapping[str, Tenant], ended_ms: Mapping[str, int], snapshot: Snapshot
) -> dict[str, Tenant]:
    """The tenants with what they have used of their budgets. `ended_ms`: by leases that have ended."""
    live = _live_ms(tenants, snapshot)
    return {
        name: tenant
        if tenant.budget is None
        else replace(tenant, used_gpu_hours=(ended_ms.get(name, 0) + live.get(name, 0.0)) / HOUR_MS)
        for name, tenant in tenants.items()
    }


def _live_ms(tenants: Mapping[str, Tenant], snapshot: Snapshot) -> dict[str, float]:
    """Milliseconds of whole devices by leases that live, since their period began."""
    devices = {device.uuid: device for device in snapshot.devices}
    sums: dict[str, float] = {}
    for lease in snapshot.leases:
        tenant = tenants.get(lease.need.tenant)
        if tenant is None or tenant.budget is None:
            continue
        first, _ = period_of(tenant.budget.per, snapshot.now_ms)
        since = max(lease.granted_ms, int(first.timestamp() * 1000))
        held_ms = max(0, min(snapshot.now_ms, lease.deadline_ms) - since)
        share = sum(_share(lease, part, devices.get(part.uuid)) for part in lease.parts)
        sums[tenant.name] = sums.get(tenant.name, 0.0) + held_ms * share
    return sums


def _share(lease: PoolLease, part: LeasePart, device: Device | None) -> float:
    """Of the device, as gpu/_gpu.lua counts it at the end."""
    if lease.need.mode is LeaseMode.EXCLUSIVE:
        return 1.0
    size = 0 if device is None else device.schedulable_mib
    return min(1.0, max(part.compute_percent / FULL_PERCENT, part.memory_mib / size if size else 0.0))


def exhausted(tenant: Tenant | None) -> bool:
    """Whether nothing is left of the budget of this period."""
    return (
        tenant is not None and tenant.budget is not None and tenant.used_gpu_hours >= tenant.budget.gpu_hours
    )


def why_exhausted(tenant: Tenant, now_ms: int) -> str:
    """The reason in words; "" while something of the budget is left, or without one."""
    if tenant.budget is None or not exhausted(tenant):
        return ""
    _, following = period_of(tenant.budget.per, now_ms)
    return (
        f"its tenant {tenant.name} has used {tenant.used_gpu_hours:.2f} of its {tenant.budget.gpu_hours:g} "
        f"GPU-hours of this {tenant.budget.per.value}; the next one begins at {following:%Y-%m-%d %H:%M} UTC"
    )
