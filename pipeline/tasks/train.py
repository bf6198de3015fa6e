"""Queue train: the next requested training, under the exclusive lease.

A message is only a wake-up: the queue of trainings stands in Redis (controller/trainings.py). The sweep finds
a dead trainer by its lease, ends its training as failed and queues it again."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Final

from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import ATTEMPTS, TrainingRequest, next_attempt
from pipeline.drain.learner import read_templates
from pipeline.errors import (
    BadInput,
    BadPayload,
    Cancelled,
    DeviceFailed,
    LeaseRefused,
    LogweirError,
    RedisUnavailable,
    Retryable,
    StaleToken,
    StoreUnavailable,
    TrainingFailed,
)
from pipeline.gpu.leasing.pool_ledger import SILENT
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.own_models import count_training
from pipeline.gpu.values import LeaseKind, LeaseMode, Need, PoolLease
from pipeline.logs import logger
from pipeline.messages.routing import TASK_TRAIN
from pipeline.models.config import FIT_MOST_S
from pipeline.observe import counters as metrics
from pipeline.records.batch import utc_now
from pipeline.records.versions import Note
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import TRAINING, HeldLease, Refused
from pipeline.tasks import periodic
from pipeline.tasks.context import Context
from pipeline.tasks.share import ended_after_loss, enrol, host_locks
from pipeline.training import training
from pipeline.training.training import Workplace

NAME: Final = TASK_TRAIN
# The wait for the GPU beyond the time that its holders have to give it back: longer than a quarantine.
PATIENCE_S: Final = 60.0
# A trainer without a GPU leaves a training to one with a GPU for so long: fifteen calls of the sweep, of
# which the other one gets every second on average.
GPU_FIRST_S: Final = 30.0
# A process that gave the GPU back keeps its lock on this host until it has ended.
LOCK_S: Final = 10.0
# Attempts after faults that heal (a store that is down): more than after faults that kill the process.
PATIENT_ATTEMPTS: Final = 10


def run(context: Context, *_: str) -> str | None:
    """The training that waits longest, under a lease of its own; the next one gets a task of its own.

    Returns why it failed, None when it did not.
    """
    if not context.trainings.due() or _left_to_gpu(context):
        return None
    try:
        floor = context.registry.newest_token()
    except StoreUnavailable as exc:  # the sweep asks again
        context.presence.complain("store", str(exc))
        return str(exc)
    if context.leases.holder_of(TRAINING) is None:
        training.load_fitting()  # now, when there is no lease that it could cost
    lease = context.leases.request(TRAINING, context.owner, floor=floor, quarantine=True)
    if isinstance(lease, Refused):
        metrics.lease_refused("training")
        # Another trainer takes what waits when it is done, or the sweep asks again.
        logger().info("training.waits", why=lease.why)
        return None
    why = None
    with context.leases.holding(lease) as renewal:
        periodic.end_lost(context)  # the lease is ours, so whoever had it before is dead or has lost
        next_training = context.trainings.take(lease)
        if next_training is not None:
            why = _train(context, renewal, *next_training)
    if context.trainings.due():
        context.submit.train()
    return why


def _left_to_gpu(context: Context) -> bool:
    """Whether a trainer without a GPU leaves the next training to one with a GPU, for a bounded time.

    The sweep calls again every other second, and any trainer may answer. So the other one takes it soon."""
    if context.profile.leased or context.trainings.waited_s() > GPU_FIRST_S:
        return False
    there = next((worker for worker in context.presence.live() if worker.role == "train-gpu"), None)
    if there is None:
        return False
    context.presence.complain(
        "train", f"a training is left to {there.name}, which has a GPU, for {GPU_FIRST_S:.0f} s at most"
    )
    return True


def _train(context: Context, renewal: HeldLease, status: Status, request: TrainingRequest) -> str | None:
    """Run one training to its end; returns why it failed."""
    log = logger(request=status.request_id, model=request.model)
    log.info("training.begins", asked_by=request.asked_by, why=request.why)
    retry: TrainingRequest | None = None
    try:
        for shown in _steps(context, renewal, status, request):
            status = shown
            if not status.ended:
                context.go_on()
                with suppress(RedisUnavailable):  # a Redis away for a moment must not cost the training
                    context.trainings.show(status, renewal.lease)
    except Cancelled as exc:
        status = replace(status, state=TrainingState.CANCELLED, reason=str(exc))
    except Exception as exc:  # noqa: BLE001 - _failed says what it was
        status, retry = _failed(context, status, request, exc)
    metrics.trained(_result(status))
    log.info("training.ended", state=status.state.value, why=status.reason, version=status.version)
    with suppress(RedisUnavailable):  # the sweep ends it then
        context.trainings.end(status, renewal.lease, retry=retry)
    if status.version and not status.published and context.registry.note(status.version) is None:
        # Whole, but never judged to its end: an operator may still want it.
        note = Note(state="candidate", reason=f"its training was not finished: {status.reason}")
        context.registry.write_note(status.version, note)
    if status.published:
        _announce(context)
        periodic.run(context)
    if not renewal.lost.is_set():
        with suppress(RedisUnavailable, StoreUnavailable):  # the next training removes them
            for version in context.registry.retire():
                log.info("model.removed", version=version)
    return status.reason if status.state is TrainingState.FAILED else None


def _announce(context: Context) -> None:
    if context.app is not None:
        from pipeline.messages.reload import announce  # Celery

        announce(context.app)


def _result(status: Status) -> str:
    """The label of a training's end in metrics."""
    if status.state is TrainingState.COMPLETED:
        return "published" if status.published else "kept"
    return status.state.value


