"""Stage infer: score the distinct unknown masked lines with the version the batch began with."""

from typing import Final

from pipeline import detect
from pipeline.gpu.devices import GPU
from pipeline.gpu.leases import Mode, Refused
from pipeline.ledger import Claim, Stage
from pipeline.routing import QUEUE_CPU, TASK_INFER
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

NAME: Final = TASK_INFER


def run(context: Context, batch_id: str) -> str | None:
    if context.device == "cpu":
        return perform(context, Stage.INFER, batch_id, step)
    lease = context.leases.request(GPU, Mode.SHARED, context.owner)
    if isinstance(lease, Refused):
        # Training holds or wants the GPU: the batch goes on without it.
        context.submit.wake(Stage.INFER, batch_id, queue=QUEUE_CPU)
        return None
    with context.leases.holding(lease):
        return perform(context, Stage.INFER, batch_id, step)


def step(context: Context, claim: Claim) -> Stage | None:
    work = context.ledger.work(claim.batch_id)
    version = work["version"][0]
    # Another batch may have brought the answers while this one waited: each line is scored once.
    work = detect.answer(work, context.verdicts.lookup(version, detect.unknown(work)["key"].to_list()))
    rows = detect.unknown(work)
    if not rows.is_empty():
        work = detect.with_evidence(work, context.model(version).score(rows["masked"].to_list()))
    context.ledger.advance(claim, Stage.DRAIN, work)
    return Stage.DRAIN
