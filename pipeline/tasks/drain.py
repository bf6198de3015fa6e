"""Stage drain: the single writer of the template tree gives unknown lines their template and verdict, and
fills the cache. Further workers stand by until the lease of the writer expires."""

import time
from contextlib import suppress
from typing import Final

from pipeline import detect
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.errors import RedisUnavailable, TooNew
from pipeline.logs import logger
from pipeline.messages.routing import TASK_DRAIN
from pipeline.models import verdict
from pipeline.records.delivery import Claim, Stage
from pipeline.redis.leases import DRAIN, Lease, Refused, granted
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

NAME: Final = TASK_DRAIN
# How often a drain worker asks whether the one before it has gone.
STAND_BY_S: Final = 0.5


def run(context: Context, batch_id: str, *_: str) -> str | None:
    if _other_writer(context):
        # It takes the batch; this worker takes nothing before the tree is its own.
        with suppress(RedisUnavailable):  # the sweeper does it then
            backfill = bool(context.ledger.backlog.backfills([batch_id]))
            context.submit.wake(Stage.DRAIN, batch_id, backfill=backfill)
        _stand_by(context)
        return None
    return perform(context, Stage.DRAIN, batch_id, step)


def _request(context: Context) -> Lease | Refused:
    return context.leases.request(DRAIN, context.owner)


def _other_writer(context: Context) -> bool:
    with suppress(RedisUnavailable):  # the next call reports it
        return isinstance(_request(context), Refused)
    return False


def _stand_by(context: Context) -> None:
    """Wait until the template tree is ours, or this worker is told to end."""
    from celery.worker import state  # a run in one process has no other writer and no Celery

    logger(stage=Stage.DRAIN.value).info("drain.stands_by")
    while state.should_stop is None and state.should_terminate is None and _other_writer(context):
        time.sleep(STAND_BY_S)


def step(context: Context, claim: Claim) -> Stage | None:
    # Asking again as the same holder renews; drain/learn.lua compares the token, so no quarantine is needed.
    lease = granted(_request(context), "the template tree")
    work = context.ledger.work(claim.batch_id)
    version = work["version"][0]
    knowledge = None if version == WARMING_VERSION else context.models.knowledge(version)
    cached = context.verdicts.lookup(version, detect.unknown(work)["key"].to_list())
    work = detect.without_evidence(detect.answer(work, cached), cached)
    rows = detect.unknown(work).to_dicts()
    if rows:
        try:
            # Kept for the next batch: giving it back would make another learner read every template first.
            with context.leases.holding(lease, give_back=False):
                verdicts = context.learner.learn(
                    rows,
                    version=version,
                    workload=claim.workload,
                    token=lease.token,
                    judge=lambda row, template_id: verdict.verdict_of(
                        {**row, "workload": claim.workload}, template_id, knowledge
                    ),
                )
        except TooNew:
            # A learner of the build that wrote the templates can go on; our lease would keep it out.
            context.leases.release(lease)
            raise
        work = detect.answer(work, verdicts)
    context.ledger.advance(claim, Stage.STORE, work)
    return Stage.STORE
