"""Needs of one kind of device, of a model, with CPU and memory of the node, on one node; and recent needs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from gpu_worlds import GIB, device, devices, exclusive, lease, orphan, request, shared, snapshot

from pipeline.errors import BadInput, BadPayload
from pipeline.gpu.leasing import wire
from pipeline.gpu.leasing.pool_ledger import News, PoolLedger
from pipeline.gpu.leasing.waiting import _Turn
from pipeline.gpu.policy.demand import DemandHistory
from pipeline.gpu.policy.device_names import names_model
from pipeline.gpu.policy.explain import device_views, wanted, why_it_waits
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import (
    Device,
    DeviceKind,
    Need,
    Node,
    PoolPlan,
    PoolRequest,
    Report,
    Snapshot,
    Tenant,
)
from pipeline.settings import Settings


def slice_of(one: Device, number: int, mib: int = 4 * GIB) -> Device:
    return replace(
        one, uuid=f"MIG-{one.node}-{number}", index=one.index + number, parent=one.uuid, schedulable_mib=mib,
        name=f"{one.name} MIG 1g.5gb",
    )  # fmt: skip


GPU = device(0, 80 * GIB)
SPLIT = device(1, 40 * GIB, node="n1")
SLICES = tuple(slice_of(SPLIT, n) for n in range(3))


def nodes(**cores: int) -> tuple[Node, ...]:
    """Nodes with so many cores and 64 GiB."""
    return tuple(
        Node(name=name, agent=name, cpu_milli=1000 * n, memory_mib=64 * GIB) for name, n in cores.items()
    )


def got(plan: PoolPlan) -> dict[str, set[str]]:
    return {grant.request_id: {part.uuid for part in grant.parts} for grant in plan.grants}


def plan_for(need: Need, *on: Device, **values: Any) -> set[str] | None:
    """The devices that the need alone gets now."""
    return got(make_plan(snapshot(on, waiting=[request("r", need)], **values))).get("r")


def test_an_exclusive_need_without_a_size_takes_the_whole_gpu_and_not_a_small_slice() -> None:
    assert plan_for(exclusive(), *SLICES, GPU) == {GPU.uuid}


def test_it_waits_for_the_whole_gpu_when_that_is_held_or_broken() -> None:
    held = lease("l", exclusive(), [GPU])
    assert plan_for(exclusive(), *SLICES, GPU, leases=[held]) is None
    assert plan_for(exclusive(), *SLICES, replace(GPU, why="XID 79")) is None
    assert plan_for(exclusive(device_kind=DeviceKind.SLICE), *SLICES, GPU, leases=[held]) == {SLICES[0].uuid}


def test_where_no_gpu_is_large_enough_or_there_is_none_it_takes_a_slice() -> None:
    assert plan_for(exclusive(), *SLICES) == {SLICES[0].uuid}
    large = slice_of(SPLIT, 5, 90 * GIB)
    assert plan_for(exclusive(85 * GIB), GPU, large) == {large.uuid}


def test_a_gang_never_mixes_gpus_and_slices() -> None:
    two = exclusive(devices=2)
    assert plan_for(two, GPU, *SLICES) == {SLICES[0].uuid, SLICES[1].uuid}
    assert plan_for(two, GPU, SLICES[0]) is None
    assert plan_for(shared(GIB, devices=2), GPU, SLICES[0]) is None
    assert plan_for(shared(GIB, devices=3), GPU, *SLICES) == {one.uuid for one in SLICES}


def test_a_shared_need_may_have_a_slice_and_says_so_when_it_must_not() -> None:
    assert plan_for(shared(GIB), GPU, *SLICES) == {SLICES[0].uuid}
    assert plan_for(shared(GIB, device_kind=DeviceKind.GPU), GPU, *SLICES) == {GPU.uuid}


@pytest.mark.parametrize(
    ("name", "model", "is_one"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA A10", "A10", True),
        ("NVIDIA A10G", "A10", False),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", True),
        ("NVIDIA H100 PCIe", "A100|H100", True),
        ("V100M16", "V100M16|V100M32", True),
        ("NVIDIA H100 PCIe", "A100 | T4", False),
    ],
)
def test_a_model_is_whole_words_of_a_name(name: str, model: str, is_one: bool) -> None:
    assert names_model(name, model) is is_one


def test_a_need_of_a_model_gets_that_one_and_waits_for_it() -> None:
    h100 = replace(device(3, 80 * GIB, node="n2"), name="NVIDIA H100 PCIe")
    assert plan_for(exclusive(model="H100"), GPU, h100) == {h100.uuid}
    held = lease("l", exclusive(), [h100])
    assert plan_for(exclusive(model="H100"), GPU, h100, leases=[held]) is None


def test_a_gpu_of_a_node_without_cpu_or_memory_left_is_not_given_to_a_need_of_both() -> None:
    on = [device(0), device(1), device(0, node="n1")]
    holds = lease("l", shared(cpu_milli=7_000, node_memory_mib=60 * GIB), on[:1])
    world = {"leases": [holds], "nodes": nodes(n0=8, n1=8)}
    assert plan_for(shared(cpu_milli=2_000), *on, **world) == {on[2].uuid}
    assert plan_for(shared(node_memory_mib=5 * GIB), *on, **world) == {on[2].uuid}
    assert plan_for(shared(cpu_milli=1_000), *on, **world) == {on[0].uuid}
    assert plan_for(shared(cpu_milli=2_000, node="n0"), *on, **world) is None
    assert plan_for(shared(), *on, **world) == {on[0].uuid}
    assert plan_for(shared(cpu_milli=99_000), *on, leases=[holds]) == {on[0].uuid}, "no node reports its CPU"


def test_cpu_of_a_lease_on_a_broken_device_counts_on_its_node() -> None:
    broken, well = device(0, why="XID 79"), device(1)
    holds = lease("l", shared(cpu_milli=7_000), [broken])
    assert plan_for(shared(cpu_milli=2_000), broken, well, leases=[holds], nodes=nodes(n0=8)) is None
    assert plan_for(shared(cpu_milli=1_000), broken, well, leases=[holds], nodes=nodes(n0=8)) == {well.uuid}


def test_a_gang_has_cpu_for_each_of_its_devices() -> None:
    on = [device(n) for n in range(3)] + [device(0, node="n1")]
    need = exclusive(devices=2, cpu_milli=5_000)
    assert plan_for(need, *on, nodes=nodes(n0=8, n1=8)) == {on[0].uuid, on[3].uuid}
    assert plan_for(exclusive(devices=3, cpu_milli=5_000), *on, nodes=nodes(n0=8, n1=8)) is None


def test_a_gang_on_one_node_waits_for_one_node_and_a_spread_one_does_not() -> None:
    on = [device(0), device(1), device(0, node="n1"), device(1, node="n1")]
    held = [lease("a", exclusive(), on[:1]), lease("b", exclusive(), on[2:3])]
    assert plan_for(exclusive(devices=2), *on, leases=held) == {on[1].uuid, on[3].uuid}
    together = snapshot(on, leases=held, waiting=[request("r", exclusive(devices=2, same_node=True))])
    plan = make_plan(together)
    assert not plan.grants
    assert plan.reservation is not None
    assert len({uuid.rpartition("-")[0] for uuid in plan.reservation.uuids}) == 1
    ended = replace(together, leases=(held[0],), reservation=plan.reservation)
    assert got(make_plan(ended))["r"] == {on[2].uuid, on[3].uuid}


def test_leases_on_other_devices_of_the_node_are_asked_to_yield_their_cpu() -> None:
    on = [device(0), device(1)]
    holds = lease("l", shared(cpu_milli=7_000, preemptible=True, tenant="a"), on[:1])
    waits = request("r", exclusive(cpu_milli=4_000, device=on[1].uuid, priority=5, tenant="a"))
    plan = make_plan(snapshot(on, leases=[holds], waiting=[waits], nodes=nodes(n0=8)))
    assert [y.lease_id for y in plan.yields] == ["l"]
    assert plan.reservation is not None
    assert plan.reservation.uuids == (on[1].uuid,)


def test_what_overtakes_takes_no_cpu_that_the_reserved_need_waits_for() -> None:
    on = [device(0), device(1)]
    holds = lease("l", exclusive(cpu_milli=6_000, max_duration_s=600.0), on[:1])
    first = request("first", exclusive(cpu_milli=4_000, device=on[0].uuid), since_ms=1)
    small = request("small", shared(cpu_milli=2_000, device=on[1].uuid), since_ms=2)
    plan = make_plan(snapshot(on, leases=[holds], waiting=[first, small], nodes=nodes(n0=8)))
    assert got(plan) == {"small": {on[1].uuid}}, "8 cores less 6, or 4 later, leave 2"
    larger = replace(small, need=replace(small.need, cpu_milli=5_000))
    assert not make_plan(snapshot(on, leases=[holds], waiting=[first, larger], nodes=nodes(n0=8))).grants


def test_words_say_what_is_needed_and_what_is_in_the_way() -> None:
    on = [device(0), device(1)]
    world = snapshot(
        on,
        leases=[lease("l", shared(cpu_milli=7_000), on[:1])],
        nodes=nodes(n0=8),
        orphans=(orphan(on[0], 1),),
    )

    def why(need: Need) -> str:
        waits = request("r", need)
        return why_it_waits(replace(world, waiting=(waits,)), waits, device_views(world))

    assert "the most free on one is 1 cores and 64.0 GiB" in why(shared(cpu_milli=2_000))
    assert "the most that one node can give now is 1" in why(
        shared(devices=2, cpu_milli=1_000, same_node=True)
    )
    assert why(exclusive(model="H100")) == "there is no device of model H100 in the pool now"
    assert wanted(exclusive(devices=2, same_node=True, model="A100", cpu_milli=1_500)) == (
        "2 whole devices of model A100 with 1.5 cores each on one node"
    )
    assert wanted(exclusive()) == "1 whole device"
    assert wanted(shared(4 * GIB, compute_percent=25)) == "4.0 GiB and 25 %"


def test_recent_needs_decide_where_a_share_goes() -> None:
    """A device with 6 GiB free is kept for needs of 6 GiB, which come here; best fit would take it."""
    on = devices(2, 8 * GIB)
    holds = lease("l", shared(2 * GIB), on[:1])
    need = shared(2 * GIB)
    assert plan_for(need, *on, leases=[holds]) == {on[0].uuid}
    six = Need(memory_mib=6 * GIB)
    assert plan_for(need, *on, leases=[holds], demand={six: 50}) == {on[1].uuid}


# In Redis


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Iterator[PoolLedger]:
    made = PoolLedger(client, settings.replace(gpu_node_ttl_ms=60_000))
    made.clear_quarantine()
    yield made


def tell(ledger: PoolLedger, cores: int = 8, **changes: Any) -> None:
    on = tuple(replace(one, **changes) for one in devices(2))
    report = Report(node="n0", agent="a", clock_ms=0, devices=on, cpu_milli=1000 * cores, memory_mib=64 * GIB)
    assert ledger.report(report) == ""


def test_what_the_agent_says_of_its_machine_bounds_grants_and_a_change_makes_plans_stale(
    client: "redis.Redis", settings: Settings
) -> None:
    pool = Pool(client, settings.replace(gpu_node_ttl_ms=60_000))
    pool.ledger.clear_quarantine()
    tell(pool.ledger)
    first = pool.request(shared(cpu_milli=6_000, same_node=True, model="A100"), holder="a")
    assert pool.snapshot().leases[0].need == first.need
    with pytest.raises(BadInput, match="9 cores"):
        pool.request(shared(cpu_milli=9_000), holder="b")
    before = pool.snapshot()
    assert (before.nodes[0].cpu_milli, before.nodes[0].memory_mib) == (8_000, 64 * GIB)
    tell(pool.ledger)
    assert pool.snapshot().epoch == before.epoch
    tell(pool.ledger, cores=16)
    assert pool.snapshot().epoch > before.epoch
    assert pool.request(shared(cpu_milli=9_000), holder="b").parts


def test_a_node_and_a_need_that_an_earlier_build_wrote_are_read() -> None:
    """It wrote no field of these."""
    node = wire.read_json(Node, '{"v":1,"name":"n0","agent":"a","driver":"","clock_ahead_ms":0,"uuids":[]}')
    assert (node.cpu_milli, node.memory_mib) == (0, 0)
    need = wire.read_json(Need, '{"v":1,"mode":"exclusive","memory_mib":0,"devices":2,"kind":"train"}')
    assert (need.device_kind, need.model, need.same_node) == (DeviceKind.ANY, "", False)


def wait_for(ledger: PoolLedger, name: str, need: Need) -> None:
    ledger.wait(PoolRequest(request_id=name, holder="h", need=need, ttl_ms=9_000), 9_000)


def test_redis_counts_recent_needs_as_the_pure_rule_does(ledger: PoolLedger) -> None:
    history: DemandHistory[Need] = DemandHistory()
    forms = [
        shared(GIB),
        exclusive(devices=2, same_node=True, model="A100|H100", device_kind=DeviceKind.GPU),
        shared(2 * GIB, cpu_milli=1_500, node_memory_mib=4 * GIB, compute_percent=30),
    ]
    for number in range(3_000):
        need = forms[0 if number % 3 else number % 9 // 3]
        # Tenant, priority and place are no part of a form.
        wait_for(ledger, f"r{number}", replace(need, tenant="a", priority=3, node="n0", preemptible=True))
        history.add(need)
    assert ledger.snapshot().demand == dict(history.counts)
    assert history.counts.total() > 1_024


def test_a_need_that_goes_on_waiting_is_counted_once_and_a_changed_one_again(ledger: PoolLedger) -> None:
    for _ in range(40):
        wait_for(ledger, "r", shared(GIB))
    assert ledger.snapshot().demand == {}
    for number in range(31):
        wait_for(ledger, "r", shared(GIB + number + 1))
    assert sum(ledger.snapshot().demand.values()) == 32


def test_forms_of_needs_are_bounded(ledger: PoolLedger) -> None:
    for number in range(1_500):
        wait_for(ledger, f"r{number}", shared(GIB + number))
    counts = Counter(ledger.snapshot().demand)
    assert 0 < len(counts) <= 768
    assert ledger.client.hlen(ledger.keys.gpu("demand_window")) <= 257


def test_counts_that_cannot_be_read_are_named_with_the_remedy() -> None:
    with pytest.raises(BadPayload, match="delete gpu:demand"):
        wire.read_demand([b"nonsense", b"3"])


def test_plans_use_the_recent_needs_of_redis(client: "redis.Redis", settings: Settings) -> None:
    pool = Pool(client, settings.replace(gpu_node_ttl_ms=60_000))
    pool.ledger.clear_quarantine()
    tell(pool.ledger)
    first = pool.request(shared(2 * GIB), holder="a")
    for number in range(64):
        wait_for(pool.ledger, f"r{number}", shared(6 * GIB))
        pool.ledger.abandon(f"r{number}", "h")
    second = pool.request(shared(2 * GIB), holder="b")
    assert first.parts[0].uuid != second.parts[0].uuid


def test_one_snapshot_after_another_is_planned_by_one_index(
    client: "redis.Redis", settings: Settings
) -> None:
    """The index of a pool must not keep what another process has changed."""
    pools = [Pool(client, settings.replace(gpu_node_ttl_ms=60_000)) for _ in range(2)]
    pools[0].ledger.clear_quarantine()
    tell(pools[0].ledger)
    for number in range(20):
        one, other = pools[number % 2], pools[(number + 1) % 2]
        leases = [one.request(exclusive(), holder="a"), other.request(exclusive(), holder="b")]
        assert {lease.parts[0].uuid for lease in leases} == {d.uuid for d in devices(2)}
        snapshot_: Snapshot = one.snapshot()
        assert len(snapshot_.leases) == 2
        assert other.release(leases[0])
        assert one.release(leases[1])


def test_the_grant_tells_the_waiting_process_its_lease(ledger: PoolLedger) -> None:
    """One command in place of a question for it."""
    tell(ledger)
    need = shared(2 * GIB, cpu_milli=500)
    wait_for(ledger, "r", need)
    news = ledger.listen("r")
    assert news.next(5) == (True, None), "who begins to listen asks once more"
    plan = make_plan(replace(ledger.snapshot(), tenants={"logweir": Tenant(name="logweir")}))
    committed = ledger.commit(ledger.snapshot().epoch, plan)
    assert news.next(5) == (True, committed.leases[0])
    assert news.next(0.05) == (False, None)
    news.close()
    assert ledger.client.pubsub_numsub(news.channel) == [(news.channel.encode(), 0)]


def test_a_forgotten_need_is_woken_without_a_lease(ledger: PoolLedger) -> None:
    tell(ledger)
    ledger.wait(PoolRequest(request_id="r", holder="h", need=shared(GIB), ttl_ms=9_000), -1)
    news = ledger.listen("r")
    news.next(5)
    assert ledger.sweep().forgotten == ("r",)
    assert news.next(5) == (True, None)
    news.close()


def test_a_large_pool_is_read_at_once_by_the_way_that_the_last_reading_took(
    ledger: PoolLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(ledger)
    monkeypatch.setattr("pipeline.gpu.leasing.pool_ledger.INLINE", 2)
    small = PoolLedger(ledger.client, ledger.settings)
    wait_for(ledger, "r", shared(GIB))

    def scripts() -> int:
        return int(ledger.client.info("commandstats")["cmdstat_evalsha"]["calls"])

    before, first = scripts(), small.snapshot()
    between, second = scripts(), small.snapshot()
    assert (between - before, scripts() - between) == (2, 1)
    assert first.waiting == second.waiting
    assert len(second.devices) == 2
    ledger.abandon("r", "h")
    monkeypatch.setattr("pipeline.gpu.leasing.pool_ledger.INLINE", 50)
    assert [len(small.snapshot().waiting) for _ in range(2)] == [0, 0]


def test_a_crowd_as_a_whole_looks_no_more_often_than_a_few_do(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(client, settings.replace(gpu_node_ttl_ms=60_000))
    pauses: list[float] = []

    def news(_news: News, pause: float) -> tuple[bool, None]:
        pauses.append(pause)
        return False, None

    monkeypatch.setattr(News, "next", news)
    for crowd, stops in ((1, False), (1_000, False), (1_000, True)):
        pool.planner.crowd = crowd
        waits = PoolRequest(request_id="r", holder="h", need=shared(GIB), ttl_ms=60_000)
        turn = _Turn(pool.ledger, pool.planner, waits, waits=True, stops=stops)
        for _ in range(50):
            turn.sleep(None)
    alone, patient, watched = pauses[:50], pauses[50:100], pauses[100:]
    assert max(alone) <= 1.5
    assert min(patient) > 3
    assert max(patient) <= 4 * settings.internal.lease_ttl_ms / 3_000, "so it is not forgotten"
    assert max(watched) <= 1.5, "somebody may end this wait, and is asked every second"
