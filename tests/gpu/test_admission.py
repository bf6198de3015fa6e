"""What can never be granted is refused at once, with the reason and the remedy."""

import math
from dataclasses import replace

import pytest
from gpu_worlds import GIB, device, devices, exclusive, request, shared, snapshot, snapshots
from hypothesis import given
from hypothesis import settings as effort

from pipeline.gpu.policy.admission import refusal
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.values import Device, DeviceKind, Need, Node, Snapshot, Tenant

POOL = (device(0, 20_000), device(1, 8 * GIB), device(0, 16 * GIB, node="n1"))
KNOWN = parse_tenants(["research=2:24GiB", "web"])


def why(need: Need, on: tuple[Device, ...] = POOL) -> str:
    return refusal(need, on, KNOWN)


@pytest.mark.parametrize(
    "need",
    [
        shared(1),
        shared(20_000, compute_percent=100),
        shared(8 * GIB, devices=3),
        shared(16 * GIB, node="n1"),
        shared(GIB, device=POOL[1].uuid),
        exclusive(),
        exclusive(16 * GIB, devices=2, priority=-1000, max_duration_s=0.001),
        shared(8 * GIB, devices=3, tenant="research", priority=1000),
    ],
)
def test_what_the_pool_can_ever_grant_is_not_refused(need: Need) -> None:
    assert why(need) == ""


def test_a_need_larger_than_every_device_is_told_what_each_has() -> None:
    assert why(shared(24 * GIB)) == (
        "24 GiB fit on no device: A100 GPU-n0-00000 has 20,000 MiB for leases, A100 GPU-n1-00000 has 16,384 "
        "MiB for leases, "
        "A100 GPU-n0-00001 has 8,192 MiB for leases; ask for less memory"
    )


def test_of_many_devices_the_first_are_named_and_the_rest_is_counted() -> None:
    assert "and 997 more" in why(exclusive(24 * GIB), devices(1000))


def test_a_gang_that_fits_on_too_few_devices_is_told_on_how_many() -> None:
    assert why(shared(16 * GIB, devices=3)).startswith(
        "16 GiB fit on 2 of the 3 devices asked for: A100 GPU-n0-00001"
    )


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (shared(0), "0 MiB were asked for"),
        (shared(-1), "-1 MiB"),
        (exclusive(-5), "-5 MiB"),
        (shared(devices=0), "0 devices"),
        (shared(devices=-2), "-2 devices"),
        (shared(devices=4), "the pool has 3"),
        (shared(devices=2, node="n1"), "the pool has 1 on node n1"),
        (shared(devices=2, device=POOL[0].uuid), "name one of them"),
        (shared(compute_percent=101), "101 %"),
        (shared(compute_percent=-1), "-1 %"),
        (shared(max_duration_s=0), "0 s"),
        (shared(max_duration_s=-1.5), "-1.5 s"),
        (shared(max_duration_s=math.nan), "nan s"),
        (shared(max_duration_s=math.inf), "inf s"),
        (shared(priority=1001), "-1000 to 1000"),
        (shared(priority=-1001), "-1000 to 1000"),
        (shared(node="n9"), "'n9' has a GPU; known are n0, n1"),
        (shared(device="GPU-x"), "'GPU-x'; known are GPU-n0-00000"),
        (shared(device=POOL[0].uuid, node="n1"), "no device of node n1"),
        (shared(20_000, node="n1"), "on no device of node n1"),
        (shared(tenant="nobody"), "known are logweir, research, web, and the setting gpu_tenants"),
        (shared(tenant="a b"), "not a name of a tenant"),
        (shared(tenant=""), "not a name of a tenant"),
        (shared(25 * GIB, tenant="research"), "fit on no device"),
        (
            shared(13 * GIB, devices=2, tenant="research"),
            "26 GiB is more than tenant 'research' may hold at a time, 24 GiB",
        ),
        (exclusive(8 * GIB, devices=3, tenant="research"), "more than tenant 'research' may hold"),
    ],
)
def test_the_reason_names_the_value_and_the_remedy(need: Need, words: str) -> None:
    told = why(need)
    assert words in told
    assert "\n" not in told
    assert ";" in told or ", and " in told


