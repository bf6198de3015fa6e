"""Batches that a worker takes along: those that wait behind its own, claimed for the same stage.

Their messages are only read, so a later reader finds these batches claimed or finished, as the ledger allows
anyway. A batch that failed before, or a half of one, is never taken along. One that may have made a group
fail is alone from then on, in this process.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from pipeline.errors import RedisUnavailable
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.logs import logger
from pipeline.records.delivery import HALF, Claim, Stage
from pipeline.tasks.context import Context
from pipeline.tasks.step import GivenBack, StepResult, suspect

SOLO_MAX: Final = 10_000  # remembered batches that are worked on alone


def alone(context: Context, claim: Claim) -> bool:
    """True if no other batch may share the work on this one."""
    return claim.batch_id in context.solo or suspect(context, claim)


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
            if HALF in batch_id or batch_id in context.solo:
                continue
            try:
                other = context.ledger.claim(batch_id, stage, context.owner, first=True)
            except RedisUnavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - its own turn reports the fault
                logger(batch=batch_id).warning("merging.left_alone", why=str(exc))
                context.solo[batch_id] = None
                continue
            if isinstance(other, Claim):
                holding.add(other)
                yield other
    except RedisUnavailable:
        return  # the next call to Redis reports it


def give_back_apart(context: Context, claims: list[Claim], why: str) -> Iterator[tuple[Claim, StepResult]]:
    """Gives the batches back to be worked on alone, uncounted: the one at fault is unknown."""
    for claim in claims:
        context.solo[claim.batch_id] = None
        yield claim, GivenBack(f"{why}; it is tried alone")
    while len(context.solo) > SOLO_MAX:
        context.solo.popitem(last=False)
