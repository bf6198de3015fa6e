"""Queue train: one training, under the exclusive lease, with its status in Redis.

A training whose worker died is asked for again by the sweep, a bounded number of times; so its status always ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import redis

from pipeline import training
from pipeline.errors import LogweirError, StaleToken, TrainingFailed
from pipeline.gpu.devices import GPU, TRAINING
from pipeline.gpu.leases import Held, Lease, Mode, Refused
from pipeline.models.threshold import Mode as Learning
from pipeline.observe import logger
from pipeline.records import Purpose
from pipeline.results import readable
from pipeline.routing import TASK_TRAIN
from pipeline.tasks import periodic, reload
from pipeline.tasks.context import Context
from pipeline.training import State, Status

NAME: Final = TASK_TRAIN
# How long a training waits for its lease: longer than a quarantine and any scoring batch.
PATIENCE_S: Final = 120.0


def run(context: Context, request_id: str) -> None:
    log = logger(request=request_id)
    key = context.ledger.keys.training
    status = Status.from_redis(context.client.hgetall(key))
    if status.request_id != request_id or status.ended:
        log.info("training.left_alone", why="superseded" if status.request_id != request_id else "ended")
        return

    def show(status: Status) -> None:
        # A Redis that is away for a moment must not cost the training; publishing asks it again anyway.
        with suppress(redis.RedisError):
            context.client.hset(key, mapping=status.to_redis())

    try:
        version = _train(context, request_id, show)
    except LogweirError as exc:
        log.warning("training.failed", why=str(exc))
        show(Status(state=State.FAILED, request_id=request_id, reason=str(exc)))
    except Exception as exc:
        log.exception("training.failed")
        show(Status(state=State.FAILED, request_id=request_id, reason=f"{type(exc).__name__}: {exc}"))
    else:
        log.info("training.completed", version=version)
        reload.announce(context.app)
        periodic.run(context)


def _train(context: Context, request_id: str, show: Callable[[Status], None]) -> str:
    show(Status(state=State.QUEUED, request_id=request_id))
    status = Status()
    baseline = context.sink(Purpose.BASELINE)
    has_baseline = any(baseline.root.glob("date=*/workload=*/*.parquet"))
    source = baseline if has_baseline else context.sink(Purpose.SCORE)
    with _alone(context, TRAINING) as held, _device(context) as gpu, readable(source.root):
        for status in training.train(
            source.scan(),
            mode=Learning.BASELINE if has_baseline else Learning.SELF,
            masks=context.masks,
            registry=context.registry,
            settings=context.settings,
            held=held,
            request_id=request_id,
            device=context.device,
        ):
            if gpu.lost.is_set():
                raise StaleToken("the GPU lease was lost while training; nothing is published, train again")
            show(status)
    return status.version


@contextmanager
def _alone(context: Context, resource: str) -> Iterator[Held]:
    with context.leases.holding(_lease(context, resource)) as held:
        yield held


@contextmanager
def _device(context: Context) -> Iterator[Held]:
    """The GPU for ourselves when we train on one; asking for it closes the door to new shared leases."""
    if context.device == "cpu":
        yield Held(Lease(resource=GPU, mode=Mode.EXCLUSIVE, holder="", token=0, ttl_ms=0))  # nothing to lose
        return
    with _alone(context, GPU) as held:
        yield held


def _lease(context: Context, resource: str) -> Lease:
    """Wait for the exclusive right to a resource."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = context.leases.request(
            resource, Mode.EXCLUSIVE, context.owner, floor=context.registry.newest_token(), quarantine=True
        )
        if not isinstance(answer, Refused):
            return answer
        if time.monotonic() > deadline:
            raise TrainingFailed(f"{resource} stayed {answer.why} for {PATIENCE_S:.0f} s; train again later")
        time.sleep(min(1.0, max(0.05, answer.wait_ms / 1000)))
