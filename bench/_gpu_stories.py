"""A workload for the simulator, the story of the gang: 8 GPUs, a stream of jobs for one GPU each, and every
400 s one need for all 8 for 20 s.

With free backfill the gang waits for hours, behind a strict queue the small jobs do; EASY backfill serves
both.
"""

import math
import random
from dataclasses import replace
from typing import Final

from bench._gpu_simulator import Job, SimulationResult, simulate
from pipeline.errors import BadInput
from pipeline.gpu.values import FULL_PERCENT, Backfill, Device, LeaseMode, Need

MEMORY_MIB: Final = 81_920  # per GPU
PERIOD_S: Final = 400  # between two gangs
GANG_S: Final = 20  # duration of a gang
SMALL_S: Final = 12.0  # mean duration of small jobs: exponential, cut at five times the mean


def story(
    load: float = 0.95,
    backfill: Backfill = Backfill.EASY,
    seed: int = 0,
    *,
    gangs: int = 49,
    gpus: int = 8,
) -> SimulationResult:
    """The story of the gang under one rule. `load`: demanded part of the GPUs' time. Raises BadInput."""
    check_story(load)
    if gangs < 1 or gpus < 2:
        raise BadInput(f"{gangs} gangs on {gpus} GPUs make no story; use 1 gang and 2 GPUs or more")
    end_s = float(gangs * PERIOD_S)
    jobs, on = _story(load, seed, gangs, gpus), machines(gpus)
    return simulate(jobs, on, backfill=backfill, end_s=end_s)


def check_story(load: float) -> None:
    """Raises BadInput for a load that the gangs alone exceed, or that no pool can carry."""
    if not GANG_S / PERIOD_S < load < 1:
        raise BadInput(
            f"a load of {load:g} makes no story; use more than {GANG_S / PERIOD_S:g} and less than 1"
        )


def compare_rules(
    load: float = 0.95, seed: int = 0, *, gangs: int = 49, gpus: int = 8
) -> dict[Backfill, SimulationResult]:
    """The same story under every rule."""
    return {rule: story(load, rule, seed, gangs=gangs, gpus=gpus) for rule in Backfill}


def machines(gpus: int, memory_mib: int = MEMORY_MIB, per_node: int = 8) -> tuple[Device, ...]:
    """Equal made-up GPUs."""
    return tuple(
        Device(
            uuid=f"GPU-{number:05}",
            node=f"node{number // per_node:04}",
            index=number % per_node,
            name="made-up",
            total_mib=memory_mib,
            schedulable_mib=memory_mib,
        )
        for number in range(gpus)
    )


def _story(load: float, seed: int, gangs: int, gpus: int) -> list[Job]:
    chance = random.Random(seed)
    full = Need(mode=LeaseMode.SHARED, memory_mib=MEMORY_MIB, compute_percent=FULL_PERCENT)
    jobs = [
        Job(
            name=f"gang{number:04}",
            arrival_s=number * PERIOD_S + PERIOD_S / 2,
            duration_s=GANG_S,
            need=replace(full, devices=gpus, max_duration_s=float(GANG_S)),
        )
        for number in range(gangs)
    ]
    mean_s = SMALL_S * -math.expm1(-5)  # of the exponential cut at five times its mean
    rate = gpus * (load - GANG_S / PERIOD_S) / mean_s
    at_s, number = chance.expovariate(rate), 0
    while at_s < gangs * PERIOD_S:
        lasts_s = round(min(5 * SMALL_S, chance.expovariate(1 / SMALL_S)) + 0.001, 3)
        need = replace(full, max_duration_s=lasts_s)
        jobs.append(Job(name=f"small{number:06}", arrival_s=at_s, duration_s=lasts_s, need=need))
        at_s, number = at_s + chance.expovariate(rate), number + 1
    return jobs
