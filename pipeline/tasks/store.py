"""Stage store: join the verdicts to the records, write them to the sink, commit."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from pipeline.messages.routing import QUEUE_STORE, TASK_STORE
from pipeline.records.delivery import Claim, Stage
from pipeline.tasks import frontend
from pipeline.tasks.context import Context
from pipeline.tasks.grouping.group_commit import Found, commit_together, committed_or_stage
from pipeline.tasks.ingest import unstored
from pipeline.tasks.step import perform_joint

NAME: Final = TASK_STORE


def run(context: Context, batch_id: str, *_: str) -> str | None:
    joint = partial(commit_together, begin=_begin, stage=Stage.STORE, queue=QUEUE_STORE)
    return perform_joint(context, Stage.STORE, batch_id, joint)


def step(context: Context, claim: Claim) -> Stage | None:
    """The whole work on one batch alone."""
    ((_, found),) = _begin(context, [claim])
    return committed_or_stage(context, claim, found)


def _begin(context: Context, claims: Sequence[Claim]) -> Iterator[Found]:
    """The results of each batch."""
    works = [context.ledger.work(claim.batch_id) for claim in claims]
    batches = frontend.prepared_batches(context, claims, works)
    yield from unstored(context, claims, batches, works)
