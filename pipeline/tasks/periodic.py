"""What beat asks for: send overdue batches and lost trainings again, rescore what was stored while warming, forget
silent workers.

A sweep may run twice or be missed: it sends only what waits in the ledger and not in the queues.
"""

from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.ledger import Stage
from pipeline.observe import logger
from pipeline.routing import TASK_SWEEP
from pipeline.tasks.context import Context

NAME: Final = TASK_SWEEP
# Batches sent through the path again per sweep: enough to keep the workers busy, few beside fresh ones.
RESCORE_AT_ONCE: Final = 200


def run(context: Context) -> None:
    try:
        sweep(context)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))


def sweep(context: Context) -> int:
    """One round; returns how many wake-ups it sent."""
    ledger, submit = context.ledger, context.submit
    context.presence.drop_silent()
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
    if ledger.warming() and context.registry.current() is not None:
        for batch_id in ledger.start_rescoring(RESCORE_AT_ONCE):
            submit.wake(Stage.INGEST, batch_id)
            sent += 1
    if sent:
        logger().info("sweep.sent", batches=sent)
    return sent
