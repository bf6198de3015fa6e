"""Stage store: join the verdicts to the records, write them to the sink, commit."""

from typing import Final

from pipeline import detect
from pipeline.ledger.batches import Claim, Stage
from pipeline.messages.routing import TASK_STORE
from pipeline.tasks.context import Context
from pipeline.tasks.ingest import finish, records_of
from pipeline.tasks.step import perform

NAME: Final = TASK_STORE


def run(context: Context, batch_id: str, *_: str) -> str | None:
    return perform(context, Stage.STORE, batch_id, step)


def step(context: Context, claim: Claim) -> Stage | None:
    work = context.ledger.work(claim.batch_id)
    records, meta = records_of(context, claim)
    prepared = detect.prepared_again(records, meta, work, context.masks)
    finish(context, claim, prepared, work)
    return None
