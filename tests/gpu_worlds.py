"""Pools as values: short builders and hypothesis strategies of snapshots, and the rules that every plan
obeys."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pipeline.gpu.policy.packing import device_matches
from pipeline.gpu.values import (
    FULL_PERCENT,
    Device,
    DeviceKind,
    LeaseMode,
    LeasePart,
    LeaseState,
    Need,
    Node,
    Orphan,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Snapshot,
    Tenant,
)

NOW_MS = 1_000_000
GIB = 1024


def device(index: int = 0, mib: int = 8 * GIB, *, node: str = "n0", why: str = "") -> Device:
    return Device(
        uuid=f"GPU-{node}-{index:05}",
        node=node,
        index=index,
        name="A100",
        total_mib=mib + 512,
        schedulable_mib=mib,
        why=why,
    )


def devices(count: int, mib: int = 8 * GIB) -> tuple[Device, ...]:
    return tuple(device(index, mib) for index in range(count))


def shared(mib: int = GIB, **values: Any) -> Need:
    return Need(mode=LeaseMode.SHARED, memory_mib=mib, **values)


def exclusive(mib: int = 0, **values: Any) -> Need:
    return Need(mode=LeaseMode.EXCLUSIVE, memory_mib=mib, **values)


def request(request_id: str, need: Need, *, since_ms: int = NOW_MS) -> PoolRequest:
    return PoolRequest(
        request_id=request_id,
        holder=f"holder-{request_id}",
        need=need,
        ttl_ms=10_000,
        since_ms=since_ms,
    )


def lease(
    lease_id: str, need: Need, on: Sequence[Device], *, age_s: float = 60.0, yield_by_ms: int | None = None
) -> PoolLease:
    alone = need.mode is LeaseMode.EXCLUSIVE
    return PoolLease(
        lease_id=lease_id,
        holder=f"holder-{lease_id}",
        need=need,
        parts=tuple(
            LeasePart(
                uuid=d.uuid,
                memory_mib=d.schedulable_mib if alone else need.memory_mib,
                compute_percent=FULL_PERCENT if alone else need.compute_percent,
                token=1,
            )
            for d in on
        ),
        state=LeaseState.ACTIVE,
        granted_ms=NOW_MS - int(age_s * 1000),
        deadline_ms=NOW_MS + 10_000,
        ttl_ms=10_000,
        yield_by_ms=yield_by_ms,
    )


def orphan(d: Device, mib: int, *, alone: bool = False, percent: int = 0) -> Orphan:
    return Orphan(
        lease_id="gone",
        uuid=d.uuid,
        memory_mib=mib,
        compute_percent=percent,
        exclusive=alone,
        pids=(),
        since_ms=NOW_MS - 1000,
        why="its holder died",
    )


def named(*names: str) -> dict[str, Tenant]:
    return {name: Tenant(name=name) for name in names}


def snapshot(
    on: Sequence[Device],
    *,
    waiting: Iterable[PoolRequest] = (),
    leases: Iterable[PoolLease] = (),
    **values: Any,
) -> Snapshot:
    values.setdefault("tenants", named("logweir", "a", "b", "c"))
    return Snapshot(
        epoch=1,
        now_ms=values.pop("now_ms", NOW_MS),
        devices=tuple(on),
        waiting=tuple(waiting),
        leases=tuple(leases),
        **values,
    )


def after(world: Snapshot, plan: PoolPlan, *, later_ms: int = 0, obey: bool = True) -> Snapshot:
    """The pool once the plan is done, and `later_ms` after it. `obey`: those asked to yield have gone and
    wait again."""
    now_ms = world.now_ms + later_ms
    asked = {y.lease_id: y for y in plan.yields}
    granted = {g.request_id: g for g in plan.grants}
    leases, waiting = [], [r for r in world.waiting if r.request_id not in granted]
    for old in world.leases:
        if old.lease_id in asked and obey:
            again = request(f"{old.lease_id}'", old.need, since_ms=now_ms)
            waiting.append(again)
        elif old.lease_id in asked:
            leases.append(replace(old, yield_by_ms=asked[old.lease_id].by_ms))
        else:
            leases.append(old)
    requests = {r.request_id: r for r in world.waiting}
    for grant in plan.grants:
        asked_for = requests[grant.request_id]
        leases.append(
            PoolLease(
                lease_id=grant.request_id,
                holder=asked_for.holder,
                need=asked_for.need,
                parts=grant.parts,
                state=LeaseState.GRANTED,
                granted_ms=world.now_ms,
                deadline_ms=world.now_ms + asked_for.ttl_ms,
                ttl_ms=asked_for.ttl_ms,
                share=grant.share,
                prepaid=grant.prepaid,
            )
        )
    return replace(
        world,
        epoch=world.epoch + 1,
        now_ms=now_ms,
        leases=tuple(leases),
        waiting=tuple(waiting),
        reservation=plan.reservation,
    )


def obeys(world: Snapshot, plan: PoolPlan) -> None:
    """What holds of every plan, whatever the pool: conservation, whole gangs, closed doors, one reservation,
    quotas."""
    known = {d.uuid: d for d in world.devices}
    requests = {r.request_id: r for r in world.waiting}
    free = {d.uuid: [d.schedulable_mib, FULL_PERCENT] for d in world.devices}
    alone: Counter[str] = Counter()
    holders: Counter[str] = Counter()
    for uuid, mib, percent, only in held(world):
        if uuid in free:
            free[uuid][0] -= mib
            free[uuid][1] -= percent
            holders[uuid] += 1
            alone[uuid] += only
    assert len({g.request_id for g in plan.grants}) == len(plan.grants), "granted twice"
    for grant in plan.grants:
        need = requests[grant.request_id].need
        uuids = [part.uuid for part in grant.parts]
        kinds = {known[uuid].kind for uuid in uuids}
        assert len(kinds) == 1, "a gang is of one kind"
        assert need.device_kind is DeviceKind.ANY or kinds == {need.device_kind}
        assert not need.same_node or len({known[uuid].node for uuid in uuids}) == 1
        if need.mode is LeaseMode.EXCLUSIVE and need.device_kind is DeviceKind.ANY and not need.device:
            gpus = [d for d in world.devices if device_matches(d, replace(need, device_kind=DeviceKind.GPU))]
            assert (kinds == {DeviceKind.GPU}) == (len(gpus) >= need.devices)
        assert len(set(uuids)) == len(uuids) == need.devices, "a gang is whole and on distinct devices"
        for part in grant.parts:
            d = known[part.uuid]
            assert d.usable
            assert need.node in ("", d.node)
            assert need.device in ("", d.uuid)
            assert not need.model or any(word in d.name for word in need.model.split("|"))
            only = need.mode is LeaseMode.EXCLUSIVE
            assert (part.memory_mib, part.compute_percent) == (
                (d.schedulable_mib, FULL_PERCENT) if only else (need.memory_mib, need.compute_percent)
            )
            assert alone[d.uuid] == 0, "somebody has it alone"
            assert not only or holders[d.uuid] == 0, "it is not empty"
            free[d.uuid][0] -= part.memory_mib
            free[d.uuid][1] -= part.compute_percent
            assert min(free[d.uuid]) >= 0, "more is leased than there is"
            holders[d.uuid] += 1
            alone[d.uuid] += only
    _quotas(world, plan, requests)
    then = after(world, replace(plan, yields=()), obey=False)
    assert node_excess(then, then.leases) <= node_excess(world, world.leases), (
        "a node gives no more than it has"
    )
    if plan.reservation is not None:
        head = requests[plan.reservation.request_id]
        assert plan.reservation.request_id not in {g.request_id for g in plan.grants}
        assert len(set(plan.reservation.uuids)) == head.need.devices
        assert all(known[uuid].usable for uuid in plan.reservation.uuids)
        assert all(device_matches(known[uuid], head.need) for uuid in plan.reservation.uuids)
        assert len({known[uuid].kind for uuid in plan.reservation.uuids}) == 1
        if head.need.same_node:
            assert len({known[uuid].node for uuid in plan.reservation.uuids}) == 1
    asked = [y.lease_id for y in plan.yields]
    going = {old.lease_id for old in world.leases if old.yield_by_ms is not None}
    preemptible = {old.lease_id for old in world.leases if old.need.preemptible}
    assert len(set(asked)) == len(asked)
    assert set(asked) <= preemptible - going
    assert not asked or plan.reservation is not None


def _quotas(world: Snapshot, plan: PoolPlan, requests: Mapping[str, PoolRequest]) -> None:
    held_mib: Counter[str] = Counter()
    for old in world.leases:
        held_mib[old.need.tenant] += sum(part.memory_mib for part in old.parts)
    for grant in plan.grants:
        tenant = requests[grant.request_id].need.tenant
        held_mib[tenant] += sum(part.memory_mib for part in grant.parts)
        quota = world.tenants[tenant].quota_mib if tenant in world.tenants else None
        assert quota is None or held_mib[tenant] <= quota, "over its quota"


def held(world: Snapshot) -> Iterable[tuple[str, int, int, bool]]:
    """(uuid, MiB, percent, alone) of everything that takes room."""
    for old in world.leases:
        for part in old.parts:
            yield part.uuid, part.memory_mib, part.compute_percent, old.need.mode is LeaseMode.EXCLUSIVE
    for gone in world.orphans:
        yield gone.uuid, gone.memory_mib, gone.compute_percent, gone.exclusive


# ---- strategies

SIZES = st.sampled_from([512, 1024, 2048, 3072, 4096, 6144, 8192, 16_384])
DURATIONS = st.sampled_from([None, None, 5.0, 60.0, 120.0, 600.0])


@st.composite
def needs(draw: st.DrawFn, tenants: Sequence[str] = ("logweir", "a", "b", "c"), nodes: int = 2) -> Need:
    alone = draw(st.booleans())
    return Need(
        tenant=draw(st.sampled_from(tenants)),
        mode=LeaseMode.EXCLUSIVE if alone else LeaseMode.SHARED,
        memory_mib=draw(SIZES),
        compute_percent=draw(st.sampled_from([0, 10, 25, 50, 100])),
        devices=draw(st.sampled_from([1, 1, 1, 2, 3])),
        priority=draw(st.sampled_from([0, 0, 0, 5])),
        max_duration_s=draw(DURATIONS),
        preemptible=draw(st.booleans()),
        node=draw(st.sampled_from(["", "", "", *(f"n{i}" for i in range(nodes))])),
        device_kind=draw(st.sampled_from([DeviceKind.ANY, DeviceKind.ANY, DeviceKind.GPU, DeviceKind.SLICE])),
        model=draw(st.sampled_from(["", "", "", "A100", "H100|A30"])),
        cpu_milli=draw(st.sampled_from([0, 0, 1_000, 4_000])),
        node_memory_mib=draw(st.sampled_from([0, 0, 0, 2_048])),
        same_node=draw(st.sampled_from([False, False, True])),
    )


def form(need: Need) -> Need:
    """The need as the distribution of recent needs counts it."""
    return Need(
        mode=need.mode,
        memory_mib=need.memory_mib,
        compute_percent=need.compute_percent,
        devices=need.devices,
        device_kind=need.device_kind,
        model=need.model,
        cpu_milli=need.cpu_milli,
        node_memory_mib=need.node_memory_mib,
        same_node=need.same_node,
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple[Device, ...]:
    count = draw(st.integers(1, 5))
    return tuple(
        replace(
            device(
                index,
                draw(st.sampled_from([4096, 8192, 16_384])),
                node=f"n{draw(st.integers(0, 1))}",
                why=draw(st.sampled_from(["", "", "", "", "its node is silent"])),
            ),
            name=draw(st.sampled_from(["NVIDIA A100-SXM4", "NVIDIA A100-SXM4", "NVIDIA A30"])),
            parent=draw(st.sampled_from(["", "", "GPU-parent"])),
        )
        for index in range(count)
    )


@st.composite
def machines_of(draw: st.DrawFn, on: Sequence[Device]) -> tuple[Node, ...]:
    """The nodes of these devices; some report their CPU and memory."""
    return tuple(
        Node(
            name=name,
            agent=name,
            cpu_milli=draw(st.sampled_from([0, 2_000, 8_000])),
            memory_mib=draw(st.sampled_from([0, 4_096, 65_536])),
        )
        for name in sorted({d.node for d in on})
        if draw(st.booleans())
    )


def node_excess(world: Snapshot, leases: Iterable[PoolLease]) -> int:
    """By how much leases have more CPU or memory than their nodes; 0 where all is well."""
    where = {d.uuid: d.node for d in world.devices}
    cpu: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for old in leases:
        for part in old.parts:
            cpu[where[part.uuid]] += old.need.cpu_milli
            memory[where[part.uuid]] += old.need.node_memory_mib
    return sum(
        max(0, cpu[node.name] - node.cpu_milli if node.cpu_milli else 0)
        + max(0, memory[node.name] - node.memory_mib if node.memory_mib else 0)
        for node in world.nodes
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Pools in mid-life: leases that fit, leftovers, people waiting, tenants with weights and quotas."""
    on = draw(pools())
    free = {d.uuid: [d.schedulable_mib, FULL_PERCENT] for d in on}
    used: set[str] = set()
    closed: set[str] = set()
    leases = []
    for number, need in enumerate(draw(st.lists(needs(), max_size=6))):
        alone = need.mode is LeaseMode.EXCLUSIVE
        fitting = [
            d
            for d in on
            if d.uuid not in closed
            and (
                (d.uuid not in used)
                if alone
                else (free[d.uuid][0] >= need.memory_mib and free[d.uuid][1] >= need.compute_percent)
            )
        ]
        if len(fitting) < need.devices:
            continue
        chosen = fitting[: need.devices]
        age_s = draw(st.sampled_from([1.0, 30.0, 300.0]))
        asked = draw(st.sampled_from([None, None, NOW_MS + 5000])) if need.preemptible else None
        leases.append(lease(f"l{number}", need, chosen, age_s=age_s, yield_by_ms=asked))
        for part in leases[-1].parts:
            free[part.uuid][0] -= part.memory_mib
            free[part.uuid][1] -= part.compute_percent
            used.add(part.uuid)
            if alone:
                closed.add(part.uuid)
    rest = [d for d in on if d.uuid not in closed and free[d.uuid][0] >= 512]
    behind = [orphan(rest[0], 512)] if rest and draw(st.booleans()) else []
    ages = itertools.count()
    waiting = [
        request(f"r{number}", need, since_ms=NOW_MS - 1000 * draw(st.integers(0, 5)) + next(ages))
        for number, need in enumerate(draw(st.lists(needs(), max_size=8)))
    ]
    known = {
        name: Tenant(
            name=name,
            weight=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])),
            quota_mib=draw(st.sampled_from([None, None, None, 8192])),
        )
        for name in ("logweir", "a", "b")
    }
    recent = draw(st.lists(needs(), max_size=4)) if draw(st.booleans()) else []
    return snapshot(
        on,
        leases=leases,
        waiting=waiting,
        orphans=tuple(behind),
        tenants=known,
        nodes=draw(machines_of(on)),
        demand={form(need): 1 + number for number, need in enumerate(recent)},
    )
