"""Stage store: join the verdicts to the records, write them to the sink, commit."""

from functools import partial
from typing import Final

from pipeline import detect
from pipeline.messages.routing import QUEUE_STORE, TASK_STORE
from pipeline.records.delivery import Claim, Stage
from pipeline.tasks.context import Context
from pipeline.tasks.group_commit import Unstored, commit, commit_together
from pipeline.tasks.ingest import records_of, unstored
from pipeline.tasks.step import perform_joint

NAME: Final = TASK_STORE


def run(context: Context, batch_id: str, *_: str) -> str | None:
    joint = partial(commit_together, begin=joined_results, stage=Stage.STORE, queue=QUEUE_STORE)
    return perform_joint(context, Stage.STORE, batch_id, joint)


def step(context: Context, claim: Claim) -> Stage | None:
    """The whole work on one batch alone."""
    commit(context, claim, joined_results(context, claim))
    return None


def joined_results(context: Context, claim: Claim) -> Unstored:
    """The results."""
    work = context.ledger.work(claim.batch_id)
    records, meta = records_of(context, claim)
    return unstored(context, claim, detect.prepared_again(records, meta, work, context.masks), work)
