"""What beat asks for: send overdue batches and lost trainings again, rescore what was stored while warming, forget
silent workers.

A sweep may run twice or be missed: it sends only what waits in the ledger and not in the queues.
"""

from dataclasses import replace
from typing import Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.gpu.devices import TRAINING
from pipeline.keyspace import text_map
from pipeline.ledger import Stage
from pipeline.observe import logger
from pipeline.routing import TASK_SWEEP
from pipeline.tasks.context import Context
from pipeline.training import State, Status

NAME: Final = TASK_SWEEP
# Batches sent through the path again per sweep: enough to keep the workers busy, few beside fresh ones.
RESCORE_AT_ONCE: Final = 200
# Trainings of one request at most; a third death is no accident.
ATTEMPTS: Final = 3
# Beside the status: "<request>:<times sent again>:<Redis ms when it was last seen or sent>"
WATCH: Final = "watch"


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
    sent += revive(context)
    if sent:
        logger().info("sweep.sent", batches=sent)
    return sent


def revive(context: Context) -> bool:
    """Ask again for a training that nobody works on; True when it did. Its worker died, and its message with it."""
    key, now = context.ledger.keys.training, context.ledger.now_ms()
    entry = context.client.hgetall(key)
    raw, status = text_map(entry), Status.from_redis(entry)
    if status.state is State.NONE or status.ended:
        return False
    request, _, rest = raw.get(WATCH, "").partition(":")
    times, _, seen = rest.partition(":")
    count, last = (int(times), int(seen)) if request == status.request_id else (0, now)
    held = context.leases.look(TRAINING).exclusive is not None
    if held or context.submit.training_waits(status.request_id):
        last = now
    again = now - last > context.settings.lease_ttl_ms
    if again:
        count, last = count + 1, now
        logger(request=status.request_id).warning("training.lost", times=count)
        if count >= ATTEMPTS:
            reason = f"the training process died {count} times; its log says why"
            context.client.hset(key, mapping=replace(status, state=State.FAILED, reason=reason).to_redis())
            return False
        context.submit.train(status.request_id)
    context.client.hset(key, WATCH, f"{status.request_id}:{count}:{last}")
    return again
