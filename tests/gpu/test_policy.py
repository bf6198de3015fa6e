"""The rules of the pool: order, fit, whole gangs, the one reservation, its door, and who is asked to
yield."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gpu_worlds import (
    GIB,
    NOW_MS,
    after,
    device,
    devices,
    exclusive,
    form,
    lease,
    machines_of,
    named,
    needs,
    obeys,
    orphan,
    request,
    shared,
    snapshot,
    snapshots,
)
from hypothesis import assume, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pipeline.gpu.policy.policy import make_plan, open_to_shared, served
from pipeline.gpu.policy.pool_index import PoolIndex
from pipeline.gpu.values import (
    FULL_PERCENT,
    Backfill,
    Device,
    LeaseMode,
    Need,
    PoolLease,
    PoolPlan,
    PoolRequest,
    Reservation,
    Snapshot,
    Tenant,
    Usage,
)

ONE, TWO, THREE, FOUR = devices(4)
RULES = st.sampled_from(list(Backfill))


def granted(made: PoolPlan) -> list[str]:
    return [grant.request_id for grant in made.grants]


def places(made: PoolPlan) -> dict[str, list[str]]:
    return {grant.request_id: [part.uuid for part in grant.parts] for grant in made.grants}


def reserved(made: PoolPlan) -> tuple[str, set[str]] | None:
    return None if made.reservation is None else (made.reservation.request_id, set(made.reservation.uuids))


def asked(made: PoolPlan) -> set[str]:
    return {one.lease_id for one in made.yields}


def inference(
    lease_id: str = "infer", *, age_s: float = 60.0, mib: int = 2 * GIB, **values: object
) -> PoolLease:
    """As our scoring workers hold it."""
    return lease(lease_id, shared(mib, compute_percent=10, preemptible=True), [ONE], age_s=age_s, **values)  # type: ignore[arg-type]


# ---- what always holds


@given(snapshots(), st.data())
def test_an_index_that_followed_the_pool_plans_as_a_new_one(world: Snapshot, data: st.DataObject) -> None:
    """Leases end, are renewed and asked for, devices break, other needs come; plans are done or not."""
    index = PoolIndex()
    for step in range(data.draw(st.integers(1, 4))):
        plan = make_plan(world, index=index)
        assert plan == make_plan(world)
        obeys(world, plan)
        if data.draw(st.booleans()):
            world = after(world, plan, obey=data.draw(st.booleans()))
        change = data.draw(st.sampled_from(["end", "renew", "ask", "break", "demand", "orphans", "nodes"]))
        some = data.draw(st.integers(0, 5))
        if change == "end":
            world = replace(world, leases=world.leases[some:])
        elif change == "renew":
            world = replace(world, leases=tuple(replace(x, deadline_ms=step) for x in world.leases))
        elif change == "ask":
            asked = tuple(replace(x, yield_by_ms=NOW_MS) for x in world.leases[:some])
            world = replace(world, leases=(*asked, *world.leases[some:]))
        elif change == "break":
            devices = tuple(
                replace(d, why="broken" if n == some else "") for n, d in enumerate(world.devices)
            )
            world = replace(world, devices=devices)
        elif change == "demand":
            world = replace(world, demand={form(r.need): 1 + some for r in world.waiting[:2]})
        elif change == "orphans":
            world = replace(world, orphans=())
        else:
            world = replace(world, nodes=data.draw(machines_of(world.devices)))
        world = replace(world, now_ms=world.now_ms + 1000 * some)


@given(snapshots(), RULES)
@effort(max_examples=60, deadline=None)
def test_every_plan_keeps_to_capacity_whole_gangs_closed_doors_and_quotas(
    world: Snapshot, rule: Backfill
) -> None:
    made = make_plan(world, backfill=rule)
    obeys(world, made)
    later = after(world, made, obey=False)
    obeys(later, make_plan(later, backfill=rule))


@given(snapshots(), RULES, st.randoms(use_true_random=False))
@effort(max_examples=60, deadline=None)
def test_the_order_in_which_a_snapshot_lists_its_parts_changes_nothing(
    world: Snapshot, rule: Backfill, chance: random.Random
) -> None:
    def mixed(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(chance.sample(items, len(items)))

    other = replace(
        world,
        devices=mixed(world.devices),
        leases=mixed(world.leases),
        waiting=mixed(world.waiting),
        orphans=mixed(world.orphans),
        tenants=dict(mixed(list(world.tenants.items()))),
    )
    assert (
        make_plan(other, backfill=rule) == make_plan(world, backfill=rule) == make_plan(world, backfill=rule)
    )


@given(snapshots(), RULES)
@effort(max_examples=60, deadline=None)
def test_a_plan_that_was_done_has_no_second_reservation_in_it(world: Snapshot, rule: Backfill) -> None:
    """Planning again with nothing changed settles: no grants, the same reservation, so that nothing is
    written."""
    for _ in range(3):
        made = make_plan(world, backfill=rule)
        world = after(world, made, obey=False)
    again = make_plan(world, backfill=rule)
    assert (again.grants, again.yields, again.reservation) == ((), (), world.reservation)


def test_in_a_quarantine_nothing_is_granted_and_the_reservation_stays() -> None:
    kept = Reservation(request_id="r", uuids=(ONE.uuid,))
    world = snapshot([ONE], waiting=[request("r", shared())], quarantine_ms=500, reservation=kept)
    assert make_plan(world) == PoolPlan(reservation=kept)
    assert not open_to_shared(world, shared())


def test_an_empty_pool_plans_nothing() -> None:
    assert make_plan(snapshot((), waiting=[request("r", shared()), request("x", exclusive())])) == PoolPlan()


# ---- fit


def test_an_exact_fit_is_accepted_to_the_last_mib_and_percent() -> None:
    made = make_plan(snapshot([ONE], waiting=[request("r", shared(8 * GIB, compute_percent=100))]))
    assert granted(made) == ["r"]
    assert granted(make_plan(snapshot([ONE], waiting=[request("r", shared(8 * GIB + 1))]))) == []


def test_the_fullest_device_that_still_fits_is_taken_and_whole_ones_survive() -> None:
    held = [lease("a", shared(2 * GIB), [TWO]), lease("b", shared(5 * GIB), [THREE])]
    world = snapshot([ONE, TWO, THREE], leases=held, waiting=[request("r", shared(3 * GIB))])
    assert places(make_plan(world)) == {"r": [THREE.uuid]}
    world = snapshot([ONE, TWO, THREE], leases=held, waiting=[request("r", shared(4 * GIB))])
    assert places(make_plan(world)) == {"r": [TWO.uuid]}


def test_compute_bounds_a_device_and_no_claim_on_it_needs_none() -> None:
    held = [lease("a", shared(GIB, compute_percent=80), [ONE])]
    waiting = [request("big", shared(compute_percent=21)), request("free", shared(compute_percent=0))]
    assert granted(make_plan(snapshot([ONE], leases=held, waiting=waiting), backfill=Backfill.FREE)) == [
        "free"
    ]


def test_an_exclusive_need_takes_the_smallest_empty_device_whole() -> None:
    large = device(9, 16 * GIB)
    world = snapshot([large, ONE], waiting=[request("r", exclusive(4 * GIB))])
    (grant,) = make_plan(world).grants
    (part,) = grant.parts
    assert (part.uuid, part.memory_mib, part.compute_percent) == (ONE.uuid, 8 * GIB, FULL_PERCENT)


def test_what_a_dead_holder_left_counts_as_taken_and_keeps_exclusive_needs_out() -> None:
    world = snapshot([ONE], orphans=(orphan(ONE, 6 * GIB),))
    assert granted(make_plan(replace(world, waiting=(request("r", shared(2 * GIB)),)))) == ["r"]
    assert granted(make_plan(replace(world, waiting=(request("r", shared(3 * GIB)),)))) == []
    assert granted(make_plan(replace(world, waiting=(request("r", exclusive()),)))) == []
    alone = snapshot([ONE], orphans=(orphan(ONE, 0, alone=True),), waiting=[request("r", shared(1))])
    assert granted(make_plan(alone)) == []


def test_a_device_that_is_out_of_order_gets_nothing_and_no_reservation() -> None:
    made = make_plan(
        snapshot([device(0, why="XID 79")], waiting=[request("r", shared()), request("x", exclusive())])
    )
    assert made == PoolPlan()


def test_a_device_that_shrank_below_its_leases_is_full_and_not_endless() -> None:
    small = replace(ONE, schedulable_mib=GIB)
    world = snapshot([small], leases=[lease("a", shared(4 * GIB), [ONE])], waiting=[request("r", shared(1))])
    assert granted(make_plan(world)) == []


def test_a_need_goes_where_it_says() -> None:
    far = device(0, node="n1")
    waiting = [request("node", shared(node="n1")), request("device", shared(device=TWO.uuid))]
    assert places(make_plan(snapshot([ONE, TWO, far], waiting=waiting))) == {
        "node": [far.uuid],
        "device": [TWO.uuid],
    }


def test_a_gang_gets_all_of_its_devices_over_nodes_or_none() -> None:
    far = device(0, node="n1")
    world = snapshot([ONE, far], waiting=[request("gang", shared(8 * GIB, devices=2))])
    assert places(make_plan(world)) == {"gang": [ONE.uuid, far.uuid]}
    assert granted(make_plan(replace(world, leases=(lease("a", shared(1), [far]),)))) == []
    near = replace(world, waiting=(request("gang", shared(GIB, devices=2, node="n0")),))
    assert make_plan(near) == PoolPlan()


# ---- order and quota


def test_higher_priority_goes_first_then_age() -> None:
    waiting = [
        request("old", shared(8 * GIB), since_ms=1),
        request("new", shared(8 * GIB), since_ms=2),
        request("high", shared(8 * GIB, priority=1), since_ms=3),
    ]
    assert granted(make_plan(snapshot([ONE], waiting=waiting))) == ["high"]
    assert granted(make_plan(snapshot([ONE, TWO], waiting=waiting))) == ["high", "old"]


def test_of_one_moment_the_smaller_id_goes_first() -> None:
    waiting = [request(name, shared(8 * GIB)) for name in ("b", "a", "c")]
    assert granted(make_plan(snapshot([ONE, TWO], waiting=waiting))) == ["a", "b"]


def test_whoever_is_at_its_quota_waits_while_others_overtake_and_nothing_is_reserved_for_it() -> None:
    known = {"a": Tenant(name="a", quota_mib=4 * GIB), "b": Tenant(name="b")}
    waiting = [
        request("a1", shared(3 * GIB, tenant="a"), since_ms=1),
        request("a2", shared(3 * GIB, tenant="a"), since_ms=2),
        request("a3", shared(1 * GIB, tenant="a"), since_ms=3),
        request("b1", shared(4 * GIB, tenant="b"), since_ms=4),
    ]
    made = make_plan(snapshot([ONE], waiting=waiting, tenants=known), backfill=Backfill.STRICT)
    assert sorted(granted(made)) == ["a1", "a3", "b1"]
    assert made.reservation is None


def test_an_exclusive_need_is_charged_to_the_quota_with_all_of_its_device() -> None:
    known = {"a": Tenant(name="a", quota_mib=8 * GIB)}
    large = device(9, 16 * GIB)
    waiting = [request("x", exclusive(GIB, tenant="a"))]
    assert make_plan(snapshot([large], waiting=waiting, tenants=known)) == PoolPlan()
    held = [lease("l", shared(GIB, max_duration_s=600), [ONE])]
    made = make_plan(snapshot([large, ONE], leases=held, waiting=waiting, tenants=known))
    assert (granted(made), reserved(made)) == ([], ("x", {ONE.uuid}))


# Tenant a may hold 8 GiB.
BOUND = {"a": Tenant(name="a", quota_mib=8 * GIB), "b": Tenant(name="b")}


def sized(node: str, *sizes_gib: int) -> list[Device]:
    return [device(index, size * GIB, node=node) for index, size in enumerate(sizes_gib)]


@pytest.mark.parametrize("recent", [{}, {shared(4 * GIB, tenant="logweir"): 9}])
@pytest.mark.parametrize(
    ("on", "values", "chosen_gib"),
    [
        (
            [
                replace(device(9, 4 * GIB), name="A30"),
                *sized("n0", 8),
                replace(device(9, 16 * GIB, node="n1"), name="A30"),
            ],
            {"memory_mib": 3 * GIB, "model": "H100|A30"},
            [4],
        ),
        ([*sized("n0", 16, 8), *sized("n1", 16)], {"memory_mib": 5 * GIB, "cpu_milli": 1000}, [8]),
        ([*sized("n0", 6, 6), *sized("n1", 2)], {"devices": 2}, [2, 6]),
        ([*sized("n0", 6, 6), *sized("n1", 2)], {"devices": 2, "cpu_milli": 1000}, [2, 6]),
        ([*sized("n0", 2, 3, 3), *sized("n1", 4)], {"devices": 3, "cpu_milli": 1000}, [2, 3, 3]),
        ([*sized("n0", 6, 6, 16), *sized("n1", 6, 2)], {"devices": 2, "same_node": True}, [2, 6]),
        (
            [*sized("n0", 6, 6), *sized("n1", 4, 4)],
            {"devices": 2, "same_node": True, "node": "n0|n1"},
            [4, 4],
        ),
    ],
)
def test_an_exclusive_need_gets_devices_that_its_quota_allows_where_the_usual_choice_exceeds_it(
    on: list[Device], values: dict[str, Any], chosen_gib: list[int], recent: dict[Need, int]
) -> None:
    need = exclusive(values.pop("memory_mib", 0), tenant="a", **values)
    made = make_plan(snapshot(on, waiting=[request("x", need)], tenants=BOUND, demand=recent))
    assert granted(made) == ["x"]
    assert sorted(part.memory_mib // GIB for part in made.grants[0].parts) == chosen_gib


def test_a_short_exclusive_gang_is_backfilled_on_a_small_reserved_device_that_its_quota_allows() -> None:
    small, busy_one, *others = *sized("n0", 2, 8), *sized("n1", 6, 6)
    held = [lease("l", exclusive(max_duration_s=160), [busy_one])]
    waiting = [
        request("head", exclusive(devices=2, tenant="b", node="n0", priority=5)),
        request("x", exclusive(devices=2, tenant="a", max_duration_s=5)),
    ]
    made = make_plan(snapshot([small, busy_one, *others], leases=held, waiting=waiting, tenants=BOUND))
    assert reserved(made) == ("head", {small.uuid, busy_one.uuid})
    assert set(places(made)["x"]) == {small.uuid, others[0].uuid}


def test_the_reservation_names_the_first_devices_to_end_of_those_that_the_quota_allows() -> None:
    large, never, later = sized("n0", 16, 8, 8)
    held = [
        lease("l0", exclusive(max_duration_s=70), [large]),
        lease("l1", exclusive(), [never]),
        lease("l2", exclusive(max_duration_s=160), [later]),
    ]
    waiting = [request("x", exclusive(tenant="a"))]
    world = snapshot([large, never, later], leases=held, waiting=waiting, tenants=BOUND)
    assert reserved(make_plan(world)) == ("x", {later.uuid})
    # A reservation from before the quota was lowered moves.
    before = Reservation(request_id="x", uuids=(large.uuid,), start_ms=NOW_MS + 10_000, made_ms=NOW_MS)
    assert reserved(make_plan(replace(world, reservation=before))) == ("x", {later.uuid})


def test_a_gang_for_one_node_waits_for_a_node_that_its_quota_allows_and_preempts_there_alone() -> None:
    on = [*sized("n0", 8, 8), *sized("n1", 2, 6)]
    held = [lease(f"l{n}", exclusive(preemptible=True), [one]) for n, one in enumerate(on)]
    waiting = [request("x", exclusive(devices=2, same_node=True, tenant="a", priority=5))]
    made = make_plan(snapshot(on, leases=held, waiting=waiting, tenants=BOUND | named("logweir")))
    assert reserved(made) == ("x", {on[2].uuid, on[3].uuid})
    assert sorted(asked.lease_id for asked in made.yields) == ["l2", "l3"]


# ---- the reservation and what overtakes it


def busy(end_s: float | None) -> list[PoolLease]:
    """One device held by somebody who says when it ends."""
    need = shared(8 * GIB, compute_percent=FULL_PERCENT, max_duration_s=None if end_s is None else 60 + end_s)
    return [lease("busy", need, [ONE], age_s=60)]


def gang(**values: object) -> PoolRequest:
    return request("gang", shared(8 * GIB, devices=2, **values), since_ms=1)  # type: ignore[arg-type]


def test_the_first_need_that_does_not_fit_gets_the_one_reservation() -> None:
    waiting = [gang(), request("gang2", shared(8 * GIB, devices=2), since_ms=2)]
    made = make_plan(snapshot([ONE, TWO], leases=busy(100), waiting=waiting))
    assert made.reservation == Reservation(
        request_id="gang", uuids=(ONE.uuid, TWO.uuid), start_ms=NOW_MS + 100_000, made_ms=NOW_MS
    )


@pytest.mark.parametrize(
    ("lasts", "rule", "starts"),
    [
        (100.0, Backfill.EASY, True),
        (100.001, Backfill.EASY, False),
        (None, Backfill.EASY, False),
        (1.0, Backfill.STRICT, False),
        (None, Backfill.FREE, True),
    ],
)
def test_a_later_need_starts_only_where_it_ends_before_the_reserved_one_can(
    lasts: float | None, rule: Backfill, starts: bool
) -> None:
    small = request("small", shared(GIB, max_duration_s=lasts), since_ms=2)
    made = make_plan(snapshot([ONE, TWO], leases=busy(100), waiting=[gang(), small]), backfill=rule)
    assert granted(made) == (["small"] if starts else [])


def test_where_nobody_knows_when_the_reserved_need_starts_nothing_ends_before_it() -> None:
    small = request("small", shared(GIB, max_duration_s=0.1), since_ms=2)
    assert granted(make_plan(snapshot([ONE, TWO], leases=busy(None), waiting=[gang(), small]))) == []


def test_what_the_reserved_need_leaves_over_may_be_had_by_others_once() -> None:
    head = request("head", shared(5 * GIB, devices=2), since_ms=1)
    small = [request(f"s{n}", shared(2 * GIB), since_ms=2 + n) for n in range(3)]
    made = make_plan(snapshot([ONE, TWO], leases=busy(100), waiting=[head, *small]))
    assert places(made) == {"s0": [TWO.uuid]}  # 8 - 5 GiB are spare there, and 2 of them are gone then


def test_devices_outside_the_reservation_are_free_to_all() -> None:
    waiting = [
        request("gang", shared(8 * GIB, devices=2, node="n0"), since_ms=1),
        request("s", shared(8 * GIB)),
    ]
    far = device(0, node="n1")
    made = make_plan(snapshot([ONE, TWO, far], leases=busy(100), waiting=waiting))
    assert (places(made), reserved(made)) == ({"s": [far.uuid]}, ("gang", {ONE.uuid, TWO.uuid}))


def test_the_devices_that_become_free_first_are_reserved() -> None:
    held = [
        lease(f"l{n}", shared(8 * GIB, max_duration_s=600 - 100 * n), [d])
        for n, d in enumerate((ONE, TWO, THREE))
    ]
    made = make_plan(snapshot([ONE, TWO, THREE], leases=held, waiting=[gang()]))
    assert reserved(made) == ("gang", {TWO.uuid, THREE.uuid})


def test_a_reservation_stays_with_its_need_and_its_devices_while_they_can_serve_it() -> None:
    held = [lease(f"l{n}", shared(8 * GIB, max_duration_s=600), [d]) for n, d in enumerate((ONE, TWO, THREE))]
    kept = Reservation(request_id="gang", uuids=(TWO.uuid, THREE.uuid), start_ms=NOW_MS + 540_000, made_ms=7)
    older = request("older", shared(8 * GIB, devices=2, tenant="b"), since_ms=0)
    world = snapshot([ONE, TWO, THREE], leases=held, waiting=[older, gang()], reservation=kept)
    assert make_plan(world) == PoolPlan(reservation=kept, line=("gang", "older"))


def test_a_reservation_moves_where_it_starts_sooner() -> None:
    held = [lease(f"l{n}", shared(8 * GIB, max_duration_s=600), [d]) for n, d in enumerate((TWO, THREE))]
    soon = [lease(f"s{n}", shared(8 * GIB, max_duration_s=100), [d]) for n, d in enumerate((ONE, FOUR))]
    kept = Reservation(request_id="gang", uuids=(TWO.uuid, THREE.uuid), start_ms=NOW_MS + 540_000, made_ms=7)
    made = make_plan(snapshot(devices(4), leases=held + soon, waiting=[gang()], reservation=kept))
    assert reserved(made) == ("gang", {ONE.uuid, FOUR.uuid})


@pytest.mark.parametrize("gone", ["device", "request", "quota"])
def test_a_reservation_that_cannot_be_served_any_more_is_given_up(gone: str) -> None:
    kept = Reservation(request_id="gang", uuids=(ONE.uuid, TWO.uuid), made_ms=7)
    on = [ONE, replace(TWO, why="XID 79")] if gone == "device" else [ONE, TWO]
    known = {"logweir": Tenant(name="logweir", quota_mib=8 * GIB)} if gone == "quota" else {}
    waiting = [] if gone == "request" else [gang()]
    world = snapshot(on, leases=busy(100), waiting=waiting, reservation=kept, tenants=known)
    assert make_plan(world).reservation is None


def test_a_higher_priority_takes_the_reservation_over() -> None:
    kept = Reservation(request_id="gang", uuids=(ONE.uuid, TWO.uuid), made_ms=7)
    high = request("high", shared(8 * GIB, devices=2, priority=1), since_ms=9)
    made = make_plan(snapshot([ONE, TWO], leases=busy(100), waiting=[gang(), high], reservation=kept))
    assert reserved(made) == ("high", {ONE.uuid, TWO.uuid})


def test_the_reserved_need_starts_as_soon_as_it_fits_wherever_that_is() -> None:
    kept = Reservation(request_id="gang", uuids=(ONE.uuid, TWO.uuid), made_ms=7)
    others = [request(f"o{n}", shared(8 * GIB, tenant="b"), since_ms=0) for n in range(4)]
    world = snapshot(devices(3), leases=busy(100), waiting=[*others, gang()], reservation=kept)
    made = make_plan(world)
    assert places(made) == {"gang": [TWO.uuid, THREE.uuid]}


def test_a_lease_that_overran_is_expected_for_a_while_and_then_has_no_end() -> None:
    just_over = [lease("busy", shared(8 * GIB, max_duration_s=59), [ONE], age_s=60)]
    long_over = [lease("busy", shared(8 * GIB, max_duration_s=40), [ONE], age_s=60)]
    later = [lease("later", shared(8 * GIB, max_duration_s=600), [TWO])]
    head = [request("head", shared(8 * GIB))]
    assert reserved(make_plan(snapshot([ONE, TWO], leases=just_over + later, waiting=head))) == (
        "head",
        {ONE.uuid},
    )
    assert reserved(make_plan(snapshot([ONE, TWO], leases=long_over + later, waiting=head))) == (
        "head",
        {TWO.uuid},
    )


def test_who_waits_for_a_device_is_compared_with_its_holder_as_if_that_had_given_it_back() -> None:
    held = [lease("a1", exclusive(tenant="a"), [ONE])]
    waiting = [
        request("a2", exclusive(tenant="a"), since_ms=1),
        request("b", exclusive(tenant="b"), since_ms=2),
    ]
    used = {"b": Usage(value=100.0, at_ms=NOW_MS)}
    assert reserved(make_plan(snapshot([ONE], leases=held, waiting=waiting))) == ("b", {ONE.uuid})
    assert reserved(make_plan(snapshot([ONE], leases=held, waiting=waiting, usage=used))) == (
        "a2",
        {ONE.uuid},
    )


# ---- the door of training


def training(**values: object) -> PoolRequest:
    return request("train", exclusive(4 * GIB, **values))  # type: ignore[arg-type]


def test_training_closes_the_door_and_inference_is_asked_to_yield_even_when_granted_just_before() -> None:
    held = [inference("i1", age_s=0.1), inference("i2", age_s=300)]
    world = snapshot([ONE], leases=held, waiting=[training()])
    made = make_plan(world, yield_ms=2500)
    assert granted(made) == []
    assert asked(made) == {"i1", "i2"}
    assert {one.by_ms for one in made.yields} == {NOW_MS + 2500}
    assert all("logweir waits for the whole of" in one.why for one in made.yields)
    assert reserved(made) == ("train", {ONE.uuid})
    again = request("again", held[0].need, since_ms=NOW_MS + 1)
    closed = after(replace(world, waiting=(*world.waiting, again)), made, obey=False)
    assert make_plan(closed) == PoolPlan(reservation=made.reservation, line=("train", "again"))
    assert not open_to_shared(closed, held[0].need)


def test_training_starts_when_they_are_gone_and_inference_returns_after_it() -> None:
    world = snapshot([ONE], leases=[inference()], waiting=[training()])
    world = after(world, make_plan(world))
    made = make_plan(world)
    assert granted(made) == ["train"]
    world = after(world, made, later_ms=20_000)
    made = make_plan(world)
    assert (granted(made), asked(made)) == ([], set())  # inference waits and displaces nobody
    world = replace(after(world, made), leases=())
    assert granted(make_plan(world)) == ["infer'"]


def test_inference_that_waited_before_training_does_not_hold_the_reservation_against_it() -> None:
    full = [inference(f"i{n}", mib=2 * GIB) for n in range(4)]
    older = request("older", full[0].need, since_ms=NOW_MS - 5000)
    world = snapshot([ONE], leases=full, waiting=[older])
    first = make_plan(world)
    assert reserved(first) == ("older", {ONE.uuid})
    made = make_plan(replace(after(world, first), waiting=(older, training())))
    assert reserved(made) == ("train", {ONE.uuid})
    assert asked(made) == {"i0", "i1", "i2", "i3"}


def test_training_that_starts_now_keeps_no_door_for_itself() -> None:
    far = lease("far", shared(8 * GIB, preemptible=True), [TWO])
    waiting = [training(), request("big", shared(8 * GIB), since_ms=NOW_MS + 1)]
    made = make_plan(snapshot([ONE, TWO], leases=[far], waiting=waiting))
    assert granted(made) == ["train"]
    assert made.reservation is not None
    assert made.reservation.request_id == "big"


@pytest.mark.parametrize(
    "need", [shared(-1), shared(compute_percent=-1), shared(devices=0), shared(devices=-1)]
)
def test_a_need_of_impossible_size_gets_nothing_even_if_nobody_refused_it(need: Need) -> None:
    assert granted(make_plan(snapshot([ONE], waiting=[request("r", need)]))) == []


def test_of_two_devices_the_one_with_fewer_holders_is_emptied() -> None:
    held = [
        inference("i1"),
        inference("i2"),
        replace(inference("i3"), parts=(replace(inference().parts[0], uuid=TWO.uuid),)),
    ]
    made = make_plan(snapshot([ONE, TWO], leases=held, waiting=[training()]))
    assert (asked(made), reserved(made)) == ({"i3"}, ("train", {TWO.uuid}))


def test_nobody_is_asked_in_vain_where_another_holder_stays() -> None:
    stays = lease("stays", shared(GIB), [ONE])
    made = make_plan(snapshot([ONE], leases=[inference(), stays], waiting=[training()]))
    assert (asked(made), reserved(made)) == (set(), ("train", {ONE.uuid}))


def test_leases_that_were_asked_already_count_as_going_and_nobody_else_is_asked() -> None:
    held = [
        inference("i1", yield_by_ms=NOW_MS + 5000),
        replace(inference("i2"), parts=(replace(inference().parts[0], uuid=TWO.uuid),)),
    ]
    made = make_plan(snapshot([ONE, TWO], leases=held, waiting=[training()]))
    assert (asked(made), reserved(made)) == (set(), ("train", {ONE.uuid}))


def test_a_lease_that_does_not_say_preemptible_is_never_asked() -> None:
    stays = lease("stays", shared(GIB, priority=-5), [ONE])
    made = make_plan(snapshot([ONE], leases=[stays], waiting=[training(priority=9)]))
    assert asked(made) == set()


def test_even_where_all_may_overtake_an_exclusive_need_closes_its_door() -> None:
    world = snapshot(
        [ONE], leases=[inference()], waiting=[training(), request("s", shared(), since_ms=NOW_MS + 1)]
    )
    made = make_plan(world, backfill=Backfill.FREE)
    assert (granted(made), reserved(made), asked(made)) == ([], ("train", {ONE.uuid}), {"infer"})


def test_a_shared_need_does_not_displace_an_exclusive_lease_of_its_priority() -> None:
    held = [lease("train", exclusive(preemptible=True, tenant="a"), [ONE])]
    for tenant in ("a", "b"):
        assert (
            asked(make_plan(snapshot([ONE], leases=held, waiting=[request("r", shared(tenant=tenant))])))
            == set()
        )


# ---- preemption between tenants


def theirs(
    lease_id: str, mib: int = 4 * GIB, tenant: str = "a", *, age_s: float = 60, priority: int = 0
) -> PoolLease:
    return lease(
        lease_id, shared(mib, tenant=tenant, preemptible=True, priority=priority), [ONE], age_s=age_s
    )


def test_whoever_has_less_displaces_who_has_more_but_only_as_much_as_it_needs() -> None:
    held = [theirs("a1", 2 * GIB, age_s=90), theirs("a2", 4 * GIB, age_s=60), theirs("a3", 2 * GIB, age_s=30)]
    made = make_plan(snapshot([ONE], leases=held, waiting=[request("b", shared(2 * GIB, tenant="b"))]))
    assert asked(made) == {"a3"}  # the newest


def test_the_winner_must_stay_below_what_the_victim_would_have_with_that_lease_back() -> None:
    held = [theirs("a1"), theirs("b1", tenant="b")]
    assert (
        asked(make_plan(snapshot([ONE], leases=held, waiting=[request("b2", shared(tenant="b"))]))) == set()
    )
    assert (
        asked(make_plan(snapshot([ONE], leases=held, waiting=[request("c", shared(4 * GIB, tenant="c"))])))
        == set()
    )
    assert asked(
        make_plan(snapshot([ONE], leases=held, waiting=[request("c", shared(3 * GIB, tenant="c"))]))
    ) == {"a1"}


def test_a_lease_is_left_alone_by_other_tenants_for_its_first_seconds() -> None:
    waiting = [request("b", shared(2 * GIB, tenant="b"))]
    assert (
        asked(make_plan(snapshot([ONE], leases=[theirs("a", 8 * GIB, age_s=9.9)], waiting=waiting))) == set()
    )
    assert asked(make_plan(snapshot([ONE], leases=[theirs("a", 8 * GIB, age_s=10)], waiting=waiting))) == {
        "a"
    }


def test_within_a_tenant_only_a_lower_priority_is_displaced() -> None:
    held = [theirs("low", priority=-1), theirs("same")]
    waiting = [request("r", shared(4 * GIB, tenant="a"))]
    assert asked(make_plan(snapshot([ONE], leases=held, waiting=waiting))) == {"low"}


def test_a_higher_priority_is_never_displaced_whatever_its_share() -> None:
    made = make_plan(
        snapshot([ONE], leases=[theirs("a", 8 * GIB, priority=1)], waiting=[request("b", shared(tenant="b"))])
    )
    assert asked(made) == set()


def test_the_lowest_priority_goes_first_then_who_has_most_then_the_newest() -> None:
    held = [
        theirs("a1", 2 * GIB),
        theirs("a2", 2 * GIB),
        theirs("c1", 2 * GIB, "c", age_s=11),
        theirs("c2", 2 * GIB, "c", priority=-1),
    ]
    for size, victims in ((1, {"c2"}), (2, {"c2"})):
        waiting = [request("b", shared(size * GIB, tenant="b"))]
        assert asked(make_plan(snapshot([ONE], leases=held, waiting=waiting))) == victims
    held[3] = theirs("a3", 2 * GIB, age_s=12)
    assert asked(make_plan(snapshot([ONE], leases=held, waiting=[request("b", shared(tenant="b"))]))) == {
        "a3"
    }


def test_a_gang_is_displaced_whole() -> None:
    both = lease("gang", shared(8 * GIB, tenant="a", devices=2, preemptible=True), [ONE, TWO])
    world = snapshot([ONE, TWO], leases=[both], waiting=[request("b", shared(tenant="b"))])
    world = after(world, make_plan(world))
    assert world.leases == ()
    assert granted(make_plan(world)) == ["b"]


@given(st.integers(0, 10**6))
@effort(max_examples=80, deadline=None)
def test_no_victim_could_have_stayed(seed: int) -> None:
    world = _crowd(random.Random(seed))
    made = make_plan(world)
    assume(made.reservation is not None and made.yields)
    assert made.reservation is not None
    head = next(r for r in world.waiting if r.request_id == made.reservation.request_id)
    world = after(world, replace(made, yields=()))
    gone = {one.lease_id for one in made.yields}
    alone = replace(world, waiting=(head,), reservation=made.reservation)

    def starts(without: set[str]) -> bool:
        left_over = tuple(one for one in alone.leases if one.lease_id not in without)
        there = tuple(d for d in alone.devices if made.reservation and d.uuid in made.reservation.uuids)
        return bool(make_plan(replace(alone, leases=left_over, devices=there)).grants)

    assert starts(gone)
    assert not any(starts(gone - {one}) for one in gone)


@given(st.integers(0, 10**6))
@effort(max_examples=60, deadline=None)
def test_displacing_comes_to_rest_and_never_goes_in_turns(seed: int) -> None:
    chance = random.Random(seed)
    world = _crowd(chance)
    more = tuple(request(f"m{n}", _need(chance, len(world.devices))) for n in range(4))
    for arrivals in ((), more):
        world = replace(world, waiting=world.waiting + arrivals)
        for _ in range(40):
            made = make_plan(world)
            obeys(world, made)
            if not made.grants and not made.yields and made.reservation == world.reservation:
                break
            world = after(world, made, later_ms=11_000)
        else:
            pytest.fail("it never rests")


SIZES_MIB = (1024, 2048, 3000, 4096, 5000, 8192)


def _need(
    chance: random.Random, gpus: int, *, tenants: str = "abc", sizes: Sequence[int] = SIZES_MIB
) -> Need:
    return Need(
        tenant=chance.choice(tenants),
        mode=chance.choice((LeaseMode.SHARED, LeaseMode.SHARED, LeaseMode.EXCLUSIVE)),
        memory_mib=chance.choice(sizes),
        compute_percent=chance.choice((0, 10, 30, 60)),
        devices=chance.choice((1, 1, 1, min(2, gpus))),
        priority=chance.choice((0, 0, 0, 1)),
        preemptible=chance.random() < 0.95,
    )


def _crowd(chance: random.Random) -> Snapshot:
    """A pool that filled up with small leases by plans, a minute ago, and some who come now and want more
    each."""
    on = devices(chance.randint(1, 4))
    known = {name: Tenant(name=name, weight=chance.choice((0.5, 1.0, 2.0))) for name in "abc"}
    first = [
        request(
            f"f{n}",
            replace(
                _need(chance, len(on), tenants="aaab", sizes=SIZES_MIB[:3]),
                mode=LeaseMode.SHARED,
                compute_percent=chance.choice((0, 5, 10)),
            ),
            since_ms=NOW_MS - 99 + n,
        )
        for n in range(chance.randint(4 * len(on), 8 * len(on)))
    ]
    world = snapshot(on, waiting=first, tenants=known)
    world = after(world, make_plan(world), later_ms=60_000)
    late = tuple(
        request(f"n{n}", _need(chance, len(on), tenants="abcc", sizes=SIZES_MIB[1:]), since_ms=NOW_MS + n)
        for n in range(3)
    )
    return replace(world, waiting=late, reservation=None)


# ---- EASY over time


def lives(chance: random.Random, *, tenants: str, rule: Backfill) -> Iterator[tuple[Snapshot, PoolPlan]]:
    """A pool of which all say rightly when they end, planned at every arrival and end, until all is done."""
    on = devices(chance.randint(2, 4))
    arrivals = sorted(
        (chance.randrange(0, 300_000, 500), n, replace(needed, tenant=chance.choice(tenants)))
        for n, needed in enumerate(_timed(chance, len(on)) for _ in range(chance.randint(5, 25)))
    )
    world = snapshot(on, now_ms=0, usage={"a": Usage(value=5.0)}, half_life_s=600.0)
    while arrivals or world.leases or world.waiting:
        ends = [_end_ms(one) for one in world.leases] + [when for when, _, _ in arrivals[:1]]
        assert ends, "needs wait in a pool where nothing runs"
        now_ms = min(ends)
        come = [request(f"r{n}", need, since_ms=when) for when, n, need in arrivals if when == now_ms]
        arrivals = arrivals[len(come) :]
        stay = tuple(one for one in world.leases if _end_ms(one) > now_ms)
        world = replace(world, now_ms=now_ms, leases=stay, waiting=(*world.waiting, *come))
        made = make_plan(world, backfill=rule)
        yield world, made
        world = after(world, made)


def _end_ms(one: PoolLease) -> int:
    return one.granted_ms + int((one.need.max_duration_s or 0) * 1000)


def _timed(chance: random.Random, gpus: int) -> Need:
    need = replace(_need(chance, gpus), priority=0, preemptible=False)
    return replace(need, max_duration_s=chance.randint(1, 120) / 2, devices=chance.choice((1, 1, 1, gpus)))


@given(st.integers(0, 10**6), st.sampled_from(["a", "abc"]))
@effort(max_examples=60, deadline=None)
def test_nothing_that_overtakes_delays_the_start_that_was_reserved(seed: int, tenants: str) -> None:
    promised: dict[str, int] = {}
    for world, made in lives(random.Random(seed), tenants=tenants, rule=Backfill.EASY):
        for grant in made.grants:
            assert world.now_ms <= promised.get(grant.request_id, world.now_ms)
        if (kept := made.reservation) is not None:
            assert kept.start_ms is not None
            assert kept.start_ms <= promised.get(kept.request_id, kept.start_ms)
            promised[kept.request_id] = kept.start_ms


@given(st.integers(0, 10**6), st.sampled_from([Backfill.EASY, Backfill.STRICT]))
@effort(max_examples=60, deadline=None)
def test_whoever_is_at_place_p_starts_within_p_plus_one_longest_leases(seed: int, rule: Backfill) -> None:
    longest_ms = 60_000
    bound: dict[str, int] = {}
    for world, made in lives(random.Random(seed), tenants="a", rule=rule):
        ordered = sorted(world.waiting, key=lambda r: (r.since_ms, r.request_id))
        for place, one in enumerate(ordered):
            bound.setdefault(one.request_id, world.now_ms + (place + 1) * longest_ms)
        assert all(world.now_ms <= bound[grant.request_id] for grant in made.grants)


# ---- routing's question


def test_open_to_shared_says_whether_the_need_would_be_granted_now() -> None:
    need = shared(2 * GIB, compute_percent=10)
    assert open_to_shared(snapshot([ONE]), need)
    assert not open_to_shared(snapshot(()), need)
    assert not open_to_shared(snapshot([replace(ONE, why="its node is silent")]), need)
    assert not open_to_shared(snapshot([ONE], leases=[lease("t", exclusive(), [ONE])]), need)
    assert not open_to_shared(snapshot([ONE], leases=[lease("t", shared(7 * GIB), [ONE])]), need)
    assert not open_to_shared(snapshot([ONE]), replace(need, node="n1"))
    assert not open_to_shared(snapshot([ONE]), replace(need, device="GPU-x"))
    assert not open_to_shared(snapshot([ONE]), exclusive())
    kept = Reservation(request_id="t", uuids=(ONE.uuid,))
    assert not open_to_shared(snapshot([ONE], reservation=kept), need)
    assert open_to_shared(snapshot([ONE, TWO], reservation=kept), need)
    assert open_to_shared(snapshot([ONE], orphans=(orphan(ONE, 4 * GIB),)), need)
    assert not open_to_shared(snapshot([ONE], orphans=(orphan(ONE, 1, alone=True),)), need)


@given(snapshots(), needs())
@effort(max_examples=60, deadline=None)
def test_open_to_shared_agrees_with_a_plan_for_that_need_alone(world: Snapshot, need: Need) -> None:
    need = replace(need, mode=LeaseMode.SHARED, tenant="c")
    world = replace(world, waiting=(request("r", need),), reservation=None)
    assert open_to_shared(world, need) == (granted(make_plan(world)) == ["r"])


def test_a_device_that_our_own_workers_fill_is_open_to_their_batches_until_they_are_asked_to_yield() -> None:
    need = shared(8 * GIB, node="n0")
    grown = lease("worker", need, [ONE])
    world = snapshot([ONE], leases=[grown])
    anywhere = shared(8 * GIB)
    assert not open_to_shared(world, anywhere)
    assert served(world, anywhere)
    assert not served(world, shared(4 * GIB)), "another need"
    assert not served(replace(world, leases=(replace(grown, yield_by_ms=NOW_MS + 1),)), anywhere)
    assert not served(replace(world, now_ms=grown.deadline_ms + 1), anywhere)
    assert not served(replace(world, devices=(replace(ONE, why="XID 79"),)), anywhere)
