"""Names of queues and tasks, and the one decision where an unknown batch is scored.

Senders and workers share only these names, so a producer never imports the workers' code.

Batches wait in two classes: fresh ones in `<queue>`, backfill in `<queue>.backfill`. A worker serves both in
alphabetical order (messages/app.py): periodic work before batches, fresh batches before backfill.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pipeline.records.delivery import Stage

QUEUE_INGEST: Final = "ingest"
QUEUE_CPU: Final = "infer.cpu"
QUEUE_GPU: Final = "infer.gpu"
QUEUE_DRAIN: Final = "drain"
QUEUE_STORE: Final = "store"
QUEUE_TRAIN: Final = "train"
QUEUE_PERIODIC: Final = "periodic"
QUEUE_BACKFILL: Final = "backfill"  # readers of archives, not batches
QUEUE_JOBS: Final = "gpu.jobs"  # programs of users; a node serves `gpu.jobs.<node>`
BACKFILL: Final = ".backfill"

TASK_INGEST: Final = "logweir.ingest"
TASK_INFER: Final = "logweir.infer"
TASK_DRAIN: Final = "logweir.drain"
TASK_STORE: Final = "logweir.store"
TASK_TRAIN: Final = "logweir.train"
TASK_SWEEP: Final = "logweir.sweep"
TASK_TICK: Final = "logweir.tick"
TASK_WATCH: Final = "logweir.watch"
TASK_COMPACT: Final = "logweir.compact"
TASK_BACKFILL: Final = "logweir.backfill"
TASK_JOB: Final = "logweir.job"

STAGE_TASK: Final = {
    Stage.INGEST: TASK_INGEST,
    Stage.INFER: TASK_INFER,
    Stage.DRAIN: TASK_DRAIN,
    Stage.STORE: TASK_STORE,
}
STAGE_QUEUES: Final = {  # of fresh batches
    Stage.INGEST: (QUEUE_INGEST,),
    Stage.INFER: (QUEUE_CPU, QUEUE_GPU),
    Stage.DRAIN: (QUEUE_DRAIN,),
    Stage.STORE: (QUEUE_STORE,),
}


def of_class(queue: str, *, backfill: bool) -> str:
    """Where batches of this class wait, of a stage's queue."""
    return queue + BACKFILL if backfill else queue


def both(queue: str) -> tuple[str, str]:
    """The queues of both classes, fresh first."""
    return (queue, queue + BACKFILL)


# Every queue there is, but those of jobs.
ALL_QUEUES: Final = (
    *(name for stage in Stage for queue in STAGE_QUEUES[stage] for name in both(queue)),
    QUEUE_TRAIN,
    QUEUE_PERIODIC,
    QUEUE_BACKFILL,
)


def jobs_queue(node: str) -> str:
    """The queue of the jobs that run on a node. It is no queue of `ALL_QUEUES`: nodes come and go."""
    return f"{QUEUE_JOBS}.{node}"


def nodes_of_queues(queues: Iterable[str]) -> set[str]:
    """The nodes whose jobs these queues carry."""
    begin = f"{QUEUE_JOBS}."
    return {name.removeprefix(begin) for name in queues if name.startswith(begin)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A snapshot of the GPU side for routing."""

    workers: int  # live workers that serve infer.gpu
    open_to_shared: bool  # a device would take a scoring process's share, or one is held and stays


def route(gpu: GpuView) -> str:
    """The queue for unknown lines: the GPU when somebody serves it and may use a device now."""
    return QUEUE_GPU if gpu.workers > 0 and gpu.open_to_shared else QUEUE_CPU


def queue_for(stage: Stage, gpu: GpuView, *, backfill: bool = False) -> str:
    """The queue of a batch of this stage and class."""
    queue = route(gpu) if stage is Stage.INFER else STAGE_QUEUES[stage][0]
    return of_class(queue, backfill=backfill)
