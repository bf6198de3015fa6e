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
from pipeline.gpu.values import Device, Need, Snapshot, Tenant

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


@given(snapshots())
@effort(max_examples=50, deadline=None)
def test_what_is_not_refused_starts_on_a_pool_that_has_nothing_else_to_do(world: Snapshot) -> None:
    well = tuple(replace(d, why="") for d in world.devices)
    for asked in world.waiting:
        known = {**world.tenants, "c": Tenant(name="c")}
        alone = snapshot(well, waiting=[request("r", asked.need)], tenants=known)
        refused = refusal(asked.need, well, known)
        assert bool(make_plan(alone).grants) == (refused == ""), refused
