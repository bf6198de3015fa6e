"""Where a batch waits: the queue of its stage, and the GPU only when somebody serves it and training leaves
it free."""

import pytest

from pipeline.messages.app import configuration
from pipeline.messages.routing import (
    BACKFILL,
    QUEUE_BACKFILL,
    QUEUE_CPU,
    QUEUE_DRAIN,
    QUEUE_GPU,
    QUEUE_INGEST,
    QUEUE_PERIODIC,
    QUEUE_STORE,
    QUEUE_TRAIN,
    STAGE_TASK,
    GpuView,
    all_queues,
    both,
    former_queues,
    queue_for,
    route,
    stage_queues,
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


@pytest.mark.parametrize("shards", [1, 3])
def test_every_stage_has_a_task_and_queues_that_exist(shards: int) -> None:
    assert set(STAGE_TASK) == set(Stage)
    assert len(set(STAGE_TASK.values())) == len(Stage)
    settings = Settings(redis_url="redis://h", drain_shards=shards)
    declared = {queue.name for queue in configuration(settings)["task_queues"]}
    assert declared == set(all_queues(shards))
    for stage in Stage:
        queues = stage_queues(stage, shards)
        assert {name for queue in queues for name in both(queue)} <= declared
        for free in (True, False):
            gpu = GpuView(workers=1, open_to_shared=free)
            for workload in ("", "shop", "bank"):
                fresh = queue_for(stage, gpu, workload=workload, shards=shards)
                late = queue_for(stage, gpu, workload=workload, shards=shards, backfill=True)
                assert fresh in queues and late == fresh + BACKFILL


def test_one_drain_shard_has_the_names_there_always_were() -> None:
    assert set(all_queues(1)) == {
        "ingest", "ingest.backfill", "infer.cpu", "infer.cpu.backfill", "infer.gpu", "infer.gpu.backfill",
        "drain", "drain.backfill", "store", "store.backfill", "train", "periodic",
        "backfill",
    }  # fmt: skip
    assert set(all_queues(3)) - set(all_queues(1)) == {
        "drain.1", "drain.1.backfill", "drain.2", "drain.2.backfill",
    }  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_a_queue_is_of_a_shard_that_is_or_of_one_that_is_no_more(shards: int) -> None:
    former = set(former_queues(shards))
    assert former.isdisjoint(all_queues(shards))
    assert former | set(all_queues(shards)) == set(all_queues(64))


def test_every_batch_queue_is_served_with_its_backfill_and_by_name_fresh_comes_first() -> None:
    options = configuration(Settings(redis_url="redis://h"))["broker_transport_options"]
    assert options["queue_order_strategy"] == "sorted"
    served = {queue for role in ROLES.values() for queue in role.queues}
    assert served == set(all_queues(1))
    for role in ROLES.values():
        assert sorted(role.queues) == list(role.queues), "the order in which a worker takes them"
        for queue in role.queues:
            if not queue.endswith(BACKFILL) and queue not in (QUEUE_TRAIN, QUEUE_PERIODIC, QUEUE_BACKFILL):
                assert queue + BACKFILL in role.queues
