"""One stage of one batch: claim, do the step, hand on. Every task that moves a batch runs through `perform`.

The claim is taken before the step and counted as an attempt, so that a killed worker counts too. Faults of the
surroundings (Redis, a full disk, a lease, a damaged model) give the batch back uncounted; faults of the batch are
counted, and after the last attempt it is split, or buried when it is a single record.
"""

import time
from collections.abc import Callable
from typing import Final

import redis

from pipeline.errors import BadBundle, ClaimLost, RedisUnavailable, Retryable
from pipeline.keyspace import is_refusal
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
            done, then = _try(context, claim, step)
        if then is not None:
            context.submit.wake(then, batch_id)
    except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
        # The claim expires by itself and the sweeper sends the batch again.
        log.warning("redis.away", why=str(exc))
        return
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
        return
    if done:
        ms = round((time.monotonic() - began) * 1000)
        log.info("batch.step", records=claim.records, ms=ms, then=then or "-")


def _try(context: Context, claim: Claim, step: Step) -> tuple[bool, Stage | None]:
    """(was the step done, where the batch goes next)."""
    log = logger(batch=claim.batch_id, stage=claim.stage.value, attempt=claim.attempts)
    try:
        return True, step(context, claim)
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
    except (Retryable, BadBundle) as exc:
        if isinstance(exc, BadBundle) and _replaced(context, claim):
            return True, Stage.INGEST
        _wait(context, claim, str(exc))
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        _wait(context, claim, f"Redis does not answer ({exc}); it is tried again")
    except Exception as exc:
        if isinstance(exc, redis.ResponseError) and is_refusal(exc):
            _wait(context, claim, f"Redis refuses to work ({exc}); give it memory or disk space")
            return False, None
        log.exception("batch.failed")
        why = f"{type(exc).__name__}: {exc}"
        if claim.attempts >= context.settings.max_attempts:
            _give_up(context, claim, why)
        else:
            context.ledger.release(claim, reason=why, delay_s=0.2 * claim.attempts, counted=True)
            context.submit.wake(claim.stage, claim.batch_id)
    return False, None


def _wait(context: Context, claim: Claim, why: str) -> None:
    """Give the batch back, uncounted, and say to operators what it waits for."""
    logger(batch=claim.batch_id, stage=claim.stage.value).warning("batch.waits", why=why)
    context.presence.complain(claim.stage.value, why)
    context.ledger.release(claim, reason=why, delay_s=RETRY_S, counted=False)


def _replaced(context: Context, claim: Claim) -> bool:
    """The batch began under a model that cannot be read and another one is live by now: it begins again under that."""
    if claim.stage not in (Stage.INFER, Stage.DRAIN):
        return False
    live = context.registry.current()
    if live is None or live.version == context.ledger.work(claim.batch_id)["version"][0]:
        return False
    context.ledger.advance(claim, Stage.INGEST)
    return True


def _give_up(context: Context, claim: Claim, why: str) -> None:
    try:
        if not claim.rescore:
            # A worker may have died between storing and committing; a split or dead batch must not be stored as well.
            context.ledger.check(claim)
            context.sink(claim.meta.purpose).remove(claim.batch_id, claim.workload)
        for half in context.ledger.give_up(claim, why or "it failed without a reason"):
            context.submit.wake(Stage.INGEST, half)
    except ClaimLost as exc:
        logger(batch=claim.batch_id).warning("claim.lost", why=str(exc))
