"""Where a batch waits: the queue of its stage, and the GPU only when somebody serves it and training leaves
it free."""

import pytest

from pipeline.messages.app import configuration
from pipeline.messages.routing import (
    ALL_QUEUES,
    BACKFILL,
    QUEUE_BACKFILL,
    QUEUE_CPU,
    QUEUE_DRAIN,
    QUEUE_GPU,
    QUEUE_INGEST,
    QUEUE_PERIODIC,
    QUEUE_STORE,
    QUEUE_TRAIN,
    STAGE_QUEUES,
    STAGE_TASK,
    GpuView,
    both,
    queue_for,
    route,
)  # fmt: skip
from pipeline.records.delivery import Stage
from pipeline.settings import Settings
from pipeline.workers.roles import ROLES


@pytest.mark.parametrize(
    ("workers", "open_to_shared", "queue"),
    [
        (0, False, QUEUE_CPU),
        (0, True, QUEUE_CPU),
        (1, False, QUEUE_CPU),
        (1, True, QUEUE_GPU),
        (8, True, QUEUE_GPU),
    ],
)
def test_unknown_lines_go_to_a_gpu_that_is_served_and_free(
    workers: int, open_to_shared: bool, queue: str
) -> None:
    gpu = GpuView(workers=workers, open_to_shared=open_to_shared)
    assert route(gpu) == queue
    assert queue_for(Stage.INFER, gpu) == queue


@pytest.mark.parametrize(
    ("stage", "queue"), [(Stage.INGEST, QUEUE_INGEST), (Stage.DRAIN, QUEUE_DRAIN), (Stage.STORE, QUEUE_STORE)]
)
def test_the_other_stages_have_one_queue_whatever_the_gpu_does(stage: Stage, queue: str) -> None:
    for gpu in (GpuView(workers=0, open_to_shared=False), GpuView(workers=3, open_to_shared=True)):
        assert queue_for(stage, gpu) == queue


def test_every_stage_has_a_task_and_queues_that_exist() -> None:
    assert set(STAGE_TASK) == set(STAGE_QUEUES) == set(Stage)
    assert len(set(STAGE_TASK.values())) == len(Stage)
    declared = {queue.name for queue in configuration(Settings(redis_url="redis://h"))["task_queues"]}
    assert declared == set(ALL_QUEUES)
    for stage in Stage:
        queues = STAGE_QUEUES[stage]
        assert {name for queue in queues for name in both(queue)} <= declared
        for free in (True, False):
            gpu = GpuView(workers=1, open_to_shared=free)
            fresh, late = queue_for(stage, gpu), queue_for(stage, gpu, backfill=True)
            assert fresh in queues and late == fresh + BACKFILL


def test_queues_have_the_names_there_always_were() -> None:
    assert set(ALL_QUEUES) == {
        "ingest", "ingest.backfill", "infer.cpu", "infer.cpu.backfill", "infer.gpu", "infer.gpu.backfill",
        "drain", "drain.backfill", "store", "store.backfill", "train", "periodic",
        "backfill",
    }  # fmt: skip


def test_every_batch_queue_is_served_with_its_backfill_and_by_name_fresh_comes_first() -> None:
    options = configuration(Settings(redis_url="redis://h"))["broker_transport_options"]
    assert options["queue_order_strategy"] == "sorted"
    served = {queue for role in ROLES.values() for queue in role.queues}
    assert served == set(ALL_QUEUES)
    for role in ROLES.values():
        assert sorted(role.queues) == list(role.queues), "the order in which a worker takes them"
        for queue in role.queues:
            if not queue.endswith(BACKFILL) and queue not in (QUEUE_TRAIN, QUEUE_PERIODIC, QUEUE_BACKFILL):
                assert queue + BACKFILL in role.queues