def _failed(
    context: Context, status: Status, request: TrainingRequest, exc: Exception
) -> tuple[Status, TrainingRequest | None]:
    """The status after a fault, and the request to be queued again where that can help."""
    if status.version and _was_live(context, status.version):
        # The answer to the publication was lost, not the publication.
        return replace(status, state=TrainingState.COMPLETED, percent=100.0, published=True), None
    expected = isinstance(exc, LogweirError)
    if not expected:
        logger(request=status.request_id).exception("training.failed")
    why = str(exc) if expected else f"{type(exc).__name__}: {exc}"
    if type(exc).__name__ == "SoftTimeLimitExceeded":  # Celery's, which a run in one process lacks
        why = f"the training took longer than its time limit; it was {status.state.value}: look at its log"
    heals = isinstance(exc, Retryable | StaleToken)
    retry = None
    if (heals or not expected) and request.attempt < (PATIENT_ATTEMPTS if heals else ATTEMPTS):
        retry = next_attempt(request, status.request_id)
    return replace(status, state=TrainingState.FAILED, reason=why[:1000]), retry


def _was_live(context: Context, version: str) -> bool:
    try:
        return context.registry.was_live(version)
    except RedisUnavailable:
        return False  # the sweep looks again


def _steps(
    context: Context, renewal: HeldLease, status: Status, request: TrainingRequest
) -> Iterator[Status]:
    totals = context.ledger.backlog.totals()
    stored_names, watched, own_models = (
        sorted(totals),
        context.watchlist.look().patterns,
        context.settings.train.own_models,
    )
    documents = request.query.documents
    workloads = (
        training.chosen_workloads(request, stored_names, watched, own_models) if documents is None else ()
    )
    if documents is None and not workloads and (request.patterns or watched or stored_names):
        # A query without workloads means all of them; that is not what was asked for.
        raise TrainingFailed(training.none_chosen(request, watched))
    served = training.chosen_workloads(
        TrainingRequest(model=request.model), stored_names, watched, own_models
    )
    stored = {name: totals[name].get("stored", 0) for name in workloads if name in totals}
    query = replace(request.query, workloads=workloads)
    if documents is not None and request.model != SHARED and not documents.workloads:
        query = replace(query, documents=replace(documents, workloads=(request.model,)))
    status = replace(status, state=TrainingState.FETCHING, stored=stored)
    stream = replace(query, workloads=served)
    if documents is not None:
        stream = training.results_query(context.settings, served, utc_now())
    # The judge compares on what the pipeline has stored of its own, where it has stored something.
    has_stored = any(totals[name].get("stored", 0) for name in served if name in totals)

    def go_on() -> None:
        with suppress(RedisUnavailable):
            context.trainings.show(status, renewal.lease)

    yield from training.Training(
        request=request,
        status=status,
        query=query,
        stream=stream if has_stored else None,
        masks=context.masks,
        templates=read_templates(context.client, context.ledger.keys),
        registry=context.registry,
        settings=context.settings,
        held=renewal,
        marks=context.marks.look().holding,
        alone=lambda: _device(context, go_on, status.request_id),
    ).run()


