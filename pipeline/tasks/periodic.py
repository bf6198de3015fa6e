"""What beat asks for: send overdue batches and lost trainings again, rescore what was stored while warming, forget
silent workers.

A sweep may run twice or be missed: it sends only what waits in the ledger and not in the queues.
"""

from typing import Final

import redis

from pipeline.controller.watchlist import model_of
from pipeline.errors import RedisUnavailable
from pipeline.gpu.devices import TRAINING
from pipeline.ledger import Stage
from pipeline.observe import logger
from pipeline.registry import SHARED
from pipeline.routing import TASK_SWEEP
from pipeline.tasks.context import Context

NAME: Final = TASK_SWEEP
# Batches sent through the path again per sweep: enough to keep the workers busy, few beside fresh ones.
RESCORE_AT_ONCE: Final = 200


def run(context: Context, *_: str) -> None:
    try:
        sweep(context)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))


def sweep(context: Context) -> int:
    """One round; returns how many wake-ups it sent."""
    ledger, submit = context.ledger, context.submit
    context.presence.drop_silent()
    _sweep_pool(context)
    by_stage: dict[Stage, list[str]] = {}
    for batch_id, stage in ledger.overdue():
        by_stage.setdefault(stage, []).append(batch_id)
    sent = 0
    for stage, ids in by_stage.items():
        queued = submit.waiting_ids(stage)
        missing = [batch_id for batch_id in ids if batch_id not in queued]
        ledger.postpone(ids)
        for batch_id in missing:
            submit.wake(stage, batch_id)
        sent += len(missing)
    models = {live.model for live in context.registry.live()} if ledger.warming() else set()
    if models:
        own = context.settings.own_models
        # As Context.version chooses: a workload whose own model is off the settings would come back for ever.
        ready = ledger.start_rescoring(
            RESCORE_AT_ONCE, has_model=lambda w: SHARED in models or model_of(w, own) in models
        )
        for batch_id in ready:
            submit.wake(Stage.INGEST, batch_id)
            sent += 1
    sent += revive(context)
    if sent:
        logger().info("sweep.sent", batches=sent)
    return sent


def _sweep_pool(context: Context) -> None:
    try:
        context.pool.sweep()
    except RedisUnavailable:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong with the GPUs, batches must be swept
        logger().exception("pool.not_swept")


def revive(context: Context) -> bool:
    """Ask for the trainings that wait and that nobody works on; True when it did.

    A trainer that died is known by its lease; its training has ended then, and may wait again.
    """
    end_lost(context)
    if not context.trainings.due() or context.submit.training_waits():
        return False
    held = context.leases.look(TRAINING).exclusive is not None
    return not held and context.submit.train()


def end_lost(context: Context) -> None:
    """End the training whose trainer died; it may be queued again then. Before anything new begins, or it is forgotten."""
    lost = context.trainings.end_lost(published=context.registry.was_live)
    if lost is not None:
        logger(request=lost.request_id).warning("training.lost", state=lost.state.value, why=lost.reason)
