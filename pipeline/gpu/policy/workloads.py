"""Workloads for the simulator: made-up ones, and those of a user's file.

The story of the gang: 8 GPUs, a stream of jobs for one GPU each, and every 400 s one need for all 8 for 20 s.
With free backfill the gang waits for hours, behind a strict queue the small jobs do; EASY backfill serves
both.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pipeline.errors import BadInput, BadSetting
from pipeline.gpu.policy.admission import refusal
from pipeline.gpu.policy.simulator import Job, SimulationResult, simulate
from pipeline.gpu.values import FULL_PERCENT, TENANT, Backfill, Device, LeaseMode, Need, Tenant
from pipeline.units import mib

MEMORY_MIB: Final = 81_920  # per GPU
PERIOD_S: Final = 400  # between two gangs
GANG_S: Final = 20  # duration of a gang
SMALL_S: Final = 12.0  # mean duration of small jobs: exponential, cut at five times the mean

# The columns of a file and their meaning, for messages. Columns with a default are optional.
COLUMNS: Final = {
    "arrival_s": "seconds from the beginning",
    "duration_s": "seconds that it works",
    "max_duration_s": "seconds that it says it works at most",
    "memory": "a size like 4GiB",
    "compute": "percent of a GPU",
    "devices": "a count",
    "tenant": "a name",
    "priority": "a number, larger first",
    "exclusive": "true or false",
    "preemptible": "true or false",
}


def story(
    load: float = 0.95,
    backfill: Backfill = Backfill.EASY,
    seed: int = 0,
    *,
    gangs: int = 49,
    gpus: int = 8,
    progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """The story of the gang under one rule. `load`: demanded part of the GPUs' time. Raises BadInput."""
    check_story(load)
    if gangs < 1 or gpus < 2:
        raise BadInput(f"{gangs} gangs on {gpus} GPUs make no story; use 1 gang and 2 GPUs or more")
    end_s = float(gangs * PERIOD_S)
    jobs, on = _story(load, seed, gangs, gpus), machines(gpus)
    return simulate(jobs, on, backfill=backfill, end_s=end_s, progress=progress)


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


def from_file(
    rows: Iterable[Mapping[str, object]],
    *,
    devices: Sequence[Device] | None = None,
    tenants: Mapping[str, Tenant] | None = None,
    backfill: Backfill = Backfill.EASY,
    progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """A user's workload until all jobs have ended, one row with the columns of COLUMNS each. Raises BadInput.

    The default `devices` are 8 GPUs of 80 GiB. Tenants without an entry have weight 1 and no quota.
    """
    jobs = jobs_of(rows)
    on = machines(8) if devices is None else devices
    everyone = {job.need.tenant: Tenant(name=job.need.tenant) for job in jobs} | dict(tenants or {})
    for number, job in enumerate(jobs, 1):
        if why := refusal(job.need, on, everyone):
            raise BadInput(f"row {number} of the workload can never run: {why}")
    return simulate(jobs, on, tenants=everyone, backfill=backfill, progress=progress)


def jobs_of(rows: Iterable[Mapping[str, object]]) -> list[Job]:
    """The jobs of the rows. Raises BadInput for an unreadable row, and when there is none."""
    jobs = [_job(number, row) for number, row in enumerate(rows, 1)]
    if not jobs:
        raise BadInput("the workload is empty; give one row per need, with arrival_s and duration_s at least")
    return jobs


def _story(load: float, seed: int, gangs: int, gpus: int) -> list[Job]:
    chance = random.Random(seed)  # noqa: S311 - a simulation, no secret
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


def _job(number: int, row: Mapping[str, object]) -> Job:
    texts = {
        key: str(value).strip() for key, value in row.items() if value is not None and str(value).strip()
    }
    unknown = sorted(set(texts) - set(COLUMNS) - {"name"})
    if unknown:
        raise BadInput(
            f"row {number} of the workload has the column {unknown[0]!r}; "
            f"known are name, {', '.join(COLUMNS)}"
        )
    alone = _truth(number, texts, "exclusive")
    duration_max_s = _number(number, texts, "max_duration_s", math.nan)
    need = Need(
        tenant=texts.get("tenant", TENANT),
        mode=LeaseMode.EXCLUSIVE if alone else LeaseMode.SHARED,
        memory_mib=_memory(number, texts, 0 if alone else 1024),
        compute_percent=int(_number(number, texts, "compute", 0)),
        devices=int(_number(number, texts, "devices", 1)),
        priority=int(_number(number, texts, "priority", 0)),
        max_duration_s=None if math.isnan(duration_max_s) else duration_max_s,
        preemptible=_truth(number, texts, "preemptible"),
    )
    arrival_s, duration_s = _number(number, texts, "arrival_s"), _number(number, texts, "duration_s")
    if arrival_s < 0 or duration_s <= 0:
        raise BadInput(
            f"row {number} of the workload comes at {arrival_s:g} s for {duration_s:g} s; "
            "use 0 or later, and more than 0 s"
        )
    # The number keeps names apart: a user's names may repeat.
    return Job(
        name=f"{number:07} {texts.get('name', '')}".strip(),
        arrival_s=arrival_s,
        duration_s=duration_s,
        need=need,
    )


def _number(number: int, texts: Mapping[str, str], column: str, default: float | None = None) -> float:
    text = texts.get(column)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = None
    integral = column in ("compute", "devices", "priority")
    if value is None or (
        text is not None and (not math.isfinite(value) or (integral and value != int(value)))
    ):
        raise BadInput(
            f"row {number} of the workload has {column} = {text!r}; write {COLUMNS[column]}, as a number"
        )
    return value


def _memory(number: int, texts: Mapping[str, str], default: int) -> int:
    text = texts.get("memory")
    if text is None:
        return default
    try:
        return mib(text)
    except BadSetting as exc:
        raise BadInput(f"row {number} of the workload: {exc}") from exc


def _truth(number: int, texts: Mapping[str, str], column: str) -> bool:
    text = texts.get(column, "false").lower()
    if text in ("true", "yes", "1"):
        return True
    if text in ("false", "no", "0"):
        return False
    raise BadInput(f"row {number} of the workload has {column} = {text!r}; write true or false")
