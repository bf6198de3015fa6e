"""The order of the GPU pool at scale: grants/s on one core, growth, fairness, and the story of the gang.

`grants_per_s` is one plan of an empty pool, nothing prepared: the snapshot is read, indexed and planned in
that time. `turnover` plans a full pool again and again while leases end, as a running pool does. Every plan
is checked for its rules, outside the timing."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from bench._gpu_stories import compare_rules, machines
from pipeline.gpu.policy.packing import Capacities
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.policy.pool_index import PoolIndex
from pipeline.gpu.values import (
    FULL_PERCENT,
    TENANT,
    Backfill,
    Device,
    Grant,
    LeaseMode,
    LeaseState,
    Need,
    Node,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Snapshot,
    Tenant,
)

TENANTS = 100
MEMORY_MIB = 81_920
SIZES = ((2048, 5), (4096, 10), (8192, 10), (10_240, 25), (20_480, 25), (40_960, 50))


def world(devices: int, queued: int, seed: int = 0) -> Snapshot:
    """Shared needs of every tenant in a size of its own, so that envy can be counted; one in fifty is a gang,
    one an exclusive."""
    chance = random.Random(seed)
    of_tenant = {f"t{n:03}": SIZES[n % len(SIZES)] for n in range(TENANTS)}
    waiting = []
    for number in range(queued):
        tenant = f"t{chance.randrange(TENANTS):03}"
        memory, percent = of_tenant[tenant]
        kind = chance.randrange(50)
        need = Need(
            tenant=tenant,
            mode=LeaseMode.EXCLUSIVE if kind == 1 else LeaseMode.SHARED,
            memory_mib=memory,
            compute_percent=0 if kind == 1 else percent,
            devices=chance.choice((2, 4, 8)) if kind == 0 else 1,
            max_duration_s=chance.choice((None, 60.0, 600.0, 3600.0)),
        )
        waiting.append(request(f"r{number:06}", need, number))
    return Snapshot(
        epoch=1,
        now_ms=10_000_000,
        devices=machines(devices, MEMORY_MIB),
        waiting=tuple(waiting),
        tenants={name: Tenant(name=name) for name in of_tenant},
    )


def request(name: str, need: Need, since_ms: int) -> PoolRequest:
    return PoolRequest(request_id=name, holder=name, need=need, ttl_ms=10_000, since_ms=since_ms)


def lease(grant: Grant, need: Need, granted_ms: int) -> PoolLease:
    return PoolLease(
        lease_id=grant.request_id,
        holder=grant.request_id,
        need=need,
        parts=grant.parts,
        state=LeaseState.ACTIVE,
        granted_ms=granted_ms,
        deadline_ms=granted_ms + 10_000,
        ttl_ms=10_000,
        share=grant.share,
        prepaid=grant.prepaid,
    )


def done(before: Snapshot, made: PoolPlan) -> Snapshot:
    """The pool after the plan."""
    needs = {r.request_id: r.need for r in before.waiting}
    granted = {grant.request_id for grant in made.grants}
    return replace(
        before,
        leases=before.leases + tuple(lease(g, needs[g.request_id], before.now_ms) for g in made.grants),
        waiting=tuple(r for r in before.waiting if r.request_id not in granted),
        reservation=made.reservation,
    )


def timed(before: Snapshot, backfill: Backfill, times: int = 3) -> tuple[PoolPlan, float]:
    """The plan, and the shortest of some runs in CPU seconds of this one thread."""
    spans = []
    for _ in range(times):
        start = time.process_time()
        made = make_plan(before, backfill=backfill)
        spans.append(time.process_time() - start)
    return made, min(spans)


def broken(before: Snapshot, made: PoolPlan) -> dict[str, int]:
    """Gangs granted in part, devices holding more than they have, and needs that fit outside the reservation
    but got nothing."""
    needs = {r.request_id: r.need for r in before.waiting}
    partial = sum(len({p.uuid for p in g.parts}) != needs[g.request_id].devices for g in made.grants)
    then = done(before, made)
    capacities = Capacities(then)
    over = sum(min(one.memory_mib, one.compute_percent) < 0 for one in capacities.devices)
    if made.reservation is not None:
        capacities.reserve([capacities.by_uuid[uuid] for uuid in made.reservation.uuids])
    head = made.reservation.request_id if made.reservation is not None else ""
    wasted = sum(
        len(capacities.best_fit(r.need)) == r.need.devices for r in then.waiting if r.request_id != head
    )
    return {"gang_partial": partial, "overcommitted": over, "nonwasteful_violations": wasted}


def envy(before: Snapshot, made: PoolPlan) -> int:
    """Pairs of tenants where one still waits and could run more of its own needs, device by device, in what
    the other got less the other's last grant. The worlds for it have one kind of need per tenant (EF1)."""
    needs = {r.request_id: r.need for r in before.waiting}
    got: dict[str, list[Grant]] = defaultdict(list)
    for grant in made.grants:
        got[needs[grant.request_id].tenant].append(grant)
    kinds = {r.need.tenant: r.need for r in done(before, made).waiting}
    return sum(
        _runs(kinds[one], got[other][:-1]) > len(got[one])
        for one in kinds
        for other in list(got)
        if one != other and got[other]
    )


