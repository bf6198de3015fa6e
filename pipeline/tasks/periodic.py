"""The sweep, a task of beat: send overdue batches and lost trainings again, call missing readers of
backfills, rescore batches that were stored while warming, forget silent workers.

A sweep may run twice or be missed: it sends only what waits in the ledger and not in the queues.
"""

from typing import Final

import redis

from pipeline.controller.watchlist import model_of
from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.messages.routing import TASK_SWEEP
from pipeline.observe import counters as metrics
from pipeline.records.delivery import BACKFILL_PART, Stage
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import TRAINING
from pipeline.tasks.backfill import call_readers
from pipeline.tasks.context import Context

NAME: Final = TASK_SWEEP
# Batches to rescore per sweep: enough to keep the workers busy, few beside fresh ones.
RESCORE_AT_ONCE: Final = 200
# Messages of one sweep: a second's work. The rest is sent by the next one.
SENT_AT_ONCE: Final = 1_000


def run(context: Context, *_: str) -> None:
    try:
        metrics.swept(sweep(context))
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))


def sweep(context: Context) -> int:
    """One round; returns how many wake-ups it sent."""
    ledger, submit = context.ledger, context.submit
    context.presence.drop_silent()
    _sweep_pool(context)
    sent = _send_missing(context)
    # Rescored batches are backfill and bypass accept, so they leave the same room to fresh ones here.
    room = int(context.settings.internal.max_pending_batches * BACKFILL_PART) - ledger.backlog.counts().get(
        "batches", 0
    )
    models = _models_there(context) if room > 0 and ledger.backlog.warming() else set()
    if models:
        own_models = context.settings.train.own_models
        # The choice of Context.version: a workload whose own model is off the settings would come back for
        # ever.
        ready = ledger.backlog.start_rescoring(
            min(RESCORE_AT_ONCE, room),
            has_model=lambda w: SHARED in models or model_of(w, own_models) in models,
        )
        for batch_id in ready:
            submit.wake(Stage.INGEST, batch_id, backfill=True)
            sent += 1
    sent += revive(context)
    sent += call_readers(context)
    if sent:
        logger().info("sweep.sent", batches=sent)
    return sent


def _models_there(context: Context) -> set[str]:
    """The models that answer lines: those with a live version of this build or a newer one."""
    outdated = {live.model for live in context.registry.outdated()}
    return {live.model for live in context.registry.live()} - outdated


def _send_missing(context: Context) -> int:
    """Send what waits in the ledger and not in the queues; returns how many.

    Each queue is read once, however long the backlog. All overdue batches are compared: a lost one must not
    wait until thousands of queued ones have had their turn."""
    ledger, submit = context.ledger, context.submit
    now, sent = ledger.store.now_ms(), 0
    waiting: dict[tuple[Stage, bool], set[str] | None] = {}
    while sent < SENT_AT_ONCE and (overdue := ledger.backlog.overdue(until_ms=now)):
        ids = [batch_id for batch_id, _ in overdue]
        backfill = ledger.backlog.backfills(ids)
        missing = []
        for batch_id, stage in overdue:
            kind = (stage, batch_id in backfill)
            if kind not in waiting:
                waiting[kind] = submit.waiting_ids(stage, backfill=kind[1])
            queued = waiting[kind]
            if queued is not None and batch_id not in queued:
                missing.append((batch_id, kind))
        ledger.backlog.postpone(ids)
        for batch_id, (stage, late) in missing:
            submit.wake(stage, batch_id, backfill=late)
        sent += len(missing)
    return sent


def _sweep_pool(context: Context) -> None:
    try:
        context.pool.sweep()
        context.job_keeper.round()
    except RedisUnavailable:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong with the GPUs, batches must be swept
        logger().exception("pool.not_swept")


def revive(context: Context) -> bool:
    """Send a wake-up for waiting trainings that no trainer works on; True if it did.

    A dead trainer is known by its expired lease. Its training ends then, and may be queued again.
    """
    end_lost(context)
    if not context.trainings.due() or context.submit.training_waits():
        return False
    working = context.leases.holder_of(TRAINING) is not None
    return not working and context.submit.train()


def end_lost(context: Context) -> None:
    """End the training whose trainer died, so that it may be queued again. Call it before a new training
    begins."""
    lost = context.trainings.end_lost(published=context.registry.was_live)
    if lost is not None:
        metrics.trained("published" if lost.published else lost.state.value)
        logger(request=lost.request_id).warning("training.lost", state=lost.state.value, why=lost.reason)
