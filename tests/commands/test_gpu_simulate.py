"""Made-up days over the real plan: the story of the gang, and workloads of a user's own."""

import pytest
from gpu_worlds import GIB, device, devices, exclusive, shared
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.gpu.policy import workloads
from pipeline.gpu.policy.fairness import ENTRY_S
from pipeline.gpu.policy.simulator import Job, SimulationResult, simulate
from pipeline.gpu.values import Backfill, Need, Tenant


def job(name: str, arrival_s: float, duration_s: float, need: Need) -> Job:
    return Job(name=name, arrival_s=arrival_s, duration_s=duration_s, need=need)


# ---- the story of the gang


@pytest.fixture(scope="module")
def story() -> dict[Backfill, SimulationResult]:
    return workloads.compare_rules(0.95, seed=3, gangs=6)


@pytest.mark.long
def test_under_easy_the_gang_waits_at_most_as_long_as_behind_a_strict_queue(
    story: dict[Backfill, SimulationResult],
) -> None:
    easy, strict = story[Backfill.EASY], story[Backfill.STRICT]
    assert easy.gangs.mean_s <= strict.gangs.mean_s
    assert easy.small.mean_s < strict.small.mean_s
    assert easy.utilisation >= strict.utilisation


@pytest.mark.long
def test_with_a_reservation_no_gang_starves_and_without_one_they_do(
    story: dict[Backfill, SimulationResult],
) -> None:
    assert (story[Backfill.EASY].starved, story[Backfill.EASY].gangs.pending) == (0, 0)
    assert story[Backfill.STRICT].starved == 0
    assert story[Backfill.FREE].starved > 0
    assert story[Backfill.FREE].gangs.mean_s > 10 * story[Backfill.EASY].gangs.mean_s


def test_the_same_seed_tells_the_same_story_and_another_one_another() -> None:
    once, again, other = (workloads.story(0.5, seed=seed, gangs=1, gpus=3) for seed in (1, 1, 2))
    assert once == again != other


def test_progress_rises_to_the_last_arrival() -> None:
    seen: list[float] = []
    workloads.story(0.5, gangs=1, gpus=2, progress=seen.append)
    assert seen == sorted(seen) and 0 < seen[0] < 0.5 and seen[-1] == 1.0


@pytest.mark.parametrize("load", [0.0, 0.05, 1.0, -1.0, float("nan")])
def test_a_load_that_no_pool_can_carry_is_refused(load: float) -> None:
    with pytest.raises(BadInput, match="load"):
        workloads.story(load)


# ---- the clock


def test_one_job_waits_for_the_other_and_the_figures_say_so() -> None:
    on = devices(1)
    jobs = [job("a", 0, 10, shared(8 * GIB)), job("b", 4, 10, shared(8 * GIB))]
    figures = simulate(jobs, on)
    assert (figures.small.count, figures.small.pending, figures.small.max_s) == (2, 0, 6.0)
    assert (figures.grants, figures.yields, figures.starved, figures.end_s) == (2, 0, 0, 20.0)
    assert figures.utilisation == 1.0


def test_training_gets_the_device_within_the_time_to_yield_and_inference_does_the_rest_after_it() -> None:
    on = devices(1)
    jobs = [
        job("inference", 0, 100, shared(2 * GIB, preemptible=True)),
        job("training", 10, 50, exclusive()),
    ]
    figures = simulate(jobs, on)
    assert figures.yields == 1
    assert figures.small.max_s == 50.0  # inference, while training had the device
    assert figures.end_s == 150.0
    assert figures.grants == 3


def test_another_tenant_is_asked_once_its_first_seconds_are_over() -> None:
    known = {"a": Tenant(name="a"), "b": Tenant(name="b")}
    jobs = [
        job("a", 0, 1000, shared(8 * GIB, tenant="a", preemptible=True)),
        job("b", 1, 5, shared(2 * GIB, tenant="b")),
    ]
    figures = simulate(jobs, devices(1), tenants=known)
    assert figures.yields == 1
    assert figures.end_s < 1030


def test_whoever_can_never_start_is_starved_at_the_end() -> None:
    figures = simulate([job("big", 0, 1, shared(9 * GIB))], devices(1))
    assert (figures.starved, figures.small.pending, figures.grants) == (1, 1, 0)


