"""Dominant shares, weights and the half-life: the algebra, a fluid reference, and what whole needs keep of
it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gpu_worlds import GIB, NOW_MS, devices, lease, named, request, shared, snapshot
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from bench.gpu_policy import broken, envy
from pipeline.errors import BadSetting
from pipeline.gpu.policy.fairness import ENTRY_S, accrued, decayed, parse_tenants, standings
from pipeline.gpu.policy.policy import make_plan
from pipeline.gpu.values import FULL_PERCENT, Backfill, Device, Need, Snapshot, Tenant, Usage

HOUR_S = 3600.0
moments = st.integers(0, 10**9)
amounts = st.floats(0, 1e6)
lives = st.floats(1, 1e7)


# ---- settings


def test_tenants_are_read_with_weights_and_quotas() -> None:
    assert parse_tenants(["research=2:40GiB", "web", "night=0", "tiny=0.5"]) == {
        "logweir": Tenant(name="logweir"),
        "research": Tenant(name="research", weight=2.0, quota_mib=40 * GIB),
        "web": Tenant(name="web"),
        "night": Tenant(name="night", weight=0.0),
        "tiny": Tenant(name="tiny", weight=0.5),
    }


def test_our_own_workers_keep_what_the_settings_say_of_them() -> None:
    assert parse_tenants(["logweir=3:8GiB"]) == {
        "logweir": Tenant(name="logweir", weight=3.0, quota_mib=8 * GIB)
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=2",
        "a b",
        "a=",
        "a=-1",
        "a=nan",
        "a=inf",
        "a=1e9",
        "a=x",
        "a=1:",
        "a=1:much",
        "a:4GiB",
        "-a",
        "ä",
        "a" * 64,
    ],
)
def test_a_tenant_that_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadSetting):
        parse_tenants([text])


def test_a_tenant_named_twice_is_refused() -> None:
    with pytest.raises(BadSetting, match="twice"):
        parse_tenants(["a", "a=2"])


# ---- the half-life


@given(amounts, moments, moments, lives)
def test_fading_twice_is_fading_once_over_both_times(
    value: float, a_ms: int, b_ms: int, half_life_s: float
) -> None:
    start = Usage(value=value, at_ms=0)
    twice = decayed(decayed(start, a_ms, half_life_s), a_ms + b_ms, half_life_s)
    once = decayed(start, a_ms + b_ms, half_life_s)
    assert twice.at_ms == once.at_ms
    assert math.isclose(twice.value, once.value, rel_tol=1e-9, abs_tol=1e-300)


@given(amounts, st.integers(1, 10**7))
def test_idling_for_one_half_life_halves_use_exactly(value: float, half_life_s: int) -> None:
    assert decayed(Usage(value=value, at_ms=5), 5 + half_life_s * 1000, half_life_s).value == value / 2


def test_an_idle_tenant_ends_at_nothing() -> None:
    assert decayed(Usage(value=1e9, at_ms=0), 10**12, HOUR_S).value == 0.0


@given(amounts, moments, moments, lives)
def test_a_clock_that_steps_back_neither_fades_nor_raises_use(
    value: float, at_ms: int, back_ms: int, half_life_s: float
) -> None:
    usage = Usage(value=value, at_ms=at_ms)
    assert decayed(usage, at_ms - back_ms, half_life_s) == usage
    assert accrued(value, -back_ms / 1000, half_life_s) == 0.0


@given(st.floats(0, 1), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(10, 1e6))
def test_use_over_two_stretches_is_use_over_both(
    share: float, a_s: float, b_s: float, half_life_s: float
) -> None:
    kept = 2.0 ** (-b_s / half_life_s)
    parts = accrued(share, a_s, half_life_s) * kept + accrued(share, b_s, half_life_s)
    assert math.isclose(parts, accrued(share, a_s + b_s, half_life_s), rel_tol=1e-9, abs_tol=1e-9)


def test_short_use_counts_about_its_own_length_and_endless_use_a_finite_amount() -> None:
    assert accrued(0.5, 10, 1e6) == pytest.approx(5.0, rel=1e-4)
    assert accrued(1.0, 1e12, HOUR_S) == pytest.approx(HOUR_S / math.log(2))


# ---- standing


def test_without_anything_everybody_stands_at_nothing_even_where_the_pool_is_empty() -> None:
    assert standings(snapshot(())) == {"logweir": 0.0, "a": 0.0, "b": 0.0, "c": 0.0}


def test_the_dominant_share_counts_and_the_weight_divides_it() -> None:
    (gpu,) = devices(1)
    needs = {"a": shared(4 * GIB, tenant="a"), "b": shared(GIB, tenant="b", compute_percent=25)}
    held = [lease(name, need, [gpu], age_s=0) for name, need in needs.items()]
    known = {"a": Tenant(name="a", weight=2.0), "b": Tenant(name="b")}
    assert standings(snapshot([gpu], leases=held, tenants=known)) == {"a": 0.25, "b": 0.25}


def test_weight_nothing_stands_last_without_dividing_by_it() -> None:
    on = devices(1)
    known = {"a": Tenant(name="a", weight=0.0), "b": Tenant(name="b")}
    world = snapshot(on, tenants=known, leases=[lease("l", shared(6 * GIB, tenant="b"), on)])
    assert standings(world)["a"] == math.inf
    both = [request("a", shared(2 * GIB, tenant="a"), since_ms=0), request("b", shared(2 * GIB, tenant="b"))]
    assert [g.request_id for g in make_plan(replace(world, waiting=tuple(both))).grants] == ["b"]


def test_a_tenant_that_left_the_settings_still_counts_with_weight_one() -> None:
    on = devices(1)
    world = snapshot(on, leases=[lease("l", shared(4 * GIB, tenant="gone"), on, age_s=0)])
    assert standings(world)["gone"] == 0.5


def test_past_use_is_an_average_so_a_full_half_life_of_all_counts_a_half() -> None:
    on = devices(1)
    used = accrued(1.0, HOUR_S, HOUR_S)
    world = snapshot(on, usage={"a": Usage(value=used, at_ms=NOW_MS)}, half_life_s=HOUR_S)
    assert standings(world)["a"] == pytest.approx(0.5)
    assert standings(replace(world, now_ms=NOW_MS + 3_600_000))["a"] == pytest.approx(0.25)


def test_a_lease_is_charged_at_the_grant_and_not_again_before_that_is_used_up() -> None:
    on = devices(1)
    (grant,) = make_plan(snapshot(on, waiting=[request("r", shared(4 * GIB, tenant="a"))])).grants
    assert (grant.share, grant.prepaid) == (0.5, 0.5 * ENTRY_S)
    held = replace(lease("r", shared(4 * GIB, tenant="a"), on, age_s=0), share=0.5, prepaid=0.5 * ENTRY_S)
    world = snapshot(on, leases=[held], usage={"a": Usage(value=grant.prepaid, at_ms=NOW_MS)})
    at_once = standings(world)["a"]
    assert at_once > 0.5
    assert standings(replace(world, now_ms=NOW_MS + 30_000))["a"] == pytest.approx(at_once, rel=1e-3)
    assert standings(replace(world, now_ms=NOW_MS + 600_000))["a"] > at_once * 1.001


def test_a_burst_of_needs_gets_no_more_than_its_share() -> None:
    many = [request(f"a{n:03}", shared(tenant="a"), since_ms=n) for n in range(100)]
    few = [request(f"b{n}", shared(tenant="b"), since_ms=1000 + n) for n in range(8)]
    made = make_plan(snapshot(devices(2), waiting=many + few))
    assert Counter(g.request_id[0] for g in made.grants) == {"a": 8, "b": 8}


def test_a_burst_of_submissions_cannot_beat_the_entry_penalty() -> None:
    """Plans of one millisecond: nothing has run yet, so all that tells tenants apart is what was prepaid."""
    on, used = devices(1), {"b": 0.0, "a": 0.0}
    burst = [request(f"a{n:03}", shared(8 * GIB, tenant="a"), since_ms=n) for n in range(100)]
    got: Counter[str] = Counter()
    for n in range(40):
        one = request(f"b{n:03}", shared(8 * GIB, tenant="b"))
        usage = {name: Usage(value=value, at_ms=NOW_MS) for name, value in used.items()}
        (grant,) = make_plan(snapshot(on, waiting=[*burst, one], usage=usage)).grants
        assert grant.prepaid == grant.share * ENTRY_S > 0
        tenant = grant.request_id[0]
        used[tenant] += grant.prepaid
        got[tenant] += 1
        burst = [waits for waits in burst if waits.request_id != grant.request_id]
    assert got == {"a": 20, "b": 20}


def test_a_lease_of_this_moment_stands_no_better_than_one_that_has_run_for_less_than_was_prepaid() -> None:
    on = devices(1)
    paid = 0.25 * ENTRY_S
    held = [
        replace(lease(name, shared(2 * GIB, tenant=name), on, age_s=age_s), share=0.25, prepaid=paid)
        for name, age_s in (("a", 0.0), ("b", 50.0))
    ]
    usage = {"a": Usage(value=paid, at_ms=NOW_MS), "b": Usage(value=paid, at_ms=NOW_MS - 50_000)}
    world = snapshot(on, leases=held, usage=usage, half_life_s=HOUR_S)
    stands = standings(world)
    assert stands["b"] < stands["a"] < stands["b"] * 1.001
    waiting = tuple(request(name, shared(4 * GIB, tenant=name)) for name in "ab")
    assert [g.request_id for g in make_plan(replace(world, waiting=waiting)).grants] == ["b"]


def test_whoever_used_the_pool_before_goes_behind_whoever_did_not() -> None:
    on = devices(1)
    waiting = [
        request("a", shared(8 * GIB, tenant="a"), since_ms=0),
        request("b", shared(8 * GIB, tenant="b")),
    ]
    used = {"a": Usage(value=1000.0, at_ms=NOW_MS)}
    assert [g.request_id for g in make_plan(snapshot(on, waiting=waiting, usage=used)).grants] == ["b"]
    assert [g.request_id for g in make_plan(snapshot(on, waiting=waiting)).grants] == ["a"]


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4), st.sampled_from([0.25, 2.0, 8.0])
)
@effort(max_examples=40)
def test_weights_count_in_proportion_and_their_scale_does_not(weights: list[float], scale: float) -> None:
    names = [f"t{n}" for n in range(len(weights))]
    backlog = [
        request(f"{name}-{n:03}", shared(256, tenant=name), since_ms=n) for name in names for n in range(64)
    ]

    def counts(factor: float) -> Counter[str]:
        known = {n: Tenant(name=n, weight=w * factor) for n, w in zip(names, weights, strict=True)}
        made = make_plan(snapshot(devices(1, 256 * 48), waiting=backlog, tenants=known))
        return Counter(g.request_id.split("-")[0] for g in made.grants)

    got = counts(1.0)
    assert got == counts(scale)
    for name, weight in zip(names, weights, strict=True):
        assert abs(got[name] - 48 * weight / sum(weights)) <= len(names)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 12))
@effort(max_examples=30)
def test_splitting_work_into_more_needs_gains_nothing(pieces: int, gpus: int) -> None:
    whole = [request(f"a{n:03}", shared(2 * GIB, tenant="a"), since_ms=n) for n in range(60)]
    split = [
        request(f"b{n:03}", shared(2 * GIB // pieces, tenant="b"), since_ms=n) for n in range(60 * pieces)
    ]
    made = make_plan(snapshot(devices(gpus), waiting=whole + split))
    held: Counter[str] = Counter()
    for grant in made.grants:
        held[grant.request_id[0]] += grant.parts[0].memory_mib
    assert abs(held["a"] - held["b"]) <= 2 * GIB


# ---- fluid dominant resource fairness, the reference


def fluid(
    capacity: Sequence[float], demands: Sequence[Sequence[float]], limits: Sequence[float] | None = None
) -> tuple[float, ...]:
    """How many tasks each runs, tasks being divisible. Raise all dominant shares at one rate; who demands
    what has run out, or has all it wants, stands still."""
    most = [
        max(amount / have for amount, have in zip(demand, capacity, strict=True) if amount)
        for demand in demands
    ]
    tasks, free = [0.0] * len(demands), list(map(float, capacity))
    moving = set(range(len(demands)))
    while moving:
        # One unit of dominant share runs 1 / most tasks.
        rates = [sum(demands[i][r] / most[i] for i in moving) for r in range(len(capacity))]
        steps = [free[r] / rate for r, rate in enumerate(rates) if rate > 0]
        ends = [(limits[i] - tasks[i]) * most[i] for i in moving] if limits else []
        step = min(steps + ends)
        for i in moving:
            tasks[i] += step / most[i]
        free = [have - step * rate for have, rate in zip(free, rates, strict=True)]
        gone = {r for r, have in enumerate(free) if have <= 1e-9 * capacity[r]}
        moving = {
            i
            for i in moving
            if not any(demands[i][r] > 0 for r in gone) and (not limits or tasks[i] < limits[i] - 1e-12)
        }
    return tuple(tasks)


def runs(demand: Sequence[float], bundle: Sequence[float]) -> float:
    return min(have / amount for amount, have in zip(demand, bundle, strict=True) if amount > 0)


# The example of the paper: 9 CPUs and 18 GB; a task of A takes <1, 4>, one of B <3, 1>.
PAPER = ((9.0, 18.0), ((1.0, 4.0), (3.0, 1.0)))


def test_the_reference_gives_what_the_paper_gives() -> None:
    assert fluid(*PAPER) == pytest.approx((3.0, 2.0))


def test_somebody_who_does_not_want_what_ran_out_goes_on() -> None:
    demands = ((1.0, 1.0), (1.0, 1.0), (0.0, 1.0))
    assert fluid((10.0, 100.0), demands) == pytest.approx((5.0, 5.0, 90.0))


def test_somebody_who_has_all_it_wants_leaves_the_rest_to_others() -> None:
    assert fluid((10.0,), ((1.0,), (1.0,), (1.0,)), limits=(1.0, 9.0, 9.0)) == pytest.approx((1.0, 4.5, 4.5))


@st.composite
def fluid_worlds(draw: st.DrawFn) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    wants = st.tuples(st.integers(1, 20), st.integers(1, 20))
    demands = draw(st.lists(wants, min_size=2, max_size=5))
    return (float(draw(st.integers(20, 200))), float(draw(st.integers(20, 200)))), tuple(demands)


@given(fluid_worlds(), st.data())
@effort(max_examples=100)
def test_the_reference_has_the_four_properties_of_the_paper(
    world: tuple[tuple[float, ...], tuple[tuple[float, ...], ...]], data: st.DataObject
) -> None:
    capacity, demands = world
    got = fluid(capacity, demands)
    bundles = [[n * amount for amount in demand] for n, demand in zip(got, demands, strict=True)]
    left = [have - sum(b[r] for b in bundles) for r, have in enumerate(capacity)]
    equal = [have / len(demands) for have in capacity]
    for i, demand in enumerate(demands):
        assert got[i] >= runs(demand, equal) * (1 - 1e-9), "sharing incentive"
        assert all(runs(demand, bundle) <= got[i] * (1 + 1e-9) for bundle in bundles), "envy-freeness"
    # Pareto: nobody can get more without another getting less, for something that each wants has run out.
    assert all(any(left[r] <= 1e-6 * capacity[r] and d[r] for r in range(2)) for d in demands)
    liar = data.draw(st.integers(0, len(demands) - 1))
    lie = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    told = (*demands[:liar], lie, *demands[liar + 1 :])
    lied = [fluid(capacity, told)[liar] * amount for amount in lie]
    assert runs(demands[liar], lied) <= got[liar] * (1 + 1e-9), "strategy-proofness"


# ---- whole needs on devices


def test_the_example_of_the_paper_gives_three_and_two() -> None:
    gpu = devices(1, 18 * GIB)  # 9 CPUs are 99 percent of it
    a = [request(f"a{n}", shared(4 * GIB, tenant="a", compute_percent=11), since_ms=n) for n in range(9)]
    b = [request(f"b{n}", shared(1 * GIB, tenant="b", compute_percent=33), since_ms=n) for n in range(9)]
    made = make_plan(snapshot(gpu, waiting=a + b))
    assert Counter(g.request_id[0] for g in made.grants) == {"a": 3, "b": 2}


@st.composite
def backlogs(draw: st.DrawFn) -> Snapshot:
    """Every tenant has one kind of need and no end of them, on some devices."""
    on: tuple[Device, ...] = devices(draw(st.integers(1, 4)), draw(st.sampled_from([8 * GIB, 16 * GIB])))
    kinds = [
        Need(
            tenant=f"t{n}",
            memory_mib=256 * draw(st.integers(1, 32)),
            compute_percent=draw(st.integers(0, 60)),
        )
        for n in range(draw(st.integers(2, 4)))
    ]
    waiting = [request(f"{k.tenant}-{n:03}", k, since_ms=n) for k in kinds for n in range(130)]
    return snapshot(on, waiting=waiting, tenants=named(*(k.tenant for k in kinds)))


@given(backlogs(), st.sampled_from([Backfill.EASY, Backfill.FREE]))
@effort(max_examples=60, deadline=None)
def test_nobody_envies_another_by_more_than_one_need(world: Snapshot, backfill: Backfill) -> None:
    assert envy(world, make_plan(world, backfill=backfill)) == 0


@given(backlogs(), st.sampled_from([Backfill.EASY, Backfill.FREE]))
@effort(max_examples=60, deadline=None)
def test_nothing_that_fits_outside_the_reservation_is_left_waiting(
    world: Snapshot, backfill: Backfill
) -> None:
    assert broken(world, make_plan(world, backfill=backfill))["nonwasteful_violations"] == 0


@given(backlogs())
@effort(max_examples=40, deadline=None)
def test_every_grant_went_to_the_lowest_share_that_could_fit(world: Snapshot) -> None:
    on = {d.uuid: [d.schedulable_mib, FULL_PERCENT] for d in world.devices}
    total = [sum(free[0] for free in on.values()), FULL_PERCENT * len(on)]
    held: dict[str, list[int]] = {name: [0, 0] for name in world.tenants}
    kinds = {r.need.tenant: r.need for r in world.waiting}
    for grant in make_plan(world, backfill=Backfill.FREE).grants:
        tenant = grant.request_id.split("-")[0]
        shares = {name: max(h / t for h, t in zip(held[name], total, strict=True)) for name in held}
        could = [
            shares[name]
            for name, kind in kinds.items()
            if any(f[0] >= kind.memory_mib and f[1] >= kind.compute_percent for f in on.values())
        ]
        assert shares[tenant] == min(could)
        (part,) = grant.parts
        for which, amount in enumerate((part.memory_mib, part.compute_percent)):
            held[tenant][which] += amount
            on[part.uuid][which] -= amount
