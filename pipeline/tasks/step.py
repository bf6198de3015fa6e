"""One stage of one batch: claim, do the step, hand on. Every task that moves a batch runs through `perform`.

The claim is taken before the step and counted as an attempt, so that a killed worker counts too. Faults of the
surroundings (Redis, a full disk, a lease, a damaged model) give the batch back uncounted; faults of the batch are
counted, and after the last attempt it is split, or buried when it is a single record.
"""

import time
from collections.abc import Callable, Collection
from typing import Final

import redis

from pipeline import detect
from pipeline.errors import (
    BadBundle,
    ClaimLost,
    ModelUnavailable,
    RedisUnavailable,
    Rejected,
    Retryable,
    SinkUnavailable,
)
from pipeline.keyspace import is_refusal
from pipeline.ledger import Claim, Stage
from pipeline.observe import logger
from pipeline.tasks.context import Context

# A step says where the batch goes next; None: it is committed.
Step = Callable[[Context, Claim], Stage | None]

RETRY_S: Final = 2.0
# How long a step may hold its claim. Longer than any batch takes on a slow machine; a step that never ends loses it.
HOLD_S: Final = 120.0


def perform(context: Context, stage: Stage, batch_id: str, step: Step) -> str | None:
    """Run `step` on the batch if it is ours to run; the reason when it was and the step was not done.

    The reason is for people: whatever follows from it stands in the ledger already.
    """
    log = logger(batch=batch_id, stage=stage.value)
    began = time.monotonic()
    try:
        claim = context.ledger.claim(batch_id, stage, context.owner)
        if isinstance(claim, str):
            log.debug("batch.left_alone", why=claim)
            return None
        if claim.exhausted:
            return _give_up(context, claim, claim.error)
        with context.ledger.holding(claim, at_most_s=HOLD_S):
            then, why = _try(context, claim, step)
        if then is not None:
            context.submit.wake(then, batch_id, workload=claim.workload, lines=claim.lines)
    except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
        # The claim expires by itself and the sweeper sends the batch again.
        log.warning("redis.away", why=str(exc))
        return str(exc)
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
        return str(exc)
    if why is None:
        ms = round((time.monotonic() - began) * 1000)
        log.info("batch.step", records=claim.records, ms=ms, then=then or "-")
    return why


def _try(context: Context, claim: Claim, step: Step) -> tuple[Stage | None, str | None]:
    """(where the batch goes next, why the step was not done)."""
    log = logger(batch=claim.batch_id, stage=claim.stage.value, attempt=claim.attempts)
    try:
        return step(context, claim), None
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
        return None, str(exc)
    except (Retryable, BadBundle) as exc:
        if isinstance(exc, BadBundle) and _replaced(context, claim, str(exc)):
            return Stage.INGEST, None
        return None, _wait(context, claim, str(exc))
    except Rejected as exc:
        # The store knows which records; trying them again, or halving around them, would only find out the same.
        log.warning("batch.rejected", why=str(exc), records=len(exc.ids))
        return None, _give_up(context, claim, str(exc), exc.ids)
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        return None, _wait(context, claim, f"Redis does not answer ({exc}); it is tried again")
    except Exception as exc:
        if isinstance(exc, redis.ResponseError) and is_refusal(exc):
            return None, _wait(context, claim, f"Redis refuses to work ({exc}); give it memory or disk space")
        log.exception("batch.failed")
        why = f"{type(exc).__name__}: {exc}"
        if claim.attempts >= context.settings.max_attempts:
            return None, _give_up(context, claim, why)
        context.ledger.release(claim, reason=why, delay_s=0.2 * claim.attempts, counted=True)
        context.submit.wake(claim.stage, claim.batch_id, workload=claim.workload, lines=claim.lines)
        return None, why


def _wait(context: Context, claim: Claim, why: str) -> str:
    """Give the batch back, uncounted, and say to operators what it waits for."""
    logger(batch=claim.batch_id, stage=claim.stage.value).warning("batch.waits", why=why)
    context.presence.complain(claim.stage.value, why)
    context.ledger.release(claim, reason=why, delay_s=RETRY_S, counted=False)
    return why


def _replaced(context: Context, claim: Claim, why: str) -> bool:
    """The batch began under a model that cannot be read here, and it can begin again under another one."""
    if claim.stage not in (Stage.INFER, Stage.DRAIN):
        return False
    version = context.ledger.work(claim.batch_id)["version"][0]
    if version in {live.version for live in context.registry.live()}:
        # Ingest must not choose it either, or the batch would come back here.
        context.registry.report_fault(version, why)
    try:
        chosen = context.version(claim.workload)
    except ModelUnavailable:
        return False
    if chosen is None or chosen == version:
        return False
    context.ledger.advance(claim, Stage.INGEST)
    return True


def _give_up(context: Context, claim: Claim, why: str, refused: Collection[str] = ()) -> str:
    """Split the batch or bury it. `refused`: record ids that the store named as the ones at fault."""
    why = why or "it failed without a reason"
    sink = context.sink(claim.meta.purpose)
    try:
        apart: list[int] = []
        if not claim.rescore:
            if refused:
                apart = rows_of(context, claim, refused)
            # A worker may have died between storing and committing; a split or dead batch must not be stored as well.
            context.ledger.check(claim)
            sink.remove(claim.batch_id, claim.workload)
        for half in context.ledger.give_up(claim, why, apart=apart):
            context.submit.wake(Stage.INGEST, half, workload=claim.workload)
    except ClaimLost as exc:
        logger(batch=claim.batch_id).warning("claim.lost", why=str(exc))
    except SinkUnavailable as exc:
        return _wait(context, claim, str(exc))
    times = "the first attempt" if claim.attempts == 1 else f"{claim.attempts} attempts"
    return f"given up after {times}: {why}"


def rows_of(context: Context, claim: Claim, record_ids: Collection[str]) -> list[int]:
    """Where these records stand in the batch, in the order they were accepted."""
    prepared = detect.prepare(context.ledger.payload(claim.batch_id), claim.meta, context.masks)
    ids = detect.record_ids(prepared, claim.meta)
    return [row for row, record_id in enumerate(ids) if record_id in record_ids]
