"""One stage of one batch: claim, do the step, hand on. Every task that moves a batch runs through `perform`.

The claim is taken before the step and counted as an attempt, so that a killed worker counts too. Faults of the
surroundings (Redis, a full disk, a lease) give the batch back uncounted; faults of the batch are counted, and after
the last attempt it is split, or buried when it is a single record.
"""

import time
from collections.abc import Callable
from typing import Final

from pipeline.errors import ClaimLost, RedisUnavailable, Retryable
from pipeline.ledger import Claim, Stage
from pipeline.observe import logger
from pipeline.tasks.context import Context

# A step says where the batch goes next; None: it is committed.
Step = Callable[[Context, Claim], Stage | None]

RETRY_S: Final = 2.0
# How long a step may hold its claim. Longer than any batch takes on a slow machine; a step that never ends loses it.
HOLD_S: Final = 120.0


def perform(context: Context, stage: Stage, batch_id: str, step: Step) -> None:
    """Run `step` on the batch if it is ours to run."""
    log = logger(batch=batch_id, stage=stage.value)
    began = time.monotonic()
    try:
        claim = context.ledger.claim(batch_id, stage, context.owner)
        if isinstance(claim, str):
            log.debug("batch.left_alone", why=claim)
            return
        if claim.exhausted:
            _give_up(context, claim, claim.error)
            return
        with context.ledger.holding(claim, at_most_s=HOLD_S):
            then = _try(context, claim, step)
    except RedisUnavailable as exc:
        # The claim expires by itself and the sweeper sends the batch again.
        log.warning("redis.away", why=str(exc))
        return
    if then is not None:
        context.submit.wake(then, batch_id)
    log.info(
        "batch.step", records=claim.records, ms=round((time.monotonic() - began) * 1000), then=then or "-"
    )


def _try(context: Context, claim: Claim, step: Step) -> Stage | None:
    log = logger(batch=claim.batch_id, stage=claim.stage.value, attempt=claim.attempts)
    try:
        return step(context, claim)
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
    except Retryable as exc:
        log.warning("batch.waits", why=str(exc))
        context.presence.complain(claim.stage.value, str(exc))
        context.ledger.release(
            claim,
            reason=str(exc),
            delay_s=RETRY_S,
            counted=False,
        )
    except Exception as exc:
        log.exception("batch.failed")
        why = f"{type(exc).__name__}: {exc}"
        if claim.attempts >= context.settings.max_attempts:
            _give_up(context, claim, why)
        else:
            context.ledger.release(claim, reason=why, delay_s=0.2 * claim.attempts, counted=True)
            context.submit.wake(claim.stage, claim.batch_id)
    return None


def _give_up(context: Context, claim: Claim, why: str) -> None:
    try:
        for half in context.ledger.give_up(claim, why or "it failed without a reason"):
            context.submit.wake(Stage.INGEST, half)
    except ClaimLost as exc:
        logger(batch=claim.batch_id).warning("claim.lost", why=str(exc))
