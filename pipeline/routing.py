"""Names of queues and tasks, and the one decision where an unknown batch is scored.

Senders and workers share only these names, so a producer never imports the workers' code.
"""

from dataclasses import dataclass
from typing import Final

from pipeline.ledger import Stage

QUEUE_INGEST: Final = "ingest"
QUEUE_CPU: Final = "infer.cpu"
QUEUE_GPU: Final = "infer.gpu"
QUEUE_DRAIN: Final = "drain"
QUEUE_STORE: Final = "store"
QUEUE_TRAIN: Final = "train"
QUEUE_PERIODIC: Final = "periodic"
QUEUES: Final = (QUEUE_INGEST, QUEUE_CPU, QUEUE_GPU, QUEUE_DRAIN, QUEUE_STORE, QUEUE_TRAIN, QUEUE_PERIODIC)

TASK_INGEST: Final = "logweir.ingest"
TASK_INFER: Final = "logweir.infer"
TASK_DRAIN: Final = "logweir.drain"
TASK_STORE: Final = "logweir.store"
TASK_TRAIN: Final = "logweir.train"
TASK_SWEEP: Final = "logweir.sweep"
TASK_TICK: Final = "logweir.tick"

STAGE_TASK: Final = {
    Stage.INGEST: TASK_INGEST,
    Stage.INFER: TASK_INFER,
    Stage.DRAIN: TASK_DRAIN,
    Stage.STORE: TASK_STORE,
}
STAGE_QUEUES: Final = {
    Stage.INGEST: (QUEUE_INGEST,),
    Stage.INFER: (QUEUE_CPU, QUEUE_GPU),
    Stage.DRAIN: (QUEUE_DRAIN,),
    Stage.STORE: (QUEUE_STORE,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """What routing needs to know about the GPU, as one snapshot."""

    workers: int  # live workers that serve infer.gpu
    open_to_shared: bool  # a device would take a scoring process's share, or one is held and stays


def route(gpu: GpuView) -> str:
    """The queue for unknown lines: the GPU when somebody serves it and may use a device now."""
    return QUEUE_GPU if gpu.workers > 0 and gpu.open_to_shared else QUEUE_CPU


def queue_for(stage: Stage, gpu: GpuView) -> str:
    """The queue in which a batch of this stage waits."""
    return route(gpu) if stage is Stage.INFER else STAGE_QUEUES[stage][0]
