"""Made-up days over the real plan, and the story of the gang."""

import pytest
from gpu_worlds import GIB, devices, exclusive, shared

from bench import _gpu_stories as workloads
from bench._gpu_simulator import Job, SimulationResult, simulate
from pipeline.errors import BadInput
from pipeline.gpu.policy.fairness import ENTRY_S
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
