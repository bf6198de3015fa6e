"""Stage drain: the single writer gives unknown lines their template and verdict, and tells the cache."""

from typing import Final

from pipeline import detect
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.gpu.devices import DRAIN
from pipeline.gpu.leases import Mode, granted
from pipeline.ledger import Claim, Stage
from pipeline.routing import TASK_DRAIN
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

NAME: Final = TASK_DRAIN


def run(context: Context, batch_id: str) -> str | None:
    return perform(context, Stage.DRAIN, batch_id, step)


def step(context: Context, claim: Claim) -> Stage | None:
    # Asking again as the same holder renews; learn.lua compares the token, so no quarantine is needed.
    lease = granted(context.leases.request(DRAIN, Mode.EXCLUSIVE, context.owner), "the template tree")
    work = context.ledger.work(claim.batch_id)
    version = work["version"][0]
    knowledge = None if version == WARMING_VERSION else context.knowledge(version)
    work = detect.answer(work, context.verdicts.lookup(version, detect.unknown(work)["key"].to_list()))
    rows = detect.unknown(work).to_dicts()
    if rows:
        # Kept for the next batch: giving it back would make another learner read every template first.
        with context.leases.holding(lease, give_back=False):
            verdicts = context.learner.learn(
                rows,
                version=version,
                workload=claim.workload,
                token=lease.token,
                judge=lambda row, template_id: detect.judge(row, template_id, knowledge),
            )
        work = detect.answer(work, verdicts)
    context.ledger.advance(claim, Stage.STORE, work)
    return Stage.STORE