def _runs(need: Need, grants: Sequence[Grant]) -> int:
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for grant in grants:
        for part in grant.parts:
            held[part.uuid][0] += part.memory_mib
            held[part.uuid][1] += part.compute_percent
    return sum(
        min(memory // need.memory_mib, percent // need.compute_percent if need.compute_percent else memory)
        for memory, percent in held.values()
    )


def fairness(worlds: int = 200) -> dict[str, int]:
    """EF1 and non-wastefulness over random small worlds of single needs, endless backlogs, both ways of
    filling behind the first."""
    found = {"worlds": 0, "ef1_violations": 0, "nonwasteful_violations": 0}
    for seed in range(worlds):
        chance = random.Random(seed)
        kinds = [
            Need(
                tenant=f"t{n}",
                memory_mib=chance.randrange(512, 40_960, 512),
                compute_percent=chance.randrange(1, 60),
            )
            for n in range(chance.randrange(2, 7))
        ]
        on = machines(chance.randrange(1, 6), MEMORY_MIB)
        waiting = tuple(
            request(f"{kind.tenant}-{number:05}", kind, number) for number in range(500) for kind in kinds
        )
        before = Snapshot(
            epoch=1,
            now_ms=0,
            devices=on,
            waiting=waiting,
            tenants={kind.tenant: Tenant(name=kind.tenant) for kind in kinds},
        )
        for backfill in (Backfill.EASY, Backfill.FREE):
            made = make_plan(before, backfill=backfill)
            found["worlds"] += 1
            found["ef1_violations"] += envy(before, made)
            found["nonwasteful_violations"] += broken(before, made)["nonwasteful_violations"]
    return found


def turnover(before: Snapshot, plans: int = 30, ending: int = 20, seed: int = 0) -> dict[str, float]:
    """A full pool where `ending` leases end before each plan."""
    chance = random.Random(seed)
    now = done(before, make_plan(before))
    grants, spans = 0, []
    for _ in range(plans):
        gone = set(chance.sample(range(len(now.leases)), ending))
        now = replace(
            now, now_ms=now.now_ms + 1000, leases=tuple(x for n, x in enumerate(now.leases) if n not in gone)
        )
        start = time.process_time()
        made = make_plan(now)
        spans.append(time.process_time() - start)
        grants += len(made.grants)
        now = done(now, made)
    return {
        "plans": plans,
        "grants": grants,
        "plan_ms_mean": round(1000 * sum(spans) / plans, 2),
        "plan_ms_max": round(1000 * max(spans), 2),
    }


def cluster() -> tuple[tuple[Node, ...], tuple[Device, ...]]:
    """1,213 made-up nodes with 6,212 GPUs, as many as in the openb trace, of four models."""
    nodes, on = [], []
    for count, gpus, cores, model in (
        (617, 8, 96, "A100"),
        (518, 2, 104, "T4"),
        (54, 4, 96, "V100"),
        (24, 1, 16, "A10"),
    ):
        for _ in range(count):
            name = f"node{len(nodes):04}"
            nodes.append(Node(name=name, agent=name, cpu_milli=1000 * cores, memory_mib=4096 * cores))
            on += [
                replace(one, uuid=f"{name}-{index}", node=name, index=index, name=model)
                for index, one in enumerate(machines(gpus, MEMORY_MIB))
            ]
    return tuple(nodes), tuple(on)


def decisions(times: int = 300, seed: int = 0) -> dict[str, Any]:
    """One need more in a nearly full pool, again and again, with an index that follows the pool.

    Before each plan one lease has ended. `waits`: the need fits nowhere, so devices are reserved for it."""
    chance = random.Random(seed)
    nodes, on = cluster()

    def need() -> Need:
        gpus = chance.choices((0, 1, 2, 4, 8), (45, 45, 4, 3, 3))[0]
        return Need(
            tenant=f"t{chance.randrange(4)}",
            mode=LeaseMode.EXCLUSIVE if gpus else LeaseMode.SHARED,
            memory_mib=0 if gpus else chance.choice((8_192, 16_384, 40_960)),
            compute_percent=0 if gpus else chance.choice((10, 25, 50)),
            devices=max(1, gpus),
            cpu_milli=chance.choice((2_000, 4_000, 8_000, 12_000)),
            node_memory_mib=8_192,
            model=chance.choice(("", "", "", "", "T4", "V100|A100")),
            same_node=gpus > 1,
            max_duration_s=chance.choice((None, 3600.0)),
        )

    recent = Counter(replace(need(), tenant=TENANT, max_duration_s=None) for _ in range(512))
    now = Snapshot(
        epoch=1,
        now_ms=10_000_000,
        nodes=nodes,
        devices=on,
        waiting=tuple(request(f"r{n:06}", need(), n) for n in range(9_000)),
        tenants={f"t{n}": Tenant(name=f"t{n}") for n in range(4)},
        demand=recent,
    )
    index = PoolIndex()
    began = time.process_time()
    plan = make_plan(now, backfill=Backfill.FREE, index=index)
    filled_s = time.process_time() - began
    now = replace(done(now, plan), waiting=(), reservation=None)
    spans: dict[str, list[float]] = {"granted": [], "waits": []}
    for number in range(times):
        ended = chance.randrange(len(now.leases))
        leases = (*now.leases[:ended], *now.leases[ended + 1 :])
        waiting = (request(f"n{number:06}", need(), 0),)
        now = replace(now, now_ms=now.now_ms + 1000, leases=leases, waiting=waiting, reservation=None)
        began = time.process_time()
        plan = make_plan(now, index=index)
        spans["granted" if plan.grants else "waits"].append(1000 * (time.process_time() - began))
        now = replace(done(now, plan), waiting=(), reservation=None)
    return {
        "nodes": len(nodes),
        "devices": len(on),
        "leases": len(now.leases),
        "grants_per_s_when_filled": round(len(now.leases) / filled_s),
        **{
            name: {"n": len(ms), "mean_ms": round(mean(ms), 2), "p99_ms": round(quantiles(ms, n=100)[98], 2)}
            for name, ms in spans.items()
            if len(ms) > 1
        },
    }


def full(devices: Sequence[Device], queued: int) -> Snapshot:
    """A pool where nothing is free: what a plan costs when it can do nothing."""
    need = Need(memory_mib=MEMORY_MIB, compute_percent=FULL_PERCENT)
    before = Snapshot(
        epoch=1,
        now_ms=10_000_000,
        devices=tuple(devices),
        waiting=tuple(request(f"r{n:06}", need, n) for n in range(len(devices) + queued)),
        tenants={need.tenant: Tenant(name=need.tenant)},
    )
    return done(before, make_plan(before))


def measure(_data: Path) -> dict[str, Any]:
    sizes = []
    broken_at: dict[str, int] = defaultdict(int)
    for devices, queued in (
        (100, 1_000),
        (1_000, 10_000),
        (1_000, 100_000),
        (10_000, 10_000),
        (10_000, 100_000),
    ):
        before = world(devices, queued)
        made, seconds = timed(before, Backfill.EASY)
        for name, count in broken(before, made).items():
            broken_at[name] += count
        idle = full(machines(devices, MEMORY_MIB), queued)
        sizes.append(
            {
                "devices": devices,
                "queued": queued,
                "tenants": TENANTS,
                "grants": len(made.grants),
                "plan_s": round(seconds, 4),
                "grants_per_s": round(len(made.grants) / seconds),
                "nothing_to_do_ms": round(1000 * timed(idle, Backfill.EASY)[1], 1),
            }
        )
    fair = fairness()
    stories = {rule.value: asdict(figures) for rule, figures in compare_rules(0.95).items()}
    main = sizes[1]
    return {
        "devices": main["devices"],
        "queued": main["queued"],
        "tenants": TENANTS,
        "grants_per_s": main["grants_per_s"],
        "ef1_violations": fair["ef1_violations"],
        "nonwasteful_violations": fair["nonwasteful_violations"] + broken_at["nonwasteful_violations"],
        "gang_partial": broken_at["gang_partial"],
        "overcommitted": broken_at["overcommitted"],
        "starved": stories["easy"]["starved"],
        "gang_wait_easy_over_strict": round(
            stories["easy"]["gangs"]["mean_s"] / stories["strict"]["gangs"]["mean_s"], 3
        ),
        "growth": {f"{s['devices']} devices, {s['queued']} needs": s for s in sizes},
        "turnover": turnover(world(1_000, 10_000)),
        "decision": decisions(),
        "fairness": fair,
        "story": stories,
    }