@contextmanager
def _device(context: Context, go_on: Callable[[], None], request_id: str) -> Iterator[Workplace]:
    """The GPU for ourselves when we train on one; asking for it closes the door to new shared leases.

    A machine whose GPU cannot be had or used trains on its CPU: a model that comes late is better than none.
    """
    if not context.profile.leased:
        yield Workplace(device=context.profile.device)
        return
    with ExitStack() as stack:
        try:
            start = time.monotonic()
            lease = _gpu(context, go_on)
            metrics.lease_waited("training", time.monotonic() - start)
            place = _start_gpu(context, stack, lease, request_id)
        except (BadInput, BadPayload, DeviceFailed, LeaseRefused) as exc:
            logger().warning("training.without_gpu", why=str(exc))
            if context.models.cuda_device is None:
                stack.close()
            place = Workplace()
        yield place


def _start_gpu(context: Context, stack: ExitStack, lease: PoolLease, request_id: str) -> Workplace:
    """Take a granted GPU into use, until the stack closes. Raises LeaseRefused, DeviceFailed.

    The placement is asked first, as for every model on a device.
    """
    renewal = stack.enter_context(context.pool.holding(lease))
    enrol(context.pool, lease)
    stack.enter_context(host_locks(lease, wait_s=LOCK_S))
    count_training(context.client, context.settings, lease, request_id)
    try:
        context.models.begin(lease)
    except LogweirError:
        renewal.dirty()  # CUDA's context ends with this process: the device stays closed until then
        context.models.unload()
        raise
    except Exception as exc:
        renewal.dirty()
        context.models.unload()
        raise DeviceFailed(f"the GPU does not begin ({type(exc).__name__}: {exc})") from exc
    if context.models.cuda_device is not None:
        stack.enter_context(ended_after_loss(renewal, context.models.end))
    stack.callback(context.models.unload)
    return Workplace(device=context.models.place, lost=renewal.lost)


def _gpu(context: Context, go_on: Callable[[], None]) -> PoolLease:
    """Wait for the GPU; `go_on` raises when the training is cancelled or lost meanwhile.

    Raises LeaseRefused when it is not to be had in time, BadInput when no GPU of this machine can be used.
    """
    settings = context.settings
    need = Need(
        mode=LeaseMode.EXCLUSIVE,
        node=this_node(),
        device=context.models.cuda_device or "",  # CUDA's context stays where it was begun
        max_duration_s=60 + FIT_MOST_S,
        kind=LeaseKind.TRAIN,
    )
    now = time.monotonic()
    end = now + settings.gpu.yield_s + PATIENCE_S
    reported = (
        now + settings.internal.gpu_node_ttl_ms / 1000 + 2 * settings.internal.gpu_beat_s
    )  # an agent that starts has reported by then
    while True:
        left_s = end - time.monotonic()
        try:
            if _usable(context, need.node, waited=time.monotonic() > reported):
                return context.pool.request(
                    need, holder=context.owner, timeout_s=max(0.1, left_s), go_on=go_on
                )
        except RedisUnavailable:  # a Redis away for a moment must not cost the training
            if left_s <= 0:
                raise
        go_on()
        time.sleep(0.5)


def _usable(context: Context, node: str, *, waited: bool) -> bool:
    """True if this machine has a usable GPU, False while its agent may still report. Raises BadInput if there
    is none."""
    devices = [device for device in context.pool.snapshot().devices if device.node == node]
    if any(device.usable for device in devices):
        return True
    if waited or any(device.why != SILENT for device in devices):
        raise BadInput(f"no GPU of {node} can be used; `logweir gpu top` says why")
    return False