@pytest.mark.long
def test_two_tenants_with_endless_work_get_the_same_over_a_long_time() -> None:
    """One device and whole needs of 7 and of 20 s: at any moment one has all, and only the memory of use
    evens it out."""
    known = {"a": Tenant(name="a"), "b": Tenant(name="b")}
    jobs = [
        job(f"{tenant}{n}", 0, lasts_s, exclusive(tenant=tenant))
        for tenant, lasts_s in (("a", 7), ("b", 20))
        for n in range(300)
    ]
    figures = simulate(jobs, devices(1), tenants=known, end_s=4000)
    assert figures.utilisation == 1.0
    # What is charged at a grant, and settled at its end, keeps them one such charge apart.
    assert abs(figures.shares["a"] - figures.shares["b"]) < 2 * ENTRY_S / 4000
    known["b"] = Tenant(name="b", weight=2.0)
    heavier = simulate(jobs, devices(1), tenants=known, end_s=4000)
    assert heavier.shares["b"] / heavier.shares["a"] == pytest.approx(2.0, rel=0.1)


# ---- a user's own workload


def test_a_users_rows_are_played_as_they_are_written() -> None:
    figures = workloads.from_file(
        [
            {"arrival_s": "0", "duration_s": "10", "memory": "4GiB", "compute": "25", "tenant": "a"},
            {"arrival_s": 1, "duration_s": 2.5, "exclusive": True, "devices": 8, "name": "training"},
            {
                "arrival_s": 2,
                "duration_s": 1,
                "memory": 512,
                "priority": -1,
                "max_duration_s": 5,
                "preemptible": "no",
            },
        ]
    )
    assert (figures.gangs.count, figures.small.count, figures.starved) == (1, 2, 0)
    assert figures.gangs.max_s == 9.0


def test_rows_of_one_name_are_different_needs() -> None:
    row = {"arrival_s": "0", "duration_s": "1", "name": "same"}
    assert workloads.from_file([row, row, row]).grants == 3


def test_a_users_own_devices_and_quotas_count() -> None:
    known = {"a": Tenant(name="a", quota_mib=2 * GIB)}
    row = {"arrival_s": "0", "duration_s": "10", "memory": "2GiB", "tenant": "a"}
    figures = workloads.from_file([row, row], devices=[device()], tenants=known)
    assert (figures.small.max_s, figures.end_s) == (10.0, 20.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"duration_s": "1"}, "row 1 of the workload has arrival_s"),
        ({"arrival_s": "0"}, "duration_s = None"),
        ({"arrival_s": "x", "duration_s": "1"}, "arrival_s = 'x'"),
        ({"arrival_s": "nan", "duration_s": "1"}, "arrival_s = 'nan'"),
        ({"arrival_s": "-1", "duration_s": "1"}, "comes at -1 s"),
        ({"arrival_s": "0", "duration_s": "0"}, "for 0 s"),
        ({"arrival_s": "0", "duration_s": "1", "devices": "1.5"}, "devices = '1.5'"),
        ({"arrival_s": "0", "duration_s": "1", "memory": "much"}, "'much' is not a size of memory"),
        ({"arrival_s": "0", "duration_s": "1", "exclusive": "perhaps"}, "write true or false"),
        ({"arrival_s": "0", "duration_s": "1", "gpu": "1"}, "the column 'gpu'"),
        (
            {"arrival_s": "0", "duration_s": "1", "memory": "99GiB"},
            "row 1 of the workload can never run: 99 GiB fit on no",
        ),
        ({"arrival_s": "0", "duration_s": "1", "tenant": "a b"}, "can never run"),
    ],
)
def test_a_row_that_cannot_be_played_is_refused_with_its_number(row: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        workloads.from_file([row])
    assert words in str(refused.value)


def test_a_workload_without_rows_is_refused() -> None:
    with pytest.raises(BadInput, match="empty"):
        workloads.from_file([])


@given(
    st.lists(
        st.fixed_dictionaries(
            {"arrival_s": st.integers(0, 30), "duration_s": st.integers(1, 20)},
            optional={
                "memory": st.sampled_from(["1GiB", "8GiB", "20GiB"]),
                "devices": st.integers(1, 3),
                "exclusive": st.booleans(),
                "preemptible": st.booleans(),
                "tenant": st.sampled_from(["a", "b"]),
                "max_duration_s": st.integers(1, 40),
                "priority": st.integers(-1, 1),
            },
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(list(Backfill)),
)
@effort(max_examples=60, deadline=None)
def test_every_workload_that_is_not_refused_is_done_in_the_end(
    rows: list[dict[str, object]], rule: Backfill
) -> None:
    figures = workloads.from_file(rows, devices=workloads.machines(3, 20 * GIB), backfill=rule)
    assert figures.starved == figures.gangs.pending == figures.small.pending == 0
    assert figures.gangs.count + figures.small.count == len(rows)
