"""Batches that a worker takes along: those that wait behind its own, claimed for the same stage.

Their messages are only read, so a later reader finds these batches claimed or finished, as the ledger allows
anyway. A batch that failed before, or a half of one, is never taken along. If the work on all of them fails,
each is worked on alone in the same step, so that only the one at fault fails.
"""

from collections.abc import Iterable, Iterator

from pipeline.errors import RedisUnavailable
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.logs import logger
from pipeline.records.delivery import HALF, Claim, Stage
from pipeline.tasks.context import Context


def claim_others(
    context: Context, claim: Claim, holding: ClaimRenewal, *, stage: Stage, queue: str, limit: int
) -> Iterator[Claim]:
    """Batches behind this one in its queue and class, each claimed when the caller asks for it.

    They are those that wait now: a worker that is told to end meanwhile takes no later ones along."""
    try:
        waiting = context.submit.next_ids(queue, limit, backfill=claim.backfill)
    except RedisUnavailable:
        waiting = []  # the next call to Redis reports it
    return _claims(context, holding, stage, waiting)


def _claims(
    context: Context, holding: ClaimRenewal, stage: Stage, batch_ids: Iterable[str]
) -> Iterator[Claim]:
    try:
        for batch_id in batch_ids:
            if HALF in batch_id:
                continue
            try:
                other = context.ledger.claim(batch_id, stage, context.owner, first=True)
            except RedisUnavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - its own turn reports the fault
                logger(batch=batch_id).warning("merging.left_alone", why=str(exc))
                continue
            if isinstance(other, Claim):
                holding.add(other)
                yield other
    except RedisUnavailable:
        return  # the next call to Redis reports it
