"""`logweir gpu tenants`: who may use the pool, what each has used, and the budgets that `set` gives."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipeline.commands.common import cell, out, print_json, printable
from pipeline.errors import BadInput

if TYPE_CHECKING:
    from pipeline.settings import Settings


def show_tenants(args: argparse.Namespace, facts: Mapping[str, Any]) -> int:
    """The table of tenants, in the order of their turn."""
    from pipeline.units import size

    found = facts["tenants"]
    if args.json:
        print_json(found)
        return 0
    table = Table(
        "tenant",
        "weight",
        "quota",
        "holds",
        "leases",
        "waiting",
        "used lately",
        "budget",
        box=None,
        pad_edge=False,
    )
    for t in found:
        quota = "none" if t["quota_mib"] is None else size(t["quota_mib"])
        name = t["tenant"] if t["known"] else f"{t['tenant']} (not in gpu_tenants)"
        row: tuple[Any, ...] = (
            name,
            f"{t['weight']:g}",
            quota,
            size(t["held_mib"]),
            t["leases"],
            t["waiting"],
        )
        used = f"{t['used_share_s'] / 3600:.2f} pool-hours"
        table.add_row(*map(cell, (*row, used, _budget_words(t.get("budget")))))
    console = out()
    console.print(table)
    console.print(
        "whoever holds and used least for its weight comes first; past use counts half after "
        f"{facts['half_life_s'] / 3600:g} h",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _budget_words(budget: Mapping[str, Any] | None) -> str:
    if budget is None:
        return "none"
    used, hours = budget["used_gpu_hours"], budget["gpu_hours"]
    over = ", refuses" if budget["over"] == "refuse" else ""
    return f"{used:.2f} of {hours:g} GPU-hours this {budget['per']}{over}"


def change_tenant(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    """`gpu tenants add | remove | set NAME`."""
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.gpu import add_tenant, remove_tenant

    name = args.tenant_name
    if args.change == "set":
        return _set_budget(args, pool, settings)
    if name is None:
        raise BadInput(f"name the tenant: logweir gpu tenants {args.change} NAME")
    if args.change == "remove":
        remove_tenant(pool.client, settings, name, by=user_of_machine())
        facts: dict[str, Any] = {"removed": name}
        words = f"{name} gets no new lease by its key any more; `logweir gpu leases` shows those that live"
    else:
        new = add_tenant(pool.client, settings, name, args.weight, by=user_of_machine())
        facts = {"tenant": name, "name": new.name, "key": new.key}
        words = f"{new.key}\nthis is the only time it is shown; with it {name} asks POST /api/v1/gpu/leases"
    if args.json:
        print_json(facts)
    else:
        out().print(words, markup=False, soft_wrap=True)
    return 0


def _set_budget(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    from pipeline.gpu.policy.budgets import parse_budget
    from pipeline.service.access.audit import user_of_machine
    from pipeline.service.gpu import set_budget

    if args.tenant_name is None or args.gpu_hours is None:
        raise BadInput(
            "name a tenant and its budget: logweir gpu tenants set NAME --gpu-hours 100/month, or none"
        )
    budget = None if args.gpu_hours == "none" else parse_budget(args.gpu_hours, refuses=args.over == "refuse")
    set_budget(pool.client, settings, args.tenant_name, budget, by=user_of_machine())
    if args.json:
        print_json({"tenant": args.tenant_name, "gpu_hours": args.gpu_hours, "over": args.over})
        return 0
    after = (
        "a need beyond it is refused" if args.over == "refuse" else "needs beyond it wait for the next period"
    )
    words = (
        f"{args.tenant_name} has no budget"
        if budget is None
        else f"{args.tenant_name} has {args.gpu_hours}; {after}"
    )
    out().print(printable(words), markup=False, soft_wrap=True)
    return 0