def test_an_empty_pool_says_that_it_has_no_gpu() -> None:
    assert why(shared(), ()).startswith("this pool has no GPU; ")


def test_a_device_that_is_out_of_order_is_no_reason_to_refuse_for_it_may_come_back() -> None:
    assert why(shared(), (replace(POOL[0], why="XID 79"),)) == ""


def test_an_exclusive_need_is_held_against_the_quota_with_the_smallest_devices_that_serve_it() -> None:
    assert why(exclusive(GIB, devices=2, tenant="research")) == ""
    assert "34 GiB" not in why(exclusive(16 * GIB, tenant="research"))
    assert why(exclusive(16 * GIB, tenant="research")) == ""


def test_the_smallest_devices_for_the_quota_are_those_that_nodes_can_give_together() -> None:
    on = tuple(
        device(index, size * GIB, node=f"n{node}") for node in (0, 1) for index, size in ((0, 4), (1, 24))
    )
    assert why(exclusive(devices=2, tenant="research"), on) == ""
    assert why(exclusive(devices=2, same_node=True, tenant="research"), on).startswith("28 GiB is more than")
    small = (Node(name="n0", agent="a", cpu_milli=500),)
    gang = exclusive(devices=2, cpu_milli=1000, tenant="research")
    assert refusal(gang, on, KNOWN, small).startswith("28 GiB is more than")


def refused(need: Need, *on: Device) -> str:
    """On a machine of 16 cores and 64 GiB, and one whose agent reports neither."""
    nodes = (Node(name="n0", agent="a", cpu_milli=16_000, memory_mib=64 * GIB), Node(name="n1", agent="b"))
    return refusal(need, on or POOL, KNOWN, nodes)


def test_a_need_that_no_node_can_serve_is_refused_with_the_reason() -> None:
    slice_ = replace(device(7, node="n1"), parent="GPU-p", name="A100 MIG 1g.5gb")
    one, two = device(0, node="n0"), device(1, node="n0")
    alone = {"node": "n0"}
    assert "17 cores and 0 MiB of its node" in refused(shared(cpu_milli=17_000, **alone), one)
    assert refused(shared(cpu_milli=16_000, **alone), one) == ""
    assert "fit for 1 of the 2 devices" in refused(shared(devices=2, cpu_milli=9_000), one, two)
    assert "fit for 0 of the 1 devices" in refused(shared(node_memory_mib=65 * GIB), one)
    assert refused(shared(cpu_milli=99_000), one, slice_) == ""
    assert "the most on one is 2" in refused(
        exclusive(devices=3, same_node=True), one, two, device(5, node="n1")
    )
    assert refused(exclusive(devices=2, same_node=True), one, two) == ""
    assert "no device of model H100" in refused(exclusive(model="H100"), one)
    assert "known are A100 (GPU)" in refused(exclusive(model="A10"), one)
    assert "no MIG slice" in refused(shared(device_kind=DeviceKind.SLICE), one)
    assert "2 GPUs of model A100: the pool has 1" in refused(
        exclusive(devices=2, device_kind=DeviceKind.GPU, model="A100"), one, slice_
    )
    assert "of one kind, and 1 GPU and 1 MIG slice serve it" in refused(exclusive(devices=2), one, slice_)
    assert "-0.5 cores" in refused(shared(cpu_milli=-500), one)


@given(snapshots())
@effort(max_examples=50, deadline=None)
def test_what_is_not_refused_starts_on_a_pool_that_has_nothing_else_to_do(world: Snapshot) -> None:
    well = tuple(replace(d, why="") for d in world.devices)
    for asked in world.waiting:
        known = {**world.tenants, "c": Tenant(name="c")}
        alone = snapshot(well, waiting=[request("r", asked.need)], tenants=known, nodes=world.nodes)
        refused = refusal(asked.need, well, known, world.nodes)
        assert bool(make_plan(alone).grants) == (refused == ""), refused
