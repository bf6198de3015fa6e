"""The roles of worker processes: queues, tasks and pools of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from celery import Celery

from pipeline.errors import BadSetting, StepFailed
from pipeline.messages import routing
from pipeline.tasks import backfill, compact, drain, infer, ingest, periodic, store, tick, train, watch
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import CPU_PROFILE, ModelPart, WorkerProfile
from pipeline.tasks.pool import job
from pipeline.workers.liveness import HELD_S

# An exception may quote what it could not read; a sentence is enough to know which one it was.
REASON_LIMIT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The work of a worker process. `time_limit_s` is for tasks that are no steps; it needs the prefork
    pool."""

    queues: tuple[str, ...]
    tasks: tuple[Any, ...]  # modules with NAME and run(context, *ids)
    pool: str = "solo"
    time_limit_s: float | None = None
    profile: WorkerProfile = CPU_PROFILE
    tasks_per_child: int | None = None  # a child that ends frees its memory, and that of CUDA's context


ROLES: Final[dict[str, Role]] = {
    "ingest": Role(
        queues=routing.both(routing.QUEUE_INGEST),
        tasks=(ingest,),
        profile=WorkerProfile(part=ModelPart.MANIFEST),
    ),
    "infer-cpu": Role(
        queues=routing.both(routing.QUEUE_CPU),
        tasks=(infer,),
        pool="prefork",
        profile=WorkerProfile(part=ModelPart.NETWORK),
    ),
    "infer-gpu": Role(
        queues=routing.both(routing.QUEUE_GPU),
        tasks=(infer,),
        pool="prefork",
        profile=WorkerProfile(part=ModelPart.NETWORK, device="cuda", leased=True),
    ),
    "drain": Role(
        queues=routing.both(routing.QUEUE_DRAIN),
        tasks=(drain,),
        profile=WorkerProfile(part=ModelPart.KNOWLEDGE),
    ),
    "store": Role(
        queues=(routing.QUEUE_PERIODIC, *routing.both(routing.QUEUE_STORE)),
        tasks=(store, periodic, tick, watch, compact),
    ),
    # A process of its own: it waits while the pipeline is full, and must not keep a stage from emptying it.
    "reader": Role(queues=(routing.QUEUE_BACKFILL,), tasks=(backfill,)),
    # It only starts processes, which outlive it. Its queue has the name of its node (bootstrap.py).
    "gpu-jobs": Role(queues=(), tasks=(job,)),
    # Besides the fit itself, whose time is a setting: reading a long history takes hours.
    "train": Role(
        queues=(routing.QUEUE_TRAIN,),
        tasks=(train,),
        pool="prefork",
        time_limit_s=6 * 3600,
        tasks_per_child=1,
    ),
    "train-gpu": Role(
        queues=(routing.QUEUE_TRAIN,),
        tasks=(train,),
        pool="prefork",
        time_limit_s=6 * 3600,
        profile=WorkerProfile(device="cuda", leased=True),
        tasks_per_child=1,
    ),
}


def register(app: Celery, context: Context, role: Role) -> None:
    """Make the role's task modules known to the app under their names."""
    for module in role.tasks:
        options: dict[str, Any] = {
            "name": module.NAME,
            "acks_late": True,
            "ignore_result": True,
            "shared": False,  # another app of this process has a context of its own
            # Said already, by the step and in the ledger: no second traceback in the log.
            "throws": (StepFailed,),
            # Sweeps every other second would hide other tasks in Flower, which shows the wake-ups that they
            # send.
            "send_events": module not in (periodic, tick, watch, compact),
        }
        if role.time_limit_s is not None:
            limit = role.time_limit_s
            options |= {"soft_time_limit": limit, "time_limit": limit + 10}
        elif role.pool == "prefork":
            # A step ends itself after `step_s`; this is for one that lets no thread of its process run.
            options["time_limit"] = context.settings.stack.step_s + 3 * HELD_S
        app.task(_bind(module.run, context), **options)


def _bind(run: Callable[..., str | None], context: Context) -> Callable[..., None]:
    def task(*ids: str, **_of_a_newer_sender: object) -> None:
        reason = run(context, *ids)
        if reason is not None:
            # For people who watch tasks: a failed one with its reason. Late acks acknowledge failed ones too.
            raise StepFailed(reason[:REASON_LIMIT])

    return task


def device_name(device: str, visible: str | None) -> str:
    """The device in a worker's name: `cpu`, or the GPU as this machine counts it, `cuda2`. Asks no driver.

    `visible` is CUDA_VISIBLE_DEVICES: indices, or `GPU-` and `MIG-` ids, which are shortened.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return kind
    index = int(number) if number.isdecimal() else 0
    chosen = [part.strip() for part in (visible or "").split(",") if part.strip()]
    if not chosen:
        return f"cuda{index}"
    name = chosen[min(index, len(chosen) - 1)][:12]
    return f"cuda{name}" if name.isdecimal() else f"cuda-{name}"


def role_named(text: str) -> Role:
    """The role in a command line. Raises BadSetting."""
    if text not in ROLES:
        raise BadSetting(f"{text!r} is not a worker role; the roles are: {', '.join(ROLES)}")
    return ROLES[text]
